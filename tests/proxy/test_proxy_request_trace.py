"""What the proxy notes of its requests, as the profiler's format has it."""

import itertools

from ridgeway.protocol import messages
from ridgeway.proxy.request_trace import LANES, RequestTrace

START = 1_000_000
Span = tuple[str, int, int]


def lines_of(recording: RequestTrace) -> dict[str, list[Span]]:
    """By title: name, begin and end (nanoseconds from the start) of each event."""
    space = messages.XSpace.FromString(recording.to_xspace(START))
    [plane] = space.planes
    return {
        line.name: [
            (plane.event_metadata[e.metadata_id].name, e.offset_ps // 1000, (e.offset_ps + e.duration_ps) // 1000)
            for e in line.events
        ]
        for line in plane.lines
    }


def test_each_session_has_a_line_of_its_requests() -> None:
    recording = RequestTrace(100)
    recording.handled(1, "compile", START + 10, START + 30)
    recording.handled(2, "init", START + 11, START + 12)
    recording.handled(1, "copy_arrays", START + 40, START + 41)
    assert lines_of(recording) == {
        "session 1: requests": [("compile", 10, 30), ("copy_arrays", 40, 41)],
        "session 2: requests": [("init", 11, 12)],
    }


def test_answers_that_come_later_overlap_in_no_line() -> None:
    recording = RequestTrace(1000)
    for n in range(LANES + 4):
        recording.answered(1, f"fetch {n}", START + n, START + 100)
    recording.answered(1, "afterwards", START + 100, START + 120)
    lines = lines_of(recording)
    assert len(lines) == LANES
    assert lines["session 1: answered later, 1"] == [("fetch 0", 0, 100), ("afterwards", 100, 120)]
    for spans in lines.values():
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(spans))


def test_events_of_the_cluster_stand_beside_them() -> None:
    recording = RequestTrace(100)
    event = {"sequence": 4, "time": (START + 50) / 1e9, "monotonic": 1.0, "kind": "slice_lost", "slice": 1}
    recording.happened(event)
    [(name, begin, end)] = lines_of(recording)["events of the cluster"]
    assert name == "slice_lost: slice 1" and abs(begin - 50) <= 1 and end > begin


def test_there_is_a_bound() -> None:
    recording = RequestTrace(3)
    for n in range(5):
        recording.handled(1, "init", START + n, START + n)
    assert recording.dropped == 2
    assert len(lines_of(recording)["session 1: requests"]) == 3
