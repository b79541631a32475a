"""Suspensions in membership, generations, links and the manager: events in, orders out, no process."""

from typing import Any

import pytest
from remembering_head import SETTINGS, Answer, Head

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.membership import HostState
from ridgeway.protocol.status import Code, Status


def saved(head: Head, executor: ExecutorLink, mark: str = "mark") -> None:
    """The executor answers everything that it was ordered, the order to save last."""
    for message in head.sent(executor, "leave_generation"):
        executor.on_reply(message[1], None, [], [])
    request = head.sent(executor, "suspend")[-1][1]
    executor.on_reply(request, None, [mark, 1000, {"groups": 2}], [])


def state_of(head: Head, slot: int) -> HostState:
    head.manager.membership.check_invariants()
    return head.manager.membership.host_state(slot)


def event(head: Head, kind: str) -> dict[str, Any]:
    return [fields for found, fields in head.events if found == kind][-1]


def suspended(head: Head) -> tuple[ExecutorLink, ExecutorLink, ExecutorLink]:
    """Three hosts that share a generation, the middle one suspended."""
    first, middle, last = head.hosts()
    head.form(first, middle, last)
    head.manager.preempt(1, 30.0, "SIGTERM")
    for link in (first, last):
        head.reply(link, "leave_generation")
    saved(head, middle)
    return first, middle, last


def test_the_whole_generation_is_left_in_order_before_the_state_is_saved() -> None:
    head = Head()
    first, middle, last = head.hosts()
    head.form(first, middle, last)
    head.manager.preempt(1, 30.0, "SIGTERM")
    assert [m[0] for m in head.links[middle.number].sent][-2:] == ["leave_generation", "suspend"]
    for link in (first, last):
        assert head.links[link.number].sent[-1][0] == "leave_generation"
    assert not head.sent(first, "abort")
    assert state_of(head, 1) is HostState.DRAINING
    # The survivors meet again without it.
    head.manager.span((first, last))
    assert head.sent(first, "enter_generation")[-1][4] == [0, 4]


def test_a_replacement_is_the_suspended_executor_from_then_on() -> None:
    head = Head()
    _, middle, _ = suspended(head)
    number = middle.number
    assert state_of(head, 1) is HostState.SUSPENDED
    assert head.links[number].closed
    middle.loaded_programs.add("program")
    middle.free(7)
    middle.send(["unload", ["program"]])
    middle.free(8)
    middle.free(9)
    replacement = head.host(1)
    assert state_of(head, 1) is HostState.RESTORING
    [path, *more] = head.sent(replacement, "restore")[-1][2:]
    assert path == head.sent(middle, "suspend")[-1][3] and path.startswith("/slice-1-host-0.")
    assert more == [1, "mark", head.sent(middle, "suspend")[-1][1]]
    changes: list[int] = []
    head.manager.suspender.on_change.append(lambda: changes.append(1))
    head.reply(replacement, "restore")
    assert state_of(head, 1) is HostState.READY
    assert head.manager.slots[1] is middle and middle.lost is None
    assert middle.number == replacement.number != number
    # What waited goes out in order, and no program is taken to be there.
    sent = head.links[middle.number].sent
    assert sent[-3:] == [["free", [7]], ["unload", ["program"]], ["free", [8, 9]]]
    assert middle.loaded_programs == set()
    assert changes == [1]
    assert event(head, "host_resumed")["bytes"] == 1000
    assert "slice_lost" not in head.kinds()
    # Its old process has nothing to say any more, nor has its old agent.
    membership = head.manager.membership
    assert membership.executor_closed(head.now, number, "closed") == []
    assert membership.state_saved(head.now, number, 1, {}) == []
    assert membership.state_restored(head.now, number) == []


def test_a_standby_takes_over_at_once() -> None:
    head = Head()
    first, middle, _ = head.hosts()
    standby = head.executor(head.agent(standby=True))
    head.manager.preempt(1, 30.0, "SIGTERM")
    saved(head, middle)
    assert state_of(head, 1) is HostState.RESTORING
    assert head.sent(standby, "restore")
    head.reply(standby, "restore")
    assert head.manager.slots[1] is middle and state_of(head, 1) is HostState.READY
    assert first.lost is None


def test_a_new_standby_is_given_a_suspended_place() -> None:
    head = Head()
    suspended(head)
    agent = head.agent(standby=True)
    assert head.manager.membership.agents[agent].slot == 1


@pytest.mark.parametrize("phase", ["saving", "saved", "restoring"])
def test_too_late_is_an_ordinary_loss(phase: str) -> None:
    head = Head()
    if phase == "saving":
        _, middle, _ = head.hosts()
        head.manager.preempt(1, 3.0, "SIGTERM")
        seconds, words = 3.1, "preempted with 3 s notice, and its state was not saved"
    else:
        _, middle, _ = suspended(head)
        seconds = SETTINGS.suspend_timeout_seconds + 0.1
        words = "replacement was not ready" if phase == "saved" else "was not restored"
        if phase == "restoring":
            replacement = head.host(1)
    head.wait(seconds)
    assert middle.lost is not None and middle.lost.code is Code.DATA_LOSS
    assert "preempted with" in middle.lost.message and words in middle.lost.message
    assert event(head, "host_lost")["cause"] in middle.lost.message
    assert head.manager.slots[1] is None
    assert list(head.manager.suspender.slots) == []
    if phase == "restoring":
        # It may hold a part of the state.
        assert replacement.lost is not None
        assert ["kill_executor", replacement.number] == head.links[replacement.agent].of("kill_executor")[-1][:2]
    # The next host there is one like any other.
    if phase != "restoring":
        assert head.host(1).lost is None and state_of(head, 1) is HostState.READY


def test_a_state_that_cannot_be_saved_is_lost_at_once() -> None:
    head = Head()
    _, middle, _ = head.hosts()
    head.manager.preempt(1, 30.0, "SIGTERM")
    request = head.sent(middle, "suspend")[-1][1]
    middle.on_reply(request, Status(Code.DATA_LOSS, "no space left"), [], [])
    assert middle.lost is not None and "its state could not be saved: no space left" in middle.lost.message
    assert state_of(head, 1) is HostState.ABSENT


def test_a_damaged_state_is_lost_and_the_replacement_is_a_fresh_host() -> None:
    head = Head()
    _, middle, _ = suspended(head)
    replacement = head.host(1)
    request = head.sent(replacement, "restore")[-1][1]
    replacement.on_reply(request, Status(Code.DATA_LOSS, "another checksum"), [], [])
    assert middle.lost is not None and "could not be restored: another checksum" in middle.lost.message
    # An executor that may hold half of it goes; its agent starts another.
    assert replacement.lost is not None
    fresh = head.executor(replacement.agent)
    assert head.manager.slots[1] is fresh and state_of(head, 1) is HostState.READY


def test_a_replacement_that_dies_leaves_the_state_for_the_next() -> None:
    head = Head()
    _, middle, _ = suspended(head)
    one = head.host(1)
    head.close_agent(one)
    assert state_of(head, 1) is HostState.SUSPENDED
    another = head.host(1)
    head.reply(another, "restore")
    assert head.manager.slots[1] is middle and middle.lost is None and middle.number == another.number


def test_a_replacement_that_is_preempted_itself_leaves_the_state_for_the_next() -> None:
    head = Head()
    _, middle, _ = suspended(head)
    one = head.host(1)
    head.manager.preempt(1, 30.0, "again")
    assert state_of(head, 1) is HostState.SUSPENDED
    assert head.links[one.agent].sent[-1][0] == "stop"
    another = head.host(1)
    head.reply(another, "restore")
    assert head.manager.slots[1] is middle and middle.lost is None


@pytest.mark.parametrize("what", ["executor", "agent"])
def test_a_crash_before_the_state_is_saved_is_a_loss_by_preemption(what: str) -> None:
    head = Head()
    _, middle, _ = head.hosts()
    head.manager.preempt(1, 30.0, "SIGTERM")
    (head.close_executor if what == "executor" else head.close_agent)(middle, "killed")
    assert middle.lost is not None
    assert "preempted with 30 s notice, and lost before it was saved: killed" in middle.lost.message
    # Its agent leaves in any case: no other executor is started there.
    assert state_of(head, 1) is HostState.ABSENT


def test_a_survivor_that_dies_meanwhile_does_not_touch_the_suspended_one() -> None:
    head = Head()
    first, middle, last = head.hosts()
    head.form(first, middle, last)
    head.manager.preempt(1, 30.0, "SIGTERM")
    head.close_agent(last)
    # In the middle of leaving, what they computed together is ended.
    assert head.sent(middle, "abort") and head.sent(first, "abort")
    saved(head, middle)
    head.reply(first, "leave_generation")
    assert head.manager.generations.generations == {}
    replacement = head.host(1)
    head.reply(replacement, "restore")
    assert middle.lost is None and last.lost is not None


def test_one_that_cannot_leave_an_ended_generation_is_recycled() -> None:
    head = Head()
    first, middle, last = head.hosts()
    head.form(first, middle, last)
    head.manager.preempt(1, 30.0, "SIGTERM")
    head.close_agent(last)
    head.wait(SETTINGS.drain_deadline_seconds + 0.2)
    assert first.lost is not None and middle.lost is not None
    assert "preempted with" in middle.lost.message


def test_nothing_is_saved_of_a_host_that_holds_nothing() -> None:
    head = Head()
    agent = head.agent(1)
    head.manager.preempt(1, 30.0, "SIGTERM")
    assert state_of(head, 1) is HostState.ABSENT
    assert head.links[agent].sent[-1][0] == "stop"
    assert "host_lost" not in head.kinds()


def test_a_second_notice_can_only_make_it_shorter() -> None:
    head = Head()
    _, middle, _ = head.hosts()
    head.manager.preempt(1, 30.0, "SIGTERM")
    head.manager.preempt(1, 90.0, "SIGTERM")
    head.manager.preempt(1, 5.0, "SIGTERM")
    assert len(head.sent(middle, "suspend")) == 1
    head.wait(5.2)
    assert middle.lost is not None


def test_nobody_comes_for_a_slice_that_is_given_up() -> None:
    head = Head()
    _, middle, _ = suspended(head)
    head.manager.give_up(1, "max_preemptions 0")
    assert middle.lost is not None and "not replaced: max_preemptions 0" in middle.lost.message


def test_answers_that_are_overtaken_are_waited_for() -> None:
    head = Head()
    _, middle, _ = head.hosts()
    answers: list[Any] = []
    middle.request("ready", [[1]], lambda *what: answers.append(what))
    head.manager.preempt(1, 30.0, "SIGTERM")
    saved(head, middle)
    assert state_of(head, 1) is HostState.DRAINING
    head.reply(middle, "ready")
    assert answers == [(None, [], [])]
    assert state_of(head, 1) is HostState.SUSPENDED


def test_what_is_asked_meanwhile_is_asked_of_the_replacement() -> None:
    head = Head()
    _, middle, _ = suspended(head)
    answers: list[Any] = []
    middle.request("ready", [[1]], lambda *what: answers.append(what))
    replacement = head.host(1)
    head.reply(replacement, "restore")
    head.reply(middle, "ready")
    assert answers == [(None, [], [])]
    # And is answered with the loss if there is none.
    head.manager.preempt(1, 30.0, "again")
    saved(head, middle)
    middle.request("ready", [[1]], lambda *what: answers.append(what))
    head.wait(SETTINGS.suspend_timeout_seconds + 0.1)
    assert answers[1:] == [(middle.lost, [], [])]


def test_what_was_held_for_another_slice_waits_until_nothing_is_suspended() -> None:
    head = Head()
    _, middle, last = head.hosts()
    head.close_agent(last)
    head.manager.expect(2)
    head.manager.holds.told(head.now)
    hold = head.manager.hold_for((4, 5))
    assert hold is not None
    answer = Answer()
    hold.defer(answer)
    head.manager.preempt(1, 30.0, "SIGTERM")
    head.host(2)
    assert answer.answers == []
    saved(head, middle)
    replacement = head.host(1)
    head.reply(replacement, "restore")
    assert answer.answers == [None]


def test_an_agent_that_does_not_leave_is_cut_off() -> None:
    head = Head()
    _, middle, _ = suspended(head)
    agent = head.links[middle.agent]
    assert agent.sent[-1][0] == "stop" and not agent.closed
    head.wait(6.0)
    assert agent.closed
