"""Jobs: what one persistence request has an executor do."""

import threading
from concurrent.futures import ThreadPoolExecutor

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.worker.persistence import Job


def test_it_is_answered_once_when_all_pieces_have_ended() -> None:
    answers: list[Status | None] = []
    job = Job(30.0, 20, answers.append)
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        if number < 4:
            barrier.wait(30)  # four at a time, so that they really overlap
        assert answers == []

    with ThreadPoolExecutor(4) as threads:
        errors = list(threads.map(lambda number: job.run(lambda _: work(number)), range(20)))
    assert errors == [None] * 20 and answers == [None]


def test_its_first_error_ends_the_pieces_to_come() -> None:
    answers: list[Status | None] = []
    full = statuses.resource_exhausted("full")
    job = Job(30.0, 3, answers.append)

    def fail(_: object) -> None:
        raise full.error()

    ran: list[int] = []
    assert job.run(fail) == full
    assert job.run(lambda _: ran.append(1)) == full
    assert answers == []
    assert job.run(lambda _: ran.append(2)) == full
    assert (ran, answers) == ([], [full])


def test_it_is_called_off_and_late() -> None:
    answers: list[Status | None] = []
    job = Job(30.0, 1, answers.append)
    lost = statuses.data_loss("slice 1 was lost")
    job.stop(lost)
    assert job.run(lambda remaining: None) == lost and answers == [lost]
    late = Job(0.0, 1, answers.append).run(lambda remaining: None)
    assert late is not None and late.code is Code.DEADLINE_EXCEEDED and "timeout of 0 s" in late.message


def test_a_bug_is_answered_too() -> None:
    answers: list[Status | None] = []

    def stumble(_: object) -> None:
        raise KeyError("x")

    Job(30.0, 1, answers.append).run(stumble)
    assert answers[0] is not None and answers[0].code is Code.INTERNAL
