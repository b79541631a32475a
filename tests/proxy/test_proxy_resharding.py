"""The plan of a resharding, carried out with numpy."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeway.protocol import shardings
from ridgeway.protocol.shardings import Sharding, Tiling
from ridgeway.protocol.status import Code, StatusError
from ridgeway.proxy import resharding


def sharding_of(tiles: tuple[int, ...], order: list[int], partial: bool = False) -> Sharding:
    """``len(order)`` devices; the i-th has tile ``order[i]``."""
    text = f"{tiles} {order} {partial}".encode()
    return Sharding(shardings.HLO, text, tuple(range(len(order))), None, Tiling(tiles, tuple(order), partial))


@st.composite
def random_shardings(draw: st.DrawFn, rank: int) -> Sharding:
    """Tiles in any order over the devices, some of them on several."""
    tiles = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    count = int(np.prod(tiles, dtype=int))
    order = list(range(count)) * draw(st.integers(1, 2))
    return sharding_of(tiles, draw(st.permutations(order)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding, Sharding]:
    """A shape, whose dimensions need not be multiples of the tiles, and two shardings."""
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=rank, max_size=rank)))
    return shape, draw(random_shardings(rank)), draw(random_shardings(rank))


def cut(data: np.ndarray, box: resharding.Box | None) -> np.ndarray:
    return data if box is None else data[tuple(slice(start, stop) for start, stop in box)]


@given(cases())
def test_pieces_make_up_every_target_shard(case: tuple[tuple[int, ...], Sharding, Sharding]) -> None:
    shape, source, target = case
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    held = [values[domain] for domain in source.index_domains(shape)]
    plan = resharding.plan(shape, source, target)
    assert len(plan) == len(target.devices)
    for pieces, domain in zip(plan, target.index_domains(shape), strict=True):
        made = np.full(values[domain].shape, -1)
        filled = 0
        for piece in pieces:
            assert len(piece.candidates) == len(set(piece.candidates))
            for candidate in piece.candidates:
                place = cut(made, piece.where)
                place[...] = cut(held[candidate], piece.taken)
            filled += cut(made, piece.where).size
        np.testing.assert_array_equal(made, values[domain])
        assert filled == made.size  # every element once


def test_an_equal_shard_is_taken_whole_from_any_replica() -> None:
    source, target = sharding_of((2,), [0, 1, 0, 1]), sharding_of((2,), [1, 0])
    plan = resharding.plan((8,), source, target)
    assert plan == ((resharding.Piece((1, 3)),), (resharding.Piece((0, 2)),))


def test_terms_of_a_sum_are_only_moved_as_they_are() -> None:
    source, target = sharding_of((1,), [0, 0], partial=True), sharding_of((2,), [0, 1])
    assert resharding.plan((8,), source, source) == resharding.shard_by_shard(2)
    with pytest.raises(StatusError) as caught:
        resharding.plan((8,), source, target)
    assert caught.value.status.code is Code.UNIMPLEMENTED


def test_a_sharding_of_undeclared_parts_moves_only_to_its_like() -> None:
    shapes = ((2, 3), (1, 3))
    source = Sharding(shardings.CONCRETE, b"a", (0, 1), None, None, (3, 3), shapes)
    assert resharding.plan((3, 3), source, dataclasses.replace(source, data=b"b", devices=(4, 5))) == (
        resharding.shard_by_shard(2)
    )
    with pytest.raises(StatusError) as caught:
        resharding.plan((3, 3), source, sharding_of((1, 3), [0, 1, 2]))
    assert caught.value.status.code is Code.UNIMPLEMENTED
