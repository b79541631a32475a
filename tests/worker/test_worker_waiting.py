"""Threads that wait for what devices compute: who is answered when a generation ends, and who queues behind whom."""

import threading
from typing import Any

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status
from ridgeway.worker.waiting import BULK_THREADS, Waiters

SECONDS = 30.0
CAUSE = statuses.data_loss("slice 2 host 0 was lost")


class Computed:
    """As much of an array as a wait looks at."""

    def __init__(self, ready: bool):
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready


class Answer:
    """Takes one answer."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, Status | None]] = []
        self._here = threading.Event()

    def __call__(self, result: Any, error: Status | None) -> None:
        self.values.append((result, error))
        self._here.set()

    def get(self) -> tuple[Any, Status | None]:
        assert self._here.wait(SECONDS)
        (value,) = self.values
        return value


def waiters() -> Waiters:
    return Waiters(lambda error: statuses.internal(str(error)))


def test_what_executors_compute_together_is_answered_with_the_cause_when_it_is_abandoned() -> None:
    pool, release, answer = waiters(), threading.Event(), Answer()
    pool.submit(lambda: release.wait(SECONDS), answer, spans=True, array=Computed(False))
    assert pool.outstanding_together == 1
    pool.abandon(CAUSE)
    assert answer.get() == (None, CAUSE)
    release.set()
    late = Answer()
    pool.submit(lambda: 1, late)
    assert late.get() == (None, CAUSE)
    pool.close()


def test_copying_what_is_computed_goes_on_when_the_rest_is_abandoned() -> None:
    pool, release, answer, array = waiters(), threading.Event(), Answer(), Computed(False)
    pool.submit(lambda: release.wait(SECONDS) and "bytes", answer, spans=True, bulk=True, array=array)
    array.ready = True
    assert (pool.outstanding, pool.outstanding_together) == (1, 0)
    pool.abandon(CAUSE)
    pool.close()
    assert answer.values == []
    release.set()
    assert answer.get() == ("bytes", None)


def test_nothing_queues_behind_what_comes_in_bulk() -> None:
    pool, release = waiters(), threading.Event()
    copies = [Answer() for _ in range(BULK_THREADS + 1)]
    for answer in copies:
        pool.submit(lambda: release.wait(SECONDS), answer, bulk=True)
    loss = Answer()
    pool.submit(lambda: 3.5, loss)
    assert loss.get() == (3.5, None)
    assert [answer.values for answer in copies] == [[]] * len(copies)
    release.set()
    assert [answer.get() for answer in copies] == [(True, None)] * len(copies)
    pool.close()
