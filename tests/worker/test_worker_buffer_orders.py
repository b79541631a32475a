"""One answer for any number of shards whose bytes are on their way."""

import numpy as np
import pytest

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status
from ridgeway.worker.buffer_orders import when_all
from ridgeway.worker.buffers import PromisedShard
from ridgeway.worker.promises import Promise

#: More than there could be calls on a thread's stack.
MANY = 5000


def _shards(count: int) -> list[PromisedShard]:
    return [PromisedShard(Promise(), lambda data: data, None) for _ in range(count)]


@pytest.mark.parametrize("before", [0, 1, MANY - 1, MANY])
def test_thousands_of_shards_give_one_answer_when_the_last_is_here(before: int) -> None:
    shards = _shards(MANY)
    answers: list[Status | None] = []
    for shard in shards[:before]:
        shard.promise.resolve(np.zeros(1))
    when_all(shards, answers.append)
    for shard in reversed(shards[before:]):
        assert not answers
        shard.promise.resolve(np.zeros(1))
    assert answers == [None]


def test_the_first_error_is_the_answer_and_the_only_one() -> None:
    shards = _shards(3)
    answers: list[Status | None] = []
    when_all(shards, answers.append)
    lost = statuses.data_loss("lost")
    shards[1].promise.resolve(lost)
    assert answers == [lost]
    shards[0].promise.resolve(np.zeros(1))
    shards[2].promise.resolve(statuses.data_loss("lost too"))
    assert answers == [lost]


def test_no_shards_are_all_here() -> None:
    answers: list[Status | None] = []
    when_all([], answers.append)
    assert answers == [None]
