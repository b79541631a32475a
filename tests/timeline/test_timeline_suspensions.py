"""From events to suspensions."""

import json
from typing import Any

from ridgeway.timeline.report import render, to_json
from ridgeway.timeline.suspensions import describe, find_suspensions


class Stream:
    """Events at given seconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def add(self, at: float, kind: str, /, **fields: Any) -> "Stream":
        number = len(self.events)
        self.events.append({"sequence": number, "time": 1e9 + at, "monotonic": at, "kind": kind, **fields})
        return self


def preempted(stream: Stream, at: float, index: int = 1) -> Stream:
    return stream.add(
        at, "preemption_announced", slice=index, host=0, incarnation=4, notice_seconds=30.0, reason="SIGTERM"
    )


def test_one_that_comes_back() -> None:
    stream = preempted(Stream(), 10.0)
    stream.add(10.5, "session_held", session=1, hosts=[[1, 0]])
    stream.add(11.0, "host_suspended", slice=1, host=0, bytes=5_000_000, seconds=1.0)
    stream.add(12.0, "host_joining", slice=1, host=0, incarnation=9)
    stream.add(14.0, "host_resumed", slice=1, host=0, restore_seconds=0.5, seconds=4.0)
    stream.add(14.0, "session_released", session=1, seconds=3.5, requests=7)
    [found] = find_suspensions(stream.events)
    assert (found.outcome, found.seconds, found.saved_seconds) == ("resumed", 4.0, 1.0)
    assert (found.waited_seconds, found.restore_seconds, found.bytes) == (2.5, 0.5, 5_000_000)
    assert found.paused == {"1": 3.5}
    assert found.time == 1e9 + 10.0
    assert "programs paused for 3.500 s" in describe(found) and "5.0 MB" in describe(found)
    text = render(stream.events)
    assert "preemption of slice 1 host 0 with 30 s notice (SIGTERM)" in text and "No loss in these events" in text
    assert json.loads(render(stream.events, as_json=True))["suspensions"][0]["outcome"] == "resumed"


def test_one_that_becomes_a_loss() -> None:
    stream = preempted(Stream(), 10.0).add(13.0, "host_lost", slice=1, host=0, cause="preempted with 3 s notice, and")
    [found] = find_suspensions(stream.events)
    assert (found.outcome, found.seconds, found.cause) == ("lost", 3.0, "preempted with 3 s notice, and")
    assert describe(found).endswith("lost after 3.000 s: preempted with 3 s notice, and")


def test_the_loss_of_a_replacement_that_was_restoring_is_not_the_loss_of_the_state() -> None:
    stream = preempted(Stream(), 10.0).add(11.0, "host_suspended", slice=1, host=0, bytes=1)
    stream.add(12.0, "host_lost", slice=1, host=0, cause="closed", was_joining=True)
    stream.add(15.0, "host_resumed", slice=1, host=0, restore_seconds=0.1)
    [found] = find_suspensions(stream.events)
    assert (found.outcome, found.seconds) == ("resumed", 5.0)


def test_one_that_held_nothing_and_one_that_is_not_over() -> None:
    stream = preempted(preempted(Stream(), 10.0), 10.1, index=2)
    stream.add(11.0, "host_joining", slice=1, host=0, incarnation=9)
    first, second = find_suspensions(stream.events)
    assert (first.outcome, second.outcome) == ("left", "unfinished")
    assert describe(second).endswith("not over yet")


def test_nonsense_is_no_error() -> None:
    stream = Stream().add(1.0, "preemption_announced").add(2.0, "host_suspended").add(3.0, "host_resumed", seconds="x")
    stream.add(4.0, "session_held", session=1, hosts="?").add(5.0, "session_released", session=1)
    stream.add(6.0, "session_held", session=1, hosts=[[1], 2]).add(7.0, "preemption_announced", slice="a")
    for suspension in find_suspensions(stream.events):
        assert describe(suspension)
    assert find_suspensions([]) == []
    assert to_json([])["suspensions"] == []
