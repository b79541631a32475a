"""Bytes on their way, and long chains of what is made of them."""

import itertools
import sys
from typing import Any

import pytest

from ridgeway.worker.promises import Promise

MANY = 3 * sys.getrecursionlimit()


def test_a_chain_may_be_longer_than_the_stack_is_deep() -> None:
    chain = [Promise() for _ in range(MANY)]
    for before, after in itertools.pairwise(chain):
        before.when_resolved(lambda value, after=after: after.resolve(value + 1))
    chain[0].resolve(0)
    assert chain[-1].value == MANY - 1


def test_a_callback_that_fails_keeps_no_other_from_its_value() -> None:
    first, second = Promise(), Promise()
    seen: list[Any] = []

    def fail(value: Any) -> None:
        raise ValueError(value)

    first.when_resolved(second.resolve)
    first.when_resolved(fail)
    first.when_resolved(seen.append)
    second.when_resolved(seen.append)
    with pytest.raises(ValueError, match="7"):
        first.resolve(7)
    assert seen == [7, 7]
    Promise().resolve(1)  # and later ones are called at once again
    third = Promise()
    third.when_resolved(seen.append)
    third.resolve(8)
    assert seen == [7, 7, 8]
