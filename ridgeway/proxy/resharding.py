"""Which pieces of an array's shards make up the shards of the same array under another sharding. Pure."""

import functools
import itertools
from dataclasses import dataclass

from ridgeway.protocol import status
from ridgeway.protocol.shardings import Shape, Sharding

type Box = tuple[tuple[int, int], ...]
"""Start and stop along each dimension."""

PLANS_KEPT = 1024
"""A training program moves arrays in some dozens of ways."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one target shard.

    Attributes:
        candidates: positions in the source's device order of the shards that have it, all replicas.
        taken: where it lies in the source shard; None: it is the whole of it.
        where: where it goes in the target shard; None: it is the whole of it.
    """

    candidates: tuple[int, ...]
    taken: Box | None = None
    where: Box | None = None


type Plan = tuple[tuple[Piece, ...], ...]
"""The pieces of the target shard on each of the target's devices. An empty shard has none."""


@functools.lru_cache(maxsize=PLANS_KEPT)
def shard_by_shard(count: int) -> Plan:
    """The i-th shard becomes the i-th shard, whatever each holds."""
    return tuple((Piece((index,)),) for index in range(count))


@functools.lru_cache(maxsize=PLANS_KEPT)
def plan(shape: Shape, source: Sharding, target: Sharding) -> Plan:
    """How shards under ``target`` are made from shards under ``source``.

    Raises:
        status.StatusError: INVALID_ARGUMENT, a sharding does not fit ``shape``; UNIMPLEMENTED, one does not say
            what its shards hold, or holds terms of a sum, and the other is not cut the same way.
    """
    if source.tiling is None or target.tiling is None or source.tiling.partial or target.tiling.partial:
        same = source.tiling == target.tiling and len(source.devices) == len(target.devices)
        if same and source.shard_shapes(shape) == target.shard_shapes(shape):
            return shard_by_shard(len(source.devices))
        raise status.unimplemented(
            f"An array with a {source.type_name} of unreduced, manual or undeclared parts cannot be resharded to a "
            f"{target.type_name} that is cut another way."
        ).error()
    holders: dict[Box, list[int]] = {}
    for position, domain in enumerate(source.index_domains(shape)):
        holders.setdefault(tuple((part.start, part.stop) for part in domain), []).append(position)
    candidates = {box: tuple(positions) for box, positions in holders.items()}
    cuts = [sorted({box[dimension] for box in candidates}) for dimension in range(len(shape))]
    known: dict[Box, tuple[Piece, ...]] = {}
    result = []
    for domain in target.index_domains(shape):
        wanted = tuple((part.start, part.stop) for part in domain)
        pieces = known.get(wanted)
        if pieces is None:
            pieces = known[wanted] = _pieces(wanted, candidates, cuts)
        result.append(pieces)
    return tuple(result)


def _pieces(
    wanted: Box, candidates: dict[Box, tuple[int, ...]], cuts: list[list[tuple[int, int]]]
) -> tuple[Piece, ...]:
    whole = candidates.get(wanted)
    if whole is not None:
        return (Piece(whole),)
    if any(start == stop for start, stop in wanted):
        return ()
    overlapping = [
        [cut for cut in row if max(cut[0], start) < min(cut[1], stop)]
        for row, (start, stop) in zip(cuts, wanted, strict=True)
    ]
    pieces = []
    for box in itertools.product(*overlapping):
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted, strict=True)]
        taken = tuple((a - start, b - start) for (a, b), (start, _) in zip(common, box, strict=True))
        where = tuple((a - start, b - start) for (a, b), (start, _) in zip(common, wanted, strict=True))
        pieces.append(Piece(
            candidates[box],
            None if taken == _full(box) else taken,
            None if where == _full(wanted) else where,
        ))  # fmt: skip
    return tuple(pieces)


def _full(box: Box) -> Box:
    return tuple((0, stop - start) for start, stop in box)
