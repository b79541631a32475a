"""Recoveries found in streams of events with known instants."""

import itertools
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import STEP, WALL, Stream, held, probes, resize, resume, start

from ridgeway.timeline.events import read_events
from ridgeway.timeline.phases import TITLES
from ridgeway.timeline.recovery import Recovery, find_recoveries


def shares(recovery: Recovery) -> list[tuple[str, float]]:
    return [(phase.name, round(phase.seconds, 6)) for phase in recovery.phases]


def check(recovery: Recovery) -> None:
    """What holds for every recovery of every stream."""
    position = 0.0
    for phase in recovery.phases:
        assert phase.begin_seconds == pytest.approx(position, abs=1e-6)
        assert phase.seconds >= 0
        assert 0 <= phase.compiling_seconds <= phase.seconds + 1e-6
        assert phase.name in TITLES
        position = phase.begin_seconds + phase.seconds
    assert position == pytest.approx(recovery.seconds, abs=1e-6)
    assert sum(phase.seconds for phase in recovery.phases) == pytest.approx(recovery.seconds, abs=1e-6)
    assert recovery.seconds >= 0
    assert recovery.losses


def only(stream: Stream, **options: Any) -> Recovery:
    (recovery,) = find_recoveries(stream.done(), **options)
    check(recovery)
    return recovery


def lost(stream: Stream, at: float, slice_index: int = 2, host: int = 0) -> Stream:
    return stream.add(at, "host_lost", slice=slice_index, host=host, code="DATA_LOSS", cause="gone")


def test_resume_with_every_instant_known() -> None:
    recovery = only(resume(start(Stream()), 100.0))
    assert recovery.outcome == "completed"
    assert recovery.mode == "resume"
    assert recovery.session == 1
    assert recovery.slices == (2,)
    assert recovery.kill_known
    assert recovery.start_time == pytest.approx(WALL + 100)
    assert recovery.seconds == pytest.approx(4.0)
    assert recovery.unattributed_seconds == 0
    assert recovery.step_program == STEP
    assert shares(recovery) == [
        ("detected", 0.05),
        ("survivors_aborted", 0.05),
        ("error_raised", 0.2),
        ("slice_available", 0.5),
        ("slices_accepted", 0.1),
        ("function_reentered", 0.7),
        # The first program that spans the slices has the generation made, after the function was entered again.
        ("state_restored", 0.1),
        ("generation_ready", 0.3),
        ("state_restored", 1.0),
        ("first_step_done", 1.0),
    ]
    assert [phase.compiling_seconds for phase in recovery.phases if phase.compiling_seconds] == [
        pytest.approx(0.1),
        pytest.approx(0.4),
    ]
    assert (recovery.compile_hits, recovery.compile_misses) == (1, 1)
    (loss,) = recovery.losses
    assert (loss.slice, loss.host, loss.code, loss.cause) == (2, 0, "DATA_LOSS", "killed by SIGKILL")
    assert [milestone.name for milestone in recovery.milestones] == [
        "killed", "detected", "survivors_aborted", "error_raised", "slice_available", "slices_accepted",
        "function_reentered", "generation_ready", "state_restored", "first_step_done",
    ]  # fmt: skip


def test_resize_is_not_confused_by_probes_of_the_slice_that_is_down() -> None:
    recovery = only(resize(start(Stream()), 100.0), killed_at=[WALL + 100])
    assert recovery.mode == "resize"
    assert recovery.seconds == pytest.approx(11.5)
    assert shares(recovery) == [
        ("detected", 0.02),
        ("survivors_aborted", 0.02),
        ("error_raised", 0.16),
        ("resize_decided", 0.06),
        ("function_reentered", 0.74),
        ("state_restored", 0.1),
        ("generation_ready", 0.1),
        ("state_restored", 1.0),
        ("first_step_done", 9.3),
    ]
    assert recovery.phases[-1].compiling_seconds == pytest.approx(7.7)


def test_without_a_known_kill_it_begins_with_the_detection() -> None:
    recovery = only(resize(start(Stream()), 100.0))
    assert not recovery.kill_known
    assert recovery.seconds == pytest.approx(11.48)
    assert recovery.phases[0].name == "survivors_aborted"


@pytest.mark.parametrize("told", [False, True])
def test_the_ten_second_poll_shows_as_time_until_acceptance(told: bool) -> None:
    """A slice that nobody expected back is refused at once, which the head does not record."""
    stream = start(Stream())
    lost(stream, 100.0).add(100.05, "survivors_aborted").add(100.2, "error_raised", session=1)
    stream.add(99.9, "step_program", session=1, name=STEP)
    probes(stream, 100.3, 3)
    stream.add(102.7, "slice_ready", slice=2)
    probes(stream, 110.398, 3)
    if told:
        stream.add(100.35, "probe_answered", session=1, slice=2, ok=False)
        stream.add(110.4, "probe_answered", session=1, slice=2, ok=True)
    stream.add(111.0, "compiled", session=1, name="jit_init", seconds=0.1, cache="hit")
    stream.add(112.0, "arrays_made", session=1, count=9, bytes=9)
    stream.add(112.5, "program_started", session=1, name=STEP)
    stream.add(113.0, "program_completed", session=1, name=STEP, seconds=0.5)
    recovery = only(stream)
    assert recovery.mode == "resume"
    assert dict(shares(recovery)) == {
        "survivors_aborted": 0.05, "error_raised": 0.15, "slice_available": 2.5, "slices_accepted": 7.7,
        "function_reentered": 0.6, "state_restored": 1.0, "first_step_done": 1.0,
    }  # fmt: skip


def test_a_hold_that_ran_out_is_a_slice_that_is_down() -> None:
    stream = start(Stream())
    lost(stream, 100.0).add(100.05, "survivors_aborted").add(100.2, "error_raised", session=1)
    stream.add(99.9, "step_program", session=1, name=STEP)
    held(probes(stream, 100.3, 3), 100.3, 110.3, False)
    # A moment too late.
    stream.add(110.4, "slice_ready", slice=2)
    stream.add(111.3, "program_started", session=1, name="jit_init").add(112.0, "arrays_made", session=1)
    stream.add(112.5, "program_started", session=1, name=STEP)
    stream.add(113.0, "program_completed", session=1, name=STEP, seconds=0.5)
    recovery = only(stream)
    assert recovery.mode == "resize"
    assert recovery.phase_seconds("resize_decided") == pytest.approx(10.1)
    assert recovery.phase_seconds("function_reentered") == pytest.approx(1.0)


def test_a_late_error_pushes_what_it_held_up() -> None:
    """The slice was back before the program noticed: nobody waited for the slice."""
    stream = start(Stream())
    lost(stream, 100.0).add(100.1, "survivors_aborted").add(100.5, "slice_ready", slice=2)
    stream.add(100.0, "step_program", session=1, name=STEP)
    stream.add(103.0, "error_raised", session=1)
    stream.add(104.0, "program_started", session=1, name="jit_init")
    stream.add(105.0, "arrays_made", session=1)
    stream.add(105.5, "program_started", session=1, name=STEP)
    stream.add(106.0, "program_completed", session=1, name=STEP, seconds=0.5)
    recovery = only(stream)
    assert shares(recovery) == [
        ("survivors_aborted", 0.1), ("error_raised", 2.9), ("slice_available", 0.0),
        ("function_reentered", 1.0), ("state_restored", 1.0), ("first_step_done", 1.0),
    ]  # fmt: skip


def test_missing_instants_are_told_and_their_seconds_are_nobodys() -> None:
    stream = start(Stream())
    lost(stream, 100.0)
    stream.add(104.0, "error_raised", session=1, code="DATA_LOSS")
    stream.add(110.0, "slice_ready", slice=2)
    stream.add(116.0, "program_started", session=1, name="jit_init")
    stream.add(119.0, "recovery_completed", session=1, seconds=19.0)
    recovery = only(stream)
    assert shares(recovery) == [
        ("unattributed", 4.0), ("slice_available", 6.0), ("function_reentered", 6.0), ("unattributed", 3.0)
    ]  # fmt: skip
    assert recovery.unattributed_seconds == pytest.approx(7.0)
    assert "survivors aborted" in recovery.phases[0].note
    assert "state restored" in recovery.phases[-1].note


def test_nobody_waits_for_survivors_where_there_are_none() -> None:
    stream = Stream().add(0, "cluster_started", topology=[1, 1, 2]).add(1, "session_started", session=1)
    stream.add(2, "generation_ready", generation=1, members=[[0, 0]], seconds=0.1)
    lost(stream, 10.0, slice_index=0).add(10.5, "error_raised", session=1)
    stream.add(12.0, "slice_ready", slice=0).add(12.0, "recovery_completed", session=1)
    assert shares(only(stream))[0] == ("error_raised", 0.5)


@pytest.mark.parametrize("at", [100.6, 102.3])
def test_a_second_loss_in_an_open_recovery_belongs_to_it(at: float) -> None:
    """The first attempt fails, too; it all counts until the first step."""
    stream = start(Stream())
    lost(stream, 100.0).add(100.1, "survivors_aborted").add(100.4, "error_raised", session=1)
    stream.add(100.0, "step_program", session=1, name=STEP)
    lost(stream, at, slice_index=1).add(at + 0.1, "error_raised", session=1)
    stream.add(103.0, "slice_ready", slice=1).add(104.0, "slice_ready", slice=2)
    probes(stream, 104.1, 3)
    stream.add(105.0, "program_started", session=1, name="jit_init")
    stream.add(106.0, "arrays_made", session=1)
    stream.add(106.5, "program_started", session=1, name=STEP)
    stream.add(107.0, "program_completed", session=1, name=STEP, seconds=0.5)
    recovery = only(stream)
    assert recovery.slices == (1, 2)
    assert [loss.slice for loss in recovery.losses] == [2, 1]
    failed = recovery.phase_seconds("attempt_failed")
    assert failed == pytest.approx(at + 0.1 - 100.4 if at > 102 else 0)
    assert recovery.phase_seconds("slice_available") == pytest.approx(104.0 - 100.4 - failed)
    assert recovery.unattributed_seconds == 0
    assert recovery.mode == "resume"


def test_losses_within_a_second_are_one_even_after_a_very_fast_recovery() -> None:
    stream = start(Stream())
    for at, slice_index in ((100.0, 2), (100.7, 1)):
        lost(stream, at, slice_index).add(at + 0.1, "error_raised", session=1)
        stream.add(at + 0.2, "slice_ready", slice=slice_index)
        stream.add(at + 0.5, "recovery_completed", session=1, seconds=0.5)
    recovery = only(stream)
    assert len(recovery.losses) == 2
    assert recovery.seconds == pytest.approx(1.2)


def test_separate_losses_are_separate_recoveries() -> None:
    stream = start(Stream())
    for number in range(3):
        resume(stream, 100.0 + 20 * number, slice_index=number)
    recoveries = find_recoveries(stream.done())
    assert [recovery.slices for recovery in recoveries] == [(0,), (1,), (2,)]
    assert [recovery.number for recovery in recoveries] == [1, 2, 3]
    assert [recovery.seconds for recovery in recoveries] == pytest.approx([4.0] * 3)


def test_steps_under_way_at_the_loss_are_not_the_next_step() -> None:
    stream = start(Stream())
    lost(stream, 100.0).add(100.0, "step_program", session=1, name=STEP)
    stream.add(100.05, "program_completed", session=1, name=STEP, seconds=0.1)
    stream.add(100.5, "error_raised", session=1)
    stream.add(103.0, "slice_ready", slice=2)
    stream.add(109.0, "program_completed", session=1, name="jit_other", seconds=0.2)
    stream.add(110.0, "program_completed", session=1, name=STEP, seconds=0.2)
    assert only(stream).seconds == pytest.approx(10.0)


def test_an_abort_that_ends_after_the_error_delays_nothing_before_it() -> None:
    stream = start(Stream())
    lost(stream, 100.0).add(100.1, "error_raised", session=1).add(100.4, "survivors_aborted")
    stream.add(101.0, "slice_ready", slice=2).add(102.0, "recovery_completed", session=1)
    assert shares(only(stream))[:3] == [("error_raised", 0.1), ("survivors_aborted", 0.3), ("slice_available", 0.6)]


def test_what_a_loss_led_to_counts_although_it_was_recorded_just_before() -> None:
    stream = start(Stream())
    stream.add(99.97, "survivors_aborted").add(99.98, "step_program", session=1, name=STEP)
    stream.add(99.99, "error_raised", session=1)
    lost(stream, 100.0).add(101.0, "slice_ready", slice=2)
    stream.add(102.0, "program_started", session=1, name="jit_init").add(103.0, "arrays_made", session=1)
    stream.add(103.5, "program_started", session=1, name=STEP)
    stream.add(104.0, "program_completed", session=1, name=STEP, seconds=0.5)
    recovery = only(stream)
    assert recovery.seconds == pytest.approx(4.0)
    assert recovery.unattributed_seconds == 0
    assert recovery.phase_seconds("error_raised") == 0


def test_one_death_that_is_noticed_twice_is_one_loss() -> None:
    """The executor's connection closes before its agent's."""
    stream = start(Stream())
    stream.add(100.0, "host_lost", slice=1, host=0, code="DATA_LOSS", cause="first", executor_only=True)
    stream.add(100.1, "host_lost", slice=1, host=0, code="DATA_LOSS", cause="second", executor_only=False)
    (loss,) = only(stream).losses
    assert (loss.cause, loss.executor_only) == ("first", False)


def test_workers_that_leave_with_their_cluster_are_no_failure() -> None:
    stream = start(Stream()).add(80.0, "session_ended", session=1)
    for slice_index in range(3):
        lost(stream, 99.0, slice_index)
    stream.add(98.0, "host_lost", slice=1, host=0).add(98.5, "slice_ready", slice=1)
    (recovery,) = find_recoveries(stream.add(100.0, "cluster_stopped", reason="SIGTERM").done())
    assert recovery.outcome == "repaired"
    # Without the end of the cluster they are failures.
    assert len(find_recoveries(stream.done()[:-1])[0].losses) == 4


def test_a_session_that_never_hears_of_the_loss_steps_on() -> None:
    """Without an error the head goes on recording; that is no endless recovery."""
    stream = start(Stream()).add(99.99, "step_program", session=1, name=STEP)
    lost(stream, 100.0)
    for number in range(60):
        stream.add(100.1 + number / 5, "arrays_made", session=1)
        stream.add(100.12 + number / 5, "program_started", session=1, name=STEP)
    lost(stream, 130.0, slice_index=1).add(130.1, "error_raised", session=1)
    stream.add(134.0, "recovery_completed", session=1)
    undisturbed, recovery = find_recoveries(stream.done())
    check(undisturbed)
    assert (undisturbed.mode, undisturbed.slices) == ("undisturbed", (2,))
    assert undisturbed.seconds == pytest.approx(0.12)
    assert recovery.slices == (1,)
    assert recovery.seconds == pytest.approx(4.0)


def test_a_session_that_steps_on_was_not_disturbed() -> None:
    """A newcomer dies while the session trains on the other slices."""
    stream = start(Stream())
    lost(stream, 100.0).add(100.0, "step_program", session=1, name=STEP)
    for at in (100.15, 100.25):
        stream.add(at - 0.1, "arrays_made", session=1)
        stream.add(at - 0.1, "program_started", session=1, name=STEP)
        stream.add(at, "program_completed", session=1, name=STEP, seconds=0.1)
    recovery = only(stream)
    assert recovery.mode == "undisturbed"
    assert shares(recovery) == [("first_step_done", 0.15)]


def test_a_loss_that_no_session_uses_is_over_when_the_slice_is_back() -> None:
    stream = start(Stream())
    stream.add(90.0, "signal_delivered", slice=1, host=0, signal=9)
    lost(stream, 90.5, slice_index=1).add(90.6, "survivors_aborted").add(95.0, "slice_ready", slice=1)
    recovery = only(stream)
    assert (recovery.session, recovery.outcome) == (None, "repaired")
    assert shares(recovery) == [("detected", 0.5), ("survivors_aborted", 0.1), ("slice_available", 4.4)]


def test_two_sessions_have_a_recovery_each() -> None:
    stream = start(Stream()).add(2, "session_started", session="b")
    resume(stream, 100.0)
    stream.add(100.6, "error_raised", session="b").add(109.0, "recovery_completed", session="b")
    recoveries = find_recoveries(stream.done())
    assert {(r.session, round(r.seconds, 3)) for r in recoveries} == {(1, 4.0), ("b", 9.0)}
    for recovery in recoveries:
        check(recovery)


def test_a_session_that_ends_or_is_not_over_leaves_a_rest() -> None:
    stream = start(Stream())
    lost(stream, 100.0).add(100.1, "survivors_aborted").add(100.3, "error_raised", session=1)
    stream.add(102.0, "replacement_expected", slice=2, host=0)
    recovery = only(stream)
    assert (recovery.outcome, recovery.mode) == ("unfinished", None)
    assert shares(recovery)[-1] == ("unattributed", 1.7)
    stream.add(103.0, "session_ended", session=1, reason="client is gone", arrays=4)
    lost(stream, 200.0).add(201.0, "slice_ready", slice=2)
    ended, later = find_recoveries(stream.done())
    check(ended)
    assert ended.outcome == "session_ended"
    assert "client is gone" in ended.phases[-1].note
    assert later.session is None


def test_state_restored_without_host_data_is_the_last_other_program() -> None:
    """From snapshots in the workers' memory nothing is put by the client."""
    stream = start(Stream())
    lost(stream, 100.0).add(100.1, "survivors_aborted").add(100.2, "error_raised", session=1)
    stream.add(100.0, "step_program", session=1, name=STEP).add(100.5, "slice_ready", slice=2)
    stream.add(101.0, "program_started", session=1, name="jit_reshard")
    stream.add(102.0, "program_completed", session=1, name="jit_reshard", seconds=1.0)
    stream.add(102.5, "program_started", session=1, name=STEP)
    stream.add(103.0, "program_completed", session=1, name=STEP, seconds=0.5)
    recovery = only(stream)
    assert recovery.phase_seconds("state_restored") == pytest.approx(1.0)
    assert recovery.unattributed_seconds == 0


def test_a_step_program_that_is_a_pmap_is_not_taken_for_a_probe() -> None:
    stream = start(Stream())
    lost(stream, 100.0).add(100.0, "step_program", session=1, name="jit__fun")
    stream.add(100.1, "survivors_aborted").add(100.2, "error_raised", session=1)
    stream.add(101.0, "slice_ready", slice=2).add(102.0, "arrays_made", session=1)
    stream.add(103.0, "program_started", session=1, name="jit__fun")
    stream.add(104.0, "program_completed", session=1, name="jit__fun", seconds=1.0)
    recovery = only(stream)
    assert recovery.seconds == pytest.approx(4.0)
    assert recovery.phase_seconds("function_reentered") == pytest.approx(1.0)


def test_which_kill_is_taken() -> None:
    stream = start(Stream())
    stream.add(60.0, "signal_delivered", slice=2, host=0, signal=int(signal.SIGSTOP))
    stream.add(61.0, "signal_delivered", slice=2, host=0, signal=int(signal.SIGCONT))
    stream.add(70.0, "signal_delivered", slice=1, host=0, signal=9)
    resume(stream, 100.0)
    # Let go on after a stop; another slice; then the one that did it.
    assert only(stream).start_time == pytest.approx(WALL + 100)
    # What the caller knows is more exact than the head's own word; later kills are later recoveries'.
    exact = only(stream, killed_at=[WALL + 99.99, WALL + 300, WALL - 5000])
    assert exact.start_time == pytest.approx(WALL + 99.99)
    assert exact.milestones[0].source == "given"
    assert only(stream, killed_at=[WALL - 5000]).start_time == pytest.approx(WALL + 100)


def test_a_stated_kill_is_used_once() -> None:
    stream = start(Stream())
    resume(stream, 100.0)
    resize(stream, 130.0)
    first, second = find_recoveries(stream.done(), killed_at=[WALL + 99.9])
    assert first.seconds == pytest.approx(4.1)
    assert not second.kill_known


def test_silence_until_the_deadline_counts_as_detection() -> None:
    stream = start(Stream()).add(90.0, "signal_delivered", slice=2, host=0, signal=int(signal.SIGSTOP))
    lost(stream, 100.0).add(100.1, "survivors_aborted").add(100.2, "error_raised", session=1)
    assert shares(only(stream))[0] == ("detected", 10.0)


def test_a_restarted_head_is_another_clock() -> None:
    events = resume(start(Stream()), 1000.0).done()
    again = resume(start(Stream()), 50.0).done()
    for event in again:
        event["time"] += 5000.0
    recoveries = find_recoveries(events + again)
    assert [recovery.seconds for recovery in recoveries] == pytest.approx([4.0, 4.0])
    assert recoveries[1].start_time == pytest.approx(WALL + 5050)


def test_one_clock_is_enough_and_order_does_not_matter() -> None:
    events = resume(start(Stream()), 100.0).done()
    whole = shares(find_recoveries(events)[0])
    for name in ("time", "monotonic"):
        less = [{key: value for key, value in event.items() if key != name} for event in events]
        assert shares(find_recoveries(less)[0]) == whole
    head, tail = events[:1], events[1:]
    random.Random(7).shuffle(tail)
    assert find_recoveries(head + tail)[0].seconds == pytest.approx(4.0)


def test_no_losses_no_recoveries() -> None:
    assert find_recoveries([]) == []
    assert find_recoveries(start(Stream()).done()) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_of_a_real_stream(data: st.DataObject) -> None:
    """Events missing anywhere never break the sum; what is attributed never exceeds the total."""
    stream = start(Stream()).add(2, "session_started", session="b")
    resume(stream, 100.0)
    resize(stream, 102.0)
    resume(stream, 130.0, session="b", slice_index=0)  # type: ignore[arg-type]
    events = stream.done()
    kept = data.draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))
    for recovery in find_recoveries(itertools.compress(events, kept), killed_at=[WALL + 101.9]):
        check(recovery)


KINDS = st.sampled_from([
    "cluster_started", "host_ready", "host_lost", "slice_ready", "slice_lost", "generation_started",
    "generation_ready", "generation_aborted", "survivors_aborted", "signal_delivered", "session_started",
    "session_ended", "error_raised", "probe_held", "probe_answered", "compiled", "program_started",
    "program_completed", "step_program", "arrays_made", "recovery_completed", "something_new",
])  # fmt: skip
SMALL = st.integers(0, 2)
CLOCK = st.one_of(st.floats(0, 30), st.floats(), st.none(), st.integers(), st.just("soon"))
JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(SMALL, max_size=2))


def field(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(usual, usual, usual, JUNK)


EVENTS = st.fixed_dictionaries(
    {"kind": KINDS},
    optional={
        "monotonic": st.one_of(st.floats(0, 30), st.floats(0, 30), CLOCK),
        "time": CLOCK,
        "session": field(SMALL),
        "slice": field(SMALL),
        "host": field(SMALL),
        "signal": field(st.sampled_from([9, 18, 19])),
        "name": field(st.sampled_from([STEP, "jit__fun", "jit_init"])),
        "seconds": field(st.floats(0, 10)),
        "ok": field(st.booleans()),
        "generation": field(SMALL),
        "members": field(st.lists(st.tuples(SMALL, SMALL), max_size=3)),
        "cache": field(st.sampled_from(["hit", "miss"])),
        "reason": field(st.just("over")),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(EVENTS, EVENTS, EVENTS, EVENTS, JUNK), max_size=40),
    st.lists(st.floats(), max_size=3),
    st.booleans(),
)
def test_any_stream_at_all(events: list[Any], killed_at: list[float], ordered: bool) -> None:
    if ordered:
        for number, event in enumerate(events):
            if isinstance(event, dict):
                event["monotonic"] = number / 4
    lost_count = sum(isinstance(event, dict) and event.get("kind") == "host_lost" for event in events)
    recoveries = find_recoveries(events, killed_at)
    for recovery in recoveries:
        check(recovery)
    # Every loss is told of, and none is made up.
    assert bool(recoveries) == bool(lost_count)
    assert sum(len(recovery.losses) for recovery in recoveries) >= lost_count


RECORDINGS = Path(__file__).parent / "recordings"


def test_a_recording_of_kills_while_a_program_steps() -> None:
    """A real cluster of 3 slices; the head's own count of the seconds agrees. Two kills were 0.4 s apart."""
    events = read_events(RECORDINGS / "kills-under-load.jsonl")
    recoveries = find_recoveries(events)
    assert [recovery.slices for recovery in recoveries] == [(1, 2), (2,)]
    # The head counts from the last loss.
    since_loss = [recovery.seconds - recovery.losses[-1].seconds for recovery in recoveries]
    counted = [event["seconds"] for event in events if event["kind"] == "recovery_completed"]
    assert since_loss == pytest.approx(counted[1:], abs=0.01)
    for recovery in recoveries:
        check(recovery)
        assert (recovery.mode, recovery.step_program) == ("resume", "jit_step")
        assert recovery.unattributed_seconds == 0


def test_a_recording_of_signals_to_an_idle_cluster() -> None:
    """A real cluster of 2 slices: a worker killed, an executor killed, a worker stopped; then it is taken down."""
    recoveries = find_recoveries(read_events(RECORDINGS / "signals-without-a-session.jsonl"))
    assert [(r.outcome, r.slices, r.kill_known) for r in recoveries] == [
        ("repaired", (1,), True), ("repaired", (0,), True), ("repaired", (0,), True)
    ]  # fmt: skip
    assert [[loss.executor_only for loss in recovery.losses] for recovery in recoveries] == [[False], [True], [False]]
    for recovery in recoveries:
        check(recovery)
        assert recovery.unattributed_seconds == 0
