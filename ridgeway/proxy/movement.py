"""The orders that make one array of another's shards: collected target shard by target shard, then sent.

Bytes go from executor to executor: the head names each transfer by a token, orders the shard's holder to send it and
promises it to the receiver.
"""

from collections.abc import Callable
from typing import Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.protocol.shardings import Shape
from ridgeway.proxy.arrays import Array, BufferGroup
from ridgeway.proxy.executables import DEFAULT_MEMORY_KIND
from ridgeway.proxy.resharding import Piece, Plan


class _Receiver:
    """What one executor has to make."""

    def __init__(self) -> None:
        self.copies: list[Any] = []
        """[target device, source group, source device]: a whole shard that is here"""
        self.assemblies: list[Any] = []
        """see `worker.buffer_orders.BufferOrders.copy`"""


class Movement:
    """Makes ``target`` of ``source``'s shards, all of which are on living executors."""

    def __init__(
        self, manager: ResourceManager, source: Array, target: Array, reuse: bool, new_token: Callable[[], int]
    ):
        self._manager = manager
        self._source = source
        self._target = target
        self._reuse = reuse and memory_kind_of(source) == memory_kind_of(target)
        self._new_token = new_token
        self._receivers: dict[ExecutorLink, _Receiver] = {}
        self._assemblies: dict[Any, list[Any]] = {}
        self._sends: dict[tuple[ExecutorLink, int, int], list[Any]] = {}
        self._tokens: dict[Any, int] = {}

    def send(self, plan: Plan, new_group: Callable[[tuple[ExecutorLink, ...]], BufferGroup]) -> None:
        """Send all orders and bind the target."""
        shared = [self._add(index, device, plan[index]) for index, device in enumerate(self._target.devices)]
        groups = {group for group in shared if group is not None}
        if self._receivers:
            made = new_group(tuple(self._receivers))
            for (sender, group, device), targets in self._sends.items():
                sender.send(["send", group, device, targets])
            for executor, work in self._receivers.items():
                order = ["copy", made.number, self._target.sharding.memory_kind, work.copies, work.assemblies]
                executor.send(order)
            groups.add(made)
            shared = [made if group is None else group for group in shared]
        if len(groups) == 1:
            self._target.bind(groups.pop())
        else:
            self._target.bind(tuple(group for group in shared if group is not None))

    def _add(self, index: int, device: int, pieces: tuple[Piece, ...]) -> BufferGroup | None:
        """Have the shard at ``index`` made; returns the group if it is shared with the source instead."""
        executor = self._manager.executor_of_device(device)
        assert executor is not None
        chosen = [self._choose(piece.candidates, device) for piece in pieces]
        whole = len(pieces) == 1 and pieces[0].taken is None and pieces[0].where is None
        if whole:
            from_device, group = self._source.devices[chosen[0]], self._source.group_at(chosen[0])
            if self._reuse and from_device == device:
                return group
            if executor_with(group, from_device, self._manager) is executor:
                self._receiver(executor).copies.append([device, group.number, from_device])
                return None
        key = (executor, tuple(chosen), pieces)
        assembly = self._assemblies.get(key)
        if assembly is not None:
            assembly[0].append(device)  # a replica on the same executor needs no bytes of its own
            return None
        parts = [self._part(executor, position, piece) for position, piece in zip(chosen, pieces, strict=True)]
        assembly = self._assemblies[key] = [[device], self._source.kind, self._shape(index, whole), parts]
        self._receiver(executor).assemblies.append(assembly)
        return None

    def _shape(self, index: int, whole: bool) -> Shape | None:
        return None if whole else self._target.sharding.shard_shapes(self._target.shape)[index]

    def _part(self, executor: ExecutorLink, position: int, piece: Piece) -> list[Any]:
        from_device, group = self._source.devices[position], self._source.group_at(position)
        sender = executor_with(group, from_device, self._manager)
        if sender is executor:
            return [piece.where, piece.taken, group.number, from_device, None, None]
        token = self._new_token()
        self._sends.setdefault((sender, group.number, from_device), []).append(
            [token, executor.transfer_host, executor.transfer_port, executor.number, piece.taken]
        )
        return [piece.where, None, None, None, token, sender.number]

    def _choose(self, candidates: tuple[int, ...], device: int) -> int:
        """The replica to read: on the device itself, or at least on its host or in its slice; else the load is
        spread."""
        if len(candidates) == 1:
            return candidates[0]
        topology = self._manager.topology
        slot = topology.slot_of_device(device)

        def distance(position: int) -> int:
            other = self._source.devices[position]
            if other == device:
                return 0
            other_slot = topology.slot_of_device(other)
            if other_slot == slot:
                return 1
            return 2 if topology.slice_of_slot(other_slot) == topology.slice_of_slot(slot) else 3

        nearest = min(map(distance, candidates))
        equals = [position for position in candidates if distance(position) == nearest]
        return equals[slot % len(equals)]

    def _receiver(self, executor: ExecutorLink) -> _Receiver:
        receiver = self._receivers.get(executor)
        if receiver is None:
            receiver = self._receivers[executor] = _Receiver()
        return receiver


def memory_kind_of(array: Array) -> str:
    """Where an array's shards lie."""
    return array.sharding.memory_kind or DEFAULT_MEMORY_KIND


def executor_with(group: BufferGroup, device: int, manager: ResourceManager) -> ExecutorLink:
    """The executor that has a group's shard on a device."""
    slot = manager.topology.slot_of_device(device)
    return next(executor for executor in group.executors if executor.slot == slot)
