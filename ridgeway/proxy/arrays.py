"""Arrays as a session knows them: relabellings of buffer groups that lie on executors.

A *buffer group* is what one order made: one shard on each of its devices, counted by the arrays that refer to it.
An *array* is a shape, a dtype, a sharding and, for each device, the group that its shard lies in.  Disassembling,
assembling and replicated shards therefore cost no message.
"""

from collections.abc import Iterable

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.cluster.slice_hold import SliceHold
from ridgeway.protocol import status as statuses
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import Status

Shape = tuple[int, ...]


class BufferGroup:
    """Shards that one order put on executors."""

    __slots__ = ("executors", "number", "references")

    def __init__(self, number: int, executors: tuple[ExecutorLink, ...]):
        self.number = number
        self.executors = executors
        self.references = 0

    def release(self) -> None:
        """One array less; the last one frees the shards."""
        self.references -= 1
        if self.references == 0:
            for executor in self.executors:
                executor.free(self.number)


class Array:
    """One array value; errors are values too."""

    __slots__ = ("_checked_epoch", "_pins", "deleted", "error", "groups", "held", "kind", "released", "shape", "sharding", "strings")

    def __init__(self, kind: int, shape: Shape, sharding: Sharding):
        self.kind = kind
        self.shape = shape
        self.sharding = sharding
        self.groups: BufferGroup | tuple[BufferGroup, ...] | None = None
        """one group for all devices, or one for each"""
        self.error: Status | None = None
        self.deleted = False
        self.held: SliceHold | None = None
        self.strings: bytes | None = None
        """an array of strings stays on the head, as it arrived"""
        self.released = False
        """the client has dropped it"""
        self._checked_epoch = -1
        self._pins = 0

    @property
    def devices(self) -> tuple[int, ...]:
        """Device ids in shard order."""
        return self.sharding.devices

    def bind(self, groups: BufferGroup | tuple[BufferGroup, ...]) -> None:
        """Refer to groups; at once dropped again if the client has dropped the array meanwhile."""
        self.groups = groups
        self.held = None
        for group in _distinct(groups):
            group.references += 1
        if self.released or self.deleted:
            self._drop()

    def pin(self) -> None:
        """Work that is held will use it: what the client does with it meanwhile comes after that use."""
        self._pins += 1

    def unpin(self) -> None:
        """The held work has used it."""
        self._pins -= 1
        if self.released or self.deleted:
            self._drop()

    def fail(self, error: Status) -> None:
        """The value is an error."""
        self.error = error
        self.held = None
        self._drop()

    def release(self) -> None:
        """The client dropped it."""
        self.released = True
        self._drop()

    def delete(self) -> None:
        """Deleted or donated: its use is an error from now on."""
        self.deleted = True
        self._drop()

    def _drop(self) -> None:
        if self._pins > 0 and self.error is None:
            return
        groups, self.groups = self.groups, None
        self.strings = None
        if groups is not None:
            for group in _distinct(groups):
                group.release()

    def group_at(self, index: int) -> BufferGroup:
        """The group of the shard at ``index`` in device order; `problem` must have returned None."""
        groups = self.groups
        assert groups is not None
        return groups[index] if isinstance(groups, tuple) else groups

    def problem(self, manager: ResourceManager) -> Status | None:
        """Why this array cannot be used, or None. What was lost stays lost, also after its host is back."""
        if self.error is not None:
            return self.error
        if self.deleted and self._pins == 0:
            return statuses.invalid_argument("the array was deleted or donated")
        if self._checked_epoch != manager.epoch and self.groups is not None:
            for group in _distinct(self.groups):
                for executor in group.executors:
                    if executor.lost is not None:
                        lost = executor.lost
                        self.fail(Status(lost.code, f"an array's shard is gone: {lost.message}"))
                        return self.error
            self._checked_epoch = manager.epoch
        return None


def _distinct(groups: BufferGroup | tuple[BufferGroup, ...]) -> Iterable[BufferGroup]:
    return dict.fromkeys(groups) if isinstance(groups, tuple) else (groups,)
