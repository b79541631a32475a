"""Holds a session's requests while a host that they touch is suspended.

Order is correctness, so from the first request on that touches such a host everything of its session waits, in order;
other sessions go on. The program sees a pause. What makes no order passes until then.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ridgeway.cluster.suspender import Suspender

Touched = Callable[[], Iterable[int]]
"""The slots that a request touches, as things are when it is asked."""


class SuspensionGate:
    """One session's."""

    def __init__(self, suspender: Suspender, session: int, limit: int, emit: Callable[..., Any]):
        self._suspender = suspender
        self._session = session
        self._limit = limit
        self._emit = emit
        self._waiting: deque[tuple[Touched, Callable[[], None]]] = deque()
        self._closed_at = 0.0
        self._passing = False
        self._room: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Whether requests wait."""
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        """Whether no more requests should be read."""
        return len(self._waiting) >= self._limit

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back once when more can be read."""
        self._room.append(callback)

    def admit(self, touched: Touched, work: Callable[[], None]) -> None:
        """Do ``work`` now, or in its turn when it may."""
        if self._waiting or self._passing:
            self._waiting.append((touched, work))
            return
        if self._suspender.slots and (slots := self._held_by(touched)):
            self._closed_at = self._suspender.now()
            self._waiting.append((touched, work))
            self._emit("session_held", session=self._session, hosts=self._suspender.places(slots))
            return
        work()

    def reopen(self) -> None:
        """Suspensions are over, or have failed: do what waits, up to the next request that has to."""
        if not self._waiting or self._passing:
            return
        self._passing = True
        count = 0
        try:
            while self._waiting and not (self._suspender.slots and self._held_by(self._waiting[0][0])):
                _, work = self._waiting.popleft()
                count += 1
                work()
        finally:
            self._passing = False
        if not self._waiting and count:
            seconds = round(self._suspender.now() - self._closed_at, 4)
            self._emit("session_released", session=self._session, seconds=seconds, requests=count)
        self._make_room()

    def close(self) -> None:
        """The session is over."""
        self._waiting.clear()
        self._make_room()

    def _held_by(self, touched: Touched) -> list[int]:
        suspended = set(self._suspender.slots)
        return sorted(suspended.intersection(touched()))

    def _make_room(self) -> None:
        if not self.full:
            callbacks, self._room = self._room, []
            for callback in callbacks:
                callback()
