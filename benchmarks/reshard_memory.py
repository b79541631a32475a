"""Move large arrays between slices and see what that costs the head: its memory must not depend on their size.

Run as ``python -m benchmarks.reshard_memory --bytes 1073741824``. The arrays are made on the devices, copied to
another slice, spread over all, gathered and replicated; the head's peak of resident memory is taken meanwhile.
Results go to ``docs/results/reshard_memory.json``. Exit code 1 if the head grew by more than ``--limit-bytes``.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click

from conformance.cluster import cluster
from ridgeway import processes

PROGRAM_SECONDS = 600.0

MOVES = """
import json, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxlib import _pathways

size = int(sys.argv[1]) // 4

def on(devices, *spec):
    return NamedSharding(Mesh(np.array(devices), ("x",)), P(*spec))

slices = [[d for d in jax.devices() if d.slice_index == n] for n in range(3)]
first, second, everywhere = on(slices[0], "x"), on(slices[1], "x"), on(jax.devices(), "x")
turned = on(jax.devices()[::-1], "x")
moves = {"copy to another slice": second, "spread over all": everywhere, "other device order": turned,
         "gather in one slice": on(slices[2], "x"), "replicate in one slice": on(slices[0])}

def run(count):
    count -= count % (6 * 1024)
    array = jax.jit(lambda: jnp.arange(count, dtype=jnp.float32), out_shardings=first)()
    array.block_until_ready()
    seconds = {}
    for name, target in moves.items():
        started = time.monotonic()
        # As `pathwaysutils.reshard` does: jax's device_put takes the array to the host for another number of devices.
        [array] = _pathways._transfer_to_shardings([array], [target], False)
        array.block_until_ready()
        seconds[name] = round(time.monotonic() - started, 3)
    assert [float(array[n]) for n in (0, count // 2, count - 1)] == [0.0, np.float32(count // 2), np.float32(count - 1)]
    return seconds

run(6 * 1024)
print("warm", flush=True)
sys.stdin.readline()
print(json.dumps(run(size)), flush=True)
"""


@click.command(context_settings={"show_default": True})
@click.option("--bytes", "size", type=click.IntRange(min=1 << 20), default=1 << 30, help="Of the array that is moved.")
@click.option("--limit-bytes", type=int, default=64 << 20, help="How much the head's memory may grow.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Where the result goes.")
def main(size: int, limit_bytes: int, output: Path | None) -> None:
    """Move an array between slices while the head's memory is watched."""
    with cluster("3x1x2") as made:
        head = made.status()["head"]["pid"]
        program = subprocess.Popen(
            [sys.executable, "-c", MOVES, str(size)], env={**os.environ, **made.environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert program.stdin is not None and program.stdout is not None
            program.stdout.readline()
            processes.reset_peak_memory(head)
            before = processes.memory_bytes(head)
            started = time.monotonic()
            program.stdin.write("go\n")
            program.stdin.flush()
            line = program.stdout.readline()
            seconds = time.monotonic() - started
            peak = processes.peak_memory_bytes(head)
        finally:
            if program.poll() is None and program.stdin is not None:
                program.stdin.close()
            program.wait(PROGRAM_SECONDS)
    if not line:
        raise click.ClickException("the program ended before its moves did; see its output above")
    result = {
        "command": f"python -m benchmarks.reshard_memory --bytes {size}",
        "array_bytes": size, "topology": "3x1x2", "moves_seconds": json.loads(line), "seconds": round(seconds, 3),
        "head_before_bytes": before, "head_peak_bytes": peak, "head_growth_bytes": peak - before,
    }  # fmt: skip
    text = json.dumps(result, indent=2) + "\n"
    click.echo(text)
    if output is not None:
        output.write_text(text)
    if peak - before > limit_bytes:
        raise click.ClickException(f"the head grew by {peak - before} bytes, more than {limit_bytes}")


if __name__ == "__main__":
    main()
