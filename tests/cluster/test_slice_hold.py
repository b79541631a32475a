"""Work for a slice that is away: when it is held, for how long, and what ends it."""

from remembering_head import SETTINGS, Answer, Head

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.slice_hold import Reason, SliceHold
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code
from ridgeway.settings import Settings

SLICE_1 = (2, 3)
PROBE = SETTINGS.probe_hold_seconds
NOTICE = SETTINGS.replacement_notice_seconds
RETRY = SETTINGS.probe_retry_seconds


def lost_slice(head: Head, slices: int = 1) -> list[ExecutorLink]:
    """All hosts, those of slice 1 (and 2) just lost, which the controller has read."""
    executors = head.hosts()
    for executor in executors[1 : 1 + slices]:
        head.close_agent(executor, "it was killed")
    head.told()
    return executors


def held(head: Head, devices: tuple[int, ...] = SLICE_1) -> tuple[SliceHold, Answer]:
    """A question that is held, and what it is answered with."""
    hold = head.manager.hold_for(devices)
    assert hold is not None
    answer = Answer()
    hold.defer(answer)
    return hold, answer


# ---- a slice on its way back


def test_work_on_a_slice_that_is_joining_is_held_until_it_is_up() -> None:
    head = Head()
    executors = head.hosts()
    head.close_executor(executors[1])
    head.told()
    hold, answer = held(head)
    assert head.manager.hold_for((3,)) is hold
    head.wait(1.0)
    assert answer.answers == []
    head.executor(executors[1].agent)
    assert answer.answers == [None]
    assert ("probe_held", {"slice": 1, "reason": "announced"}) in head.events
    assert ("probe_answered", {"slice": 1, "held_seconds": 1.0, "ok": True}) in head.events
    assert head.manager.hold_for(SLICE_1) is None


def test_work_over_several_slices_is_not_held() -> None:
    head = Head()
    executors = head.hosts()
    head.close_executor(executors[1])
    head.told()
    assert head.manager.hold_for((1, 2)) is None


def test_work_of_a_controller_that_has_not_been_told_of_the_loss_fails_at_once() -> None:
    head = Head()
    executors = head.hosts()
    head.close_executor(executors[0])
    head.told()
    head.wait(0.1)
    head.close_executor(executors[1])
    assert head.manager.hold_for(SLICE_1) is None
    # What was told is told, also after another slice's loss.
    assert head.manager.hold_for((0, 1)) is not None
    head.told()
    assert head.manager.hold_for(SLICE_1) is not None


def test_held_work_fails_with_the_loss_when_its_time_is_over() -> None:
    head = Head()
    executors = head.hosts()
    head.close_executor(executors[1], "it was killed")
    head.told()
    hold, answer = held(head)
    head.wait(PROBE + 0.1)
    (error,) = answer.answers
    assert error is not None
    assert "it was killed" in error.message
    # The next question is held anew.
    assert head.manager.hold_for(SLICE_1) not in (None, hold)


def test_held_work_over_its_limit_fails_at_once() -> None:
    head = Head()
    executors = head.hosts()
    head.close_executor(executors[1])
    head.told()
    hold = head.manager.hold_for(SLICE_1)
    assert hold is not None
    answers = [Answer() for _ in range(4)]
    for answer in answers:
        hold.defer(answer)
    assert [len(answer.answers) for answer in answers] == [0, 0, 0, 1]
    (error,) = answers[3].answers
    assert error is not None
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert "pending_order_limit" in error.message


def test_nothing_is_held_when_holding_is_switched_off() -> None:
    head = Head(settings=Settings(probe_hold_seconds=0.0))
    executors = head.hosts()
    head.close_executor(executors[1])
    head.told()
    assert head.manager.hold_for(SLICE_1) is None


def test_work_is_held_for_a_replacement_that_the_launcher_has_announced() -> None:
    head = Head()
    lost_slice(head)
    head.manager.expect(1)
    hold, answer = held(head)
    assert hold.reason is Reason.ANNOUNCED
    assert head.manager.hold_for((4,)) is None
    head.wait(PROBE - 0.1)
    assert answer.answers == []


def test_an_announcement_that_was_faster_than_the_news_of_the_loss_counts() -> None:
    head = Head()
    executors = head.hosts()
    head.manager.expect(1)
    head.close_agent(executors[1])
    head.told()
    assert held(head)[0].reason is Reason.ANNOUNCED


def test_an_announcement_is_forgotten_when_nobody_comes() -> None:
    head = Head()
    lost_slice(head)
    head.manager.expect(1)
    head.wait(SETTINGS.replacement_expected_seconds + 0.1)
    assert head.manager.hold_for(SLICE_1) is None


def test_a_slice_that_flaps_holds_no_question_longer_than_one_that_does_not() -> None:
    head = Head()
    lost_slice(head)
    head.manager.expect(1)
    _, answer = held(head)
    for _ in range(3):
        head.wait(PROBE / 4)
        agent = head.agent(1)  # joins, and dies before its executor is there
        head.manager.apply(head.manager.membership.agent_closed(head.now, agent, "it was killed again"))
        head.manager.expect(1)
    head.wait(PROBE / 4 + 0.2)
    (error,) = answer.answers
    assert error is not None
    assert "it was killed" in error.message


# ---- resize does not wait


def test_a_replacement_that_has_yet_to_find_a_machine_is_not_waited_for() -> None:
    head = Head()
    lost_slice(head)
    _, answer = held(head)
    head.wait(NOTICE + 0.1)  # the launcher says nothing: it waits for a machine
    (error,) = answer.answers
    assert error is not None
    assert "it was killed" in error.message
    assert head.manager.hold_for(SLICE_1) is None
    assert ("probe_held", {"slice": 1, "reason": "notice"}) in head.events


def test_an_announcement_right_after_the_question_is_heard() -> None:
    head = Head()
    lost_slice(head)
    _, answer = held(head)
    head.wait(NOTICE / 2)
    head.manager.expect(1)
    head.wait(NOTICE + 1.0)
    assert answer.answers == []
    head.host(1)
    assert answer.answers == [None]


def test_a_replacement_that_joins_right_after_the_question_is_heard_without_an_announcement() -> None:
    head = Head()
    lost_slice(head)
    _, answer = held(head)
    agent = head.agent(1)
    head.wait(NOTICE + 1.0)
    assert answer.answers == []
    head.executor(agent)
    assert answer.answers == [None]


def test_giving_up_a_slice_answers_who_waits_for_it() -> None:
    head = Head()
    lost_slice(head)
    head.manager.expect(1)
    _, answer = held(head)
    head.manager.give_up(1, "10 restarts are used up")
    (error,) = answer.answers
    assert error is not None
    assert "slice 1 is down for good (10 restarts are used up)" in error.message
    assert head.manager.hold_for(SLICE_1) is None


def test_a_controller_that_trains_on_without_the_slice_is_refused_each_time_it_asks() -> None:
    head = Head()
    executors = lost_slice(head)
    head.wait(NOTICE + 0.1)
    for _ in range(3):
        assert head.manager.hold_for(SLICE_1) is None
        head.wait(RETRY + 1.0)
        head.manager.span((executors[0], executors[2]))


# ---- a controller that does nothing but wait


def test_a_slice_that_is_asked_again_and_again_is_held_for_without_an_announcement() -> None:
    head = Head()
    lost_slice(head)
    head.wait(NOTICE + 0.1)
    assert head.manager.hold_for(SLICE_1) is None
    head.wait(RETRY + 0.1)
    hold, answer = held(head)
    assert hold.reason is Reason.AWAITED
    head.wait(PROBE - 1.0)
    head.host(1)
    assert answer.answers == [None]


def test_questions_soon_after_a_refusal_are_refused_too() -> None:
    head = Head()
    lost_slice(head)
    head.wait(NOTICE + 0.1)
    assert head.manager.hold_for(SLICE_1) is None
    head.wait(RETRY / 2)
    assert head.manager.hold_for(SLICE_1) is None


def test_a_question_that_was_held_in_vain_is_followed_by_another_one_that_is_held() -> None:
    head = Head()
    lost_slice(head)
    head.wait(NOTICE + 0.1)
    assert head.manager.hold_for(SLICE_1) is None
    head.wait(PROBE)
    first, answer = held(head)
    head.wait(PROBE + 0.1)
    assert len(answer.answers) == 1
    second, _ = held(head)
    assert second is not first
    assert second.reason is Reason.AWAITED


def test_another_slices_return_is_soon_told_to_who_waits_for_several() -> None:
    head = Head()
    lost_slice(head, 2)
    head.wait(NOTICE + 0.1)
    for devices in (SLICE_1, (4, 5)):
        assert head.manager.hold_for(devices) is None
    head.wait(PROBE)
    _, first = held(head)
    _, second = held(head, (4, 5))
    head.wait(1.0)
    head.host(1)
    assert first.answers == [None]
    assert second.answers == []
    head.wait(NOTICE + 0.1)
    (error,) = second.answers
    assert error is not None and error.code is statuses.Code.DATA_LOSS


def test_a_slice_that_never_was_there_is_waited_for_like_one_that_was_lost() -> None:
    head = Head()
    for slot in (0, 2):
        head.host(slot)
    assert head.manager.hold_for(SLICE_1) is None
    head.wait(RETRY + 0.1)
    _, answer = held(head)
    head.host(1)
    assert answer.answers == [None]


def test_a_probe_over_the_hosts_of_one_slice_is_no_work_over_several_slices() -> None:
    head = Head(slices=2, hosts_per_slice=2)
    executors = head.hosts()
    head.close_agent(executors[2])
    head.told()
    head.wait(NOTICE + 0.1)
    assert head.manager.hold_for((4, 5, 6, 7)) is None
    head.wait(RETRY + 0.1)
    head.manager.span((executors[0], executors[1]))
    assert head.manager.hold_for((4, 5, 6, 7)) is not None
