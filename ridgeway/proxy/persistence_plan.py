"""Who writes and reads what, and when a write is complete. Nothing here knows a socket, a thread or a clock."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from ridgeway.protocol import status as statuses
from ridgeway.protocol.shardings import Shape, Sharding
from ridgeway.protocol.status import Status

SMALL_CHUNK_FRACTION = 16
"""A chunk shape that makes chunks so many times smaller than wanted is worse than one that makes them too large."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of an array that one executor writes or reads.

    Attributes:
        array: the array's position in the request.
        positions: positions in the array's device order: of the replica that is written, of all that are read.
        start, shape: where the part begins in the array, and its shape.
    """

    array: int
    positions: tuple[int, ...]
    start: Shape
    shape: Shape


def chunk_shape(shard: Shape, item_bytes: int, limit_bytes: int) -> Shape:
    """The chunk shape of an array whose shards have the shape ``shard``: divides it, so that no chunk belongs to two
    shards, and makes chunks of at most ``limit_bytes`` where that does not make them tiny. The first dimensions are
    cut first, so that a chunk lies in one piece in memory."""
    chunk = [max(1, size) for size in shard]
    for axis, size in enumerate(chunk):
        large = math.prod(chunk) * item_bytes
        if large <= limit_bytes:
            break
        fitting = (d for d in _divisors(size) if large // d <= limit_bytes)
        divisor = next(fitting, size)
        if large // divisor * SMALL_CHUNK_FRACTION >= limit_bytes:
            chunk[axis] = size // divisor
    return tuple(chunk)


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def plan_write(
    arrays: Sequence[tuple[Shape, int, Sharding]], executor_of: Callable[[int], int]
) -> dict[int, list[Part]]:
    """Which executor writes which part: each distinct one once, by the replica whose executor has the least to write
    so far.

    Args:
        arrays: shape, bytes of an element, sharding.
        executor_of: the executor that has a device.

    Raises:
        StatusError: INVALID_ARGUMENT, devices hold terms of a sum, or it is not known what they hold.
    """
    load: dict[int, int] = {}
    plan: dict[int, list[Part]] = {}
    for index, (shape, item_bytes, sharding) in enumerate(arrays):
        for start, extent, positions in _domains(shape, sharding):
            chosen = min(positions, key=lambda p: load.get(executor_of(sharding.devices[p]), 0))
            executor = executor_of(sharding.devices[chosen])
            # The byte more spreads empty arrays, of which each is a file all the same.
            load[executor] = load.get(executor, 0) + math.prod(extent) * item_bytes + 1
            plan.setdefault(executor, []).append(Part(index, (chosen,), start, extent))
    return plan


def plan_read(arrays: Sequence[tuple[Shape, Sharding]], executor_of: Callable[[int], int]) -> dict[int, list[Part]]:
    """Which executor reads which part: each what its own devices hold, once for all of them.

    Raises:
        StatusError: as `plan_write`.
    """
    plan: dict[int, list[Part]] = {}
    for index, (shape, sharding) in enumerate(arrays):
        for start, extent, positions in _domains(shape, sharding):
            here: dict[int, list[int]] = {}
            for position in positions:
                here.setdefault(executor_of(sharding.devices[position]), []).append(position)
            for executor, mine in here.items():
                plan.setdefault(executor, []).append(Part(index, tuple(mine), start, extent))
    return plan


def _domains(shape: Shape, sharding: Sharding) -> list[tuple[Shape, Shape, list[int]]]:
    """Start, shape and holders of each distinct part of an array."""
    if sharding.tiling is not None and sharding.tiling.partial:
        raise statuses.invalid_argument(
            "an array whose devices hold terms of a sum, or differing values, cannot be kept in storage"
        ).error()
    found: dict[tuple[Shape, Shape], list[int]] = {}
    for position, domain in enumerate(sharding.index_domains(shape)):
        start = tuple([part.start for part in domain])
        extent = tuple([part.stop - part.start for part in domain])
        found.setdefault((start, extent), []).append(position)
    return [(start, extent, positions) for (start, extent), positions in found.items()]


# ---- the course of a write


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Tell executors to write no more."""

    executors: frozenset[int]
    cause: Status


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """Have one executor make arrays of the parts."""

    executor: int


@dataclasses.dataclass(frozen=True, slots=True)
class Discard:
    """Have one executor remove what was written."""

    executor: int


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """Tell the client; exactly one for each write."""

    error: Status | None


Effect = Stop | Commit | Discard | Finish


class WriteCourse:
    """One write, from its orders to its end: an array is completed when all of its writers have succeeded and have
    ended, and what a failed write left is removed when all of its writers have ended, so that no late one puts it back.

    Every executor that was given an order answers exactly once, also by being lost.
    """

    def __init__(self, writers: Sequence[int], is_living: Callable[[int], bool]):
        self._writers = tuple(writers)
        self._is_living = is_living
        self._writing = set(writers)
        self._committing: int | None = None
        self._finished = False
        self.error: Status | None = None

    def written(self, executor: int, error: Status | None) -> list[Effect]:
        """A writer has ended."""
        self._writing.discard(executor)
        effects = self._fail(error) if error is not None else []
        if self._writing:
            return effects
        if self.error is not None:
            return effects + self._discard()
        self._committing = self._living()
        if self._committing is None:
            # Each has answered before it was lost, so all parts are there; but nobody is left who could tell.
            return self._fail(statuses.data_loss("every executor that wrote was lost before the write was complete"))
        return [Commit(self._committing)]

    def committed(self, error: Status | None) -> list[Effect]:
        """Completing has ended."""
        self._committing = None
        if error is not None:
            return self._fail(error) + self._discard()
        return self._finish(None)

    def expired(self, error: Status) -> list[Effect]:
        """The client waits no longer."""
        return self._fail(error)

    def _living(self) -> int | None:
        return next(filter(self._is_living, self._writers), None)

    def _fail(self, error: Status) -> list[Effect]:
        if self._finished:
            return []
        self.error = error
        busy = frozenset(self._writing if self._committing is None else {self._committing})
        return [*self._finish(error), *([Stop(busy, error)] if busy else [])]

    def _discard(self) -> list[Effect]:
        living = self._living()
        return [] if living is None else [Discard(living)]

    def _finish(self, error: Status | None) -> list[Effect]:
        if self._finished:
            return []
        self._finished = True
        return [Finish(error)]
