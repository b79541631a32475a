"""Arrays that share shards: what deletes, frees and fails them."""

from types import SimpleNamespace
from typing import Any, cast

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.cluster.topology import Topology
from ridgeway.protocol import shardings
from ridgeway.protocol.shardings import WHOLE, Sharding
from ridgeway.protocol.status import Code, data_loss
from ridgeway.proxy.arrays import Array, BufferGroup

F32 = 11


class Executor:
    """An executor that counts what it is told to forget."""

    def __init__(self, slot: int):
        self.slot = slot
        self.lost: Any = None
        self.freed: list[int] = []

    def free(self, group: int) -> None:
        self.freed.append(group)


def manager(epoch: int = 1) -> ResourceManager:
    """Two slices of one host with two devices."""
    return cast(ResourceManager, SimpleNamespace(topology=Topology(2, 1, 2), epoch=epoch))


def array_on(*devices: int) -> Array:
    return Array(F32, (4,), Sharding(shardings.HLO, repr(devices).encode(), devices, None, WHOLE))


def group_on(number: int, *executors: Executor) -> BufferGroup:
    return BufferGroup(number, cast(tuple[ExecutorLink, ...], executors))


def sharing() -> tuple[Array, Array, Array, list[Executor]]:
    """One array on four devices, and two of its shards as arrays of their own."""
    executors = [Executor(0), Executor(1)]
    group = group_on(5, *executors)
    whole, first, last = array_on(0, 1, 2, 3), array_on(0), array_on(3)
    for array in (whole, first, last):
        array.bind(group)
    return whole, first, last, executors


def test_shards_are_freed_with_the_last_array_that_has_them() -> None:
    whole, first, last, executors = sharing()
    whole.release()
    first.release()
    assert [e.freed for e in executors] == [[], []]
    last.release()
    assert [e.freed for e in executors] == [[5], [5]]


def test_deleting_a_shard_deletes_the_arrays_that_have_it() -> None:
    whole, first, last, _ = sharing()
    first.delete()
    assert (whole.is_deleted, last.is_deleted) == (True, False)
    assert last.problem(manager()) is None
    problem = whole.problem(manager())
    assert problem is not None and problem.code is Code.INVALID_ARGUMENT


def test_deleting_the_whole_deletes_every_shard() -> None:
    whole, first, last, _ = sharing()
    whole.delete()
    assert first.is_deleted and last.is_deleted


def test_what_was_given_to_another_array_lives_on_there() -> None:
    whole, first, _, _ = sharing()
    first.give_away()
    assert first.is_deleted and not whole.is_deleted
    assert first.problem(manager()) is not None and whole.problem(manager()) is None


def test_held_work_uses_what_is_deleted_meanwhile() -> None:
    whole, first, _, executors = sharing()
    whole.pin()
    whole.delete()
    assert whole.problem(manager()) is None and not first.is_deleted
    whole.unpin()
    assert whole.problem(manager()) is not None and first.is_deleted
    assert executors[0].freed == []


def test_a_loss_fails_the_arrays_that_lie_there_and_no_others() -> None:
    whole, first, last, executors = sharing()
    executors[1].lost = data_loss("slice 1 host 0 was lost")
    now = manager(epoch=2)
    assert first.problem(now) is None
    for array in (whole, last):
        problem = array.problem(now)
        assert problem is not None and problem.code is Code.DATA_LOSS and "slice 1 host 0" in problem.message
    executors[1].lost = None
    assert whole.problem(manager(epoch=3)) is not None  # what was lost stays lost


def test_shards_of_several_groups_each_count_for_themselves() -> None:
    executors = [Executor(0), Executor(1)]
    left, right = group_on(1, executors[0]), group_on(2, executors[1])
    mixed, part = array_on(0, 2), array_on(2)
    mixed.bind((left, right))
    part.bind(right)
    part.delete()
    assert mixed.is_deleted
    mixed.release()
    assert [e.freed for e in executors] == [[1], [2]]
