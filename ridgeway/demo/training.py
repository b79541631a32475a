"""One training run through a cluster on this machine: start the controller, watch it, kill workers, end it.

Used by the demonstration and by the benchmarks. What it learns comes from outside the controller: its log,
its checkpoint folder, and the head's answers.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeway.demo import job as jobs
from ridgeway.launch import control
from ridgeway.launch.child_processes import Process, kill_group, last_line, spawn, terminate, wait_all
from ridgeway.launch.cluster_folder import ClusterRecord
from ridgeway.launch.environment import command_environment
from ridgeway.launch.local import LocalCluster

POLL_SECONDS = 0.05
#: How long a controller may take to end after SIGTERM, before SIGKILL.
STOP_SECONDS = 5.0
#: How long a worker that died may take to be replaced.
REPLACEMENT_SECONDS = 120.0

#: pathwaysutils (0.1.13, elastic/manager.py) logs this at each entry of the training function; the first is number 1.
_ATTEMPT = "Elastic attempt "
_EXCEPTION_LINE = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Limit)\b|SystemExit).*")


class TrainingError(Exception):
    """The run did not go as it should; the message is one line that says what and where to look."""


@dataclass(frozen=True)
class Kill:
    """A worker that was killed.

    Attributes:
        slice: its slice.
        host: its host in the slice.
        pid: its process, the agent; the kernel ends the executor with it.
        time: wall time of the kill, seconds.
        monotonic: the same on the monotonic clock, which all processes of a machine share.
        steps_before: how many steps had been logged.
        attempts_before: how often the training function had been entered.
        committed: the checkpoints that were complete.
    """

    slice: int
    host: int
    pid: int
    time: float
    monotonic: float
    steps_before: int
    attempts_before: int
    committed: list[int]


@dataclass(frozen=True)
class Resumption:
    """The first step after a recovery.

    Attributes:
        index: its position among all steps logged.
        last_step: the last step logged before.
        step: its number. It is at most ``last_step`` unless a checkpoint was committed right before the kill.
        seconds: from the kill to its log line.
    """

    index: int
    last_step: int
    step: int
    seconds: float


class LogReader:
    """The steps in a log that grows; each part of the log is read once.

    Attributes:
        records: all steps so far.
        attempts: for each entry of the training function how many steps had been logged before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.records: list[jobs.StepRecord] = []
        self.attempts: list[int] = []

    def read(self) -> list[jobs.StepRecord]:
        """The steps that are new since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole_lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole_lines)
        before = len(self.records)
        for line in whole_lines.decode("utf-8", errors="replace").splitlines():
            if _ATTEMPT in line and not line.rstrip().endswith("failed."):
                self.attempts.append(len(self.records))
            elif "completed step" in line:
                self.records += jobs.parse_steps(line)
        return self.records[before:]


def last_error(log: Path) -> str:
    """The last line of a log that looks like a Python exception; failing that, the last line."""
    try:
        lines = log.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = next((line for line in reversed(lines) if _EXCEPTION_LINE.match(line)), None)
    return (found or last_line(log))[:400]


class Training:
    """A controller process on a cluster that is up.

    Args:
        cluster: after its ``start``; both belong to one event loop.
        job: what to run. Its module is run by ``ridgeway.demo.controller``, which counts the steps.
        log: the controller's stdout and stderr.
        on_step: told about every step when it is seen in the log.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        job: jobs.Job,
        log: Path,
        on_step: Callable[[jobs.StepRecord], None] = lambda record: None,
    ) -> None:
        self.job = job
        self.log = log
        self.kills: list[Kill] = []
        self._cluster = cluster
        self._reader = LogReader(log)
        self._on_step = on_step
        self._process: Process | None = None

    async def start(self) -> int:
        """Start the controller; returns its process id.

        Raises:
            TrainingError: it cannot be started, or the checkpoints of an earlier run are in the way.
        """
        if jobs.committed_steps(self.job.checkpoint_directory):
            raise TrainingError(f"{self.job.checkpoint_directory} holds an earlier run; name another output folder")
        self.job.metrics_file.parent.mkdir(parents=True, exist_ok=True)
        # "python -m MODULE …" becomes "python -m ridgeway.demo.controller MODULE …".
        command = [*self.job.command[:2], "ridgeway.demo.controller", *self.job.command[2:]]
        inherited = os.environ | self.job.environment
        try:
            self._process = await spawn(
                command, command_environment(inherited, "127.0.0.1", self._record.proxy_port), self.log
            )
        except OSError as error:
            raise TrainingError(f"cannot start the controller: {error.strerror or error}") from None
        return self._process.pid

    @property
    def _record(self) -> ClusterRecord:
        assert self._cluster.record is not None, "the cluster is not up"
        return self._cluster.record

    @property
    def exit_code(self) -> int | None:
        """The controller's; None while it runs, negative when a signal ended it."""
        return self._process.returncode if self._process is not None else None

    @property
    def steps(self) -> list[jobs.StepRecord]:
        """All steps seen in the log so far."""
        return self._reader.records

    def committed(self) -> list[int]:
        """Steps whose checkpoint is complete."""
        return jobs.committed_steps(self.job.checkpoint_directory)

    def look(self) -> None:
        """Read what is new in the log."""
        for record in self._reader.read():
            self._on_step(record)

    async def until(self, what: str, done: Callable[[], bool], seconds: float) -> None:
        """Wait while the controller trains.

        Raises:
            TrainingError: the controller or the cluster ended first, or the deadline passed.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if done():
                return
            if self._cluster.failure.done():
                raise TrainingError(f"waiting for {what}: the cluster failed: {self._cluster.failure.result()}")
            if self.exit_code == 0:
                raise TrainingError(f"waiting for {what}: the controller had done all its steps (log: {self.log})")
            if self.exit_code is not None:
                raise TrainingError(
                    f"waiting for {what}: the controller ended with code {self.exit_code}: "
                    f"{last_error(self.log)} (log: {self.log})"
                )
            if time.monotonic() > deadline:
                raise TrainingError(f"waited {seconds:g} s for {what}; see {self.log} and {self._cluster.logs}")
            await asyncio.sleep(POLL_SECONDS)

    async def until_stepping_again(self, kill: Kill, seconds: float) -> Resumption:
        """Wait for the first step of the attempt that follows a kill (of the last one, when several follow).

        Raises:
            TrainingError: as for ``until``.
        """
        attempts = self._reader.attempts

        def stepping() -> bool:
            return len(attempts) > kill.attempts_before and len(self.steps) > attempts[-1]

        await self.until("the step after the recovery", stepping, seconds)
        index = attempts[-1]
        first, last = self.steps[index], self.steps[index - 1]
        logged_at = first.logged_at.timestamp() if first.logged_at else time.time()
        return Resumption(index, last.step, first.step, logged_at - kill.time)

    async def finish(self, seconds: float) -> int:
        """Wait until the controller ends by itself; returns its exit code, negative for a signal.

        Raises:
            TrainingError: the cluster failed, or the deadline passed.
        """
        await self.until("the end of training", lambda: self.exit_code is not None, seconds)
        self.look()
        assert self.exit_code is not None
        return self.exit_code

    async def status(self) -> dict[str, Any]:
        """The head's status.

        Raises:
            TrainingError: the head does not answer.
        """
        return await asyncio.to_thread(self._status)

    def _status(self) -> dict[str, Any]:
        try:
            with control.connect(self._record) as client:
                return client.request("status")
        except control.ControlError as error:
            raise TrainingError(str(error)) from None

    async def kill_worker(self, slice_index: int, host: int) -> Kill:
        """SIGKILL a worker, as ``kill -9`` from a shell would.

        Raises:
            TrainingError: there is no such worker now.
        """
        found = (await self.status())["slices"][slice_index]["hosts"][host]
        pid = found["pid"]
        if pid is None:
            raise TrainingError(f"slice {slice_index} host {host} has no worker to kill; it is {found['state']}")
        self.look()
        counts, committed = (len(self.steps), len(self._reader.attempts)), self.committed()
        kill = Kill(slice_index, host, pid, time.time(), time.monotonic(), *counts, committed)
        os.kill(pid, signal.SIGKILL)
        self.kills.append(kill)
        return kill

    async def until_whole(self, standbys: int, seconds: float = REPLACEMENT_SECONDS) -> None:
        """Wait until all slices are up and so many standbys are ready.

        Raises:
            TrainingError: as for ``until``.
        """
        deadline = time.monotonic() + seconds
        while True:
            status = await self.status()
            ready = sum(standby["state"] == "ready" for standby in status["standbys"])
            if ready >= standbys and all(part["state"] == "up" for part in status["slices"]):
                return
            await self.until("the workers", lambda: True, seconds)
            if time.monotonic() > deadline:
                raise TrainingError(f"not all workers are back after {seconds:g} s; see {self._cluster.logs}")
            await asyncio.sleep(4 * POLL_SECONDS)

    async def stop(self) -> None:
        """End the controller, if it still runs, and all its children."""
        process = self._process
        if process is None:
            return
        terminate(process)
        await wait_all([process], STOP_SECONDS)
        kill_group(process)
        await wait_all([process], STOP_SECONDS)
