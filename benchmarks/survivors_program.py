"""A stock JAX program that keeps several overlapping sets of devices busy and checks every number it gets.

It knows nothing of Ridgeway. It runs round after round: executions on sets chosen at random, one behind the
other without waiting, then every result is fetched and compared with what the same program gave when nothing
had failed yet, bit by bit. When an operation raises, it makes its inputs anew and tries again.

Lines of output, each a JSON object: ``{"ready": seconds}`` once the reference results are known,
``{"round": number, "begun": t, "ended": t}`` (monotonic clock, seconds) for a round whose results were all
right, ``{"error": text}`` for what an operation raised, ``{"wrong": set}`` for a result that is not the
reference's. It ends when its input is closed.
"""

import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

EXECUTIONS_A_ROUND = 12
#: Between two attempts after an error; a slice may be down for seconds.
PAUSE_SECONDS = 0.02
#: Numbers of elements of the all-reduces in the program that has many.
SIZES = (1, 6, 2, 17, 1, 64, 3, 128)


class Job:
    """A program on one set of devices, its input and the result it must give.

    Args:
      program: takes an array, gives an array; may donate.
      make_input: puts the input on the devices.
    """

    def __init__(self, program: Callable[[jax.Array], jax.Array], make_input: Callable[[], jax.Array]):
        self._program = program
        self._make_input = make_input
        self.reference: np.ndarray | None = None

    def is_reference(self, result: np.ndarray) -> bool:
        """Whether a result is bit by bit what it must be."""
        return self.reference is not None and np.array_equal(result, self.reference)

    def begin(self) -> jax.Array:
        """Start one execution on a fresh input."""
        return self._program(self._make_input())


def _averaging(devices: list[Any]) -> Job:
    """f32[8 n, 8]: five times halfway to the mean of the rows, the rows shared out over n devices."""
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    rows = 8 * len(devices)
    values = np.random.default_rng(len(devices)).standard_normal((rows, 8), dtype=np.float32)

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        def turn(_: int, v: jax.Array) -> jax.Array:
            return v * 0.5 + jnp.sum(v, axis=0, keepdims=True) / rows * 0.5

        return jax.lax.fori_loop(0, 5, turn, x)

    return Job(program, lambda: jax.device_put(values, sharding))


def _donating(devices: list[Any]) -> Job:
    """f32[8 n, 8]: as above once, the input donated."""
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    values = np.random.default_rng(7).standard_normal((8 * len(devices), 8), dtype=np.float32)
    program = jax.jit(lambda x: (x + jnp.mean(x)) * 0.5, donate_argnums=0)
    return Job(program, lambda: jax.device_put(values, sharding))


def _many_reductions(by_slice: list[list[Any]]) -> Job:
    """f32[]: 24 all-reduces of several sizes over each axis of the mesh (slices, devices of a slice) and both."""
    mesh = Mesh(np.array(by_slice), ("slice", "device"))
    values = np.random.default_rng(1).standard_normal((len(by_slice), 64), dtype=np.float32)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("slice", None), out_specs=P(None), check_vma=False)
    def program(x: jax.Array) -> jax.Array:
        total = jnp.zeros((), jnp.float32)
        for k in range(24):
            part = x[0, :1] * (1 + k) + jnp.arange(SIZES[k % len(SIZES)], dtype=jnp.float32)
            total = total + jnp.sum(jax.lax.psum(part, (("slice",), ("device",), ("slice", "device"))[k % 3]))
        return jax.lax.pmean(total, ("slice", "device"))[None]

    return Job(program, lambda: jax.device_put(values, NamedSharding(mesh, P("slice", None))))


def make_jobs(by_slice: list[list[Any]]) -> dict[str, Job]:
    """Jobs on overlapping sets of devices: all of them, each pair of slices, single slices, other orders."""
    everything = [device for devices in by_slice for device in devices]
    jobs = {
        "all": _averaging(everything),
        "all, reversed": _averaging(everything[::-1]),
        "all, many reductions": _many_reductions(by_slice),
        "all, donated": _donating(everything),
        "one device of each slice, reversed": _averaging([devices[-1] for devices in by_slice][::-1]),
        "slice 0": _averaging(by_slice[0]),
        f"slice {len(by_slice) - 1}": _donating(by_slice[-1]),
    }
    for first, second in itertools.combinations(range(len(by_slice)), 2):
        jobs[f"slices {first} and {second}"] = _averaging(by_slice[first] + by_slice[second])
    return jobs


def say(message: dict[str, Any]) -> None:
    """One line of output."""
    print(json.dumps(message), flush=True)


def one_round(jobs: dict[str, Job], names: list[str]) -> None:
    """Start the jobs one behind the other, then look at every result."""
    begun = [(name, jobs[name].begin()) for name in names]
    for name, result in begun:
        if not jobs[name].is_reference(np.asarray(result)):
            say({"wrong": name})


def main(seed: int) -> None:
    """Run until standard input is closed."""
    started = time.monotonic()
    by_slice: dict[int, list[Any]] = {}
    for device in jax.devices():
        by_slice.setdefault(device.slice_index, []).append(device)
    jobs = make_jobs([by_slice[index] for index in sorted(by_slice)])
    for job in jobs.values():
        job.reference = np.asarray(job.begin())
    say({"ready": round(time.monotonic() - started, 3)})
    # Not at interpreter exit: whatever still hangs in the runtime must not keep the program alive.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    chooser = random.Random(seed)
    for number in itertools.count(1):
        begun = time.monotonic()
        extra = chooser.choices(list(jobs), k=max(0, EXECUTIONS_A_ROUND - len(jobs)))
        names = [*jobs, *extra]
        chooser.shuffle(names)
        try:
            one_round(jobs, names)
        except jax.errors.JaxRuntimeError as error:
            say({"error": str(error)})
            time.sleep(PAUSE_SECONDS)
        else:
            say({"round": number, "begun": begun, "ended": time.monotonic()})


if __name__ == "__main__":
    main(int(sys.argv[1]))
