"""What sessions' time was spent on, read from events and shown."""

import json

from recorded import WALL, Stream, resume, start

from ridgeway.timeline.goodput import describe, find_goodput
from ridgeway.timeline.report import WIDTH, render

SECONDS = {
    "stepping": 60.0, "compiling": 10.0, "waiting_for_hardware": 2.5, "restoring": 1.5, "saving": 4.0,
    "repeating": 12.0, "unattributed": 10.0,
}  # fmt: skip


def told(stream: Stream, at: float, session: int, undecided: float = 0.0, **seconds: float) -> Stream:
    """An account as the head records it."""
    spent = {**SECONDS, **seconds}
    return stream.add(
        at, "goodput", session=session, wall_seconds=sum(spent.values()) + undecided, seconds=spent,
        undecided_seconds=undecided, step_program="jit_train_step", step_seconds=0.1, steps=720, repeated_steps=120,
        saves=6, recoveries=1, compile_hits=3, compile_misses=21, array_bytes=1 << 30,
    )  # fmt: skip


def recorded() -> Stream:
    """Two sessions: one that ended, one that goes on."""
    stream = resume(start(Stream()), 40.0)
    told(stream, 50.0, 1, stepping=10.0)
    told(stream, 102.0, 1)
    stream.add(102.0, "session_ended", session=1, reason="the client disconnected")
    stream.add(110.0, "session_started", session=2, client="ipv4:127.0.0.1:5")
    return told(stream, 220.0, 2, undecided=10.0)


def test_the_last_account_of_each_session_counts() -> None:
    first, second = find_goodput(recorded().done())
    assert (first.session, first.ended, first.client) == (1, True, "python")
    assert first.seconds == SECONDS
    assert first.wall_seconds == 100.0
    assert first.start_time == WALL + 2.0
    assert first.goodput == 0.6
    assert (first.steps, first.repeated_steps, first.saves, first.recoveries) == (720, 120, 6, 1)
    assert (first.compile_hits, first.compile_misses) == (3, 21)
    assert (second.session, second.ended) == (2, False)
    assert second.wall_seconds == 110.0
    assert sum(second.seconds.values()) + second.undecided_seconds == second.wall_seconds


def test_sessions_of_two_heads_with_the_same_number_are_two() -> None:
    events = told(start(Stream()), 102.0, 1).done() + told(start(Stream()), 102.0, 1, stepping=1.0).done()
    assert [account.seconds["stepping"] for account in find_goodput(events)] == [60.0, 1.0]


def test_what_an_event_lacks_or_has_wrong_reads_as_nothing() -> None:
    stream = start(Stream())
    stream.add(50.0, "goodput", session=1, seconds={"stepping": "long", "saving": -1, "other": 7, "repeating": 2})
    stream.add(50.0, "goodput", session=2)
    stream.add(50.0, "goodput")
    by_session = {account.session: account for account in find_goodput(stream.done())}
    assert sorted(by_session) == [1, 2]
    assert by_session[1].wall_seconds == 2.0
    assert by_session[2].goodput == 0.0


def test_the_table() -> None:
    text = render(recorded().done())
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "Recovery 1: " in text
    assert "Session 1: goodput 60 % of 100.0 s (ended)" in text
    assert "720 steps of jit_train_step, 0.100 s each; 120 of them done again after a loss" in text
    assert "6 saves, 1 recovery; 21 programs compiled, 3 from the cache" in text
    assert "Session 2: goodput 55 % of 110.0 s so far" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["waiting", "for", "hardware", "2.500", "2", "%"] in lines
    assert ["repeating", "lost", "steps", "12.000", "12", "%"] in lines
    assert ["wall", "clock", "100.000", "100", "%"] in lines
    assert ["not", "told", "apart", "yet", "10.000", "9", "%"] in lines


def test_without_a_loss_there_is_goodput_all_the_same() -> None:
    text = render(told(start(Stream()), 102.0, 1).done())
    assert "No loss in these events" in text
    assert "Session 1: goodput 60 %" in text


def test_the_json_form() -> None:
    first, second = json.loads(render(recorded().done(), as_json=True))["goodput"]
    assert first["seconds"] == SECONDS
    assert first["goodput"] == 0.6
    assert (first["wall_seconds"], first["undecided_seconds"], first["ended"]) == (100.0, 0.0, True)
    assert second["undecided_seconds"] == 10.0


def test_one_line() -> None:
    line = describe({"seconds": {**SECONDS, "saving": 0.01}, "undecided_seconds": 4.0, "wall_seconds": 100.0})
    assert line.startswith("goodput 60 %: stepping 60.0 s, compiling 10.0 s, waiting for hardware 2.5 s")
    assert "saving" not in line
    assert line.endswith("not told apart yet 4.0 s")
    nothing = {"seconds": dict.fromkeys(SECONDS, 0.0), "undecided_seconds": 0.0, "wall_seconds": 0.0}
    assert describe(nothing) == "goodput 0 %: nothing yet"
