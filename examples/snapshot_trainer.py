"""Train with a snapshot of the state in the workers' host memory after every step; go on from it after a loss.

The state never touches storage. Each slice's hosts keep their own replica (memory kind ``pinned_host``); when a
slice is lost, slice 0 included, Orbax's `Snapshotter` puts the state together from those that are left.

    ridgeway run --slices 3 --devices-per-host 2 --standby 1 -- python examples/snapshot_trainer.py --steps 1000
    ridgeway kill slice=1           # in a second shell: at most --snapshot-period steps are done again

With ``--minimum-slices 2`` training goes on with two slices and takes the third in when it is back. If every
slice is lost at once nothing is left, and training begins anew; add checkpoints (see plain_trainer.py) against that.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.elastic.manager import ElasticRetryLimit, Manager, ScaleUpSignalError
from plain_trainer import BATCH, LAYOUT, batch_at, initialize, train_step


class Log:
    """One JSON object a line; written at once, so that a reader sees every step that was done."""

    def __init__(self, path: Path | None):
        self._file: TextIO | None = None if path is None else path.open("a", buffering=1)

    def __call__(self, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"time": time.time(), **fields}) + "\n")


class Snapshots:
    """Orbax snapshotters that share the same bytes in host memory.

    Loading uses a snapshotter's arrays up. One that is interrupted by yet another loss is spent, and the next one
    still has the snapshot.
    """

    def __init__(self, count: int = 3):
        self._snapshotters = [ocp.v1.training.pathways.Snapshotter() for _ in range(count)]

    def save(self, step: int, state: Any) -> None:
        """Copy the state to host memory, in the background; the last whole snapshot counts until this one is."""
        self.join()  # a save that finds another one under way is skipped
        host = jax.device_put(state, jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), state))
        for snapshotter in self._snapshotters:
            snapshotter.save(step, host)

    def join(self) -> None:
        """Wait for a snapshot that is under way; it fails if a slice is lost meanwhile."""
        for snapshotter in self._snapshotters:
            snapshotter.join()

    def load(self, abstract: Any) -> tuple[int, Any] | None:
        """Step and state of the last whole snapshot; None if there is none, or no slice is left that has it."""
        self.join()
        whole = [(s.latest.step, s) for s in self._snapshotters if s.latest is not None]
        for step, snapshotter in sorted(whole, key=lambda found: -found[0]):
            try:
                return step, snapshotter.load(abstract)
            except jax.errors.JaxRuntimeError:
                raise  # another loss, meanwhile: elastic_retry's business
            except RuntimeError as error:
                print(f"snapshot of step {step}: {error}", flush=True)
        return None


def train(args: argparse.Namespace, manager: Manager, snapshots: Snapshots, log: Log) -> None:
    """One attempt, on the slices that are there."""
    slices = sorted(manager.active_slice_indices)
    devices = [device for index in slices for device in manager.slice_to_devices[index]]
    if len(devices) % args.model_parallel or BATCH % (len(devices) // args.model_parallel):
        raise SystemExit(f"cannot share {BATCH} rows out over {len(devices)} devices; see --model-parallel")
    # The first axis is the one along which the state is replicated, slice by slice.
    mesh = Mesh(np.array(devices).reshape(-1, args.model_parallel), ("data", "model"))

    def described(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = LAYOUT.get(getattr(path[-1], "key", ""), P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    key = jax.random.key(0)
    abstract = jax.tree_util.tree_map_with_path(described, jax.eval_shape(initialize, key))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    by_row, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    step_function = jax.jit(train_step, out_shardings=(shardings, everywhere), donate_argnums=0)
    recovered = snapshots.load(abstract)
    if recovered is None:
        first, state = 0, jax.jit(initialize, out_shardings=shardings)(key)
        print(f"starting on {len(devices)} devices", flush=True)
    else:
        first, state = recovered[0] + 1, recovered[1]
        print(f"restored step {recovered[0]} on {len(devices)} devices", flush=True)
    log(event="attempt", slices=slices, first_step=first, restored=recovered is not None)
    for step in range(first, args.steps):
        started = time.perf_counter()
        batch = batch_at(step)
        tokens = jax.make_array_from_callback(batch.shape, by_row, batch.__getitem__)
        state, loss = step_function(state, tokens)
        snapshot = args.snapshot_period > 0 and (step + 1) % args.snapshot_period == 0
        if snapshot:
            snapshots.save(step, state)
        value = float(loss)
        print(f"step {step} loss {value!r}", flush=True)
        log(event="step", step=step, loss=value, slices=slices, seconds=time.perf_counter() - started)
        if snapshot and manager.available_inactive_slices:
            snapshots.join()
            raise ScaleUpSignalError
    snapshots.join()


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--snapshot-period", type=int, default=1, help="steps from one snapshot to the next; 0: none")
    parser.add_argument("--model-parallel", type=int, default=2, help="devices that share a copy of the model")
    parser.add_argument("--minimum-slices", type=int, help="go on with as many; default: wait for all")
    parser.add_argument("--max-attempts", type=int, default=1_000_000)
    parser.add_argument("--slice-timeout-seconds", type=float, default=300.0, help="longest wait for slices")
    parser.add_argument("--poll-seconds", type=float, default=10.0, help="between two looks at slices that are away")
    parser.add_argument("--log", type=Path, help="file that gets a JSON object for every attempt and step")
    args = parser.parse_args()
    pathwaysutils.initialize()
    print(f"start pid {os.getpid()}", flush=True)
    manager = Manager()
    snapshots = Snapshots()  # outlives every attempt
    log = Log(args.log)
    log(event="start", pid=os.getpid(), steps=args.steps, snapshot_period=args.snapshot_period)
    retry = manager.elastic_retry(
        minimum_slice_count=args.minimum_slices,
        poll_interval=args.poll_seconds,
        timeout=args.slice_timeout_seconds,
        retry_policy=ElasticRetryLimit(args.max_attempts),
    )
    retry(train)(args, manager, snapshots, log)
    log(event="end", pid=os.getpid())
    print(f"end pid {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()
