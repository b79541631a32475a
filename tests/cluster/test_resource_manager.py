"""The resource manager with links that only remember what was sent, under a clock that the test moves."""

from typing import Any

from remembering_head import Answer, Head, RememberingLink

from ridgeway.cluster.compilers import Compiler
from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.transport import frames

# ---- who has which devices


def test_devices_are_found_at_the_executors_that_own_them() -> None:
    head = Head()
    executors = head.hosts()
    assert head.manager.executors_of((5, 0)) == (executors[0], executors[2])
    assert head.manager.executor_of_device(3) is executors[1]
    assert head.sent(executors[2], "assign") == [["assign", 2, 4]]


def test_devices_of_a_host_that_never_joined_say_so() -> None:
    head = Head()
    head.host(0)
    problem = head.manager.executors_of((0, 2))
    assert isinstance(problem, Status)
    assert str(problem) == "DATA_LOSS: slice 1 host 0 has not joined the cluster yet"


def test_devices_of_a_lost_host_name_place_and_cause_until_a_replacement_is_there() -> None:
    head = Head()
    executors = head.hosts()
    assert not isinstance(head.manager.executors_of((2, 3)), Status)
    head.close_agent(executors[1], "connection to its agent closed")
    problem = head.manager.executors_of((2, 3))
    assert isinstance(problem, Status)
    assert problem.code is Code.DATA_LOSS
    assert "slice 1 host 0" in problem.message
    assert "connection to its agent closed" in problem.message
    replacement = head.host(1)
    assert head.manager.executors_of((2, 3)) == (replacement,)
    assert executors[1].lost is not None


def test_what_a_launcher_knows_of_a_loss_is_added_to_what_users_read() -> None:
    head = Head()
    executors = head.hosts()
    head.close_executor(executors[1])
    head.manager.explain_loss(1, "executor killed by signal 9", executors[1].number)
    head.manager.explain_loss(1, "executor killed by signal 9", executors[1].number)
    problem = head.manager.executors_of((2,))
    assert isinstance(problem, Status)
    assert problem.message.count("killed by signal 9") == 1


def test_an_explanation_of_an_earlier_executors_end_is_not_taken_for_the_last_ones() -> None:
    head = Head()
    executors = head.hosts()
    head.close_executor(executors[1], "it hung")
    second = head.executor(executors[1].agent)
    head.close_executor(second, "it was silent")
    head.manager.explain_loss(1, "executor killed by signal 11", executors[1].number)
    problem = head.manager.executors_of((2,))
    assert isinstance(problem, Status)
    assert "signal 11" not in problem.message


# ---- losses


def test_a_loss_answers_everything_that_waited_for_the_executor() -> None:
    head = Head()
    executors = head.hosts()
    answers: list[Status | None] = []
    executors[0].request("ready", [[1]], lambda error, fields, buffers: answers.append(error))
    executors[1].request("ready", [[1]], lambda error, fields, buffers: answers.append(error))
    head.close_executor(executors[0], "it was killed")
    (error,) = answers
    assert error is not None
    assert "it was killed" in error.message
    executors[0].request("ready", [[2]], lambda error, fields, buffers: answers.append(error))
    assert answers[-1] == error


def test_a_loss_is_told_to_every_other_executor_and_its_link_is_closed() -> None:
    head = Head()
    executors = head.hosts()
    lost: list[ExecutorLink] = []
    head.manager.on_loss.append(lost.append)
    head.close_executor(executors[1])
    for other in (executors[0], executors[2]):
        ((_, number, code, text),) = head.sent(other, "peer_lost")
        assert (number, code) == (executors[1].number, Code.DATA_LOSS)
        assert "slice 1 host 0" in text
    assert head.links[executors[1].number].closed
    assert lost == [executors[1]]


def test_an_agents_loss_closes_the_links_of_its_standby_executor_and_its_compiler() -> None:
    head = Head()
    head.hosts()
    standby = head.executor(head.agent(standby=True))
    compiler = _compiler(head, standby.agent)
    other = _compiler(head, head.manager.membership.slots[0] or 0)
    head.close_agent(standby, "it was silent")
    assert head.links[standby.number].closed
    assert standby.number not in head.manager.executors
    assert compiler.link.closed
    assert not other.link.closed
    assert head.manager.compilers._compilers == {other.number: other}


def _compiler(head: Head, agent: int) -> Any:
    compiler = Compiler(head.manager.membership.new_number(), agent, RememberingLink(), 1, "")  # type: ignore[arg-type]
    head.manager.compilers.add(compiler)
    return compiler


# ---- generations


def test_members_are_ordered_in_rank_order_and_told_where_to_meet() -> None:
    head = Head()
    executors = head.hosts()
    head.manager.span((executors[0], executors[2]))
    for rank, executor in enumerate((executors[0], executors[2])):
        ((_, _, generation, own_rank, first_devices),) = head.sent(executor, "enter_generation")
        assert (generation, own_rank, first_devices) == (1, rank, [0, 4])
        assert head.sent(executor, "service") == [["service", 1, "10.0.0.1:101"]]
    assert head.sent(executors[1], "enter_generation") == []


def test_a_generation_waits_for_a_service_and_gets_it_when_there_is_one() -> None:
    head = Head()
    executors = head.hosts()
    head.services.have = False
    head.manager.span(tuple(executors))
    head.wait(0.2)
    assert head.sent(executors[0], "service") == []
    head.services.have = True
    head.wait(0.1)
    assert head.sent(executors[0], "service") == [["service", 1, "10.0.0.1:101"]]


def test_a_generation_that_ended_before_it_had_a_service_takes_none() -> None:
    head = Head()
    executors = head.hosts()
    head.services.have = False
    head.manager.span(tuple(executors))
    head.close_executor(executors[0])
    head.services.have = True
    head.wait(0.1)
    assert head.sent(executors[1], "service") == []
    assert head.services.next == 100


def test_a_service_ends_when_all_have_left_its_generation() -> None:
    head = Head()
    executors = head.hosts()
    head.form(*executors)
    head.close_executor(executors[0])
    head.reply(executors[1], "leave_generation")
    assert head.services.closed == []
    head.reply(executors[2], "leave_generation")
    assert head.services.closed == [101]
    assert "survivors_aborted" in head.kinds()


def test_survivors_are_told_of_the_abort_before_anything_else_of_the_loss() -> None:
    head = Head()
    executors = head.hosts()
    head.form(*executors)
    head.close_executor(executors[0])
    kinds = [message[0] for message in head.links[executors[1].number].sent]
    assert kinds[-3:] == ["abort", "leave_generation", "peer_lost"]


def test_who_does_not_leave_is_recycled_and_its_loss_names_the_one_behind_it() -> None:
    head = Head()
    executors = head.hosts()
    head.form(*executors)
    head.close_executor(executors[0], "it was killed")
    head.reply(executors[1], "leave_generation")
    head.wait(1.2)
    assert executors[1].lost is None
    lost = executors[2].lost
    assert lost is not None
    assert "drain_deadline_seconds" in lost.message
    assert "it was killed" in lost.message
    agent = head.links[executors[2].agent]
    assert [message[1] for message in agent.of("kill_executor")] == [executors[2].number]


def test_nobody_is_recycled_because_the_head_stood_still() -> None:
    head = Head()
    executors = head.hosts()
    head.form(*executors)
    head.close_executor(executors[0])
    head.now += 500.0
    head.manager.tick()
    assert executors[1].lost is None
    assert executors[2].lost is None
    assert len(head.manager.membership.agents) == 3
    head.wait(1.2)
    assert executors[1].lost is not None


def test_a_member_that_cannot_enter_ends_the_generation_for_all() -> None:
    head = Head()
    executors = head.hosts()
    head.manager.span(tuple(executors))
    request = head.sent(executors[1], "enter_generation")[-1][1]
    failure = Status(Code.DEADLINE_EXCEEDED, "GetKeyValue() timed out")
    executors[1].on_reply(request, failure, [], [])
    ((_, generation, code, text),) = head.sent(executors[2], "abort")
    assert (generation, code) == (1, Code.DEADLINE_EXCEEDED)
    assert text == "generation 1 ended at slice 1 host 0: GetKeyValue() timed out"
    assert head.manager.generations.current == {}


# ---- errors and their causes


def test_an_error_that_is_no_collectives_is_delivered_at_once() -> None:
    head = Head()
    answer = Answer()
    error = statuses.invalid_argument("no such shape")
    head.manager.settle("slice 0 host 0", error, False, 1, answer)
    assert answer.answers == [error]


def test_a_collectives_error_waits_for_the_loss_behind_it() -> None:
    head = Head()
    executors = head.hosts()
    generation = head.form(*executors)
    answer = Answer()
    broken = Status(Code.ABORTED, "collective failed: Connection closed by peer")
    head.manager.settle("slice 1 host 0", broken, True, generation, answer)
    assert answer.answers == []
    head.close_executor(executors[0], "it was killed")
    (error,) = answer.answers
    assert error is not None
    assert error.code is Code.DATA_LOSS
    assert "slice 0 host 0" in error.message
    assert "it was killed" in error.message
    # The same for an error that comes after the loss.
    late = Answer()
    head.manager.settle("slice 2 host 0", broken, True, generation, late)
    assert late.answers == [error]


def test_a_collectives_error_without_a_loss_ends_its_generation_and_is_lost_data() -> None:
    head = Head()
    executors = head.hosts()
    generation = head.form(*executors)
    answer = Answer()
    broken = Status(Code.ABORTED, "collective failed: Connection closed by peer")
    head.manager.settle("slice 1 host 0", broken, True, generation, answer)
    head.wait(1.9)
    assert answer.answers == []
    head.wait(0.2)
    (error,) = answer.answers
    assert error is not None
    assert error.code is Code.DATA_LOSS
    assert error.message == f"generation {generation} ended at slice 1 host 0: {broken.message}"
    assert head.sent(executors[2], "abort")


def test_a_collectives_error_of_a_generation_that_is_forgotten_is_lost_data() -> None:
    head = Head()
    answer = Answer()
    head.manager.settle("slice 1 host 0", Status(Code.ABORTED, "collective failed"), True, 77, answer)
    head.wait(2.1)
    (error,) = answer.answers
    assert error is not None
    assert error.code is Code.DATA_LOSS


def test_an_execution_that_only_some_can_run_ends_the_generation() -> None:
    head = Head()
    executors = head.hosts()
    generation = head.form(*executors)
    head.manager.execution_started(9, tuple(executors))
    head.manager.execution_failed(executors[1], 9, statuses.invalid_argument("bad strides"), generation)
    head.wait(0.4)
    assert head.sent(executors[0], "abort") == []
    head.wait(0.2)
    ((_, _, _, text),) = head.sent(executors[0], "abort")
    assert text == f"generation {generation} ended at slice 1 host 0: bad strides"


def test_an_execution_that_all_refuse_leaves_the_generation_alone_and_they_are_told() -> None:
    head = Head()
    executors = head.hosts()
    generation = head.form(*executors)
    head.manager.execution_started(9, tuple(executors))
    for executor in executors:
        assert head.sent(executor, "everybody_refused") == []
        head.manager.execution_failed(executor, 9, statuses.invalid_argument("bad strides"), generation)
    for executor in executors:
        assert head.sent(executor, "everybody_refused") == [["everybody_refused", 9]]
    head.wait(1.0)
    assert head.sent(executors[0], "abort") == []


def test_an_execution_that_breaks_everywhere_while_it_runs_is_not_taken_for_refused() -> None:
    head = Head()
    executors = head.hosts()
    generation = head.form(*executors)
    head.manager.execution_started(9, tuple(executors))
    for executor in executors:
        head.manager.execution_failed(executor, 9, Status(Code.ABORTED, "collective failed"), generation)
    assert head.sent(executors[0], "everybody_refused") == []
    head.wait(0.6)
    assert head.sent(executors[0], "abort")


def test_an_execution_on_one_executor_is_nobody_elses_business() -> None:
    head = Head()
    executors = head.hosts()
    generation = head.form(*executors)
    head.manager.execution_started(9, (executors[0],))
    head.manager.execution_failed(executors[0], 9, statuses.invalid_argument("bad strides"), generation)
    head.wait(1.0)
    assert head.sent(executors[1], "abort") == []


def test_a_program_that_hangs_because_a_callback_raised_ends_with_its_generation() -> None:
    head = Head()
    executors = head.hosts()
    generation = head.form(*executors)
    problem = Status(Code.UNKNOWN, "LookupError: no such thing")
    head.manager.stuck(executors[1], problem, generation)
    ((_, number, code, text),) = head.sent(executors[0], "abort")
    # The program's own mistake, which nobody is to try again.
    assert (number, code) == (generation, int(Code.UNKNOWN))
    assert "slice 1 host 0" in text and "no such thing" in text
    # Once is enough, and what is not in a generation has none to end.
    head.manager.stuck(executors[0], problem, generation)
    head.manager.stuck(executors[0], problem, 0)
    assert len(head.sent(executors[0], "abort")) == 1


# ---- executors that are worn


def test_a_worn_executor_is_renewed_when_it_is_in_no_generation() -> None:
    head = Head()
    executors = head.hosts()
    generation = head.form(*executors)
    renewals = head.manager.renewals
    renewals.consider(executors[0], True)
    assert head.sent(executors[0], "renew") == []
    head.close_agent(executors[1], "it was killed")
    assert generation not in head.manager.generations.current.values()
    ((_, leaving, _),) = head.sent(executors[0], "leave_generation")
    executors[0].on_reply(leaving, None, [False], [])
    renewals.consider(executors[0], False)
    assert head.sent(executors[0], "renew") == []
    for _ in range(2):  # one order at a time
        renewals.consider(executors[0], True)
    ((_, request),) = head.sent(executors[0], "renew")
    executors[0].on_reply(request, None, [False, "bytes are on their way"], [])
    renewals.consider(executors[0], True)
    assert len(head.sent(executors[0], "renew")) == 1
    head.wait(2.5)
    renewals.consider(executors[0], True)
    _, (_, request) = head.sent(executors[0], "renew")
    executors[0].on_reply(request, None, [True, 4711], [])
    assert executors[0].pid == 4711
    # A lost one is nobody's business any more.
    head.close_agent(executors[0], "it was killed too")
    renewals.consider(executors[0], True)
    assert len(head.sent(executors[0], "renew")) == 2


# ---- slices that are given up


def test_work_for_a_slice_that_is_given_up_fails_for_good_and_says_why() -> None:
    head = Head()
    executors = head.hosts()
    head.close_agent(executors[1], "it was killed")
    head.manager.expect(1)
    head.manager.give_up(1, "10 restarts are used up")
    assert head.manager.hold_for((2, 3)) is None
    problem = head.manager.executors_of((2, 3))
    assert isinstance(problem, Status)
    assert "slice 1 is down for good (10 restarts are used up)" in problem.message
    assert "it was killed" in problem.message


def test_a_slice_that_is_up_again_is_no_longer_given_up() -> None:
    head = Head()
    executors = head.hosts()
    head.close_agent(executors[1])
    head.manager.give_up(1, "10 restarts are used up")
    head.host(1)
    assert not isinstance(head.manager.executors_of((2, 3)), Status)
    head.close_executor(head.manager.slots[1] or executors[1])
    problem = head.manager.executors_of((2, 3))
    assert isinstance(problem, Status)
    assert "for good" not in problem.message


# ---- orders


def test_frees_go_out_before_the_next_order_and_by_themselves_at_a_tick() -> None:
    head = Head()
    executor = head.hosts()[0]
    executor.free(4)
    executor.free(5)
    executor.send(["put", 6])
    sent = head.links[executor.number].sent
    assert sent[-2:] == [["free", [4, 5]], ["put", 6]]
    executor.free(6)
    head.wait(0.1)
    assert sent[-1] == ["free", [6]]


def test_nothing_is_sent_to_a_lost_executor() -> None:
    head = Head()
    executor = head.hosts()[0]
    head.close_executor(executor)
    before = len(head.links[executor.number].sent)
    head.links[executor.number].closed = False
    executor.send(["put", 6])
    executor.send_aside(["data", 1])
    executor.free(3)
    executor.flush_frees()
    assert len(head.links[executor.number].sent) == before


def test_an_executor_that_has_dispatched_less_than_it_was_sent_is_behind() -> None:
    head = Head()
    executor = head.hosts()[0]
    before = executor.ordered
    executor.send(["put", 6])
    executor.send_aside(["data", 1])
    executor.send_packed(frames.pack(["execute", 1]))
    executor.free(6)
    executor.flush_frees()
    executor.request("ready", [[1]], lambda error, fields, buffers: None)
    assert executor.ordered == before + 4
