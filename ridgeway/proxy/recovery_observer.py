"""Sees, from requests alone, what the controller does between a loss and its next step, and records it.

Recording every execution would cost too much, so it happens only while a recovery is open: from a loss until the
program that was the *step* (the one with the most arguments among those executed often) has completed again.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.protocol.status import RETRIED_CODES, Status

if TYPE_CHECKING:
    from ridgeway.proxy.executables import Executable
    from ridgeway.proxy.session import Session

EXECUTIONS_UNTIL_STEP = 2
INTERVALS_KEPT = 32
ARRAYS_MADE_EVERY_SECONDS = 0.1
OPEN_FOR_SECONDS = 3600.0
UNDISTURBED_STEPS = 3
UNDISTURBED_SECONDS = 5.0


class _Activity:
    """One session's executions by program name."""

    def __init__(self) -> None:
        self.arguments: dict[str, int] = {}
        self.executions: dict[str, int] = {}
        self.last: dict[str, float] = {}
        self.intervals: dict[str, deque[float]] = {}
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
        often = [name for name, count in self.executions.items() if count >= EXECUTIONS_UNTIL_STEP]
        return max(often, key=lambda name: (self.arguments[name], self.executions[name]), default=None)


class RecoveryObserver:
    """Watches every session."""

    def __init__(self, manager: ResourceManager, emit: Callable[..., Any]):
        self._manager = manager
        self._emit = emit
        self._activities: dict[int, _Activity] = {}

    def _activity(self, session: "Session") -> _Activity:
        activity = self._activities.get(session.number)
        if activity is None:
            activity = self._activities[session.number] = _Activity()
        return activity

    def lost(self, sessions: list["Session"]) -> None:
        """An executor was lost."""
        for session in sessions:
            activity = self._activity(session)
            name = activity.step_program() or activity.step
            # A loss in the middle of a recovery may well never show in an error of its own.
            activity.recovering = activity.lost_at is not None and activity.disturbed
            activity.error_seen = False
            activity.lost_at = time.monotonic()
            activity.undisturbed_steps = 0
            activity.step = name
            if name is None:
                continue  # lost before the first step: the recovery ends when a step program has shown itself
            intervals = activity.intervals.get(name)
            self._emit(
                "step_program", session=session.number, name=name, executions=activity.executions.get(name, 0),
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
        self._emit(
            "error_raised", session=session.number, code=status.code.name, message=status.message[:500], request=request
        )

    def executing(self, session: "Session", executable: "Executable") -> bool:
        """An execution starts; True if its completion should be reported with `executed`."""
        activity = self._activity(session)
        name = executable.name
        now = time.monotonic()
        activity.arguments[name] = executable.arguments
        activity.executions[name] = activity.executions.get(name, 0) + 1
        if name in activity.last:
            activity.intervals.setdefault(name, deque(maxlen=INTERVALS_KEPT)).append(now - activity.last[name])
        activity.last[name] = now
        if activity.lost_at is None:
            return False
        if now - activity.lost_at > OPEN_FOR_SECONDS:
            activity.lost_at = None
            return False
        if activity.step is None:
            activity.step = activity.step_program()
        if name == activity.step and not activity.disturbed:
            activity.undisturbed_steps += 1
            if activity.undisturbed_steps > UNDISTURBED_STEPS and now - activity.lost_at > UNDISTURBED_SECONDS:
                # This session goes on stepping and saw no error: what was lost was nothing of its own.
                self._emit("recovery_completed", session=session.number, seconds=0.0, disturbed=False)
                activity.lost_at = None
                return False
        self._flush_arrays(session, activity)
        self._emit(
            "program_started", session=session.number, name=name, devices=len(executable.devices),
            arguments=executable.arguments,
        )  # fmt: skip
        return activity.disturbed and name == activity.step

    def executed(self, session: "Session", executable: "Executable", started: float, status: Status | None) -> None:
        """An execution that `executing` wanted to know of is over."""
        activity = self._activities.get(session.number)
        if status is not None or activity is None or activity.lost_at is None:
            return
        self._emit(
            "program_completed", session=session.number, name=executable.name, devices=len(executable.devices),
            seconds=round(time.monotonic() - started, 4),
        )  # fmt: skip
        if executable.name == activity.step:
            seconds = round(time.monotonic() - activity.lost_at, 4)
            self._emit("recovery_completed", session=session.number, seconds=seconds)
            activity.lost_at = None

    def arrays_made(self, session: "Session", count: int, bytes_made: int) -> None:
        """The client put host data on devices."""
        activity = self._activities.get(session.number)
        if activity is None or activity.lost_at is None:
            return
        activity.arrays_made += count
        activity.bytes_made += bytes_made
        if time.monotonic() - activity.made_reported >= ARRAYS_MADE_EVERY_SECONDS:
            self._flush_arrays(session, activity)

    def _flush_arrays(self, session: "Session", activity: _Activity) -> None:
        if activity.arrays_made:
            self._emit("arrays_made", session=session.number, count=activity.arrays_made, bytes=activity.bytes_made)
            activity.arrays_made = activity.bytes_made = 0
            activity.made_reported = time.monotonic()

    def session_ended(self, session: "Session") -> None:
        """Forget a session."""
        self._activities.pop(session.number, None)
