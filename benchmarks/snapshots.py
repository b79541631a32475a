"""What a snapshot of the whole state in the workers' host memory after every step costs.

Three slices of two devices; each slice has a replica of the state, sharded over its devices. A program of its own
(`benchmarks.snapshots_program`) makes blocks of steps, by turns with and without Orbax's `Snapshotter` saving each
of them, for states of several sizes. The ratio is that of the medians. On a machine where workers share the cores
with each other and the controller, copying competes with computing for them; on hosts of their own it would not.
"""

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from ridgeway.demo import job as jobs
from ridgeway.launch.environment import command_environment
from ridgeway.launch.local import LocalCluster

SHAPE = jobs.SMALL
RUN_SECONDS = 600.0


def summary(seconds: dict[str, list[float]], state_mib: int) -> dict[str, Any]:
    """One size's result: medians in seconds, their ratio, and the speed of one snapshot alone."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "state_mib_per_slice": state_mib,
        "step_without": harness.spread(seconds["without"]),
        "step_with": harness.spread(seconds["with"]),
        "ratio": round(medians["with"] / medians["without"], 3),
        "added_seconds_a_step": round(medians["with"] - medians["without"], 4),
        "save_call_seconds": harness.spread(seconds["save"]),
        "whole_snapshot_seconds": harness.spread(seconds["whole"]),
        "load_seconds": harness.spread(seconds["load"]),
        "mib_a_second_all_slices": round(SHAPE.slices * state_mib / medians["whole"]),
    }


async def measure(
    cluster: LocalCluster, state_mib: int, step_seconds: float, steps: int, blocks: int, log: Path
) -> dict[str, Any]:
    """One size of state."""
    assert cluster.record is not None
    environment = command_environment(os.environ, "127.0.0.1", cluster.record.proxy_port)
    command = [
        sys.executable, "-m", "benchmarks.snapshots_program",
        "--state-mib", str(state_mib), "--step-seconds", str(step_seconds),
        "--steps", str(steps), "--blocks", str(blocks),
    ]  # fmt: skip
    output = await harness.output_of(command, environment, log, RUN_SECONDS)
    return summary(json.loads(output.splitlines()[-1])["seconds"], state_mib)


def show(result: dict[str, Any], console: Console) -> None:
    """The result as a table."""
    table = Table(title="A snapshot after every step, milliseconds (medians)", title_justify="left")
    for column in ("state a slice", "step without", "step with", "ratio", "save call", "whole snapshot", "load"):
        table.add_column(column, justify="right")
    for size in result["sizes"]:
        names = ("step_without", "step_with", "save_call_seconds", "whole_snapshot_seconds", "load_seconds")
        without, with_, save, whole, load = (harness.number(1000 * size[name]["median"], 1) for name in names)
        ratio = harness.number(size["ratio"])
        table.add_row(f"{size['state_mib_per_slice']} MiB", without, with_, ratio, save, whole, load)
    console.print(table)


async def benchmark(
    sizes: tuple[int, ...], step_seconds: float, steps: int, blocks: int, output: Path, work: Path | None
) -> None:
    """Every size, one after the other, each in a program of its own."""
    say = harness.Say()
    result: dict[str, Any] = {
        "benchmark": "snapshots", "machine": harness.machine(), "topology": "3x1x2",
        "aimed_step_seconds": step_seconds, "sizes": [],
    }  # fmt: skip
    with harness.work_folder(work) as folder:
        async with harness.cluster("benchmark-snapshots", SHAPE, 0, say) as cluster:
            for size in sizes:
                found = await measure(cluster, size, step_seconds, steps, blocks, folder / f"snapshots-{size}.log")
                result["sizes"].append(found)
                say(f"{size} MiB a slice: {found['ratio']:.2f} x the step without snapshots")
    harness.write(result, output)
    show(result, harness.console())
    say(f"written to {output}")


@click.command(help=__doc__)
@click.option("--state-mib", "sizes", multiple=True, type=click.IntRange(1), default=(4, 32, 128), show_default=True)
@click.option("--step-seconds", type=click.FloatRange(0.001), default=0.2, show_default=True, help="Computing a step.")
@click.option("--steps", type=click.IntRange(3), default=20, show_default=True, help="Of each block.")
@click.option("--blocks", type=click.IntRange(1), default=3, show_default=True, help="Of each kind.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), default=harness.RESULTS / "snapshots.json",
    help="JSON to write.  [default: docs/results/snapshots.json]",
)  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Keep logs here.")
def main(
    sizes: tuple[int, ...], step_seconds: float, steps: int, blocks: int, output: Path, work: Path | None
) -> None:
    harness.run(lambda: benchmark(sizes, step_seconds, steps, blocks, output, work))


if __name__ == "__main__":
    main()
