"""Which programs crash the executors that run them. Pure: losses and their explanations in, refusals out.

A program that makes XLA crash would be tried again for ever: its execution fails with a lost device, which elastic
managers answer with another try.  So executions that were under way when an executor crashed are counted, and a program
that was there too often is refused, as a mistake that no retry puts right.

Not every crash is a program's fault: a survivor of somebody else's death may crash too (gloo ends the process on
what a peer's death leaves).  Losses within ``settle_seconds`` are therefore taken as one event, which counts only if
each of them was a crash.  If several programs were under way they share the blame.
"""

import dataclasses
import signal

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status

CRASH_SIGNALS = frozenset(
    int(number)
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
)

ENDS_KEPT = 100
EXPLANATION_SECONDS = 30.0
"""How long it is waited for what an agent says about the end of its executor; a lost agent says nothing."""

type Running = list[tuple[str, str]]
"""Program and its name, of each execution that was under way."""


def program_of(execution: str) -> str:
    """The program's key in the name by which an executor knows it on given devices (`proxy.executables`)."""
    return execution.partition("@")[0]


@dataclasses.dataclass(slots=True)
class _Event:
    """Losses that belong together: those within ``settle_seconds`` of the first."""

    first: float
    executors: set[int]
    unexplained: set[int]
    accident: bool = False
    """one of them was no crash"""
    crashes: list[dict[str, str]] = dataclasses.field(default_factory=list)
    """of each crash the programs that were running, with their names"""


class ProgramCrashes:
    """Counts crashes by program; ``limit`` of them within ``window_seconds`` make a refusal that lasts as long."""

    def __init__(self, limit: int, window_seconds: float, settle_seconds: float):
        self._limit = limit
        self._window_seconds = window_seconds
        self._settle_seconds = settle_seconds
        self._events: list[_Event] = []
        self._ends: dict[int, tuple[int, Running]] = {}
        """of executors whose loss is not known yet"""
        self._crashes: dict[str, list[tuple[float, float]]] = {}
        """program -> when, and its share"""
        self.refused: dict[str, Status] = {}
        """by program; looked at before every execution"""

    def lost(self, now: float, executor: int) -> None:
        """An executor was lost."""
        if not self._events or now - self._events[-1].first >= self._settle_seconds:
            self._events.append(_Event(now, set(), set()))
        event = self._events[-1]
        event.executors.add(executor)
        event.unexplained.add(executor)
        end = self._ends.pop(executor, None)
        if end is not None:
            self.exited(executor, *end)

    def exited(self, executor: int, code: int, running: Running) -> None:
        """How an executor's process ended (negative: by which signal), and what it was running; it may come before
        `lost`, or much later, when a core was dumped."""
        event = next((event for event in self._events if executor in event.executors), None)
        if event is None:
            self._ends[executor] = (code, running)
            if len(self._ends) > ENDS_KEPT:
                del self._ends[next(iter(self._ends))]
        elif -code in CRASH_SIGNALS:
            event.unexplained.discard(executor)
            event.crashes.append(dict(running))
        else:
            event.unexplained.discard(executor)
            event.accident = True

    def tick(self, now: float) -> list[tuple[str, int]]:
        """Time has passed; returns the names of programs that are refused from now on, with the number of crashes."""
        self._forget(now)
        refused: list[tuple[str, int]] = []
        for event in list(self._events):
            age = now - event.first
            if age < self._settle_seconds or (event.unexplained and age < EXPLANATION_SECONDS):
                continue
            self._events.remove(event)
            if not event.accident and not event.unexplained:
                refused += self._count(now, event.crashes)
        return refused

    def _count(self, now: float, crashes: list[dict[str, str]]) -> list[tuple[str, int]]:
        refused = []
        common = [program for program in crashes[0] if all(program in others for others in crashes)]
        for program in common:
            times = self._crashes.setdefault(program, [])
            times.append((now, 1 / len(common)))
            if program not in self.refused and sum(share for _, share in times) >= self._limit - 1e-9:
                name = crashes[0][program]
                self.refused[program] = _refusal(name, len(times))
                refused.append((name, len(times)))
        return refused

    def _forget(self, now: float) -> None:
        for program, times in list(self._crashes.items()):
            if now - times[-1][0] >= self._window_seconds:
                del self._crashes[program]
                self.refused.pop(program, None)


def _refusal(name: str, count: int) -> Status:
    return statuses.invalid_argument(
        f"the program {name} was running each of the {count} times that an executor crashed: it makes XLA crash and is "
        "not run again (program_crash_limit). Change it, or report it with its text (lower().as_text())."
    )
