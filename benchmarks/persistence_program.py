"""A state on a cluster's devices, saved by Orbax and restored, twice on another topology; prints one JSON object.

`persistence` runs it. With ``ENABLE_PATHWAYS_PERSISTENCE=1`` workers write and read the state themselves; without,
every byte goes through the proxy and this process.
"""

import argparse
import json
import os
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, COLUMNS = 4096, 8192
ARRAY_BYTES = ROWS * COLUMNS * 4
SPEC = P(("data", "fsdp"))


def mesh_of(devices: Any) -> Mesh:
    """All devices, sharded over by `SPEC`."""
    return Mesh(np.array(devices)[None], ("data", "fsdp"))


def values(seed: Any) -> jax.Array:
    """f32[ROWS, COLUMNS] between -1 and 1 that no compressor makes smaller."""
    mixed = jax.lax.broadcasted_iota(jnp.uint32, (ROWS, COLUMNS), 0) * jnp.uint32(COLUMNS)
    mixed += jax.lax.broadcasted_iota(jnp.uint32, (ROWS, COLUMNS), 1)
    mixed = (mixed + jnp.uint32(seed) * jnp.uint32(0x9E3779B9)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed ^= mixed >> 16
    return mixed.astype(jnp.float32) / jnp.float32(2**31) - 1


def checksum(array: jax.Array) -> jax.Array:
    """u32[]: of every bit and its position."""
    bits = jax.lax.bitcast_convert_type(array, jnp.uint32)
    places = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 0) * 31 + jax.lax.broadcasted_iota(
        jnp.uint32, bits.shape, 1
    )
    return (bits * (places * 2 + 1)).sum(dtype=jnp.uint32)


def main() -> None:
    """Entry point of ``python -m benchmarks.persistence_program``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--arrays", type=int, required=True)
    arguments = parser.parse_args()
    pathwaysutils.initialize()
    phases: dict[str, dict[str, float]] = {}
    everywhere = mesh_of(jax.devices())
    alone = mesh_of([device for device in jax.devices() if device.slice_index == 0])
    names = [f"layer{number:02d}" for number in range(arguments.arrays)]

    def phase(name: str, started: float, **more: float) -> None:
        ended = time.monotonic()
        phases[name] = {"started": started, "ended": ended, "seconds": round(ended - started, 3), **more}

    started = time.monotonic()
    make = jax.jit(values, out_shardings=NamedSharding(everywhere, SPEC))
    state = {name: make(np.uint32(number)) for number, name in enumerate(names)}
    expected = {name: int(jax.jit(checksum)(array)) for name, array in state.items()}
    phase("make", started)

    # A step that goes on while the state is saved.
    small = jax.device_put(np.zeros((len(jax.devices()), 1000), np.float32), NamedSharding(everywhere, SPEC))
    step = jax.jit(lambda x: x + x.sum() + 1, donate_argnums=0)
    small = step(small)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=True)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    with ocp.CheckpointManager(arguments.folder, options=options, item_handlers=handler) as checkpoints:
        started = time.monotonic()
        checkpoints.save(1, args=ocp.args.PyTreeSave(state))
        returned = time.monotonic() - started
        saving = threading.Thread(target=checkpoints.wait_until_finished)
        saving.start()
        steps, longest = 0, 0.0
        while saving.is_alive():
            before = time.monotonic()
            small = step(small)
            small.block_until_ready()
            longest = max(longest, time.monotonic() - before)
            steps += 1
        saving.join()
        phase(
            "save", started, call_seconds=round(returned, 3), steps_meanwhile=steps,
            longest_step_seconds=round(longest, 3),
        )  # fmt: skip
        if checkpoints.latest_step() != 1:
            raise SystemExit("the checkpoint was not committed")
        like = {name: jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32) for name in names}
        for name, mesh in (("restore", everywhere), ("restore on one slice", alone)):
            del state
            sharding = NamedSharding(mesh, SPEC)
            wanted = {
                name: ocp.ArrayRestoreArgs(
                    sharding=sharding, global_shape=(ROWS, COLUMNS), dtype=jnp.dtype(jnp.float32)
                )
                for name in names
            }
            started = time.monotonic()
            state = checkpoints.restore(1, args=ocp.args.PyTreeRestore(item=like, restore_args=wanted))
            jax.block_until_ready(state)
            phase(name, started)
            started = time.monotonic()
            found = {name: int(jax.jit(checksum)(array)) for name, array in state.items()}
            phase(f"check of {name}", started)
            if found != expected:
                raise SystemExit(f"{name}: other numbers than were saved")
    files = [path for path in arguments.folder.rglob("*") if path.is_file()]
    result = {
        "persistence": os.environ.get("ENABLE_PATHWAYS_PERSISTENCE") == "1", "arrays": len(names),
        "bytes": len(names) * ARRAY_BYTES, "files": len(files), "bytes_on_disk": sum(p.stat().st_size for p in files),
        "phases": phases, "controller_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    shutil.rmtree(arguments.folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
