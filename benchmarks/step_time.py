"""Seconds a training step takes through Ridgeway, beside native jax with the same layout, in the same run.

- MaxText, the demonstration's job, and the plain trainer of the examples: three slices of two devices through
  Ridgeway, and three jax processes of two devices each, natively (multi-controller, gloo collectives). The two
  take turns, and each pair begins with the other one.
- Micro-benchmarks (`benchmarks.micro`): through Ridgeway on the same cluster, natively in one process with six
  devices.

A step's time is that between two log lines of MaxText, and between two fetched losses of the plain trainer.
"""

import asyncio
import json
import os
import re
import socket
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from ridgeway.demo import job as jobs
from ridgeway.demo.training import Training
from ridgeway.launch.environment import command_environment
from ridgeway.launch.local import LocalCluster

#: Steps at the beginning that are not counted: caches are cold.
WARM_UP_STEPS = 10
#: Longer than any run: a checkpoint is saved at the first and the last step only.
CHECKPOINT_PERIOD = 100_000
RUN_SECONDS = 900.0
TRAINER = harness.ROOT / "examples" / "plain_trainer.py"
SHAPE = jobs.SMALL
#: Set on standard output by the trainer, one for each step.
_STEP_TIMES = re.compile(r"^end pid \d+: (\d+) step times kept, median ([\d.]+) s", re.MULTILINE)

Measure = Callable[[int], Awaitable[list[float]]]


class Benchmark:
    """One run, on a cluster that is up all the time."""

    def __init__(self, cluster: LocalCluster, dataset: Path, folder: Path, steps: int, say: harness.Say) -> None:
        self._cluster = cluster
        self._dataset = dataset
        self._folder = folder
        self._steps = steps
        self._say = say

    def _proxy_environment(self) -> dict[str, str]:
        assert self._cluster.record is not None
        return command_environment(os.environ, "127.0.0.1", self._cluster.record.proxy_port)

    def _options(self, name: str) -> jobs.Options:
        return jobs.Options(
            dataset=self._dataset,
            output=self._folder,
            steps=self._steps + WARM_UP_STEPS,
            checkpoint_period=CHECKPOINT_PERIOD,
            run_name=name,
        )

    async def maxtext(self, number: int) -> list[float]:
        """Seconds of each step of MaxText through Ridgeway."""
        name = f"maxtext-{number}"
        training = Training(self._cluster, jobs.build(self._options(name)), self._folder / f"{name}.log")
        try:
            await training.start()
            code = await training.finish(RUN_SECONDS)
        finally:
            await training.stop()
        if code:
            raise harness.BenchmarkError(f"MaxText ended with code {code}; see {training.log}")
        return jobs.step_intervals_seconds(training.steps)[WARM_UP_STEPS:]

    async def native_maxtext(self, number: int) -> list[float]:
        """The same in native multi-controller jax."""
        name = f"maxtext-{number}"
        found = await harness.native_job(self._options(name), self._folder / f"native-{name}.log", RUN_SECONDS)
        return found["step_seconds"][WARM_UP_STEPS:]

    async def trainer(self, number: int) -> list[float]:
        """Median seconds of a step of the plain trainer through Ridgeway."""
        return await self._trainer(f"trainer-{number}", [self._proxy_environment()])

    async def native_trainer(self, number: int) -> list[float]:
        """The same in native multi-controller jax."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        environments = [
            os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(SHAPE.devices_per_slice),
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
                "JAX_COORDINATOR_ADDRESS": coordinator,
                "JAX_NUM_PROCESSES": str(SHAPE.slices),
                "JAX_PROCESS_ID": str(index),
            }
            for index in range(SHAPE.slices)
        ]
        return await self._trainer(f"native-trainer-{number}", environments)

    async def _trainer(self, name: str, environments: list[dict[str, str]]) -> list[float]:
        command = [
            sys.executable, str(TRAINER),
            "--checkpoints", str(self._folder / name),
            "--steps", str(4 * (self._steps + WARM_UP_STEPS)),
            "--checkpoint-period", str(CHECKPOINT_PERIOD),
        ]  # fmt: skip
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        harness.output_of(command, environment, self._folder / f"{name}-{index}.log", RUN_SECONDS)
                    )
                    for index, environment in enumerate(environments)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        found = _STEP_TIMES.search(tasks[0].result())
        if found is None:
            raise harness.BenchmarkError(f"{TRAINER} did not say what a step took; see {self._folder}")
        return [float(found[2])]

    async def micro(self, repetitions: int) -> dict[str, Any]:
        """The micro-benchmarks, one after the other natively and through Ridgeway."""
        native = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(SHAPE.devices)}
        command = [sys.executable, "-m", "benchmarks.micro", "--repetitions", str(repetitions)]
        found = {}
        for name, environment in (("native", native), ("ridgeway", self._proxy_environment())):
            self._say(f"micro-benchmarks, {name}")
            text = await harness.output_of(command, environment, self._folder / f"micro-{name}.log", RUN_SECONDS)
            found[name] = json.loads(text)["seconds"]
        return {
            name: {
                **{side: harness.spread(found[side][name], digits=7) for side in ("ridgeway", "native")},
                "ratio": round(
                    statistics.median(found["ridgeway"][name]) / statistics.median(found["native"][name]), 2
                ),
            }
            for name in found["native"]
        }

    async def pairs(self, name: str, count: int, ridgeway: Measure, native: Measure) -> dict[str, Any]:
        """So many pairs of runs; the ratio is that of the medians over all of them."""
        found: dict[str, list[list[float]]] = {"ridgeway": [], "native": []}
        for number in range(count):
            sides: list[tuple[str, Measure]] = [("ridgeway", ridgeway), ("native", native)]
            for side, measure in sides if number % 2 == 0 else reversed(sides):
                found[side].append(await measure(number))
                median = statistics.median(found[side][-1])
                self._say(f"{name}, pair {number + 1} of {count}, {side}: {1000 * median:.0f} ms a step")
        medians = {side: [statistics.median(run) for run in runs] for side, runs in found.items()}
        overall = {side: statistics.median([s for run in runs for s in run]) for side, runs in found.items()}
        return {
            "pairs": count,
            "median_seconds": {side: round(value, 4) for side, value in overall.items()},
            "median_seconds_of_each_run": {side: [round(v, 4) for v in values] for side, values in medians.items()},
            "ratio": round(overall["ridgeway"] / overall["native"], 3),
            "ratio_of_each_pair": [
                round(a / b, 3) for a, b in zip(medians["ridgeway"], medians["native"], strict=True)
            ],
        }


def show(result: dict[str, Any], console: Console) -> None:
    """The result as tables."""
    steps = Table(title="Milliseconds a step (medians)", title_justify="left")
    for column in ("job", "Ridgeway", "native, 3 processes", "ratio", "ratio of each pair"):
        steps.add_column(column, justify="left" if column == "job" else "right")
    for name, label in (("maxtext", "MaxText, Qwen3-shaped"), ("trainer", "plain trainer")):
        part = result.get(name)
        if part:
            steps.add_row(
                label,
                *(harness.number(1000 * part["median_seconds"][side], 1) for side in ("ridgeway", "native")),
                harness.number(part["ratio"]),
                ", ".join(harness.number(ratio) for ratio in part["ratio_of_each_pair"]),
            )
    console.print(steps)
    micro = Table(title="Micro-benchmarks, milliseconds (medians)", title_justify="left")
    for column in ("", "Ridgeway", "native, 1 process", "ratio"):
        micro.add_column(column, justify="right" if column else "left")
    for name, part in result["micro"].items():
        micro.add_row(
            name.replace("_", " "),
            *(harness.number(1000 * part[side]["median"], 3) for side in ("ridgeway", "native")),
            harness.number(part["ratio"]),
        )
    console.print(micro)


async def benchmark(
    pairs: int, steps: int, repetitions: int, only: str | None, output: Path, work: Path | None
) -> None:
    """Everything, one after the other."""
    say = harness.Say()
    result: dict[str, Any] = {"benchmark": "step_time", "machine": harness.machine()}
    with harness.work_folder(work) as folder:
        dataset = await harness.prepared_data(say)
        async with harness.cluster("benchmark-steps", SHAPE, 0, say) as cluster:
            runs = Benchmark(cluster, dataset, folder, steps, say)
            result["micro"] = await runs.micro(repetitions)
            if only in (None, "trainer"):
                result["trainer"] = await runs.pairs("plain trainer", pairs, runs.trainer, runs.native_trainer)
            if only in (None, "maxtext"):
                result["maxtext"] = await runs.pairs("MaxText", pairs, runs.maxtext, runs.native_maxtext)
    harness.write(result, output)
    show(result, harness.console())
    say(f"written to {output}")


@click.command(help=__doc__)
@click.option("--pairs", type=click.IntRange(1), default=3, show_default=True, help="Runs of each job and side.")
@click.option("--steps", type=click.IntRange(20), default=60, show_default=True, help="Steps of MaxText that count.")
@click.option("--repetitions", type=click.IntRange(1), default=7, show_default=True, help="Of micro-benchmarks.")
@click.option("--only", type=click.Choice(["maxtext", "trainer", "micro"]), help="Leave the other jobs out.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), default=harness.RESULTS / "step_time.json",
    help="JSON to write.  [default: docs/results/step_time.json]",
)  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Keep logs and checkpoints here.")
def main(pairs: int, steps: int, repetitions: int, only: str | None, output: Path, work: Path | None) -> None:
    harness.run(lambda: benchmark(pairs, steps, repetitions, only, output, work))


if __name__ == "__main__":
    main()
