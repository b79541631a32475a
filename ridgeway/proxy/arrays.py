"""Arrays as a session knows them: relabellings of buffer groups that lie on executors.

A *buffer group* is what one order made: one shard on each of its devices, counted by the arrays that refer to it.
An *array* is a shape, a dtype, a sharding and, for each device, the group that its shard lies in.  Disassembling,
assembling and replicated shards therefore cost no message.
"""

from collections.abc import Callable, Iterable

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.cluster.slice_hold import Hold
from ridgeway.protocol import status as statuses
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import Status

Shape = tuple[int, ...]


class BufferGroup:
    """Shards that one order put on executors."""

    __slots__ = ("deleted_devices", "executors", "number", "references")

    def __init__(self, number: int, executors: tuple[ExecutorLink, ...]):
        self.number = number
        self.executors = executors
        self.references = 0
        self.deleted_devices: frozenset[int] | None = None
        """where one of several arrays that share this group deleted or donated its shards, for all of them"""

    def release(self) -> None:
        """One array less; the last one frees the shards."""
        self.references -= 1
        if self.references == 0:
            for executor in self.executors:
                executor.free(self.number)


class StringShard:
    """The strings of one shard, as a serialized `StringArrayContents`; they stay on the head."""

    __slots__ = ("_callbacks", "_value")

    def __init__(self) -> None:
        self._value: bytes | Status | None = None
        self._callbacks: list[Callable[[bytes | Status], None]] = []

    def set(self, value: bytes | Status) -> None:
        """The client's buffer arrived, or will not."""
        self._value = value
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(value)

    def when_here(self, callback: Callable[[bytes | Status], None]) -> None:
        """Call back with the value, now or when it arrives."""
        if self._value is not None:
            callback(self._value)
        else:
            self._callbacks.append(callback)


class Array:
    """One array value; errors are values too."""

    __slots__ = (
        "_checked_epoch", "_given_away", "_pins", "deleted", "error", "groups", "held", "kind", "released", "shape",
        "sharding", "strings",
    )  # fmt: skip

    def __init__(self, kind: int, shape: Shape, sharding: Sharding):
        self.kind = kind
        self.shape = shape
        self.sharding = sharding
        self.groups: BufferGroup | tuple[BufferGroup, ...] | None = None
        """one group for all devices, or one for each"""
        self.error: Status | None = None
        self.deleted = False
        self.held: Hold | None = None
        self.strings: tuple[StringShard, ...] | None = None
        """an array of strings has these instead of groups, one for each device"""
        self.released = False
        """the client has dropped it"""
        self._checked_epoch = -1
        self._pins = 0
        self._given_away = False

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
        """Deleted or donated to a program: its use is an error from now on, and that of arrays that share shards."""
        self.deleted = True
        self._drop()

    def give_away(self) -> None:
        """Donated to another array, which has the shards now."""
        self.deleted = True
        self._given_away = True
        self._drop()

    @property
    def is_deleted(self) -> bool:
        """Whether it, or a shard that it shares with another array, was deleted or donated."""
        return self.deleted or self._shards_deleted()

    def _shards_deleted(self) -> bool:
        groups = self.groups
        if isinstance(groups, BufferGroup):
            gone = groups.deleted_devices
            return gone is not None and not gone.isdisjoint(self.devices)
        return groups is not None and any(
            group.deleted_devices is not None and device in group.deleted_devices
            for group, device in zip(groups, self.devices, strict=True)
        )

    def _drop(self) -> None:
        if self._pins > 0 and self.error is None:
            return
        groups, self.groups = self.groups, None
        self.strings = None
        if groups is not None:
            for group in _distinct(groups):
                if self.deleted and group.references > 1 and not self._given_away:
                    group.deleted_devices = (group.deleted_devices or frozenset()) | self._devices_in(group, groups)
                group.release()

    def _devices_in(self, group: BufferGroup, groups: BufferGroup | tuple[BufferGroup, ...]) -> frozenset[int]:
        if isinstance(groups, BufferGroup):
            return frozenset(self.devices)
        return frozenset(d for d, other in zip(self.devices, groups, strict=True) if other is group)

    def group_at(self, index: int) -> BufferGroup:
        """The group of the shard at ``index`` in device order; `problem` must have returned None."""
        groups = self.groups
        assert groups is not None
        return groups[index] if isinstance(groups, tuple) else groups

    def problem(self, manager: ResourceManager) -> Status | None:
        """Why this array cannot be used, or None. What was lost stays lost, also after its host is back."""
        if self.error is not None:
            return self.error
        groups = self.groups
        shared = type(groups) is not BufferGroup or groups.deleted_devices is not None
        if self._pins == 0 and (self.deleted or (shared and self._shards_deleted())):
            return statuses.invalid_argument("Array has been deleted or donated.")
        if self._checked_epoch != manager.epoch and groups is not None:
            for _, executor in self.executors(manager):
                if executor.lost is not None:
                    lost = executor.lost
                    self.fail(Status(lost.code, f"an array's shard is gone: {lost.message}"))
                    return self.error
            self._checked_epoch = manager.epoch
        return None

    def executors(self, manager: ResourceManager) -> list[tuple[BufferGroup, ExecutorLink]]:
        """Where its shards are: a group may have shards of other arrays on other executors too."""
        groups = self.groups
        if groups is None:
            return []
        slot_of = manager.topology.slot_of_device
        found: list[tuple[BufferGroup, ExecutorLink]] = []
        for group in _distinct(groups):
            slots = {slot_of(device) for device in self._devices_in(group, groups)}
            found += [(group, executor) for executor in group.executors if executor.slot in slots]
        return found


def _distinct(groups: BufferGroup | tuple[BufferGroup, ...]) -> Iterable[BufferGroup]:
    return dict.fromkeys(groups) if isinstance(groups, tuple) else (groups,)
