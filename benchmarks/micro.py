"""Micro-benchmarks of one JAX client; prints one JSON object. `step_time` runs it natively and through Ridgeway.

Every figure is a list of seconds, one for each repetition: of a call where calls are timed in a row, else of
the whole thing. All work is on six devices except where a single one is named.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 6
DISPATCHES = 200
FETCHES = 50
ARRAYS = 300
PUT_BYTES = 32 << 20


def timed(work: Callable[[], object], repetitions: int, divide_by: int = 1) -> list[float]:
    """Seconds of each repetition, after one that is not counted."""
    work()
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        work()
        seconds.append((time.perf_counter() - started) / divide_by)
    return seconds


def measure(repetitions: int) -> dict[str, list[float]]:
    """All figures by name."""
    devices = jax.devices()[:DEVICES]
    mesh = Mesh(np.array(devices), ("x",))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    one = jax.device_put(np.float32(1), devices[0])
    add_one = jax.jit(lambda x: x + 1)

    def dispatch() -> float:
        """Seconds for the calls to return: the devices work on, and are waited for outside the time."""
        value = one
        started = time.perf_counter()
        for _ in range(DISPATCHES):
            value = add_one(value)
        seconds = time.perf_counter() - started
        value.block_until_ready()
        return seconds / DISPATCHES

    def fetch() -> None:
        for _ in range(FETCHES):
            float(add_one(one))

    rows = jax.device_put(np.zeros((DEVICES, 8), np.float32), split)
    total = jax.jit(lambda x: x.sum(), out_shardings=whole)

    def collective() -> None:
        for _ in range(FETCHES):
            float(total(rows))

    many = [jax.device_put(np.full((DEVICES, 4), i, np.float32), split) for i in range(ARRAYS)]
    shift = jax.jit(lambda values: [value + 1 for value in values], out_shardings=[split] * ARRAYS)

    def in_and_out() -> None:
        jax.block_until_ready(shift(many))

    block = np.zeros(PUT_BYTES, np.uint8)

    def put() -> None:
        jax.device_put(block, devices[0]).block_until_ready()

    dispatch()
    return {
        "tiny_dispatch": [dispatch() for _ in range(repetitions)],
        "blocking_fetch": timed(fetch, repetitions, FETCHES),
        "blocking_sum_over_devices": timed(collective, repetitions, FETCHES),
        "arrays_300_in_and_out": timed(in_and_out, repetitions),
        "put_32_mib": timed(put, repetitions),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    if len(jax.devices()) < DEVICES:
        sys.stderr.write(f"needs {DEVICES} devices, has {len(jax.devices())}\n")
        return 2
    assert jnp.asarray(1).dtype == np.int32
    print(json.dumps({"platform": jax.devices()[0].platform, "seconds": measure(arguments.repetitions)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
