"""Seconds from a SIGKILL to the next training step: with standby workers, without, and natively.

The job is the demonstration's: MaxText, a small Qwen3-shaped model on 3 slices with 2 devices each, a
checkpoint every 10 steps. Through Ridgeway, workers are killed again and again under one controller process.
Natively (one jax process for each slice, gloo collectives), one process is killed once; the job is started anew
when all its processes have ended.

"Next step" is, in all three, the first step that MaxText logs after the kill. "Noticed" is the head's
``host_lost`` event.
"""

import itertools
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from ridgeway.demo import job as jobs
from ridgeway.demo.training import Kill, Resumption, Training, TrainingError
from ridgeway.timeline import recovery, report
from ridgeway.timeline.events import read_events

CHECKPOINT_PERIOD = 10
#: Steps after a checkpoint before the next kill.
STEPS_AFTER_CHECKPOINT = 3
#: More than a run of any length does; it is ended from outside.
STEPS = 100_000
#: Slices are killed in turn.
VICTIMS = (2, 0, 1)

FIRST_STEP_SECONDS = 300.0
CHECKPOINT_SECONDS = 300.0
RECOVERY_SECONDS = 180.0
#: The native job, its survivors' own time to end and its relaunch included.
NATIVE_SECONDS = 1200.0


async def measure(
    name: str, dataset: Path, folder: Path, kills: int, standbys: int, say: harness.Say
) -> dict[str, Any]:
    """Kill so many workers, one after the other, in one training run."""
    job = jobs.build(
        jobs.Options(
            dataset=dataset,
            output=folder,
            steps=STEPS,
            checkpoint_period=CHECKPOINT_PERIOD,
            run_name=name,
            elastic_max_retries=kills + 10,
            checkpoints_to_keep=3,
        )
    )
    done: list[tuple[Kill, Resumption]] = []
    async with harness.cluster(f"benchmark-{name}", jobs.SMALL, standbys, say) as cluster:
        training = Training(cluster, job, folder / f"{name}.log")
        try:
            pid = await training.start()
            say(f"{name}: controller pid {pid}")
            await training.until("the first step", lambda: bool(training.steps), FIRST_STEP_SECONDS)
            for victim in itertools.islice(itertools.cycle(VICTIMS), kills):
                await until_ready_to_kill(training, standbys)
                kill = await training.kill_worker(victim, 0)
                resumed = await training.until_stepping_again(kill, RECOVERY_SECONDS)
                done.append((kill, resumed))
                say(
                    f"{name}: kill {len(done)} of {kills}, slice {victim}: step {resumed.step} "
                    f"{resumed.seconds:.2f} s after it"
                )
            wanted = len(training.steps) + STEPS_AFTER_CHECKPOINT
            await training.until("steps at the end", lambda: len(training.steps) >= wanted, CHECKPOINT_SECONDS)
            assert cluster.logs is not None
            events = read_events(cluster.logs / "events.jsonl")
        finally:
            await training.stop()
    return {"standbys": standbys, "controllers": 1, **summarize(done, events, training.steps)}


async def until_ready_to_kill(training: Training, standbys: int) -> None:
    """Wait until the cluster is whole, and steps were done after a checkpoint that is newer than this moment."""
    await training.until_whole(standbys)
    known = max(training.committed(), default=-1)
    await training.until(
        "a checkpoint", lambda: max(training.committed(), default=-1) > max(known, 0), CHECKPOINT_SECONDS
    )
    step = max(training.committed()) + STEPS_AFTER_CHECKPOINT
    await training.until("steps after it", lambda: training.steps[-1].step >= step, CHECKPOINT_SECONDS)


def noticed_seconds(kill: Kill, events: list[dict[str, Any]]) -> float:
    """From a kill to the head's event about it.

    Raises:
        TrainingError: there is none.
    """
    for event in events:
        if (
            event["kind"] == "host_lost"
            and (event.get("slice"), event.get("host")) == (kill.slice, kill.host)
            and event["monotonic"] >= kill.monotonic
        ):
            return event["monotonic"] - kill.monotonic
    raise TrainingError(f"the head has no event about the loss of slice {kill.slice} host {kill.host}")


def summarize(
    done: list[tuple[Kill, Resumption]], events: list[dict[str, Any]], steps: list[jobs.StepRecord]
) -> dict[str, Any]:
    """What was measured, as plain values."""
    noticed = [noticed_seconds(kill, events) for kill, _ in done]
    found = recovery.find_recoveries(events, [kill.time for kill, _ in done])
    timeline = report.summarize(found)
    return {
        "kill_to_next_step_seconds": harness.spread([resumed.seconds for _, resumed in done]),
        "noticed_seconds": harness.spread(noticed),
        "median_step_seconds": jobs.median_step_seconds(steps),
        "kills": [
            {
                "slice": kill.slice,
                "kill_to_next_step_seconds": round(resumed.seconds, 3),
                "noticed_seconds": round(seconds, 4),
                "last_step": resumed.last_step,
                "next_step": resumed.step,
            }
            for (kill, resumed), seconds in zip(done, noticed, strict=True)
        ],
        "timeline": timeline,
        "executors_lost_besides": sum(
            event["kind"] == "host_lost" and bool(event.get("executor_only")) for event in events
        ),
    }


async def measure_native(dataset: Path, folder: Path, say: harness.Say) -> dict[str, Any]:
    """One kill and relaunch of the same job as native multi-controller jax."""
    options = jobs.Options(
        dataset=dataset, output=folder, steps=40, checkpoint_period=CHECKPOINT_PERIOD, run_name="recovery"
    )
    say("native: the same job without Ridgeway; a process is killed, all are started anew when all have ended")
    found = await harness.native_job(
        options, folder / "native.log", NATIVE_SECONDS, "--kill-after-checkpoint", "--relaunch"
    )
    took = found["recovery"]
    say(f"native: next step {took['kill_to_next_step_seconds']:.1f} s after the kill")
    kept = ("kill_to_all_dead_seconds", "all_dead_to_next_step_seconds", "kill_to_next_step_seconds")
    return {
        "processes": found["processes"],
        "median_step_seconds": found["median_step_seconds"],
        **{name: took[name] for name in kept},
        "ended_by_deadline": took["ended_by_deadline"],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The result as tables."""
    base = (result.get("native") or {}).get("kill_to_next_step_seconds")
    table = Table(title="Seconds from SIGKILL to the next step", title_justify="left")
    for column in ("", "kills", "median", "min", "max", "noticed (median)", "native / this"):
        table.add_column(column, justify="left" if not column else "right")
    for name, label in (("standby", "with standby workers"), ("cold", "without (cold)")):
        part = result.get(name)
        if not part:
            continue
        seconds, noticed = part["kill_to_next_step_seconds"], part["noticed_seconds"]
        table.add_row(
            f"Ridgeway, {label}",
            str(seconds["count"]),
            *(harness.number(seconds[key]) for key in ("median", "minimum", "maximum")),
            harness.number(noticed["median"], 3),
            f"{base / seconds['median']:.0f}x" if base and seconds["median"] else "",
        )
    if base:
        table.add_row("native, all processes anew", "1", harness.number(base), "", "", "", "1x")
    console.print(table)
    for name in ("standby", "cold"):
        part = result.get(name)
        if part:
            spent = part["timeline"]["phases"]
            phases = ", ".join(f"{phase} {harness.number(spent[phase]['median_seconds'])}" for phase in spent)
            console.print(f"{name}: median seconds of each phase: {phases}", highlight=False)
    if base:
        parts = result["native"]
        console.print(
            f"native: {parts['kill_to_all_dead_seconds']:.1f} s until all processes had ended, "
            f"{parts['all_dead_to_next_step_seconds']:.1f} s from the relaunch to the next step",
            highlight=False,
        )


async def benchmark(kills: int, standbys: int, with_native: bool, output: Path, work: Path | None) -> None:
    """Everything, one after the other."""
    say = harness.Say()
    result: dict[str, Any] = {"benchmark": "recovery", "machine": harness.machine()}
    with harness.work_folder(work) as folder:
        dataset = await harness.prepared_data(say)
        if standbys:
            result["standby"] = await measure("standby", dataset, folder, kills, standbys, say)
        result["cold"] = await measure("cold", dataset, folder, kills, 0, say)
        if with_native:
            result["native"] = await measure_native(dataset, folder, say)
    base = (result.get("native") or {}).get("kill_to_next_step_seconds")
    medians = {
        name: result[name]["kill_to_next_step_seconds"]["median"] for name in ("standby", "cold") if name in result
    }
    result["native_to_ridgeway"] = {name: round(base / median, 2) for name, median in medians.items()} if base else None
    harness.write(result, output)
    show(result, harness.console())
    say(f"written to {output}")


@click.command(help=__doc__)
@click.option("--kills", type=click.IntRange(1), default=5, show_default=True, help="In each training run.")
@click.option("--standby", type=click.IntRange(0), default=1, show_default=True, help="0 leaves that run out.")
@click.option("--native/--no-native", "with_native", default=True, show_default=True, help="Some three minutes.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), default=harness.RESULTS / "recovery.json",
    help="JSON to write.  [default: docs/results/recovery.json]",
)  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Keep logs and checkpoints here.")
def main(kills: int, standby: int, with_native: bool, output: Path, work: Path | None) -> None:
    harness.run(lambda: benchmark(kills, standby, with_native, output, work))


if __name__ == "__main__":
    main()
