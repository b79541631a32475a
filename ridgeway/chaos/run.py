"""Chaos on a running cluster: fault after fault of a plan, each at its moment."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ridgeway.chaos.injection import Injector, Struck
from ridgeway.chaos.plan import Fault, Moment, moment_of
from ridgeway.launch import control
from ridgeway.launch.cluster_folder import ClusterRecord

POLL_SECONDS = 0.005
#: How long a moment is waited for; then the fault strikes all the same.
MOMENT_TIMEOUT_SECONDS = 20.0


class EventFeed:
    """The cluster's events from now on, as they come, until the head ends or its link is closed."""

    def __init__(self, client: control.ControlClient):
        self.list: list[dict[str, Any]] = []
        self.over = False
        # The head sends all that it remembers; what was before is none of this.
        self._started = time.monotonic()
        threading.Thread(target=self._read, args=(client,), name="events", daemon=True).start()

    def _read(self, client: control.ControlClient) -> None:
        with contextlib.suppress(control.ControlError, OSError):
            for event in client.follow(0):
                if event["monotonic"] >= self._started:
                    self.list.append(event)
        self.over = True

    def since(self, moment: float, *kinds: str) -> list[dict[str, Any]]:
        """Events of some kinds from a moment of the monotonic clock on."""
        return [event for event in list(self.list) if event["monotonic"] >= moment and event["kind"] in kinds]


class Moments:
    """When each moment last was: from the events, and from what a program says of itself."""

    def __init__(self, events: EventFeed):
        self._events = events
        self._seen = 0
        self._last: dict[Moment, float] = {}
        self._lock = threading.Lock()

    def say(self, moment: Moment) -> None:
        """The program is at a moment now. From any thread."""
        with self._lock:
            self._last[moment] = time.monotonic()

    def been_since(self, moment: Moment, since: float) -> bool:
        """Whether it was after ``since`` of the monotonic clock."""
        if moment is Moment.ANY:
            return True
        events = self._events.list
        while self._seen < len(events):
            event = events[self._seen]
            self._seen += 1
            found = moment_of(event)
            if found is not None:
                with self._lock:
                    self._last[found] = max(self._last.get(found, 0.0), event["monotonic"])
        return self._last.get(moment, -1.0) >= since


@contextlib.contextmanager
def links(record: ClusterRecord) -> Iterator[tuple[control.ControlClient, EventFeed]]:
    """A control link for questions, and one for events.

    Raises:
      ControlError: the head cannot be reached.
    """
    with control.connect(record) as client, control.connect(record) as second:
        yield client, EventFeed(second)


def wait_for_moment(
    fault: Fault, moments: Moments, since: float, check: Callable[[], None], timeout_seconds: float
) -> bool:
    """Wait until it is time to strike; False if the moment did not come.

    Args:
      since: monotonic clock; the moment must be later.
      check: called all the time; may raise to end the wait.
      timeout_seconds: how long the moment is waited for.
    """
    end = time.monotonic() + timeout_seconds
    came = True
    while not moments.been_since(fault.moment, since):
        check()
        if time.monotonic() >= end:
            came = False
            break
        time.sleep(POLL_SECONDS)
    time.sleep(fault.offset_seconds)
    return came


def chaos(
    injector: Injector,
    events: EventFeed,
    faults: Iterator[Fault],
    count: int | None,
    seconds: float | None,
    say: Callable[[str], None],
) -> list[Struck]:
    """Strike until there were ``count`` faults, ``seconds`` are over, or the head is gone; undo what lasts.

    Raises:
      InjectionError: this machine does not allow a fault.
      ControlError: the head does not answer.
    """
    done: list[Struck] = []
    moments = Moments(events)
    end = float("inf") if seconds is None else time.monotonic() + seconds
    last = time.monotonic()

    def over() -> bool:
        return events.over or time.monotonic() >= end or (count is not None and len(done) >= count)

    try:
        while not over():
            fault = next(faults)
            resume = time.monotonic() + fault.pause_seconds
            while time.monotonic() < resume and not over():
                time.sleep(min(0.1, max(0.0, resume - time.monotonic())))
            if over():
                break
            came = wait_for_moment(fault, moments, last, lambda: None, MOMENT_TIMEOUT_SECONDS)
            last = time.monotonic()
            struck = injector.strike(fault)
            done.append(struck)
            what = "" if struck.victims else "; nobody was there to be hit"
            say(f"{fault.describe()}{'' if came else ' (which did not come)'}{what}")
    finally:
        injector.end()
    return done
