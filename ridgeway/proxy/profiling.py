"""Profiles of the whole cluster: recorded by every executor and by the proxy, collected here over the links.

A profile is asked for in two ways.  The client's plugin takes part in `jax.profiler` (`Profiler.serve_client`, see
`protocol.profile_link`): the traces end up in the file that jax writes.  pathwaysutils sends a request in place of a
program (`ProfileProgram`), executed once to start and once to stop: a file for each process is written here, where jax
would write it, for xprof to find.
"""

import asyncio
import datetime
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.protocol import callback_link, dtypes, messages, profile_link, shardings
from ridgeway.protocol import status as statuses
from ridgeway.protocol.profile_link import Options, Trace
from ridgeway.protocol.status import Status, StatusError
from ridgeway.proxy.arrays import Array, StringShard
from ridgeway.proxy.request_trace import RequestTrace
from ridgeway.settings import Settings

if TYPE_CHECKING:
    from ridgeway.proxy.session import Session

PROXY_NAME = "proxy"
_SESSION_NAME = "%Y_%m_%d_%H_%M_%S"
"""As jax names the folders of profiles."""
_UNFIT = re.compile(r"[^\w.-]+")
REQUEST_KIND = "profileRequest"

Target = tuple[Any, str]
"""An `fsspec` file system, or None for this host's own, and a folder in it."""

Subscribe = Callable[[Callable[[dict[str, Any]], None]], Callable[[], None]]
"""Have a function called with each event of the cluster; returns what ends that."""


class Profile:
    """One that is being recorded."""

    def __init__(self, number: int, options: Options, hosts: int | None, recording: RequestTrace):
        self.number = number
        self.options = options
        self.hosts = hosts
        """at most so many executors record at a time; None: all"""
        self.started = time.time_ns()
        self.recording = recording
        self.waiting: dict[int, str] = {}
        """executors that record -> their places"""
        self.traces: list[Trace] = []
        self.problems: list[str] = []
        self.bytes = 0
        self.complete = asyncio.Event()


class Profiler:
    """At most one profile at a time, for an executor can record only one."""

    def __init__(self, manager: ResourceManager, settings: Settings, emit: Callable[..., Any], subscribe: Subscribe):
        self._manager = manager
        self._emit = emit
        self._subscribe = subscribe
        self._settings = settings
        self._count = 0
        self._profile: Profile | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()
        self.recording: RequestTrace | None = None
        """where sessions note their requests, if a profile is being recorded"""
        manager.on_activation.append(self._activated)
        manager.on_loss.append(self._lost)
        manager.on_profile_data = self._arrived

    def start(self, options: Options, hosts: int | None = None) -> Profile:
        """Have the executors record; those that join later too.

        Raises:
          StatusError: FAILED_PRECONDITION, a profile is being recorded.
        """
        if self._profile is not None:
            raise statuses.failed_precondition("a profile of this cluster is being recorded already").error()
        self._count += 1
        recording = RequestTrace(self._settings.profile_request_limit)
        profile = self._profile = Profile(self._count, options, hosts, recording)
        self.recording = recording
        self._unsubscribe = self._subscribe(recording.happened)
        for executor in self._manager.slots:
            if executor is not None:
                self._ask(profile, executor)
        self._emit("profile_started", profile=profile.number, executors=len(profile.waiting))
        return profile

    async def stop(self, profile: Profile) -> tuple[list[Trace], list[str]]:
        """What was recorded, and what could not be."""
        if self._profile is not profile:
            return [], ["the profile was given up"]
        self._cease(profile)
        recorders = dict(profile.waiting)
        if recorders:
            for number in recorders:
                executor = self._manager.executors.get(number)
                if executor is not None:
                    executor.send_aside(["profile_stop", profile.number])
            try:
                await asyncio.wait_for(profile.complete.wait(), self._settings.profile_stop_seconds)
            except TimeoutError:
                seconds = f"within {self._settings.profile_stop_seconds} s (profile_stop_seconds)"
                profile.problems += [f"{place} gave no trace {seconds}" for place in profile.waiting.values()]
        if self._profile is profile:
            self._profile = None
        if profile.recording.dropped:
            profile.problems.append(f"{profile.recording.dropped} requests are not shown (profile_request_limit)")
        own = Trace(PROXY_NAME, profile.started, profile.recording.to_xspace(profile.started))
        self._emit(
            "profile_stopped", profile=profile.number, traces=len(profile.traces) + 1,
            bytes=profile.bytes, problems=profile.problems,
        )  # fmt: skip
        return [own, *profile.traces], profile.problems

    def give_up(self, profile: Profile) -> None:
        """Nobody wants it any more."""
        if self._profile is profile:
            self._cease(profile)
            self._profile = None
            for number in profile.waiting:
                executor = self._manager.executors.get(number)
                if executor is not None:
                    executor.send_aside(["profile_stop", profile.number])

    def _cease(self, profile: Profile) -> None:
        if self.recording is profile.recording:
            self._unsubscribe()
            self.recording = None

    def in_background(self, work: Any) -> None:
        """Run a coroutine that handles its own errors."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- executors

    def _ask(self, profile: Profile, executor: ExecutorLink) -> None:
        if profile.hosts is None or len(profile.waiting) < profile.hosts:
            profile.waiting[executor.number] = executor.place
            executor.send_aside(["profile_start", profile.number, profile.options.to_fields()])

    def _activated(self, executor: ExecutorLink) -> None:
        if self._profile is not None and self.recording is self._profile.recording:
            self._ask(self._profile, executor)

    def _lost(self, executor: ExecutorLink) -> None:
        profile = self._profile
        if profile is not None and profile.waiting.pop(executor.number, None) is not None:
            cause = executor.lost.message if executor.lost is not None else "lost"
            profile.problems.append(f"no trace of what {executor.place} did before it was lost: {cause}")
            self._look(profile)

    def _arrived(self, executor: ExecutorLink, number: int, start: int, problem: str, data: bytes) -> None:
        profile = self._profile
        if profile is None or profile.number != number or profile.waiting.pop(executor.number, None) is None:
            return
        limit = self._settings.profile_total_limit_bytes
        if profile.bytes + len(data) > limit:
            problem = f"its {len(data)} bytes are more than the rest of {limit} (profile_total_limit_bytes)"
        elif data:
            profile.bytes += len(data)
            same = sum(trace.name.startswith(executor.place) for trace in profile.traces)
            profile.traces.append(Trace(executor.place + (f" ({same + 1})" if same else ""), start, data))
        if problem:
            profile.problems.append(f"{executor.place}: {problem}")
        self._look(profile)

    def _look(self, profile: Profile) -> None:
        if not profile.waiting:
            profile.complete.set()

    # ---- the client's plugin

    async def serve_client(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The stream of one client's profiler; its end, whenever it comes, ends the profile.

        Raises:
          ValueError: a message is none of the protocol.
        """
        profile = None
        try:
            async for data in requests:
                message = callback_link.unpack(data)
                if message[0] == "start" and profile is None and len(message) == 2:
                    try:
                        profile = self.start(Options.from_fields(message[1]))
                    except StatusError as error:
                        yield callback_link.pack(["refused", error.status.message])
                        return
                    yield callback_link.pack(["started"])
                elif message == ["stop"] and profile is not None:
                    traces, problems = await self.stop(profile)
                    for trace in traces:
                        for part in profile_link.chunks(trace):
                            yield callback_link.pack(part)
                    yield callback_link.pack(["end", problems])
                    return
                else:
                    raise ValueError(f"not a message of a profiler: {str(message[0])[:40]!r}")
        finally:
            if profile is not None:
                self.give_up(profile)


class ProfileProgram:
    """``profileRequest`` of `pathwaysutils.profiling`: the first execution starts a profile, the second stops it."""

    name = "profile"
    devices: tuple[int, ...] = (0,)
    """It needs none, but jaxlib's client waits for the end of an execution on each of them."""

    def __init__(self, body: Any):
        xprof = body.get("xprofTraceOptions")
        self._answers = xprof is not None
        """whether the client takes a text for a result"""
        xprof = xprof or {}
        threads = xprof.get("pwTraceOptions") or {}
        self._folder = str(xprof.get("traceDirectory") or body["traceLocation"])
        self._session = _UNFIT.sub("_", str(xprof.get("traceSessionName") or ""))
        self._options = Options(
            int(xprof.get("hostTraceLevel", 2)), int(bool(threads.get("enablePythonTracer"))),
            float(body.get("maxDurationSecs") or 0),
        )  # fmt: skip
        hosts = int(body.get("maxNumHosts") or 0)
        self._hosts = hosts if hosts > 0 else None
        self._profile: Profile | None = None
        self._target: Target = (None, "")

    def execute(self, session: "Session", arguments: list[Array], done: Callable[[Status | None], None]) -> list[Array]:
        """See `plugin_programs.PluginProgram`."""
        if arguments:
            raise statuses.invalid_argument(f"a profile takes no arguments, not {len(arguments)}").error()
        profiler = session.services.profiler
        if self._profile is None:
            self._target = open_folder(self._folder, self._session)  # now, while the user can still choose another
            self._profile = profiler.start(self._options, self._hosts)
            done(None)
        else:
            profile, self._profile = self._profile, None
            profiler.in_background(self._stop(profiler, profile, done))
        return [_text(self._folder)] if self._answers else []

    def close(self, session: "Session") -> None:
        """The client has dropped it, or is gone: nobody wants what is being recorded."""
        profile, self._profile = self._profile, None
        if profile is not None:
            session.services.profiler.give_up(profile)

    async def _stop(self, profiler: Profiler, profile: Profile, done: Callable[[Status | None], None]) -> None:
        traces, problems = await profiler.stop(profile)
        try:
            await asyncio.to_thread(write, self._target, traces, problems)
        except Exception as error:
            done(statuses.invalid_argument(f"the profile cannot be written to {self._folder}: {error}"))
        else:
            done(None)


def _text(value: str) -> Array:
    blob = messages.ShardingProto.FromString(shardings.single_device_sharding_proto(0))
    array = Array(dtypes.KIND_STRING, (1,), shardings.parse(blob))
    shard = StringShard()
    shard.set(messages.StringArrayContents(strings=[value.encode()]).SerializeToString())
    array.strings = (shard,)
    return array


def open_folder(folder: str, session: str) -> Target:
    """The folder for a profile's files.

    Raises:
      StatusError: INVALID_ARGUMENT, it cannot be used; says why.
    """
    session = session or datetime.datetime.now().strftime(_SESSION_NAME)
    if "://" not in folder:
        path = Path(folder) / "plugins" / "profile" / session
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise statuses.invalid_argument(f"profiles cannot be written to {folder}: {error}").error() from None
        return None, str(path)
    try:
        import fsspec  # only where one has it installed; nothing else here needs it

        system, root = fsspec.core.url_to_fs(folder)
    except Exception as error:
        raise statuses.invalid_argument(f"the head cannot write profiles to {folder}: {error}").error() from None
    return system, f"{root}/plugins/profile/{session}"


def write(target: Target, traces: list[Trace], problems: list[str]) -> None:
    """A file for each trace, ``NAME.xplane.pb``, and what is missing in a text beside them.

    Raises:
      Exception: what the file system says.
    """
    system, path = target
    files = {f"{_UNFIT.sub('_', trace.name)}.xplane.pb": trace.data for trace in traces}
    if problems:
        files["ridgeway_problems.txt"] = "".join(f"{problem}\n" for problem in problems).encode()
    for name, data in files.items():
        if system is None:
            (Path(path) / name).write_bytes(data)
        else:
            system.pipe_file(f"{path}/{name}", data)
