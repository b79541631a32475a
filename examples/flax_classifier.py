"""Train a small Flax network with optax, its batch spread over all devices of all slices.

Through a cluster:
    ridgeway run --slices 3 --devices-per-host 2 -- python examples/flax_classifier.py

The same file natively gives the same losses:
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=6 python examples/flax_classifier.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, FEATURES, CLASSES = 96, 20, 5


class Classifier(nn.Module):
    """Two layers with dropout and normalization between them."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.Dense(64)(x))
        x = nn.LayerNorm()(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


def batch_at(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Features f32[BATCH, FEATURES] and labels int32[BATCH], which the features determine."""
    random = np.random.default_rng(step)
    features = random.standard_normal((BATCH, FEATURES), np.float32)
    return features, features[:, :CLASSES].argmax(axis=1).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_row, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    model = Classifier()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, args.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def initialize() -> train_state.TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)), train=False)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state: train_state.TrainState, features: jax.Array, labels: jax.Array):
        def loss_of(params):
            key = jax.random.fold_in(jax.random.key(1), state.step)
            logits = state.apply_fn({"params": params}, features, train=True, rngs={"dropout": key})
            right = (logits.argmax(axis=1) == labels).mean()
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), right

        (loss, right), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), loss, right

    state = jax.jit(initialize, out_shardings=everywhere)()
    step = jax.jit(step, donate_argnums=0, out_shardings=everywhere)
    for number in range(args.steps):
        features, labels = jax.device_put(batch_at(number), by_row)
        state, loss, right = step(state, features, labels)
        if number % 10 == 9:
            print(f"step {number + 1} loss {float(loss):.6f} right {float(right):.3f}", flush=True)


if __name__ == "__main__":
    main()
