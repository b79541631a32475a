"""What an executor holds: buffer groups, each a set of shards of one array on this executor's devices.

A shard is in one of four states, and moves only to the right or to an error::

    Promise (bytes on their way) -> HostShard (host memory, no client) -> array on a runtime
                                 `-> Status (poisoned: the error is the value)

Shards that were drained from an ended generation stay host shards until something uses them.  Shards in host memory
(`HOST_MEMORY_KINDS`: snapshots, offloaded state) that were put or copied there are never more than host shards: they
belong to no client, so no generation's end costs them anything; a program that takes one gets a copy.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status, StatusError
from ridgeway.worker.device_runtime import (
    LoadedProgram,
    Runtime,
    is_deleted,
    memory_kind_of,
    shards_of,
    to_host,
)
from ridgeway.worker.promises import Ended, Promise, WaitEnded, never

HOST_MEMORY_KINDS = frozenset({"pinned_host", "unpinned_host"})
"""Memory kinds whose bytes are this process's own, outside all clients."""
COPIED_AT_ONCE_BYTES = 64 << 20
"""Of a large shard that is brought to host memory: the head hears of progress after each part."""
def _nothing() -> None:
    return None



class HostShard:
    """Bytes in host memory that belong to no client."""

    __slots__ = ("data", "memory_kind")

    def __init__(self, data: np.ndarray, memory_kind: str | None):
        self.data = data
        self.memory_kind = memory_kind

    def with_memory_kind(self, memory_kind: str | None) -> "HostShard":
        """The same bytes, to be brought into another memory."""
        return HostShard(self.data, memory_kind)


class PromisedShard:
    """A shard made from a promise by ``decode`` (bytes -> array)."""

    __slots__ = ("decode", "memory_kind", "promise")

    def __init__(self, promise: Promise, decode: Any, memory_kind: str | None):
        self.promise = promise
        self.decode = decode
        self.memory_kind = memory_kind

    def with_memory_kind(self, memory_kind: str | None) -> "PromisedShard":
        """The same bytes, to be brought into another memory."""
        return PromisedShard(self.promise, self.decode, memory_kind)


class Group:
    """The shards of one array on this executor."""

    __slots__ = ("array", "array_local", "in_host_memory", "runtime", "shards", "spans")

    def __init__(self, memory_kind: str | None = None) -> None:
        self.in_host_memory = memory_kind in HOST_MEMORY_KINDS
        self.shards: dict[int, Any] | None = None
        """device id -> shard; None while only ``array`` has them"""
        self.array: Any = None
        """a global array over ``array_local`` on ``runtime``, kept to pass on without building it again"""
        self.array_local: tuple[int, ...] = ()
        self.runtime: Runtime | None = None
        self.spans = False
        """computed by a program that spans several executors, or from something that is"""


def result_group(
    array: Any, local: tuple[int, ...], runtime: Runtime, spans: bool, memory_kind: str | None = None
) -> Group:
    """A group from a program's result; ``spans``: of a program that spans several executors."""
    group = Group(memory_kind)
    group.array = array
    group.array_local = local
    group.runtime = runtime
    group.spans = spans
    return group


def shard_group(shards: dict[int, Any], runtime: Runtime | None = None, memory_kind: str | None = None) -> Group:
    """A group from shards in any state; arrays among them must be on ``runtime``."""
    group = Group(memory_kind)
    group.shards = shards
    group.runtime = runtime
    return group


class BufferStore:
    """All groups of one executor. Used by the order thread only, but for `size` and `host_memory_bytes`."""

    def __init__(self, transfer_timeout_seconds: float):
        self._groups: dict[int, Group] = {}
        self._in_host_memory: dict[int, Group] = {}
        self._transfer_timeout_seconds = transfer_timeout_seconds

    @property
    def size(self) -> int:
        """Number of groups."""
        return len(self._groups)

    def host_memory_bytes(self) -> int:
        """Bytes of arrays that were asked to be in host memory; bytes that several of them share count once."""
        sizes: dict[int, int] = {}
        for group in list(self._in_host_memory.values()):
            shards, array = group.shards, group.array
            if shards is not None:
                parts = list(shards.values())
            else:
                parts = [] if array is None or is_deleted(array) else shards_of(array)
            for shard in parts:
                if isinstance(shard, PromisedShard):
                    data = shard.promise.value
                else:
                    data = shard.data if isinstance(shard, HostShard) else shard
                if isinstance(data, (bytes, bytearray)):
                    sizes[id(data)] = len(data)
                elif data is not None and not isinstance(data, Status):
                    sizes[id(data)] = data.nbytes
        return sum(sizes.values())

    @property
    def groups(self) -> dict[int, Group]:
        """All groups, by number."""
        return self._groups

    @property
    def promised(self) -> int:
        """Shards whose bytes are not here."""
        return sum(not shard.promise.resolved for _, _, shard in self._promised_shards())

    def _promised_shards(self) -> list[tuple[dict[int, Any], int, PromisedShard]]:
        return [
            (group.shards, device, shard)
            for group in self._groups.values()
            if group.shards is not None
            for device, shard in group.shards.items()
            if isinstance(shard, PromisedShard)
        ]

    def keep_in_host_memory(self) -> None:
        """Turn every shard whose bytes were promised, and are here now, into bytes or the error in their place."""
        for shards, device, shard in self._promised_shards():
            try:
                shards[device] = HostShard(shard.decode(shard.promise.wait(0.0)), shard.memory_kind)
            except statuses.StatusError as error:
                shards[device] = error.status

    def set(self, number: int, group: Group) -> None:
        """Bind a group."""
        self._groups[number] = group
        if group.in_host_memory:
            self._in_host_memory[number] = group

    def poison(self, number: int, devices: tuple[int, ...], status: Status) -> None:
        """Bind an error to a group."""
        self._groups[number] = shard_group(dict.fromkeys(devices, status))

    def spans(self, number: int) -> bool:
        """Whether a group was computed, at the last, by executors together."""
        group = self._groups.get(number)
        return group is not None and group.spans

    def free(self, numbers: list[int]) -> None:
        """Forget groups."""
        for number in numbers:
            group = self._groups.pop(number, None)
            if group is not None and group.in_host_memory:
                del self._in_host_memory[number]

    def legacy(self) -> list[tuple[int, bool, dict[int, Any]]]:
        """All groups, drained: number, whether it was asked to be in host memory, device -> shard."""
        return [(number, group.in_host_memory, _split(group)) for number, group in self._groups.items()]

    def inherit(self, groups: dict[int, Group]) -> None:
        """Begin with a predecessor's groups."""
        for number, group in groups.items():
            self.set(number, group)

    def group(self, number: int) -> Group:
        """A group by number.

        Raises:
          statuses.StatusError: there is none (INTERNAL: head and executor disagree).
        """
        group = self._groups.get(number)
        if group is None:
            raise statuses.internal(f"buffer group {number} is not on this executor").error()
        return group

    def peek(self, number: int, device: int) -> Any:
        """One shard in whatever state it is: `Status`, `PromisedShard`, `HostShard` or an array on a runtime.

        Raises:
          statuses.StatusError: there is no such group.
        """
        return _split(self.group(number))[device]

    def shard(self, number: int, device: int, runtime: Runtime, ended: Ended = never) -> Any:
        """One shard as an array on ``runtime``; brings it there if it is not.

        Raises:
          WaitEnded: its bytes are not here and ``ended`` says to wait no longer.
          statuses.StatusError: the shard is poisoned, or its bytes do not come.
        """
        return self._materialize(self.group(number), device, runtime, ended)

    def _materialize(self, group: Group, device: int, runtime: Runtime, ended: Ended) -> Any:
        shards = _split(group)
        shard = shards[device]
        if group.runtime is not runtime and group.runtime is not None:
            # Another runtime's arrays: `drain` turned them into host shards, so nothing of it is left.
            group.array = None
        if isinstance(shard, PromisedShard):
            try:
                data = shard.decode(shard.promise.wait(self._transfer_timeout_seconds, ended))
            except WaitEnded:
                raise
            except StatusError as error:
                shards[device] = error.status
                raise
            shard = HostShard(data, shard.memory_kind)
            shards[device] = shard
        if isinstance(shard, HostShard):
            shard = runtime.put(shard.data, device, shard.memory_kind)
            if not group.in_host_memory:
                shards[device] = shard
                group.runtime = runtime
        if isinstance(shard, Status):
            raise shard.error()
        return shard

    def argument(
        self, number: int, index: int, program: LoadedProgram, runtime: Runtime, ended: Ended = never
    ) -> Any:
        """A whole group as argument ``index`` of a program.

        Raises:
          WaitEnded: bytes of it are not here and ``ended`` says to wait no longer.
          statuses.StatusError: one of its shards is poisoned.
        """
        group = self.group(number)
        if group.array is not None and group.runtime is runtime and group.array_local == program.local:
            return group.array
        shards = [self._materialize(group, device, runtime, ended) for device in program.local]
        array = program.assemble(index, shards)
        if not group.in_host_memory:
            group.array, group.array_local = array, program.local
        return array

    def drain(
        self, runtime: Runtime, describe: Callable[[BaseException], Status], gives_up: Callable[[bool], bool],
        progressed: Callable[[], None] = _nothing,
    ) -> tuple[int, int]:
        """Bring every shard that is on ``runtime`` to host memory, waiting for running executions.

        Those that cannot be brought become errors, by ``describe``.  When ``gives_up(spans)`` says so, what is not
        computed yet is lost too, but everything else is kept.  Returns how many shards were lost, and how many of
        those were never computed.  ``progressed`` is called between parts of at most `COPIED_AT_ONCE_BYTES`.
        """
        uncounted = 0
        lost = stuck = 0
        for group in self._groups.values():
            if group.runtime is not runtime:
                continue
            shards = _split(group)
            spans = group.spans
            group.array = None
            group.runtime = None
            group.spans = False
            for device, shard in shards.items():
                if isinstance(shard, (HostShard, PromisedShard, Status)):
                    continue
                try:
                    if is_deleted(shard):
                        shards[device] = statuses.invalid_argument("the buffer was donated or deleted")
                        continue
                    if not _wait_until_ready(shard, spans, gives_up):
                        runtime.left_behind.append(shard)
                        stuck += 1
                        raise RuntimeError("it was being computed when its generation was aborted")
                    data = to_host(shard)
                    shards[device] = HostShard(_copied(data, progressed), memory_kind_of(shard))
                    uncounted += data.nbytes
                    if uncounted >= COPIED_AT_ONCE_BYTES:
                        uncounted = 0
                        progressed()
                except Exception as error:
                    lost += 1
                    shards[device] = describe(error)
        return lost, stuck


def _copied(data: np.ndarray, progressed: Callable[[], None]) -> np.ndarray:
    if data.nbytes <= COPIED_AT_ONCE_BYTES or data.ndim == 0 or not data.flags.c_contiguous:
        return np.array(data, copy=True)
    copy = np.empty_like(data)
    source, target = data.reshape(-1), copy.reshape(-1)
    step = max(1, COPIED_AT_ONCE_BYTES // data.itemsize)
    for start in range(0, source.size, step):
        target[start : start + step] = source[start : start + step]
        progressed()
    return copy


def _wait_until_ready(shard: Any, spans: bool, gives_up: Callable[[bool], bool]) -> bool:
    pause = 0.0005
    while not shard.is_ready():
        if gives_up(spans):
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.01)
    return True


def _split(group: Group) -> dict[int, Any]:
    if group.shards is None:
        if is_deleted(group.array):
            deleted = statuses.invalid_argument("the buffer was donated or deleted")
            group.shards = dict.fromkeys(group.array_local, deleted)
            group.array = None
        else:
            group.shards = dict(zip(group.array_local, shards_of(group.array), strict=True))
    return group.shards
