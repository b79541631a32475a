"""The event log: what happened in a cluster, in order, in memory and as JSON lines in a file.

An event is a flat JSON object::

    {"sequence": int, "time": wall seconds, "monotonic": seconds, "kind": str, ...fields of the kind}

Sequence numbers begin at 0 and have no gaps in memory; a gap in the file is an event that could not be
written.
"""

import collections
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Subscriber = Callable[[Event], None]

#: Fields every event has; an emitter may not use these names for its own.
RESERVED_FIELDS = frozenset({"sequence", "time", "monotonic", "kind"})

#: Seconds between two attempts to open an event file that could not be opened.
REOPEN_INTERVAL_SECONDS = 1.0

_log = logging.getLogger(__name__)


class EventLog:
    """Numbers events, keeps the newest `limit` of them, appends each to a file and hands it to subscribers.

    Safe to use from several threads. Every subscriber sees every event in the order of its sequence number,
    also when a subscriber emits events itself. What goes wrong in the file or a subscriber never reaches the
    emitter: a failed write is counted in `dropped_writes` and logged once, as is a subscriber's exception.

    Args:
      path: the file to append to; None keeps events in memory only. Missing folders are made.
      limit: events kept in memory, at least 1.
    """

    def __init__(self, path: Path | None, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"an event log keeps at least 1 event, not {limit}")
        self.path = path
        self.dropped_writes = 0
        """Events that did not reach the file."""
        self._lock = threading.Lock()
        self._events: collections.deque[Event] = collections.deque(maxlen=limit)
        self._next = 0
        self._pending: collections.deque[Event] = collections.deque()
        self._delivering = False
        self._subscribers: dict[int, Subscriber] = {}
        self._next_subscriber = 0
        self._failed_subscribers: set[int] = set()
        self._descriptor: int | None = None
        self._line_open = False
        self._open_again_at = 0.0
        self._write_problem_logged = False
        self._closed = False
        if path is not None:
            self._open(path)

    def emit(self, kind: str, **fields: Any) -> Event:
        """Record an event that happens now.

        Values that JSON has no form for become text, numbers that are not finite become null.

        Returns:
          The event, as it was written and as subscribers see it. Nobody may change it.

        Raises:
          ValueError: a field has one of `RESERVED_FIELDS` as its name.
        """
        if not RESERVED_FIELDS.isdisjoint(fields):
            names = ", ".join(sorted(RESERVED_FIELDS & set(fields)))
            raise ValueError(f"event {kind!r} uses reserved field names: {names}")
        with self._lock:
            event: Event = {
                "sequence": self._next,
                "time": time.time(),
                "monotonic": time.monotonic(),
                "kind": kind,
                **fields,
            }
            event, line = _encode(event)
            self._next += 1
            self._events.append(event)
            if self.path is not None and not self._closed:
                self._write(self.path, line)
            self._pending.append(event)
            if self._delivering:
                # Another call, maybe further up this stack, is handing events out; it takes this one too.
                return event
            self._delivering = True
        self._deliver()
        return event

    @property
    def next_sequence(self) -> int:
        """The number that the next event gets."""
        with self._lock:
            return self._next

    def since(self, n: int, limit: int) -> tuple[list[Event], int]:
        """Up to `limit` events with sequence number `n` or above, oldest first, and the `n` to go on with.

        Events that are no longer kept are left out: the first one's number is then above `n`. An `n` above
        the newest event gives no events and the number of the next one.
        """
        with self._lock:
            first = self._next - len(self._events)
            begin = min(max(n, first), self._next)
            end = min(begin + max(limit, 0), self._next)
            # The deque is indexed from its nearer end, so the usual short tail is cheap.
            return [self._events[index - first] for index in range(begin, end)], end

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback` with every event from now on, in the thread that emits.

        Returns:
          A function that ends the subscription; calling it again does nothing.
        """
        with self._lock:
            number = self._next_subscriber
            self._next_subscriber += 1
            self._subscribers[number] = callback

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.pop(number, None)
                self._failed_subscribers.discard(number)

        return unsubscribe

    def close(self) -> None:
        """Close the file. Later events are kept in memory and handed to subscribers only."""
        with self._lock:
            self._closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _deliver(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._pending:
                        self._delivering = False
                        return
                    event = self._pending.popleft()
                    subscribers = list(self._subscribers.items())
                # Called without the lock, so that a subscriber may emit, subscribe or wait for others.
                for number, callback in subscribers:
                    self._call(number, callback, event)
        except BaseException:
            # An interrupt in a subscriber goes up to the emitter; the next event is handed out all the same.
            with self._lock:
                self._delivering = False
            raise

    def _call(self, number: int, callback: Subscriber, event: Event) -> None:
        try:
            callback(event)
        except Exception:
            if number not in self._failed_subscribers:
                self._failed_subscribers.add(number)
                _log.exception("a subscriber failed on event %s; its later failures are not logged", event["kind"])

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._report_write_problem(error)
            self._open_again_at = time.monotonic() + REOPEN_INTERVAL_SECONDS
            return
        self._descriptor = descriptor
        self._line_open = _ends_inside_line(descriptor)

    def _write(self, path: Path, line: bytes) -> None:
        if self._descriptor is None and time.monotonic() >= self._open_again_at:
            self._open(path)
        if self._descriptor is None:
            self.dropped_writes += 1
            return
        # A line cut off by a full disk is ended first, so that it costs only itself.
        data = b"\n" + line if self._line_open else line
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            self.dropped_writes += 1
            self._report_write_problem(error)
            return
        # One write and no second attempt for the rest: a short write to a file means that its disk is full.
        if written:
            self._line_open = data[written - 1 : written] != b"\n"
        if written < len(data):
            self.dropped_writes += 1
            self._report_write_problem(OSError("only a part of the line could be written; is the disk full?"))

    def _report_write_problem(self, error: OSError) -> None:
        if not self._write_problem_logged:
            self._write_problem_logged = True
            _log.warning(
                "events cannot be written to %s (%s); the cluster runs on with the last %d events in memory",
                self.path,
                error.strerror or error,
                self._events.maxlen,
            )


def read_events(path: Path) -> list[Event]:
    """The events in a file, in the file's order.

    A line that is no JSON object with a kind is left out: the last one, which a process may be writing or may
    have died on, and any that a full disk has cut off.

    Raises:
      OSError: the file cannot be read.
    """
    events: list[Event] = []
    with open(path, "rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("kind"), str):
                events.append(event)
    return events


def _encode(event: Event) -> tuple[Event, bytes]:
    try:
        line = json.dumps(event, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        # What was asked for cannot be written as it is; what is kept in memory is then what is written.
        event = {str(name): _plain(value, 8) for name, value in event.items()}
        line = json.dumps(event, separators=(",", ":"))
    return event, line.encode("ascii") + b"\n"


def _plain(value: Any, depth: int) -> Any:
    """`value` with only the types of JSON; what is nested deeper than `depth` becomes text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if value - value == 0 else None
    if depth > 0 and isinstance(value, Mapping):
        return {str(name): _plain(item, depth - 1) for name, item in value.items()}
    if depth > 0 and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth - 1) for item in value]
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _ends_inside_line(descriptor: int) -> bool:
    try:
        size = os.fstat(descriptor).st_size
        return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    except OSError:
        # Not a regular file (a pipe, a terminal): nothing precedes what we write.
        return False
