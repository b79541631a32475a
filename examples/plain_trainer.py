"""Train a small byte-level language model with plain jax, optax and orbax, and survive the loss of a slice.

Through a cluster (the process that you start keeps running when a worker dies):
    ridgeway run --slices 3 --devices-per-host 2 -- python examples/plain_trainer.py --checkpoints /tmp/plain

To see that, give it ``--steps 2000`` and, in a second shell while it trains: ``ridgeway kill slice=2``.

The same file natively, without pathways or elasticity, gives the same losses:
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=6 python examples/plain_trainer.py --checkpoints /tmp/native
"""

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.elastic.manager import ElasticRetryLimit, Manager, ScaleUpSignalError

CONTEXT, EMBEDDING, HIDDEN, BATCH = 32, 16, 256, 48
# How each parameter, and what Adam keeps of it, is laid out on the mesh ("data", "model").
LAYOUT = {"embed": P(), "w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "b2": P()}
TEXT = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8)
optimizer = optax.adamw(1e-3)


def batch_at(step: int) -> np.ndarray:
    """The batch of a step, int32[BATCH, CONTEXT + 1]: depends on the step alone, so recovery repeats it."""
    starts = np.random.default_rng(step).integers(0, len(TEXT) - CONTEXT - 1, BATCH)
    return TEXT[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def initialize(key: jax.Array) -> dict:
    k = jax.random.split(key, 3)
    params = {
        "embed": jax.random.normal(k[0], (256, EMBEDDING)),
        "w1": jax.random.normal(k[1], (CONTEXT * EMBEDDING, HIDDEN)) * 0.05,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(k[2], (HIDDEN, 256)) * 0.05,
        "b2": jnp.zeros(256),
    }
    return {"params": params, "optimizer": optimizer.init(params)}


def loss_of(params: dict, tokens: jax.Array) -> jax.Array:
    inputs = params["embed"][tokens[:, :-1]].reshape(tokens.shape[0], -1)
    hidden = jax.nn.gelu(inputs @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


def train_step(state: dict, tokens: jax.Array) -> tuple[dict, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], tokens)
    updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, loss


def train(args: argparse.Namespace, manager: Manager | None, step_seconds: list[float]) -> None:
    """One attempt: lay the model out on the live devices, restore the last committed checkpoint, train."""
    devices = list(jax.devices())
    if manager is not None:
        devices = [d for i in sorted(manager.active_slice_indices) for d in manager.slice_to_devices[i]]
    if len(devices) % args.model_parallel or BATCH % (len(devices) // args.model_parallel):
        raise SystemExit(f"cannot share {BATCH} rows out over {len(devices)} devices; see --model-parallel")
    mesh = Mesh(np.array(devices).reshape(-1, args.model_parallel), ("data", "model"))

    def described(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = LAYOUT.get(getattr(path[-1], "key", ""), P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    key = jax.random.key(0)
    abstract = jax.tree_util.tree_map_with_path(described, jax.eval_shape(initialize, key))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    by_row, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    step_function = jax.jit(train_step, out_shardings=(shardings, everywhere), donate_argnums=0)
    options = ocp.CheckpointManagerOptions(save_interval_steps=args.checkpoint_period, max_to_keep=3)
    with ocp.CheckpointManager(args.checkpoints.absolute(), options=options) as checkpoints:
        restored = checkpoints.latest_step()
        if restored is None:
            state = jax.jit(initialize, out_shardings=shardings)(key)
        else:
            state = checkpoints.restore(restored, args=ocp.args.StandardRestore(abstract))
            print(f"restored step {restored} on {len(devices)} devices", flush=True)
        for step in range(0 if restored is None else restored + 1, args.steps):
            started = time.perf_counter()
            batch = batch_at(step)
            tokens = jax.make_array_from_callback(batch.shape, by_row, batch.__getitem__)
            state, loss = step_function(state, tokens)
            print(f"step {step} loss {float(loss)!r}", flush=True)
            step_seconds.append(time.perf_counter() - started)
            saved = checkpoints.save(step, args=ocp.args.StandardSave(state))
            if saved and manager is not None and manager.available_inactive_slices:
                checkpoints.wait_until_finished()
                raise ScaleUpSignalError


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder; continued from if not empty")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--checkpoint-period", type=int, default=10)
    parser.add_argument("--model-parallel", type=int, default=2, help="devices that share a copy of the model")
    parser.add_argument("--minimum-slices", type=int, help="go on with as many; default: wait for all")
    parser.add_argument("--max-attempts", type=int, default=10)
    parser.add_argument("--slice-timeout-seconds", type=float, default=300.0, help="longest wait for slices")
    parser.add_argument("--poll-seconds", type=float, default=10.0, help="between two looks at slices that are away")
    args = parser.parse_args()
    pathwaysutils.initialize()
    print(f"start pid {os.getpid()}", flush=True)
    step_seconds: list[float] = []  # lives here, in the controller: no recovery touches it
    if "proxy" in (jax.config.jax_platforms or ""):
        manager = Manager()
        retry = manager.elastic_retry(
            minimum_slice_count=args.minimum_slices,
            poll_interval=args.poll_seconds,
            timeout=args.slice_timeout_seconds,
            retry_policy=ElasticRetryLimit(args.max_attempts),
        )
        retry(train)(args, manager, step_seconds)
    else:
        if "JAX_COORDINATOR_ADDRESS" in os.environ:  # native, with one process per host
            count, index = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
            jax.distributed.initialize(num_processes=count, process_id=index)
        train(args, None, step_seconds)
    median = float(np.median(step_seconds)) if step_seconds else 0.0
    print(f"end pid {os.getpid()}: {len(step_seconds)} step times kept, median {median:.4f} s", flush=True)


if __name__ == "__main__":
    main()
