"""Sees, from requests alone, what the controller does, and records it: the way from a loss to the next step, and what
each session's time was spent on.

Recording every execution would cost too much, so events of single executions come only while a recovery is open: from a
loss until the program that was the *step* (the one with the most arguments among those executed often) has completed
again.  The rest goes into a `SessionAccount`, which is recorded now and then and at the session's end.
"""

import collections
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.protocol import dtypes
from ridgeway.protocol.status import RETRIED_CODES, Code, Status
from ridgeway.proxy.session_account import PROBE_PROGRAMS, Mark, SessionAccount

if TYPE_CHECKING:
    from ridgeway.proxy.executables import Executable
    from ridgeway.proxy.session import Session

EXECUTIONS_UNTIL_STEP = 2
INTERVALS_KEPT = 32
ARRAYS_MADE_EVERY_SECONDS = 0.1
OPEN_FOR_SECONDS = 3600.0
UNDISTURBED_STEPS = 3
UNDISTURBED_SECONDS = 5.0


class _Program:
    """Executions of one session by one name."""

    __slots__ = ("arguments", "executions", "first", "intervals", "last", "loaded", "name")

    def __init__(self, executable: "Executable", first: Mark):
        self.name = executable.name
        self.loaded = executable.program
        """what was executed last: the same name may run on other devices after a recovery"""
        self.arguments = executable.arguments
        self.executions = 0
        self.first = first
        self.last = first.at
        self.intervals: deque[float] = deque(maxlen=INTERVALS_KEPT)


class _Activity:
    """What one session does."""

    def __init__(self, started: float) -> None:
        self.account = SessionAccount(started)
        self.reported: tuple[Any, ...] = ()
        self.report_at = started
        self.programs: dict[str, _Program] = {}
        self.stepping: _Program | None = None
        """what its account takes for the step"""
        self.step: str | None = None
        self.lost_at: float | None = None
        self.error_seen = False
        """since the last loss"""
        self.recovering = False
        """an error was seen after an earlier loss, and no step has completed since"""
        self.undisturbed_steps = 0
        self.arrays_made = 0
        self.bytes_made = 0
        self.made_reported = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether the program knows of what was lost."""
        return self.error_seen or self.recovering

    def step_program(self) -> str | None:
        """The program that looks like the training step."""
        often = [program for program in self.programs.values() if program.executions >= EXECUTIONS_UNTIL_STEP]
        found = max(often, key=lambda program: (program.arguments, program.executions), default=None)
        return None if found is None else found.name


class RecoveryObserver:
    """Watches every session."""

    def __init__(self, manager: ResourceManager, emit: Callable[..., Any], report_seconds: float):
        self._manager = manager
        self._emit = emit
        self._report_seconds = report_seconds
        self._activities: dict[int, _Activity] = {}
        self._slices_down = set(range(manager.topology.slices))

    def _activity(self, session: "Session") -> _Activity:
        activity = self._activities.get(session.number)
        if activity is None:
            activity = self._activities[session.number] = _Activity(session.started)
            activity.account.slices_down(time.monotonic(), self._slices_down)
        return activity

    def on_event(self, event: Mapping[str, Any]) -> None:
        """What the event log says of slices and of compiled programs."""
        match event["kind"]:
            case "slice_lost" | "preemption_announced":
                self._slices_down.add(event["slice"])
            case "slice_ready":
                self._slices_down.discard(event["slice"])
            case "compiled":
                activity = self._activities.get(event["session"])
                if activity is not None:
                    probe = event["name"] in PROBE_PROGRAMS
                    activity.account.compiled(time.monotonic(), event["cache"] == "hit", probe)
                return
            case _:
                return
        for activity in self._activities.values():
            activity.account.slices_down(time.monotonic(), self._slices_down)

    # ---- losses

    def lost(self, sessions: list["Session"], executor: ExecutorLink) -> None:
        """An executor was lost."""
        silent = executor.lost is not None and executor.lost.code is Code.DEADLINE_EXCEEDED
        for session in sessions:
            activity = self._activity(session)
            name = activity.step_program() or activity.step
            # A loss in the middle of a recovery may well never show in an error of its own.
            activity.recovering = activity.lost_at is not None and activity.disturbed
            activity.error_seen = False
            activity.lost_at = time.monotonic()
            activity.account.lost(activity.lost_at, silent)
            activity.undisturbed_steps = 0
            activity.step = name
            if name is None:
                continue  # lost before the first step: the recovery ends when a step program has shown itself
            program = activity.programs.get(name)
            intervals = None if program is None else program.intervals
            self._emit(
                "step_program", session=session.number, name=name,
                executions=0 if program is None else program.executions,
                median_seconds=round(statistics.median(intervals), 4) if intervals else None,
            )  # fmt: skip

    def error_raised(self, session: "Session", status: Status, request: str) -> None:
        """An error goes to the client."""
        if status.code not in RETRIED_CODES:
            return
        self._manager.holds.told(self._manager.clock())
        activity = self._activities.get(session.number)
        if activity is None or activity.lost_at is None or activity.error_seen:
            return
        activity.error_seen = True
        activity.account.error(time.monotonic())
        self._emit(
            "error_raised", session=session.number, code=status.code.name, message=status.message[:500], request=request
        )

    # ---- programs

    def executing(self, session: "Session", executable: "Executable") -> bool:
        """An execution starts; True if its completion should be reported with `executed`."""
        activity = self._activity(session)
        name = executable.name
        now = time.monotonic()
        program = activity.programs.get(name)
        if program is None:
            program = activity.programs[name] = _Program(executable, activity.account.mark(now))
        else:
            program.intervals.append(now - program.last)
        program.executions += 1
        program.last = now
        self._account_for(activity, program, executable, now)
        if activity.lost_at is None:
            return False
        if now - activity.lost_at > OPEN_FOR_SECONDS:
            activity.lost_at = None
            activity.account.undisturbed()
            return False
        if activity.step is None:
            activity.step = activity.step_program()
        if name == activity.step and not activity.disturbed:
            activity.undisturbed_steps += 1
            if activity.undisturbed_steps > UNDISTURBED_STEPS and now - activity.lost_at > UNDISTURBED_SECONDS:
                # This session goes on stepping and saw no error: what was lost was nothing of its own.
                self._emit("recovery_completed", session=session.number, seconds=0.0, disturbed=False)
                activity.lost_at = None
                activity.account.undisturbed()
                return False
        self._flush_arrays(session, activity)
        self._emit(
            "program_started", session=session.number, name=name, devices=len(executable.devices),
            arguments=executable.arguments,
        )  # fmt: skip
        return activity.disturbed and name == activity.step

    def _account_for(self, activity: _Activity, program: _Program, executable: "Executable", now: float) -> None:
        account = activity.account
        step = activity.stepping
        if program is step:
            if executable.program != program.loaded:
                account.runs_on(now, self._slices_of(executable))
            account.step(now)
        elif program.executions >= EXECUTIONS_UNTIL_STEP and (step is None or executable.arguments > step.arguments):
            activity.stepping = program
            account.step_program_found(
                now, program.name, _carried_bytes(executable), self._slices_of(executable), program.first
            )
            account.step(now)
        elif program.name in PROBE_PROGRAMS:
            account.probe(now)
        else:
            account.program(now)
        program.loaded = executable.program
        program.arguments = executable.arguments

    def _slices_of(self, executable: "Executable") -> set[int]:
        return {self._manager.topology.slice_of_device(device) for device in executable.devices}

    def executed(self, session: "Session", executable: "Executable", started: float, status: Status | None) -> None:
        """An execution that `executing` wanted to know of is over."""
        activity = self._activities.get(session.number)
        if status is not None or activity is None or activity.lost_at is None:
            return
        now = time.monotonic()
        self._emit(
            "program_completed", session=session.number, name=executable.name, devices=len(executable.devices),
            seconds=round(now - started, 4),
        )  # fmt: skip
        if executable.name == activity.step:
            seconds = round(now - activity.lost_at, 4)
            self._emit("recovery_completed", session=session.number, seconds=seconds)
            activity.lost_at = None
            activity.account.recovered(now, started)

    def compiling(self, session: "Session") -> Callable[[], None]:
        """A program is being compiled, or taken from the cache, until the returned function is called."""
        account = self._activity(session).account
        account.compile_began(time.monotonic())
        return lambda: account.compile_ended(time.monotonic())

    # ---- arrays

    def arrays_made(self, session: "Session", count: int, bytes_made: int) -> None:
        """The client put host data on devices."""
        activity = self._activity(session)
        now = time.monotonic()
        activity.account.put(now, bytes_made)
        if activity.lost_at is None:
            return
        activity.arrays_made += count
        activity.bytes_made += bytes_made
        if now - activity.made_reported >= ARRAYS_MADE_EVERY_SECONDS:
            self._flush_arrays(session, activity)

    def _flush_arrays(self, session: "Session", activity: _Activity) -> None:
        if activity.arrays_made:
            self._emit("arrays_made", session=session.number, count=activity.arrays_made, bytes=activity.bytes_made)
            activity.arrays_made = activity.bytes_made = 0
            activity.made_reported = time.monotonic()

    def saving(self, session: "Session", size: int) -> Callable[[bool], None]:
        """So many bytes of state are being copied to where they survive the devices, until the returned function is
        called with whether that worked."""
        account = self._activity(session).account
        account.copy_began(time.monotonic())
        return lambda ok: account.copy_ended(time.monotonic(), size if ok else 0)

    def reading(self, session: "Session", size: int) -> Callable[[bool], None]:
        """So many bytes of state are being read from storage, until the returned function is called with whether that
        worked."""
        account = self._activity(session).account
        account.read_began(time.monotonic())
        return lambda ok: account.read_ended(time.monotonic(), size if ok else 0)

    def restored(self, session: "Session", size: int) -> None:
        """So many bytes of state came back to devices from host memory."""
        self._activity(session).account.put(time.monotonic(), size)

    def fetching(
        self, session: "Session", size: int, done: Callable[[Status | None], None]
    ) -> Callable[[Status | None], None]:
        """An array of so many bytes is being copied to the host; the result is called with the outcome, as ``done``
        would be."""
        account = self._activity(session).account
        if not account.is_state(size):
            return self.waiting(session, done)
        copied = self.saving(session, size)

        def ended(status: Status | None) -> None:
            copied(status is None)
            done(status)

        return ended

    def waiting(
        self, session: "Session", done: Callable[[Status | None], None]
    ) -> Callable[[Status | None], None]:
        """The controller waits for results; the result is called with the outcome, as ``done`` would be."""
        account = self._activity(session).account
        account.wait_began(time.monotonic())

        def ended(status: Status | None) -> None:
            account.wait_ended(time.monotonic())
            done(status)

        return ended

    # ---- accounts

    def account(self, session: "Session") -> dict[str, Any] | None:
        """What the session's time was spent on; None if it has done nothing yet."""
        activity = self._activities.get(session.number)
        return None if activity is None else activity.account.report(time.monotonic())

    def tick(self, sessions: list["Session"]) -> None:
        """Record the accounts that have changed, each every so often."""
        now = time.monotonic()
        for session in sessions:
            activity = self._activities.get(session.number)
            if activity is None or now < activity.report_at:
                continue
            activity.report_at = now + self._report_seconds
            activity.account.tick(now)
            self._report(session, activity, now)

    def _report(self, session: "Session", activity: _Activity, now: float) -> None:
        account = activity.account
        state = (account.seconds(), account.compile_hits, account.compile_misses, account.saves)
        if state != activity.reported:
            activity.reported = state
            self._emit("goodput", session=session.number, array_bytes=session.array_bytes, **account.report(now))

    def session_ended(self, session: "Session") -> None:
        """Close the account of a session and forget it."""
        activity = self._activities.pop(session.number, None)
        if activity is not None:
            now = time.monotonic()
            activity.account.end(now)
            self._report(session, activity, now)


def _carried_bytes(executable: "Executable") -> int:
    """Bytes of the arrays that a program takes and gives again, with the same shapes and types: its state."""
    metadata = executable.compiled.metadata
    given = collections.Counter((tuple(shape), kind) for shape, kind in metadata["outputs"])
    taken = collections.Counter((tuple(shape), kind) for shape, kind in metadata["inputs"])
    return sum(count * dtypes.array_bytes(kind, shape) for (shape, kind), count in (given & taken).items())
