"""A cluster of processes on this machine: bring it up, replace what dies, take it down without a trace.

`LocalCluster` is the shell around `ridgeway.launch.supervision`.  Every process it starts ends with it, also
when it is killed by SIGKILL (Linux).
"""

import asyncio
import dataclasses
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeway.cluster.topology import Topology
from ridgeway.launch import cluster_folder, supervision
from ridgeway.launch.child_processes import Process, interrupt, kill_group, last_line, spawn, wait_all
from ridgeway.launch.cluster_folder import ClusterFolder, ClusterRecord
from ridgeway.launch.control import ControlError, ControlStream, open_stream
from ridgeway.launch.environment import runtime_environment
from ridgeway.launch.narration import narrate, to_policy
from ridgeway.transport.authentication import new_secret

#: The head says this once it serves.
_READY_LINE = re.compile(r"READY cluster=(\S+):(\d+) proxy=(\S+):(\d+)(?: metrics=(\S+))?")

#: How long each stage of taking the cluster down may take: by the head's word, by SIGINT, by SIGKILL.
STOP_STAGE_SECONDS = 3.0
#: How long a head whose process lives may be out of reach.
HEAD_SILENCE_SECONDS = 10.0
RECONNECT_SECONDS = 0.2


class LaunchError(Exception):
    """The cluster did not come up; the message says why, where and what to do. Nothing is left running."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocalOptions:
    """What a user chooses about a cluster on this machine."""

    name: str
    topology: Topology
    standbys: int = 0
    max_slice_restarts: int | None = 10
    max_preemptions: int | None = None
    scratch_folder: Path | None = None
    """Where the state of preempted workers waits, in a folder of this cluster's own; None: beside the logs."""
    replacement_delay_seconds: float = 0.0
    cluster_host: str = "127.0.0.1"
    cluster_port: int = 29001
    proxy_host: str = "127.0.0.1"
    proxy_port: int = 29000
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """Where the head serves Prometheus metrics; None: nowhere."""
    settings: tuple[str, ...] = ()
    """``name=value`` for the head; it sends them on to the workers."""
    start_timeout_seconds: float = 120.0
    command: tuple[str, ...] | None = None
    """What `run` is going to run, for `status`."""
    with_workers: bool = True
    """False: the head alone; workers are started by somebody else."""
    secret: str | None = None
    """None: a fresh one."""
    worker_arguments: tuple[str, ...] = ()
    """More arguments for every worker's command line."""
    worker_prefixes: tuple[tuple[str, ...], ...] = ()
    """By host slot, what a worker's command line begins with (as ``ip netns exec NAME``); standbys have none."""


def cache_folder() -> Path:
    """Where compiled programs are kept: ``${XDG_CACHE_HOME:-~/.cache}/ridgeway/compiled``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeway" / "compiled"


def reachable_host(host: str) -> str:
    """The address at which this machine reaches something that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


class LocalCluster:
    """One cluster, from `start` to `stop`; both are called from one event loop.

    Args:
      options: what to start.
      say: told in plain language what is happening.
    """

    def __init__(self, options: LocalOptions, say: Callable[[str], None]):
        self.options = options
        self.record: ClusterRecord | None = None
        self.logs: Path | None = None
        self._user_say = say
        self._secret = options.secret or new_secret()
        self._folder: ClusterFolder | None = None
        self._scratch: Path | None = None
        self._head: Process | None = None
        self._workers: dict[str, Process] = {}
        self._worker_logs: dict[str, Path] = {}
        self._starting: set[str] = set()
        self._kill_when_started: set[str] = set()
        self._policy = supervision.Supervision(
            supervision.Options(
                slices=options.topology.slices,
                hosts_per_slice=options.topology.hosts_per_slice,
                standbys=options.standbys,
                max_slice_restarts=options.max_slice_restarts,
                max_preemptions=options.max_preemptions,
                replacement_delay_seconds=options.replacement_delay_seconds,
            )
        )
        self._control: ControlStream | None = None
        self._next_event = 0
        self._slices_ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False

    @property
    def failure(self) -> asyncio.Future[str]:
        """Done, with the reason, when the cluster as a whole has failed and is to be stopped."""
        return self._failure

    @property
    def given_up(self) -> dict[int, str]:
        """Slices without a future, with the reason."""
        return self._policy.given_up

    # ---- up

    async def start(self) -> ClusterRecord:
        """Bring everything up: the head, a worker for every host, all slices ready.

        On any failure, and when cancelled, call `stop`.

        Raises:
          LaunchError: it did not work out.
          cluster_folder.ClusterError: the name is taken, or a folder cannot be made.
        """
        began = time.monotonic()
        options = self.options
        self._folder = cluster_folder.create(options.name)
        self.logs = cluster_folder.create_logs_folder(options.name, time.time())
        self._scratch = cluster_folder.create_scratch_folder(options.name, options.scratch_folder, self.logs)
        self._say(f"cluster {options.name!r}, {options.topology}; logs in {self.logs}")
        try:
            async with asyncio.timeout(options.start_timeout_seconds):
                await self._start_head()
                if not options.with_workers:
                    assert self.record is not None
                    return self.record
                count = options.topology.slots
                self._say(f"starting {count} worker{'s' if count > 1 else ''}")
                self._apply(self._policy.begin(self._now()))
                await self._first(self._all_ready.wait())
        except TimeoutError:
            missing = sorted(set(range(options.topology.slices)) - self._slices_ready)
            raise LaunchError(
                f"slices {missing} of cluster {options.name!r} are not ready after "
                f"{options.start_timeout_seconds:g} s; see the logs in {self.logs}, or allow more with "
                "--start-timeout-seconds"
            ) from None
        except OSError as error:
            raise LaunchError(f"cannot start cluster {options.name!r}: {error}") from None
        self._say(f"cluster is ready, {time.monotonic() - began:.1f} s after the start")
        assert self.record is not None
        return self.record

    async def _first(self, wanted: Any) -> None:
        """Wait for something, or for the cluster's failure.

        Raises:
          LaunchError: the cluster failed first.
        """
        task = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait([task, self._failure], return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise LaunchError(self._failure.result())
            await task
        finally:
            task.cancel()

    async def _start_head(self) -> None:
        options, logs = self.options, self._logs_folder()
        log = logs / "head.log"
        topology = options.topology
        command = [
            sys.executable, "-m", "ridgeway.proxy.head",
            "--name", options.name,
            "--slices", str(topology.slices),
            "--hosts-per-slice", str(topology.hosts_per_slice),
            "--devices-per-host", str(topology.devices_per_host),
            "--cluster-host", options.cluster_host, "--cluster-port", str(options.cluster_port),
            "--proxy-host", options.proxy_host, "--proxy-port", str(options.proxy_port),
            "--events", str(logs / "events.jsonl"),
            "--cache-folder", str(cache_folder()),
            "--scratch-folder", str(self._scratch),
        ]  # fmt: skip
        if options.metrics_port is not None:
            command += ["--metrics-host", options.metrics_host, "--metrics-port", str(options.metrics_port)]
        for setting in options.settings:
            command += ["--set", setting]
        self._head = head = await spawn(command, runtime_environment(os.environ, self._secret), log, stdout_pipe=True)
        self._task(self._watch_head(head))
        assert head.stdout is not None
        ready = None
        while ready is None:
            line = await head.stdout.readline()
            if not line:
                await head.wait()
                raise LaunchError(f"the head could not start: {last_line(log) or 'it said nothing'}")
            ready = _READY_LINE.match(line.decode(errors="replace"))
        self._task(self._drain(head.stdout, log))
        self.record = ClusterRecord(
            name=options.name,
            secret=self._secret,
            head_host=reachable_host(ready[1]),
            cluster_port=int(ready[2]),
            proxy_port=int(ready[4]),
            supervisor_pid=os.getpid(),
            head_pid=head.pid,
            topology=[topology.slices, topology.hosts_per_slice, topology.devices_per_host],
            started=time.time(),
            logs_folder=str(logs),
            command=list(options.command) if options.command is not None else None,
        )
        assert self._folder is not None
        self._folder.write(self.record)
        self._say(f"head is up (pid {head.pid}): proxy on {ready[3]}:{ready[4]}, workers on {ready[1]}:{ready[2]}")
        if options.metrics_port is not None:
            self._say(f"metrics at http://{ready[5]}/metrics")
        linked = asyncio.Event()
        self._task(self._follow_head(linked))
        await self._first(linked.wait())

    def _logs_folder(self) -> Path:
        assert self.logs is not None
        return self.logs

    async def _drain(self, stream: asyncio.StreamReader, log: Path) -> None:
        while data := await stream.read(1 << 16):
            try:
                with log.open("ab") as file:
                    file.write(data)
            except OSError:
                pass  # A full disk must not keep the cluster from running.

    # ---- the head

    async def _watch_head(self, head: Process) -> None:
        code = await head.wait()
        if not self._stopping:
            words = last_line(self._logs_folder() / "head.log")
            self._fail(
                f"the head {supervision.describe_exit(code)}"
                + (f"; its last line: {words}" if words else "")
                + "; all workers are ended"
            )

    async def _follow_head(self, linked: asyncio.Event) -> None:
        record = self.record
        assert record is not None
        heard = time.monotonic()
        while not self._stopping:
            problem = "the link to it closed"
            try:
                async with open_stream(record.head_host, record.cluster_port, self._secret) as stream:
                    self._control = stream
                    linked.set()
                    await stream.follow(self._next_event, self._event)
                heard = time.monotonic()
            except ControlError as error:
                problem = str(error)
            finally:
                self._control = None
            if time.monotonic() - heard > HEAD_SILENCE_SECONDS:
                self._fail(f"the head has been out of reach for {HEAD_SILENCE_SECONDS:g} s: {problem}")
                return
            await asyncio.sleep(RECONNECT_SECONDS)

    def _event(self, event: dict[str, Any]) -> None:
        self._next_event = max(self._next_event, event.get("sequence", -1) + 1)
        if self._stopping or self._failure.done():
            return
        text = narrate(event)
        if text is not None:
            self._say(text)
        if event.get("kind") == "slice_ready":
            self._slices_ready.add(event["slice"])
            if len(self._slices_ready) == self.options.topology.slices:
                self._all_ready.set()
        elif event.get("kind") == "slice_lost":
            self._slices_ready.discard(event["slice"])
        if self.options.with_workers and (policy_event := to_policy(event)) is not None:
            self._apply(self._policy.handle(policy_event, self._now()))

    def _ask(self, verb: str, **arguments: Any) -> None:
        """Tell the head something; it is not fatal if it does not hear it."""
        control = self._control
        if control is None:
            return

        async def ask() -> None:
            try:
                await control.request(verb, **arguments)
            except ControlError as error:
                if not self._stopping:
                    self._say(f"the head was told {verb} but: {error}")

        self._task(ask())

    # ---- the policy

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _apply(self, effects: list[supervision.Effect]) -> None:
        if self._stopping or self._failure.done():
            return
        for effect in effects:
            match effect:
                case supervision.StartWorker(launch_id, slot, expect):
                    if expect and slot is not None:
                        self._ask("expect", slice=slot[0], host=slot[1])
                    self._starting.add(launch_id)
                    self._task(self._run_worker(launch_id, slot))
                case supervision.KillWorker(launch_id):
                    if launch_id in self._workers:
                        kill_group(self._workers[launch_id])
                    elif launch_id in self._starting:
                        self._kill_when_started.add(launch_id)
                case supervision.ReportExit(slice_index, host_index, launch_id, description):
                    self._ask(
                        "report_exit",
                        slice=slice_index,
                        host=host_index,
                        launch_id=launch_id,
                        description=description,
                    )
                case supervision.GiveUp(slice_index, reason):
                    self._ask("give_up", slice=slice_index, reason=reason)
                case supervision.TookOver(launch_id, slot):
                    self._link_standby_log(launch_id, slot)
                case supervision.CannotStart(launch_id, _, text):
                    log = self._worker_logs[launch_id]
                    self._fail(f"{text}: {last_line(log) or 'it said nothing'} (log: {log})")
                case supervision.Say(text):
                    self._say(text)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wakeup = self._policy.next_wakeup()
        if wakeup != float("inf"):
            self._timer = asyncio.get_running_loop().call_at(wakeup, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._policy.tick(self._now()))

    async def _run_worker(self, launch_id: str, slot: supervision.Slot | None) -> None:
        """One worker process from start to end."""
        record = self.record
        assert record is not None
        log = self._new_log(slot)
        self._worker_logs[launch_id] = log
        place = ["--standby"] if slot is None else ["--slice", str(slot[0]), "--host", str(slot[1])]
        prefixes = self.options.worker_prefixes
        command = [
            *(prefixes[slot[0] * self.options.topology.hosts_per_slice + slot[1]] if prefixes and slot else ()),
            sys.executable, "-m", "ridgeway.worker.agent",
            "--head", f"{record.head_host}:{record.cluster_port}",
            "--launch-id", launch_id,
            *place,
            *self.options.worker_arguments,
        ]  # fmt: skip
        try:
            worker = await spawn(command, runtime_environment(os.environ, self._secret), log)
        except OSError as error:
            self._starting.discard(launch_id)
            self._say(f"cannot start a worker process: {error.strerror}")
            self._apply(self._policy.handle(supervision.WorkerExited(launch_id, 127), self._now()))
            return
        self._starting.discard(launch_id)
        self._workers[launch_id] = worker
        if self._stopping or launch_id in self._kill_when_started:
            self._kill_when_started.discard(launch_id)
            kill_group(worker)
        code = await worker.wait()
        # What is left of its session, where the kernel does not end children with their parent.
        kill_group(worker)
        del self._workers[launch_id]
        self._apply(self._policy.handle(supervision.WorkerExited(launch_id, code), self._now()))

    def _new_log(self, slot: supervision.Slot | None) -> Path:
        logs = self._logs_folder()
        if slot is None:
            number = 1 + len(list(logs.glob("standby-*.log")))
            path = logs / f"standby-{number}.log"
        else:
            number = 1 + len(cluster_folder.worker_logs(logs, *slot))
            path = logs / f"worker-{slot[0]}-{slot[1]}{f'.{number}' if number > 1 else ''}.log"
        path.touch()
        return path

    def _link_standby_log(self, launch_id: str, slot: supervision.Slot) -> None:
        log = self._worker_logs.get(launch_id)
        if log is None:
            return
        number = 1 + len(cluster_folder.worker_logs(log.parent, *slot))
        (log.parent / f"worker-{slot[0]}-{slot[1]}.{number}.log").symlink_to(log.name)

    # ---- down

    async def stop(self, reason: str) -> None:
        """Take everything down; may be called at any moment, also twice. Afterwards no process, socket or folder
        of the cluster is left but its logs."""
        if self._folder is None:
            return
        folder, self._folder = self._folder, None
        self._say(f"stopping the cluster: {reason}")
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        head = self._head
        if self._control is not None and head is not None and head.returncode is None:
            try:
                await asyncio.wait_for(self._control.request("shutdown", reason=reason), STOP_STAGE_SECONDS)
                await wait_all([*self._workers.values(), head], STOP_STAGE_SECONDS)
            except (ControlError, TimeoutError):
                pass  # Then by signals.
        everything = [*self._workers.values(), *([head] if head is not None else [])]
        left = [process for process in everything if process.returncode is None]
        for process in left:
            interrupt(process)
        left = await wait_all(left, STOP_STAGE_SECONDS)
        for process in everything:
            kill_group(process)
        left = await wait_all(left, STOP_STAGE_SECONDS)
        if left:
            self._say(f"processes {[process.pid for process in left]} do not end, not even by SIGKILL")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        folder.remove()
        self._say("everything is down")

    # ---- odds and ends

    def _fail(self, reason: str) -> None:
        """The cluster as a whole is lost: end the workers now, replace none, and leave the rest to `stop`."""
        if self._failure.done():
            return
        self._failure.set_result(reason)
        for worker in self._workers.values():
            kill_group(worker)
        self._kill_when_started |= self._starting

    def _say(self, text: str) -> None:
        self._user_say(text)
        if self.logs is not None:
            try:
                with (self.logs / "supervisor.log").open("a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            except OSError:
                pass  # A full disk must not keep the cluster from being supervised.

    def _task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"the supervisor failed: {type(error).__name__}: {error}")
