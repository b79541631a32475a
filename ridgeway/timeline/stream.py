"""Event dictionaries, from whatever source, brought onto one clock: the ground that timelines stand on.

Events may come from a file that was cut off, damaged or written by another release. Nothing in here raises on
what an event contains; a field that is missing or has the wrong type reads as None.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

#: A number of seconds beyond this (31 thousand years) is no instant of a clock.
_CLOCK_LIMIT_SECONDS = 1e12

#: What happens to all sessions alike, whatever fields an event has.
_CLUSTER_KINDS = frozenset({"cluster_started", "host_lost", "signal_delivered", "slice_ready"})

SessionName = int | str


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """One event at its instant on the run's clock."""

    index: int
    """Position in its run."""
    kind: str
    instant: float
    """Seconds of the head's monotonic clock."""
    fields: Mapping[str, Any]

    def integer(self, name: str) -> int | None:
        """A field that is an integer."""
        value = self.fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, name: str) -> str:
        """A field that is a text; empty when there is none."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def seconds(self, name: str) -> float | None:
        """A field that is a duration: a number of seconds, at least 0."""
        value = clock_value(self.fields.get(name))
        return value if value is not None and value >= 0 else None

    def flag(self, name: str) -> bool:
        """A field that is literally true."""
        return self.fields.get(name) is True

    @property
    def session(self) -> SessionName | None:
        """The session it belongs to; None for an event of the cluster as a whole."""
        if self.kind in _CLUSTER_KINDS:
            return None
        value = self.fields.get("session")
        return value if isinstance(value, int | str) and not isinstance(value, bool) else None

    @property
    def host(self) -> tuple[int | None, int | None]:
        """Slice and host it is about."""
        return self.integer("slice"), self.integer("host")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The events of one life of the head, ordered by instant."""

    moments: list[Moment]
    wall_offset: float
    """Wall time minus instant, seconds."""


def read_runs(events: Iterable[Any]) -> list[Run]:
    """Split events at each `cluster_started` and put every part on one clock.

    Instants are those of the monotonic clock. An event without one is placed by its wall time, one without
    either at the instant of the event before it. What is no event at all (no mapping, no kind) is left out.
    """
    parts: list[list[Mapping[str, Any]]] = [[]]
    for event in events:
        if not isinstance(event, Mapping) or not isinstance(event.get("kind"), str):
            continue
        # Monotonic clocks of two processes, maybe on two machines, have nothing to do with each other.
        if event["kind"] == "cluster_started" and parts[-1]:
            parts.append([])
        parts[-1].append(event)
    return [_one_run(part) for part in parts if part]


def _one_run(events: list[Mapping[str, Any]]) -> Run:
    clocks = [(clock_value(event.get("monotonic")), clock_value(event.get("time"))) for event in events]
    offsets = [wall - monotonic for monotonic, wall in clocks if monotonic is not None and wall is not None]
    # The median, because the wall clock may have been set in the middle.
    offset = statistics.median(offsets) if offsets else 0.0
    instants = [
        monotonic if monotonic is not None else wall - offset if wall is not None else None
        for monotonic, wall in clocks
    ]
    last = next((instant for instant in instants if instant is not None), 0.0)
    placed: list[tuple[float, Mapping[str, Any]]] = []
    for instant, event in zip(instants, events, strict=True):
        last = last if instant is None else instant
        placed.append((last, event))
    placed.sort(key=lambda pair: pair[0])
    moments = [Moment(index, event["kind"], instant, event) for index, (instant, event) in enumerate(placed)]
    return Run(moments, offset)


def by_session(run: Run) -> dict[SessionName, list[Moment]]:
    """For each session its own events and those of the cluster during its life, in order.

    A session whose start is not among the events is taken to have lived from the first one.
    """
    cluster: list[Moment] = []
    own: dict[SessionName, list[Moment]] = {}
    for moment in run.moments:
        session = moment.session
        if session is None:
            cluster.append(moment)
        else:
            own.setdefault(session, []).append(moment)
    result: dict[SessionName, list[Moment]] = {}
    for session, moments in own.items():
        begin = next((moment.index for moment in moments if moment.kind == "session_started"), 0)
        end = next((moment.index for moment in moments if moment.kind == "session_ended"), len(run.moments))
        mine = [moment for moment in moments if begin <= moment.index <= end]
        around = [moment for moment in cluster if begin <= moment.index <= end]
        result[session] = sorted(mine + around, key=lambda moment: moment.index)
    return result


def clock_value(value: Any) -> float | None:
    """`value` if it is a number that a clock can show, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The comparison is false for what is not a number, too.
    return float(value) if -_CLOCK_LIMIT_SECONDS < value < _CLOCK_LIMIT_SECONDS else None
