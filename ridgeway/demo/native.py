"""Run the demonstration job in native multi-controller jax: one process per slice, no proxy, no elasticity.

This is the baseline: MaxText as it is, ``jax.distributed`` and gloo collectives between local processes. With
``--kill-after-checkpoint`` one process is killed once a checkpoint is committed; the others notice by
themselves, as they would in any multi-controller job. With ``--relaunch`` all are then started again.

The report is one JSON object on standard output; progress goes to standard error.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO

import click

from ridgeway.demo import job as jobs

# Options of one process of the job, passed through the environment because sys.argv is MaxText's.
_COORDINATOR = "RIDGEWAY_NATIVE_COORDINATOR"
_PROCESS_COUNT = "RIDGEWAY_NATIVE_PROCESS_COUNT"
_PROCESS_INDEX = "RIDGEWAY_NATIVE_PROCESS_INDEX"

POLL_SECONDS = 0.05
TERMINATE_GRACE_SECONDS = 5.0


class NativeError(Exception):
    """The native job failed; the message is one line that names the process and its log."""


@dataclass(frozen=True)
class Recovery:
    """What a killed process cost.

    Attributes:
        killed_process: index of the process that got SIGKILL.
        last_step: last step reported before the kill.
        restored_step: checkpoint that the relaunched job continued from.
        kill_to_all_dead_seconds: until the last process had ended.
        ended_by_deadline: processes that had to be killed because they did not end by themselves.
        all_dead_to_next_step_seconds: from there to the first step reported by the relaunched job.
        kill_to_next_step_seconds: the sum.
        next_step: number of that step.
    """

    killed_process: int
    last_step: int
    kill_to_all_dead_seconds: float
    ended_by_deadline: list[int]
    restored_step: int | None = None
    all_dead_to_next_step_seconds: float | None = None
    kill_to_next_step_seconds: float | None = None
    next_step: int | None = None


class Processes:
    """The job's processes, each with its log; a context manager that leaves none behind.

    Only processes started here are ever signalled.
    """

    def __init__(self, job: jobs.Job, shape: jobs.Shape, logs: Path) -> None:
        self._job = job
        self._shape = shape
        self._logs = logs
        self._children: list[subprocess.Popen[bytes]] = []
        self._files: list[IO[bytes]] = []
        self._starts = 0
        self._log_offset = 0
        self._steps: list[jobs.StepRecord] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes, with a coordinator port of their own."""
        self._starts += 1
        self._log_offset = 0
        self._steps = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        command = self._job.command
        # "-m maxtext…train ARGUMENTS" becomes "-m ridgeway.demo.native ARGUMENTS"; see _process.
        arguments = [command[0], "-m", "ridgeway.demo.native", *command[3:]]
        for index in range(self._shape.slices):
            environment = (
                os.environ
                | self._job.environment
                | {
                    "JAX_PLATFORMS": "cpu",
                    "JAX_NUM_CPU_DEVICES": str(self._shape.devices_per_slice),
                    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
                    _COORDINATOR: coordinator,
                    _PROCESS_COUNT: str(self._shape.slices),
                    _PROCESS_INDEX: str(index),
                }
            )
            file = self.log_path(index).open("wb")
            self._files.append(file)
            # A session of its own: Ctrl-C reaches the runner alone, which then ends the processes in order.
            self._children.append(
                subprocess.Popen(
                    arguments,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def log_path(self, index: int) -> Path:
        """The log of one process of the latest start."""
        return self._logs / f"start-{self._starts}-process-{index}.log"

    def steps(self) -> list[jobs.StepRecord]:
        """The steps that process 0 has reported since the latest start."""
        # Only what is new is read: the job's processes need the cores.
        with self.log_path(0).open("rb") as file:
            file.seek(self._log_offset)
            text = file.read()
        whole_lines = text[: text.rfind(b"\n") + 1]
        self._log_offset += len(whole_lines)
        self._steps.extend(jobs.parse_steps(whole_lines.decode("utf-8", errors="replace")))
        return list(self._steps)

    def kill(self, index: int) -> None:
        """SIGKILL one process."""
        self._children[index].kill()

    def running(self) -> list[int]:
        """Indices of the processes that have not ended."""
        return [index for index, child in enumerate(self._children) if child.poll() is None]

    def failed(self) -> str | None:
        """One line about a process that has ended badly, or None."""
        for index, child in enumerate(self._children):
            code = child.poll()
            if code:
                ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
                return f"process {index} {ended}; its log is {self.log_path(index)}"
        return None

    def stop(self) -> None:
        """End all processes: SIGTERM, then SIGKILL after ``TERMINATE_GRACE_SECONDS``."""
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + TERMINATE_GRACE_SECONDS
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for file in self._files:
            file.close()
        self._children.clear()
        self._files.clear()


def _wait(what: str, done: Callable[[], bool], processes: Processes, deadline: float) -> None:
    """Poll until ``done()``; raises NativeError when a process fails first or the deadline passes."""
    while not done():
        if failure := processes.failed():
            raise NativeError(f"waiting for {what}: {failure}")
        if not processes.running() and not done():
            raise NativeError(f"waiting for {what}: all processes ended; see {processes.log_path(0)}")
        if time.monotonic() > deadline:
            raise NativeError(f"{what}: not within the deadline; see {processes.log_path(0)}")
        time.sleep(POLL_SECONDS)


def _kill_and_wait(
    processes: Processes, victim: int, seconds: float, say: Callable[[str], None]
) -> tuple[float, float, list[int]]:
    """SIGKILL one process and wait until all have ended.

    Returns:
        The monotonic time of the kill, that of the last end, and the processes killed at the deadline.
    """
    killed_at = time.monotonic()
    processes.kill(victim)
    say(f"killed process {victim}; waiting until all have ended")
    left: list[int] = []
    while processes.running() and not left:
        if time.monotonic() > killed_at + seconds:
            left = processes.running()
        time.sleep(POLL_SECONDS)
    for index in left:
        processes.kill(index)
    while processes.running():
        time.sleep(POLL_SECONDS)
    return killed_at, time.monotonic(), left


def native_options(options: jobs.Options) -> jobs.Options:
    """The same job without a proxy: no elasticity, one controller per slice."""
    overrides = dict(options.overrides or {}) | {
        "enable_single_controller": "false",
        # Without Pathways these processes make up one slice, as MaxText sees it.
        "dcn_data_parallelism": "1",
        "ici_data_parallelism": str(options.shape.slices),
    }
    return replace(options, elastic=False, overrides=overrides)


def run(
    options: jobs.Options,
    *,
    kill_after_checkpoint: bool = False,
    relaunch: bool = False,
    victim: int = 2,
    start_seconds: float = 180.0,
    training_seconds: float = 600.0,
    death_seconds: float = 300.0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, object]:
    """Run the job natively and report its step times and, when a process is killed, what that cost.

    Args:
        options: the job; each slice of its shape becomes one process.
        kill_after_checkpoint: SIGKILL the victim once a checkpoint of a step after 0 is committed.
        relaunch: start all processes again when all have ended, and train to the end.
        victim: index of the process to kill.
        start_seconds: deadline from a start to the first reported step.
        training_seconds: deadline for the steps after the first.
        death_seconds: deadline for the survivors to end by themselves; those left are killed.
        say: takes one line of progress.

    Raises:
        NativeError: a process failed, or a deadline passed. No process is left running.
        jobs.JobError: the options are out of range.
    """
    if not 0 <= victim < options.shape.slices:
        raise NativeError(f"there is no process {victim}; the job has {options.shape.slices}")
    job = jobs.build(native_options(options))
    if jobs.committed_steps(job.checkpoint_directory):
        raise NativeError(f"{job.checkpoint_directory} holds an earlier run; name another --output")
    logs = options.output / "logs"
    try:
        job.metrics_file.parent.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NativeError(f"cannot write {options.output}: {error.strerror or error}") from error
    recovery: Recovery | None = None
    restarted_steps: list[jobs.StepRecord] = []

    with Processes(job, options.shape, logs) as processes:

        def train_to_the_end() -> list[jobs.StepRecord]:
            deadline = time.monotonic() + training_seconds
            _wait("the end of training", lambda: not processes.running(), processes, deadline)
            if failure := processes.failed():
                raise NativeError(failure)
            return processes.steps()

        started = time.monotonic()
        say(f"starting {options.shape.slices} processes with {options.shape.devices_per_slice} devices each")
        processes.start()
        _wait("the first step", lambda: bool(processes.steps()), processes, started + start_seconds)
        start_to_first_step = time.monotonic() - started
        say(f"first step after {start_to_first_step:.1f} s")
        if not kill_after_checkpoint:
            steps = train_to_the_end()
        else:
            _wait(
                "a committed checkpoint",
                lambda: any(step > 0 for step in jobs.committed_steps(job.checkpoint_directory)),
                processes,
                time.monotonic() + training_seconds,
            )
            killed_at, dead_at, left = _kill_and_wait(processes, victim, death_seconds, say)
            steps = processes.steps()
            recovery = Recovery(victim, steps[-1].step, dead_at - killed_at, left)
            say(f"all processes had ended after {dead_at - killed_at:.1f} s")
            processes.stop()
            if relaunch:
                restored = jobs.committed_steps(job.checkpoint_directory)[-1]
                processes.start()
                deadline = time.monotonic() + start_seconds
                _wait("the first step again", lambda: bool(processes.steps()), processes, deadline)
                next_at = time.monotonic()
                say(f"training again {next_at - killed_at:.1f} s after the kill")
                recovery = replace(
                    recovery,
                    restored_step=restored,
                    all_dead_to_next_step_seconds=next_at - dead_at,
                    kill_to_next_step_seconds=next_at - killed_at,
                    next_step=processes.steps()[0].step,
                )
                restarted_steps = train_to_the_end()

    metrics = Path(f"{job.metrics_file}.0").read_text("utf-8")
    intervals = [*jobs.step_intervals_seconds(steps), *jobs.step_intervals_seconds(restarted_steps)]
    return {
        "processes": options.shape.slices,
        "devices_per_process": options.shape.devices_per_slice,
        "start_to_first_step_seconds": start_to_first_step,
        "median_step_seconds": jobs.median_step_seconds([*steps, *restarted_steps]),
        "step_seconds": intervals,
        "losses": {str(record.step): record.loss for record in jobs.parse_metrics(metrics)},
        "recovery": asdict(recovery) if recovery else None,
        "logs": str(logs),
    }


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _process(arguments: Sequence[str]) -> None:
    """Be one process of the job: join the others, then become MaxText.

    MaxText takes an already initialised ``jax.distributed`` as it is. Its own way to set it up on CPUs
    insists on port 1234 and on the variables of one launcher.
    """
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    import jax

    index = os.environ[_PROCESS_INDEX]
    jax.distributed.initialize(
        coordinator_address=os.environ[_COORDINATOR],
        num_processes=int(os.environ[_PROCESS_COUNT]),
        process_id=int(index),
    )
    # All processes write metrics; one file for each, or they would mix.
    sys.argv = ["train", *(f"{a}.{index}" if a.startswith("metrics_file=") else a for a in arguments)]
    runpy.run_module("maxtext.trainers.pre_train.train", run_name="__main__", alter_sys=True)


def _stop_on_terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@click.command(help=__doc__)
@click.option("--dataset", required=True, type=click.Path(path_type=Path), help="From ridgeway.demo.dataset.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="For checkpoints, metrics, logs.")
@click.option("--steps", default=60, show_default=True)
@click.option("--checkpoint-period", default=10, show_default=True, help="Steps between checkpoints.")
@click.option("--kill-after-checkpoint", is_flag=True, help="SIGKILL a process after the first checkpoint.")
@click.option("--relaunch", is_flag=True, help="Start all processes again after the kill.")
@click.option("--victim", default=2, show_default=True, help="Index of the process to kill.")
@click.option("--start-seconds", default=180.0, show_default=True, help="Deadline from start to first step.")
@click.option("--training-seconds", default=600.0, show_default=True, help="Deadline for the other steps.")
@click.option("--death-seconds", default=300.0, show_default=True, help="Deadline for survivors to end.")
def main(
    dataset: Path,
    output: Path,
    steps: int,
    checkpoint_period: int,
    kill_after_checkpoint: bool,
    relaunch: bool,
    victim: int,
    start_seconds: float,
    training_seconds: float,
    death_seconds: float,
) -> None:
    if relaunch and not kill_after_checkpoint:
        raise click.UsageError("--relaunch needs --kill-after-checkpoint")
    signal.signal(signal.SIGTERM, _stop_on_terminate)
    options = jobs.Options(
        dataset=dataset, output=output, steps=steps, checkpoint_period=checkpoint_period, run_name="native"
    )
    try:
        report = run(
            options,
            kill_after_checkpoint=kill_after_checkpoint,
            relaunch=relaunch,
            victim=victim,
            start_seconds=start_seconds,
            training_seconds=training_seconds,
            death_seconds=death_seconds,
            say=lambda text: click.echo(text, err=True),
        )
    except (NativeError, jobs.JobError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(report, indent=2))


if __name__ == "__main__":
    if _PROCESS_INDEX in os.environ:
        _process(sys.argv[1:])
    else:
        main()
