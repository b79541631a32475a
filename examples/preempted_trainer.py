"""Plain jax, nothing elastic in it: a training loop that is preempted in the middle and does not notice.

    ridgeway run --slices 3 --devices-per-host 2 -- python examples/preempted_trainer.py

While it runs, from another terminal:
    ridgeway preempt slice=1 --notice-seconds 30

The loss at every step is that of an undisturbed run to the last bit; there is no exception, no checkpoint, and nothing
is computed twice. `ridgeway timeline` then says how long the program paused, and for what.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, BATCH = 64, 48


def loss_of(weights: jax.Array, batch: jax.Array) -> jax.Array:
    """f32[]: how far f32[BATCH, WIDTH] is from its own mean after a layer of f32[WIDTH, WIDTH]."""
    return jnp.mean((jnp.tanh(batch @ weights) - jnp.mean(batch, axis=1, keepdims=True)) ** 2)


@jax.jit
def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next weights, and the loss before."""
    loss, gradient = jax.value_and_grad(loss_of)(weights, batch)
    return weights - 0.5 * gradient, loss


def main() -> None:
    """Train, and print a loss a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="pause after each step")
    options = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    weights = jax.device_put(np.eye(WIDTH, dtype=np.float32), NamedSharding(mesh, P()))
    for step in range(options.steps):
        values = np.random.default_rng(step).standard_normal((BATCH, WIDTH), dtype=np.float32)
        weights, loss = train_step(weights, jax.device_put(values, NamedSharding(mesh, P("data"))))
        print(f"step {step} loss {float(loss):.9f}", flush=True)
        time.sleep(options.step_seconds)


if __name__ == "__main__":
    main()
