"""What the proxy did while a profile was recorded, in the format of jaxlib's profiler. Pure: times are given."""

from collections.abc import Iterable
from typing import Any

from ridgeway.protocol import messages

PLANE = "/host:CPU"
"""The plane that viewers take for a host's threads."""
LANES = 16
"""Lines for answers that come later: events of one line must not overlap."""
_EVENT_SHOWN_NS = 1_000_000
"""An event of the cluster has no length; so long it is shown."""
_TEXT_LIMIT = 200

type _Span = tuple[str, int, int]
"""Name, begin, end."""


class RequestTrace:
    """Collects what is to be shown. All times are nanoseconds since 1970."""

    def __init__(self, limit: int):
        self._limit = limit
        self._handled: dict[int, list[_Span]] = {}
        self._answered: dict[int, list[_Span]] = {}
        self._events: list[_Span] = []
        self._count = 0
        self.dropped = 0
        """requests and events beyond ``limit``"""

    def handled(self, session: int, kind: str, begin: int, end: int) -> None:
        """A request of a session was dispatched, which took so long."""
        self._add(self._handled.setdefault(session, []), (kind, begin, end))

    def answered(self, session: int, kind: str, begin: int, end: int) -> None:
        """A request that was received at ``begin`` and not answered at once was answered at ``end``."""
        self._add(self._answered.setdefault(session, []), (kind, begin, end))

    def happened(self, event: dict[str, Any]) -> None:
        """An event of the cluster (`timeline.events`)."""
        fields = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("sequence", "time", "monotonic", "kind"))
        begin = int(event["time"] * 1e9)
        text = f"{event['kind']}: {fields}" if fields else event["kind"]
        self._add(self._events, (text[:_TEXT_LIMIT], begin, begin + _EVENT_SHOWN_NS))

    def _add(self, spans: list[_Span], span: _Span) -> None:
        if self._count >= self._limit:
            self.dropped += 1
        else:
            self._count += 1
            spans.append(span)

    def to_xspace(self, start: int) -> bytes:
        """A serialized XSpace whose times count from ``start``."""
        space = messages.XSpace()
        plane = space.planes.add(id=1, name=PLANE)
        names: dict[str, int] = {}

        def add_line(title: str, spans: Iterable[_Span]) -> None:
            line = plane.lines.add(id=len(plane.lines) + 1, name=title)
            for name, begin, end in spans:
                number = names.setdefault(name, len(names) + 1)
                line.events.add(
                    metadata_id=number, offset_ps=max(0, begin - start) * 1000, duration_ps=max(0, end - begin) * 1000
                )

        if self._events:
            add_line("events of the cluster", sorted(self._events, key=lambda span: span[1]))
        for session, spans in sorted(self._handled.items()):
            add_line(f"session {session}: requests", spans)
        for session, spans in sorted(self._answered.items()):
            for number, lane in enumerate(_lanes(spans)):
                add_line(f"session {session}: answered later, {number + 1}", lane)
        for name, number in names.items():
            plane.event_metadata[number].id = number
            plane.event_metadata[number].name = name
        return space.SerializeToString()


def _lanes(spans: list[_Span]) -> list[list[_Span]]:
    """Spans in as few lines as go without an overlap; what finds no room in `LANES` of them is left out."""
    lanes: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: span[1]):
        free = next((lane for lane in lanes if lane[-1][2] <= span[1]), None)
        if free is None and len(lanes) < LANES:
            free = []
            lanes.append(free)
        if free is not None:
            free.append(span)
    return lanes
