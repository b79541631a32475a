"""What `benchmarks.soak` runs: the plain trainer's model, trained without end by one process that survives everything.

Says what happens as JSON lines on standard output and ends, at the step after, when its standard input does::

    {"ready": pid}  {"attempt": number, "devices": count, "from": first step}  {"moment": "save" or "snapshot"}
    {"step": number, "loss": text of the float, "devices": count}  {"end": number of the last step}
"""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import jax
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
import plain_trainer as plain
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.elastic.manager import Manager, ScaleUpSignalError
from snapshot_trainer import Snapshots

POLL_SECONDS = 1.0
#: Steps from one program that was never compiled before to the next.
COMPILE_PERIOD = 20
SLICE_TIMEOUT_SECONDS = 300.0
#: More than any attempt has under way at once; the answers of one time after the other pile up.
TRANSFERS_AT_ONCE = 200
#: Fills in a row that add no thread, after which the pools are taken for full; and fills at most.
FILLS_WITHOUT_GROWTH = 4
FILLS_LIMIT = 40
#: Of a transfer.
VALUES = 1024


#: Standard output as it was at the start: what anybody else prints goes to standard error.
_messages = sys.stdout


def say(**message: Any) -> None:
    print(json.dumps(message), file=_messages, flush=True)


def fill_thread_pools() -> None:
    """Have more transfers at once than any attempt will, each way.

    jaxlib's client runs transfers and answers on the threads of two `tsl::UnboundedWorkQueue`, which keep as many as
    there ever were at once. Without this their number would rise with every attempt that sets a new record.
    """
    this = psutil.Process()
    most, without_growth = 0, 0
    for _ in range(FILLS_LIMIT):
        _fill_thread_pools()
        threads = this.num_threads()
        without_growth = 0 if threads > most else without_growth + 1
        most = max(most, threads)
        if without_growth == FILLS_WITHOUT_GROWTH:
            return


def _fill_thread_pools() -> None:
    device = jax.devices()[0]
    hosts = [np.full(VALUES, number, np.float32) for number in range(TRANSFERS_AT_ONCE)]
    jax.block_until_ready(jax.device_put(hosts, device))

    # One argument: the cluster takes the program with the most of them, of those that recur, for that of the steps.
    def fill(ones: jax.Array) -> list[jax.Array]:
        ones = jax.lax.fori_loop(0, 500, lambda _, x: x @ x, ones)
        return [jax.numpy.full(VALUES, number, np.float32) * ones[0, 0] for number in range(TRANSFERS_AT_ONCE)]

    # Nothing of it is there before the loop has ended, and then everything is.
    filled = jax.jit(fill)(jax.device_put(np.eye(256, dtype=np.float32), device))
    for found, host in zip(jax.device_get(filled), hosts, strict=True):
        np.testing.assert_array_equal(found, host)


class Soak:
    """The function that is tried again and again, and what outlives its attempts."""

    def __init__(self, options: argparse.Namespace, manager: Manager):
        self._options = options
        self._manager = manager
        self._attempt = 0
        self._ending = threading.Event()
        self._snapshots = Snapshots() if options.snapshot_period else None
        self._last_step: int | None = options.steps
        threading.Thread(target=self._wait_for_the_end, daemon=True).start()

    def _wait_for_the_end(self) -> None:
        sys.stdin.read()
        self._ending.set()

    def _is_over(self, step: int) -> bool:
        return self._ending.is_set() if self._last_step is None else step >= self._last_step

    def train(self) -> None:
        """One attempt: from the last checkpoint to the end."""
        manager, model_parallel = self._manager, self._options.model_parallel
        self._attempt += 1
        devices = [d for i in sorted(manager.active_slice_indices) for d in manager.slice_to_devices[i]]
        mesh = Mesh(np.array(devices).reshape(-1, model_parallel), ("data", "model"))

        def described(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = plain.LAYOUT.get(getattr(path[-1], "key", ""), P())
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        key = jax.random.key(0)
        abstract = jax.tree_util.tree_map_with_path(described, jax.eval_shape(plain.initialize, key))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        by_row, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        step_function = jax.jit(plain.train_step, out_shardings=(shardings, everywhere), donate_argnums=0)
        period = self._options.checkpoint_period
        options = ocp.CheckpointManagerOptions(save_interval_steps=period, max_to_keep=2)
        with ocp.CheckpointManager(self._options.checkpoints.absolute(), options=options) as checkpoints:
            kept = None if self._snapshots is None else self._snapshots.load(abstract)
            restored = checkpoints.latest_step()
            if kept is not None:
                step, state = kept
            elif restored is not None:
                step, state = restored, checkpoints.restore(restored, args=ocp.args.StandardRestore(abstract))
            else:
                step, state = -1, jax.jit(plain.initialize, out_shardings=shardings)(key)
            say(attempt=self._attempt, devices=len(devices), **{"from": step + 1})
            last_of_attempt = None if self._options.attempt_steps is None else step + self._options.attempt_steps
            while True:
                step += 1
                started = time.monotonic()
                batch = plain.batch_at(step)
                tokens = jax.make_array_from_callback(batch.shape, by_row, batch.__getitem__)
                state, loss = step_function(state, tokens)
                say(step=step, loss=repr(float(loss)), devices=len(devices))
                if step % COMPILE_PERIOD == COMPILE_PERIOD // 2:
                    # Something new to compile now and then: all else is compiled once.
                    jax.block_until_ready(jax.jit(lambda x, step=step: x * step + jax.numpy.sin(x + step))(loss))
                if step % period == 0:
                    say(moment="save")
                saved = checkpoints.save(step, args=ocp.args.StandardSave(state))
                if self._snapshots is not None and step % self._options.snapshot_period == 0:
                    say(moment="snapshot")
                    self._snapshots.save(step, state)
                    saved = True
                if saved and manager.available_inactive_slices:
                    checkpoints.wait_until_finished()
                    if self._snapshots is not None:
                        self._snapshots.join()
                    raise ScaleUpSignalError
                if self._is_over(step):
                    if self._snapshots is not None:
                        self._snapshots.join()  # an interpreter that ends under it would abort
                    say(end=step)
                    return
                if step == last_of_attempt:
                    raise jax.errors.JaxRuntimeError("DATA_LOSS: nothing was lost; see --attempt-steps")
                time.sleep(max(0.0, started + self._options.pace_seconds - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--minimum-slices", type=int, help="go on with as many; default: wait for all")
    parser.add_argument("--checkpoint-period", type=int, default=20)
    parser.add_argument("--snapshot-period", type=int, default=0, help="steps; 0: none")
    parser.add_argument("--model-parallel", type=int, default=2)
    parser.add_argument("--pace-seconds", type=float, default=0.1, help="shortest time of a step")
    parser.add_argument("--steps", type=int, help="end after this step instead of with standard input")
    parser.add_argument("--attempt-steps", type=int, help="end an attempt after as many, as if something were lost")
    options = parser.parse_args()
    sys.stdout = sys.stderr
    pathwaysutils.initialize()
    manager = Manager()
    retry = manager.elastic_retry(
        minimum_slice_count=options.minimum_slices,
        poll_interval=POLL_SECONDS,
        timeout=SLICE_TIMEOUT_SECONDS,
        # Each of pathwaysutils' health probes is a program of its own, which jax's caches keep with what it gave.
        on_elastic_event_callback=jax.clear_caches,
    )
    fill_thread_pools()
    say(ready=os.getpid())
    retry(Soak(options, manager).train)()


if __name__ == "__main__":
    main()
