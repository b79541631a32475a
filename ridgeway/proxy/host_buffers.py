"""Host buffers of one session: bytes that travel beside the requests that name them, in either order."""

import time
from collections.abc import Callable

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status

Arrival = Callable[[bytes | Status], None]


class HostBufferStore:
    """Bytes by handle, and who waits for which: what the client sends, and what it is to fetch."""

    def __init__(self, limit_bytes: int, timeout_seconds: float):
        self._limit_bytes = limit_bytes
        self._timeout_seconds = timeout_seconds
        self._buffers: dict[int, bytes | Status] = {}
        self._waiting: dict[int, tuple[float, list[Arrival]]] = {}
        self._watching: dict[int, tuple[float, list[Arrival]]] = {}
        self._results: set[int] = set()
        self._getting_on = float("-inf")
        self.bytes = 0
        self.result_bytes = 0
        """of them, those that the client is to fetch"""
        self.on_wanted: Callable[[int], None] = lambda handle: None
        """called when somebody begins to wait for a buffer that is not here"""
        self.on_taken: Callable[[], None] = lambda: None
        """called when a buffer that was here is forgotten"""

    def gets_on(self) -> None:
        """Bytes of some buffer came in: those that wait behind it are not late."""
        self._getting_on = time.monotonic()

    def is_wanted(self, handle: int) -> bool:
        """Whether somebody waits for a buffer that is not here."""
        return handle in self._waiting or handle in self._watching

    def put_result(self, handle: int, data: bytes) -> None:
        """Keep what the client is to fetch; whoever asked for it has seen to it that there is room."""
        self.take(handle)
        self._buffers[handle] = data
        self._results.add(handle)
        self.bytes += len(data)
        self.result_bytes += len(data)
        self._tell_watchers(handle, data)

    def put(self, handle: int, data: bytes) -> None:
        """A buffer is complete.

        Raises:
          statuses.StatusError: RESOURCE_EXHAUSTED, more bytes wait than the session may have.
        """
        waiting = self._waiting.pop(handle, None)
        if waiting is not None:
            for arrival in waiting[1]:
                arrival(data)
            self._tell_watchers(handle, data)
            return
        self.take(handle)  # a handle that is used twice has the later bytes
        held = self.bytes - self.result_bytes
        if held and held + len(data) > self._limit_bytes:
            raise statuses.resource_exhausted(
                f"host buffers of this session would exceed {self._limit_bytes} bytes (host_buffer_limit_bytes)"
            ).error()
        self._buffers[handle] = data
        self.bytes += len(data)
        self._tell_watchers(handle, data)

    def fail(self, handle: int, error: Status) -> None:
        """The buffer will not come: whoever waits for it, or looks it up, gets the error."""
        self.take(handle)
        _, waiting = self._waiting.pop(handle, (0.0, []))
        for arrival in waiting:
            arrival(error)
        self._buffers[handle] = error
        self._tell_watchers(handle, error)

    def _tell_watchers(self, handle: int, value: bytes | Status) -> None:
        watching = self._watching.pop(handle, None)
        if watching is not None:
            for arrival in watching[1]:
                arrival(value)

    def has(self, handle: int) -> bool:
        """Whether the buffer is here."""
        return isinstance(self._buffers.get(handle), bytes)

    def take(self, handle: int) -> bytes | None:
        """The buffer if it is here; it is forgotten."""
        data = self._buffers.get(handle)
        if not isinstance(data, bytes):
            return None
        del self._buffers[handle]
        self.bytes -= len(data)
        if handle in self._results:
            self._results.discard(handle)
            self.result_bytes -= len(data)
        self.on_taken()
        return data

    def forget(self, handle: int) -> None:
        """The client needs the buffer, or the error in its place, no more."""
        if self.take(handle) is None:
            self._buffers.pop(handle, None)

    def discard(self, handle: int) -> None:
        """Nobody will use the buffer, whether it is here or still comes."""
        if handle in self._buffers:
            self.forget(handle)
        else:
            self.when_here(handle, lambda _: None)

    def look_up(self, handle: int, arrival: Arrival) -> None:
        """Call ``arrival`` with the buffer, now or when it comes, or with an error; the buffer stays. The client
        asks for a buffer at the same time as it asks for the copy that fills it."""
        value = self._buffers.get(handle)
        if value is not None:
            arrival(value)
            return
        _, arrivals = self._watching.setdefault(handle, (time.monotonic() + self._timeout_seconds, []))
        arrivals.append(arrival)
        self.on_wanted(handle)

    def when_here(self, handle: int, arrival: Arrival) -> None:
        """Call ``arrival`` with the buffer, which is not here yet, or with an error: that of the copy which was to
        fill it, or after the timeout."""
        failed = self._buffers.get(handle)
        if isinstance(failed, Status):
            arrival(failed)
            return
        _, arrivals = self._waiting.setdefault(handle, (time.monotonic() + self._timeout_seconds, []))
        arrivals.append(arrival)
        self.on_wanted(handle)

    def postpone(self, seconds: float) -> None:
        """Give everything that waits so much more time."""
        for table in (self._waiting, self._watching):
            for handle, (deadline, arrivals) in table.items():
                table[handle] = (deadline + seconds, arrivals)

    def tick(self) -> None:
        """Fail what waited too long while nothing came in."""
        now = time.monotonic()
        if now < self._getting_on + self._timeout_seconds:
            return
        late = [(t, h) for t in (self._waiting, self._watching) for h, (deadline, _) in t.items() if now >= deadline]
        for table, handle in late:
            _, arrivals = table.pop(handle)
            error = statuses.deadline_exceeded(
                f"host buffer {handle} did not arrive within {self._timeout_seconds} s, nor any other "
                "(host_buffer_timeout_seconds)"
            )
            for arrival in arrivals:
                arrival(error)

    def close(self) -> None:
        """The session ended: nothing more will come."""
        waiting = [*self._waiting.values(), *self._watching.values()]
        self._waiting, self._watching = {}, {}
        for _, arrivals in waiting:
            for arrival in arrivals:
                arrival(statuses.data_loss("the client went away"))
        self._buffers.clear()
        self._results.clear()
        self.bytes = self.result_bytes = 0
        self.on_taken()
