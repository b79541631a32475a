"""Who writes and reads what, and the course of a write, without an executor."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeway.protocol import messages, shardings
from ridgeway.protocol import status as statuses
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.proxy.persistence_plan import (
    SMALL_CHUNK_FRACTION,
    Commit,
    Discard,
    Effect,
    Finish,
    Stop,
    WriteCourse,
    chunk_shape,
    plan_read,
    plan_write,
)

DEVICES_EACH = 2


def executor_of(device: int) -> int:
    return 100 + device // DEVICES_EACH


def sharding(devices: tuple[int, ...], tiles: tuple[int, ...]) -> Sharding:
    """Tiles in device order; over more devices than tiles, replicas side by side in the list's slowest dimension."""
    count = math.prod(tiles)
    replicas = len(devices) // count
    # Position i of the list holds tile i % count: the tile assignment lists the holders of each tile together.
    order = [replica * count + tile for tile in range(count) for replica in range(replicas)]
    proto = messages.OpSharding(
        type=3, tile_assignment_dimensions=[*tiles, replicas], tile_assignment_devices=order,
        replicate_on_last_tile_dim=True,
    )  # fmt: skip
    blob = shardings.hlo_sharding_proto(devices, proto.SerializeToString())
    return shardings.parse(messages.ShardingProto.FromString(blob))


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 96, 127, 1000, 151936]), max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1 << 10, 1 << 16, 1 << 26]),
)
def test_chunks_divide_the_shard_and_are_neither_too_large_nor_tiny(shard: list[int], item: int, limit: int) -> None:
    chunk = chunk_shape(tuple(shard), item, limit)
    assert len(chunk) == len(shard)
    assert all(size % part == 0 for size, part in zip(shard, chunk, strict=True))
    size = math.prod(chunk) * item
    assert size * SMALL_CHUNK_FRACTION >= min(limit, math.prod(shard) * item)
    # Larger than wanted only if each further cut is by a prime so large that it makes crumbs.
    if size > limit:
        assert any(part > SMALL_CHUNK_FRACTION for part in chunk)


def test_chunks_of_usual_shapes() -> None:
    assert chunk_shape((), 4, 100) == ()
    assert chunk_shape((0, 3), 4, 100) == (1, 3)
    assert chunk_shape((8, 8), 4, 256) == (8, 8)
    assert chunk_shape((8, 8), 4, 64) == (2, 8)
    assert chunk_shape((2, 1024), 4, 1024) == (1, 256)
    assert chunk_shape((1009, 64), 4, 1 << 16) == (1009, 16)  # 1009 is a prime: rows of 256 bytes would be crumbs


def test_each_part_is_written_once_and_the_load_is_spread() -> None:
    replicated = sharding((0, 1, 2, 3, 4, 5), (2,))  # two tiles, three replicas on three executors
    arrays = [((64,), 4, replicated)] * 9
    plan = plan_write(arrays, executor_of)
    written = [(part.array, part.start) for parts in plan.values() for part in parts]
    assert sorted(written) == [(array, (start,)) for array in range(9) for start in (0, 32)]
    assert {executor: len(parts) for executor, parts in plan.items()} == {100: 6, 101: 6, 102: 6}
    for executor, parts in plan.items():
        for part in parts:
            [position] = part.positions
            assert executor_of(replicated.devices[position]) == executor
            assert replicated.index_domains((64,))[position][0] == slice(part.start[0], part.start[0] + part.shape[0])


def test_every_device_is_read_for_and_replicas_of_an_executor_once() -> None:
    plan = plan_read([((8, 4), sharding((0, 1, 2, 3), (2, 1))), ((), sharding((3, 1), ()))], executor_of)
    parts = {(e, p.array, p.positions, p.start, p.shape) for e, parts in plan.items() for p in parts}
    assert parts == {
        (100, 0, (0,), (0, 0), (4, 4)), (100, 0, (1,), (4, 0), (4, 4)),
        (101, 0, (2,), (0, 0), (4, 4)), (101, 0, (3,), (4, 0), (4, 4)),
        (101, 1, (0,), (), ()), (100, 1, (1,), (), ()),
    }  # fmt: skip
    together = plan_read([((8,), sharding((0, 1), ()))], executor_of)
    assert [(p.positions, p.shape) for p in together[100]] == [((0, 1), (8,))]


def test_terms_of_a_sum_are_not_written() -> None:
    proto = messages.OpSharding(type=3, tile_assignment_dimensions=[1, 2], last_tile_dims=[4])
    blob = shardings.hlo_sharding_proto((0, 1), proto.SerializeToString())
    partial = shardings.parse(messages.ShardingProto.FromString(blob))
    with pytest.raises(StatusError, match="terms of a sum") as caught:
        plan_write([((4,), 4, partial)], executor_of)
    assert caught.value.status.code is Code.INVALID_ARGUMENT


# ---- the course of a write

FULL = statuses.resource_exhausted("full")
LOST = statuses.data_loss("slice 1 was lost")
LATE = statuses.deadline_exceeded("late")


def test_a_write_is_completed_when_all_have_written() -> None:
    course = WriteCourse((7, 8), lambda _: True)
    assert course.written(8, None) == []
    assert course.written(7, None) == [Commit(7)]
    assert course.committed(None) == [Finish(None)]
    assert course.expired(LATE) == []


def test_a_failed_write_is_removed_when_nobody_writes_any_more() -> None:
    course = WriteCourse((7, 8, 9), lambda number: number != 7)
    assert course.written(7, LOST) == [Finish(LOST), Stop(frozenset({8, 9}), LOST)]
    assert course.written(9, LOST) == []
    assert course.written(8, None) == [Discard(8)]


def test_a_write_that_is_late_is_called_off() -> None:
    course = WriteCourse((7, 8), lambda _: True)
    assert course.written(7, None) == []
    assert course.expired(LATE) == [Finish(LATE), Stop(frozenset({8}), LATE)]
    assert course.written(8, None) == [Discard(7)]


def test_what_was_written_by_the_dead_is_completed_by_the_living() -> None:
    course = WriteCourse((7, 8), lambda number: number == 8)
    course.written(7, None)
    assert course.written(8, None) == [Commit(8)]
    assert course.committed(LOST) == [Finish(LOST), Discard(8)]


@pytest.mark.parametrize("errors", list(itertools.product([None, FULL, LOST], repeat=3)))
@pytest.mark.parametrize("expires", range(6))
def test_every_course_ends_once_and_completes_only_what_is_whole(
    errors: tuple[Status | None, ...], expires: int
) -> None:
    """Three writers and the completing, each of which may fail, and the deadline at any moment."""
    dead = {number for number, error in enumerate(errors) if error is LOST}
    for order, commit_error in itertools.product(itertools.permutations(range(3)), (None, FULL)):
        course = WriteCourse((0, 1, 2), lambda number: number not in dead)
        done: list[Effect] = []
        ended: set[int] = set()

        def apply(
            effects: list[Effect],
            course: WriteCourse = course,
            done: list[Effect] = done,
            ended: set[int] = ended,
        ) -> None:
            for effect in effects:
                if isinstance(effect, Commit):
                    assert len(ended) == 3 and errors == (None,) * 3 and effect.executor not in dead
                    assert not any(isinstance(earlier, Finish) for earlier in done)
                if isinstance(effect, Discard):
                    assert len(ended) == 3 and course.error is not None and effect.executor not in dead
                done.append(effect)

        for moment, number in enumerate(order):
            if moment == expires:
                apply(course.expired(LATE))
            ended.add(number)
            apply(course.written(number, errors[number]))
        if expires == 3:
            apply(course.expired(LATE))
        committing = any(isinstance(effect, Commit) for effect in done)
        if committing:
            apply(course.committed(commit_error))
        if expires == 4:
            apply(course.expired(LATE))
        [finish] = [effect for effect in done if isinstance(effect, Finish)]
        whole = errors == (None,) * 3 and commit_error is None
        assert (finish.error is None) == (whole and expires >= 4)
        removed = any(isinstance(effect, Discard) for effect in done)
        assert removed == (len(dead) < 3 and (finish.error is not None) and not (committing and commit_error is None))
