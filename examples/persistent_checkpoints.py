"""Checkpoints whose bytes go from the workers straight to storage: the controller and the proxy hold none of them.

    ridgeway run --slices 2 --devices-per-host 2 -- python examples/persistent_checkpoints.py --checkpoints /tmp/kept
    ridgeway run --slices 3 --devices-per-host 2 -- python examples/persistent_checkpoints.py --checkpoints /tmp/kept

The second run goes on where the first one ended, on another number of devices. With workers on several machines the
folder has to be one that all of them have under this path, or gs://bucket/folder, s3://bucket/folder.

What is on disk is ordinary Orbax: the same file without Ridgeway goes on from it too.
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 python examples/persistent_checkpoints.py --checkpoints /tmp/kept
"""

import argparse
import os

# Before pathwaysutils.initialize(), which then gives Orbax the handler that asks workers to read and write.
os.environ.setdefault("ENABLE_PATHWAYS_PERSISTENCE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SHAPES = {"embed": (4096, 512), "up": (512, 4096), "down": (4096, 512), "step": ()}
LAYOUT = {"embed": P("fsdp"), "up": P(None, "fsdp"), "down": P("fsdp"), "step": P()}


def initialize(key: jax.Array) -> dict:
    keys = jax.random.split(key, len(SHAPES))
    state = {name: jax.random.normal(k, SHAPES[name]) for name, k in zip(SHAPES, keys, strict=True)}
    return state | {"step": jnp.int32(0)}


def train_step(state: dict) -> tuple[dict, jax.Array]:
    """Stands for a step of training: every value changes, and depends on those on other devices."""
    hidden = jnp.tanh(state["embed"][:64] @ state["up"] / 64)
    loss = jnp.square(hidden @ state["down"] / 64).mean()
    new = {name: value * 0.99 + loss * 0.01 for name, value in state.items() if name != "step"}
    return new | {"step": state["step"] + 1}, loss


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--checkpoints", required=True, help="folder or URL; continued from if not empty")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint-period", type=int, default=10)
    args = parser.parse_args()
    pathwaysutils.initialize()
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "fsdp"))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in LAYOUT.items()}
    step_function = jax.jit(train_step, out_shardings=(shardings, NamedSharding(mesh, P())), donate_argnums=0)
    # Orbax's persistence handler writes neither OCDBT nor zarr version 3.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    folder = args.checkpoints if "://" in args.checkpoints else os.path.abspath(args.checkpoints)
    with ocp.CheckpointManager(folder, item_handlers=handler) as checkpoints:
        latest = checkpoints.latest_step()
        if latest is None:
            state = jax.jit(initialize, out_shardings=shardings)(jax.random.key(0))
        else:
            abstract = jax.eval_shape(initialize, jax.random.key(0))
            wanted = {
                name: ocp.ArrayRestoreArgs(sharding=shardings[name], global_shape=leaf.shape, dtype=leaf.dtype)
                for name, leaf in abstract.items()
            }
            state = checkpoints.restore(latest, args=ocp.args.PyTreeRestore(item=abstract, restore_args=wanted))
            print(f"restored step {latest} on {len(mesh.devices.flat)} devices", flush=True)
        first = int(state["step"])
        for step in range(first + 1, first + args.steps + 1):
            state, loss = step_function(state)  # donates a state that is perhaps still being written
            print(f"step {step} loss {float(loss):.9f}", flush=True)
            if step % args.checkpoint_period == 0:
                checkpoints.save(step, args=ocp.args.PyTreeSave(state))
        checkpoints.wait_until_finished()
        print(f"checkpoints: {list(checkpoints.all_steps())}", flush=True)


if __name__ == "__main__":
    main()
