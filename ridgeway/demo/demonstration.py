"""One demonstration, step by step: train, kill, recover, train on; then judge and show what was seen."""

import asyncio
import dataclasses
import json
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeway.demo import dataset, evidence
from ridgeway.demo import job as jobs
from ridgeway.demo.controller import parse_account
from ridgeway.demo.training import Kill, Training, TrainingError
from ridgeway.launch import checks
from ridgeway.launch.cluster_folder import ClusterError
from ridgeway.launch.local import LaunchError, LocalCluster, LocalOptions, cache_folder
from ridgeway.timeline import plots, recovery, report
from ridgeway.timeline.events import read_events

CLUSTER_NAME = "demo"
RUN_NAME = "training"

#: Checkpoints after that of step 0 that must be complete before the kill.
CHECKPOINTS_BEFORE_KILL = 2
#: Steps between the newest checkpoint and the kill, at least, and so many before the next checkpoint: the log is a
#: step behind, and a checkpoint of the very moment would leave nothing to go back over.
STEPS_AROUND_CHECKPOINT = 2
#: Steps after the recovery before the workers are looked at again.
STEPS_UNTIL_STATUS = 5

START_SECONDS = 120.0
#: From the controller's start to its first step: imports and compilation, on a busy machine.
FIRST_STEP_SECONDS = 180.0
#: For so many steps that a checkpoint is due.
TRAINING_SECONDS = 300.0
RECOVERY_SECONDS = 120.0
#: After everything was stopped, until no process is left.
VANISH_SECONDS = 5.0


class DemoError(Exception):
    """The demonstration cannot run, or did not get to its end; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """A topology with a number of steps that fits it.

    Attributes:
        shape: topology and model.
        steps: number of training steps.
        checkpoint_period: a checkpoint at every step divisible by it.
    """

    shape: jobs.Shape
    steps: int
    checkpoint_period: int


SMALL_PLAN = Plan(jobs.SMALL, steps=50, checkpoint_period=10)
FULL_PLAN = Plan(jobs.FULL, steps=26, checkpoint_period=5)


@dataclass(frozen=True)
class Options:
    """What a user may choose.

    Attributes:
        plan: topology, model and length.
        output: folder for everything that is left.
        jsonl: text to train on; None for the Python standard library.
        standby: workers that wait, ready, to take a dead one's place.
        kill_slice: slice whose worker is killed.
        kill_host: its host in the slice; None for one chosen by the seed.
        seed: of the host and of the number of steps between checkpoint and kill.
        cluster: name of the cluster.
    """

    plan: Plan
    output: Path
    jsonl: Path | None = None
    standby: int = 1
    kill_slice: int = 2
    kill_host: int | None = None
    seed: int = 0
    cluster: str = CLUSTER_NAME


class Progress:
    """Lines with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """Print one line now."""
        elapsed = time.monotonic() - self._started
        self._console.print(f"[dim]{elapsed:6.1f} s[/dim]  {escape(text)}", style=style, soft_wrap=True)


def data_folder(jsonl: Path | None) -> Path:
    """Where the data set is kept between demonstrations: it is the same for every one with the same text."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return cache_folder().parent / "demo-data" / ("jsonl" if jsonl else f"python-{version}")


class Demonstration:
    """One run, step by step."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options = options
        self.output = options.output.absolute()
        self._console = console
        self._progress = Progress(console)
        self._say = self._progress.say
        self._random = random.Random(options.seed)
        self._watched: dict[int, float] = {}

    async def run(self) -> list[evidence.Check]:
        """Do everything and show the evidence; returns the checks.

        Raises:
            DemoError: it did not get to the end. Nothing is left running, as when it is cancelled.
        """
        options = self.options
        data = await self._data()
        job = jobs.build(
            jobs.Options(
                dataset=data,
                output=self.output,
                shape=options.plan.shape,
                steps=options.plan.steps,
                checkpoint_period=options.plan.checkpoint_period,
                run_name=RUN_NAME,
            )
        )
        shape = options.plan.shape
        topology = checks.make_topology(shape.slices, shape.hosts_per_slice, shape.devices_per_host)
        checks.check_memory(topology, options.standby, checks.available_bytes())
        cluster = LocalCluster(
            LocalOptions(
                name=options.cluster,
                topology=topology,
                standbys=options.standby,
                proxy_port=0,
                cluster_port=0,
                start_timeout_seconds=START_SECONDS,
                command=("ridgeway", "demo"),
            ),
            lambda text: self._say(f"cluster: {text}", style="cyan"),
        )
        training = Training(cluster, job, self.output / "controller.log", self._on_step)
        reason = "the demonstration did not get to its end"
        try:
            await cluster.start()
            seen = await self._train(training)
            assert cluster.logs is not None
            # Before the cluster is stopped: the losses that this means are none of the story's.
            shutil.copyfile(cluster.logs / "events.jsonl", self.output / "events.jsonl")
            reason = "the demonstration is over"
        except OSError as error:
            raise DemoError(f"cannot copy the events to {self.output}: {error.strerror or error}") from None
        except (TrainingError, LaunchError, ClusterError) as error:
            raise DemoError(str(error)) from None
        finally:
            await training.stop()
            await cluster.stop(reason)
        return await self._report(training, seen)

    async def _data(self) -> Path:
        folder = data_folder(self.options.jsonl)
        self._say(f"data set in {folder}")
        try:
            made = await asyncio.to_thread(dataset.build, folder, jsonl=self.options.jsonl)
        except dataset.DatasetError as error:
            raise DemoError(str(error)) from None
        text = "the JSONL file" if self.options.jsonl else "the Python standard library"
        self._say(
            f"{made.characters / 1e6:.1f} million characters from {text}, {made.pieces} tokenizer pieces"
            + (", as made before" if made.reused else "")
        )
        return folder

    def _on_step(self, record: jobs.StepRecord) -> None:
        if record.step % 5 == 0 or record.step == self.options.plan.steps - 1:
            self._say(f"step {record.step}: loss {record.loss:.3f}")

    async def _train(self, training: Training) -> "_Seen":
        options, plan = self.options, self.options.plan
        shape = plan.shape
        self._say(
            f"starting the controller: MaxText, a {shape.layers}-layer Qwen3-shaped model on {shape.devices} devices "
            f"in {shape.slices * shape.hosts_per_slice} workers; log: {training.log}"
        )
        pid = await training.start()
        self._say(f"controller pid {pid}; imports and compilation take a while")
        await training.until("the first step", lambda: bool(training.steps), FIRST_STEP_SECONDS)

        def committed() -> list[int]:
            return [step for step in training.committed() if step > 0]

        await training.until(
            "two committed checkpoints", lambda: len(committed()) >= CHECKPOINTS_BEFORE_KILL, TRAINING_SECONDS
        )
        # The log runs a step or two behind what has been dispatched, so the second half of a period is too close to
        # the next checkpoint: it could be committed before the kill, and the counter would have nothing to go back to.
        latest = max(STEPS_AROUND_CHECKPOINT, plan.checkpoint_period // 2)
        delay = self._random.randint(STEPS_AROUND_CHECKPOINT, latest)
        await training.until(
            f"the {delay}th step after a checkpoint",
            lambda: training.steps[-1].step % plan.checkpoint_period == delay,
            TRAINING_SECONDS,
        )
        before = await training.status()
        host = options.kill_host
        if host is None:
            host = self._random.randrange(shape.hosts_per_slice)
        self._watch(before, pid)
        kill = await training.kill_worker(options.kill_slice, host)
        complete = ", ".join(map(str, kill.committed))
        self._say(
            f"SIGKILL to the worker of slice {kill.slice} host {kill.host} (pid {kill.pid}) after step "
            f"{training.steps[-1].step}; committed checkpoints: {complete}",
            style="bold red",
        )
        resumed = await training.until_stepping_again(kill, RECOVERY_SECONDS)
        self._say(
            f"training again {resumed.seconds:.1f} s after the kill: step {resumed.last_step}, then step "
            f"{resumed.step}; controller pid {pid}",
            style="bold green",
        )
        wanted = resumed.index + STEPS_UNTIL_STATUS
        await training.until("more steps", lambda: len(training.steps) >= wanted, TRAINING_SECONDS)
        after = await training.status()
        self._watch(after, pid)
        exit_code = await training.finish(TRAINING_SECONDS)
        self._say(f"the controller has ended with code {exit_code}")
        return _Seen(kill, pid, exit_code, before, after)

    def _watch(self, status: dict[str, Any], controller: int) -> None:
        """Remember processes with their start times, to see later that they have ended."""
        pids = [controller, status["head"]["pid"], *(standby["pid"] for standby in status["standbys"])]
        for host in evidence.hosts(status).values():
            pids += [pid for pid in (host["pid"], host["executor_pid"]) if pid]
        for pid in pids:
            try:
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    self._watched[each.pid] = each.create_time()
            except psutil.NoSuchProcess:
                continue

    def _still_running(self) -> list[int]:
        left = []
        for pid, created in self._watched.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(pid)
            except psutil.NoSuchProcess:
                continue
        return sorted({*left, *(child.pid for child in psutil.Process().children(recursive=True))})

    async def _report(self, training: Training, seen: "_Seen") -> list[evidence.Check]:
        deadline = time.monotonic() + VANISH_SECONDS
        while (left := self._still_running()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        try:
            events = read_events(self.output / "events.jsonl")
            log_text = training.log.read_text("utf-8", errors="replace")
            metrics = jobs.parse_metrics(training.job.metrics_file.read_text("utf-8"))
        except OSError as error:
            raise DemoError(f"cannot read {error.filename}: {error.strerror}") from None
        recoveries = recovery.find_recoveries(events, [seen.kill.time])
        records = jobs.parse_steps(log_text)
        observed = evidence.Observed(
            steps=self.options.plan.steps,
            records=records,
            metrics=metrics,
            committed=training.committed(),
            kill=seen.kill,
            controller_pid=seen.controller_pid,
            exit_code=seen.exit_code,
            account=parse_account(log_text),
            before=seen.before,
            after=seen.after,
            events=events,
            recoveries=recoveries,
            left_running=left,
        )
        found = evidence.judge(observed)
        written = self._write(events, recoveries, records, seen, found)
        found.append(written)
        self._show(log_text, events, records, seen, found)
        return found

    def _write(
        self,
        events: list[dict[str, Any]],
        recoveries: list[recovery.Recovery],
        records: list[jobs.StepRecord],
        seen: "_Seen",
        found: list[evidence.Check],
    ) -> evidence.Check:
        """The timeline and the evidence as files."""
        subject = "the timeline as a table, as JSON and as a picture"
        kills = [seen.kill.time]
        names = ("timeline.txt", "timeline.json", "timeline.png")
        try:
            report.render(events, self.output / names[0], killed_at=kills)
            report.render(events, self.output / names[1], as_json=True, killed_at=kills)
            plots.plot(recoveries, self.output / names[2], evidence.step_times(records))
            content = {
                "kill": dataclasses.asdict(seen.kill),
                "controller_pid": seen.controller_pid,
                "status_before": seen.before,
                "status_after": seen.after,
                "checks": [dataclasses.asdict(check) for check in found],
            }
            (self.output / "evidence.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        except (OSError, plots.PlotError) as error:
            return evidence.Check(subject, False, str(error))
        return evidence.Check(subject, True, ", ".join(names))

    def _show(
        self,
        log_text: str,
        events: list[dict[str, Any]],
        records: list[jobs.StepRecord],
        seen: "_Seen",
        found: list[evidence.Check],
    ) -> None:
        console = self._console
        rewinds = jobs.find_rewinds(records)
        if rewinds:
            console.print(f"\n[bold]From {escape(str(self.output / 'controller.log'))}[/bold]")
            for line in evidence.excerpt(log_text, rewinds[0]):
                console.print(f"  {escape(line)}", soft_wrap=True, highlight=False)
        console.print("\n[bold]Timeline[/bold]")
        console.print(report.render(events, killed_at=[seen.kill.time]), markup=False, highlight=False, soft_wrap=True)
        if rewinds:
            before, after = evidence.rates(records, rewinds[0])
            if before and after:
                console.print(f"A step took {before:.3f} s before the kill and {after:.3f} s after it (medians).")
        table = Table(title="Evidence", title_justify="left", title_style="bold", show_header=False, box=None)
        for column in range(3):
            table.add_column(overflow="fold", ratio=(None, 2, 3)[column])
        for check in found:
            mark = "[green]ok[/green]" if check.passed else "[bold red]MISSING[/bold red]"
            table.add_row(mark, escape(check.subject), escape(check.text))
        console.print(table)
        console.print(f"\nEverything is in {escape(str(self.output))}", soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class _Seen:
    """What is known when training is over."""

    kill: Kill
    controller_pid: int
    exit_code: int
    before: dict[str, Any]
    after: dict[str, Any]
