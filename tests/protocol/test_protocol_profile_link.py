"""Traces of several processes, over the side channel and put together."""

import pytest

from ridgeway.protocol import messages, profile_link
from ridgeway.protocol.profile_link import CHUNK_BYTES, PLANE_PREFIX, Collector, Options, Trace


def trace(name: str, start: int, *planes: str) -> Trace:
    """A trace whose planes each have one line with one event; a plane named ``-...`` has none."""
    space = messages.XSpace()
    for text in planes:
        plane = space.planes.add(id=1, name=text.lstrip("-"))
        if not text.startswith("-"):
            plane.lines.add(name="thread", timestamp_ns=5).events.add(metadata_id=1, offset_ps=7, duration_ps=9)
            plane.event_metadata[1].name = "work"
    return Trace(name, start, space.SerializeToString())


def test_planes_have_their_processes_names_and_absolute_times() -> None:
    merged = messages.XSpace.FromString(
        profile_link.together([
            trace("proxy", 1_000, "/host:CPU"),
            trace("slice 0 host 0", 2_000, "-/host:metadata", "/host:CPU", "/host:python-tracer"),
        ])
    )
    assert [plane.name for plane in merged.planes] == [
        PLANE_PREFIX + "proxy", PLANE_PREFIX + "slice 0 host 0", PLANE_PREFIX + "slice 0 host 0 host:python-tracer",
    ]  # fmt: skip
    assert [plane.lines[0].timestamp_ns for plane in merged.planes] == [1_005, 2_005, 2_005]
    assert len({plane.id for plane in merged.planes}) == 3  # viewers tell them by it
    assert merged.planes[0].event_metadata[1].name == "work"


def test_a_trace_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match="slice 1 host 0"):
        profile_link.together([Trace("slice 1 host 0", 0, b"\xff\xff")])


def test_traces_come_back_from_their_messages() -> None:
    traces = [Trace("a", 1, b"x" * (2 * CHUNK_BYTES + 3)), Trace("b", 2, b"")]
    collector = Collector(limit_bytes=len(traces[0].data))
    for part in traces:
        for message in profile_link.chunks(part):
            assert len(message[-1] if message[0] == "data" else b"") <= CHUNK_BYTES
            collector.add(list(message))
    assert not collector.ended
    collector.add(["end", ["no trace of c"]])
    assert collector.ended and collector.problems == ["no trace of c"]
    assert collector.traces() == traces


@pytest.mark.parametrize(
    "sent",
    [
        [["data", b"x"]],
        [["part", "a", 0, 1], ["data", b"xy"]],
        [["part", "a", 0, 101]],
        [["part", "a", 0, 60], ["part", "b", 0, 60]],
        [["part", "a", "0", 1]],
        [["hello"]],
        [["end", "no list"]],
    ],
)
def test_other_messages_and_too_many_bytes_are_refused(sent: list[list[object]]) -> None:
    collector = Collector(limit_bytes=100)
    with pytest.raises(ValueError, match=r"trace|traces"):
        for message in sent:
            collector.add(message)


def test_options_are_kept_within_their_range() -> None:
    assert Options.from_fields(Options(3, 1, 2.5).to_fields()) == Options(3, 1, 2.5)
    assert Options.from_fields([99, -1, -1]) == Options(3, 0, 0.0)
    for wrong in ([1, 2], "123", [1, 2, None], [True, 1, 2]):
        with pytest.raises(ValueError, match="three numbers"):
            Options.from_fields(wrong)
