"""What `benchmarks.snapshots` runs through Ridgeway: steps with and without a snapshot after each; prints one JSON
object of seconds. See there."""

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LEAVES = 24
"""Arrays that the state is made of."""
WARM_UP_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mib", type=int, required=True, help="bytes of one replica of the state, in MiB")
    parser.add_argument("--step-seconds", type=float, required=True, help="about what a step's computing takes")
    parser.add_argument("--steps", type=int, required=True, help="of each block")
    parser.add_argument("--blocks", type=int, required=True, help="of each kind, by turns")
    args = parser.parse_args()
    pathwaysutils.initialize()
    slices: dict[int, list[Any]] = {}
    for device in jax.devices():
        slices.setdefault(device.slice_index, []).append(device)
    mesh = Mesh(np.array(list(slices.values())), ("data", "model"))
    sharded, everywhere = NamedSharding(mesh, P("model")), NamedSharding(mesh, P())
    size = args.state_mib * (1 << 20) // 4 // LEAVES
    size -= size % mesh.shape["model"]
    make = jax.jit(lambda: [jnp.full(size, i, jnp.float32) for i in range(LEAVES)], out_shardings=[sharded] * LEAVES)

    def step(state: list[jax.Array], x: jax.Array, turns: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        x = jax.lax.fori_loop(0, turns, lambda _, v: jnp.tanh(v @ v), x)
        return [leaf + x[0, 0] for leaf in state], x.sum() + sum(leaf[0] for leaf in state)

    train_step = jax.jit(step, out_shardings=([sharded] * LEAVES, everywhere), donate_argnums=0)
    x = jax.device_put(np.eye(128, dtype=np.float32) * 0.5, everywhere)
    state = make()
    one = jax.device_put(np.int32(200), everywhere)
    state, loss = train_step(state, x, one)
    float(loss)
    started = time.perf_counter()
    state, loss = train_step(state, x, one)
    float(loss)
    turns = max(1, int(200 * args.step_seconds / (time.perf_counter() - started)))
    turns = jax.device_put(np.int32(turns), everywhere)

    snapshots = ocp.v1.training.pathways.Snapshotter()
    found: dict[str, list[float]] = {"without": [], "with": [], "save": [], "whole": []}
    for block in range(2 * args.blocks):
        kind = ("without", "with")[block % 2]
        for number in range(WARM_UP_STEPS + args.steps):
            started = time.perf_counter()
            state, loss = train_step(state, x, turns)
            saved = 0.0
            if kind == "with":
                snapshots.join()
                before = time.perf_counter()
                snapshots.save(number, state)
                saved = time.perf_counter() - before
            float(loss)
            seconds = time.perf_counter() - started
            if number >= WARM_UP_STEPS:
                found[kind].append(seconds)
                if kind == "with":
                    found["save"].append(saved)
        snapshots.join()
    # One by itself, nothing else going on.
    for number in range(5):
        jax.block_until_ready(state)
        started = time.perf_counter()
        snapshots.save(number, state)
        snapshots.join()
        found["whole"].append(time.perf_counter() - started)
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in state]
    del state
    found["load"] = []
    for _ in range(3):
        started = time.perf_counter()
        restored = snapshots.load(abstract)
        found["load"].append(time.perf_counter() - started)
        del restored
    print(json.dumps({"seconds": found}))


if __name__ == "__main__":
    main()
