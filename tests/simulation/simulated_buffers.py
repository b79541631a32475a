"""The buffers of an executor process: what they hold, how they come and go, and what is said when they cannot."""

import asyncio
from collections.abc import Callable
from typing import Any

from simulated_network import Connection, Machine, Process
from simulated_runtime import Execution, GenerationFailure, Pending, Promise, Runtime, Shard, Waiters
from simulated_xla import BROKEN

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.settings import Settings


class BufferHolder(Process):
    """Orders about buffers, as `ridgeway.worker.buffer_orders` carries them out."""

    def __init__(self, machine: Machine, number: int, per_host: int, settings: Settings, cluster: Any):
        super().__init__(machine, f"executor {number}")
        self.number = number
        self.settings = settings
        self.cluster = cluster
        self.connection: Connection | None = None
        self.promises: dict[int, Promise] = {}
        self.lost_peers: dict[int, Status] = {}
        self.pushing = 0
        """shards that are on their way to other executors"""
        self.store: dict[int, dict[int, Shard]] = {}
        self.runtime = Runtime(0, [0], per_host, 0, None)
        self.waiters = Waiters()

    def send(self, message: list[Any], attached: tuple[bytes, ...] = ()) -> None:
        if self.alive and self.connection is not None:
            self.connection.send(message, attached)

    async def _pause(self, seconds: float) -> None:
        """Let time pass; while the process is stopped it stands still."""
        if self.machine.slowness != 1.0 or self.stopped:
            await asyncio.sleep(seconds * self.machine.slowness)
            while self.stopped:
                await asyncio.sleep(0.05)

    def describe(self, status: Status, runtime: Runtime) -> Status:
        """For a value that was an error before."""
        if isinstance(status, GenerationFailure) and status.generation == runtime.generation:
            return runtime.aborted or status
        return status

    def _broken(self, runtime: Runtime) -> Status:
        """For what a collective itself ended in."""
        return runtime.aborted or GenerationFailure(BROKEN.code, BROKEN.message, runtime.generation)

    def _error_fields(self, status: Status, runtime: Runtime) -> list[Any]:
        if isinstance(status, GenerationFailure) and status.generation > 0:
            return [int(status.code), status.message, True, status.generation]
        return [int(status.code), status.message, False, runtime.generation]

    def _reply_error(self, request: int, status: Status, runtime: Runtime) -> None:
        self.send(["error", request, *self._error_fields(status, runtime)])

    def _promise(self, token: int) -> Promise:
        return self.promises.setdefault(token, Promise())

    def _claim(self, token: int, source: int | None) -> Promise:
        promise = self._promise(token)
        promise.claimed, promise.source, promise.claimed_at = True, source, self.world.now
        if source in self.lost_peers:
            promise.resolve(self.lost_peers[source])
        if promise.value is not None:
            del self.promises[token]
        return promise

    def resolve_promise(self, token: int, value: int | Status) -> None:
        promise = self._promise(token)
        if promise.claimed:
            del self.promises[token]
        promise.resolve(value)

    def _expire_promises(self) -> None:
        patience = self.settings.transfer_timeout_seconds
        for token, promise in list(self.promises.items()):
            if promise.claimed and self.world.now - promise.claimed_at >= patience:
                text = f"bytes that were announced did not come within {patience} s"
                self.resolve_promise(token, statuses.deadline_exceeded(text))

    def _aside_data(self, token: int, attached: list[bytes]) -> None:
        self.resolve_promise(token, int.from_bytes(attached[0], "little"))

    def _aside_data_failed(self, token: int, code: int, message: str, attached: list[bytes]) -> None:
        self.resolve_promise(token, Status(Code(code), message))

    def _aside_peer_lost(self, executor: int, code: int, message: str, attached: list[bytes]) -> None:
        self.lost_peers[executor] = Status(Code(code), message)
        for token, promise in list(self.promises.items()):
            if promise.claimed and promise.source == executor:
                self.resolve_promise(token, Status(Code(code), message))

    def _group(self, number: int) -> dict[int, Shard]:
        group = self.store.get(number)
        if group is None:
            self.world.violation(f"buffer group {number} is not on {self.name}")
            raise AssertionError
        return group

    async def _shard(self, group: int, device: int) -> "int | Pending":
        shards = self._group(group)
        shard = shards[device]
        if isinstance(shard, Promise):
            if shard.value is None:
                arrived: asyncio.Future[None] = self.world.loop.create_future()
                shard.when_done(lambda: arrived.done() or arrived.set_result(None))
                try:
                    await asyncio.wait_for(arrived, self.settings.transfer_timeout_seconds)
                except TimeoutError:
                    seconds = self.settings.transfer_timeout_seconds
                    shard.value = statuses.deadline_exceeded(
                        f"bytes that were announced did not come within {seconds} s"
                    )
                await self._pause(0.0)
            assert shard.value is not None
            shards[device] = shard = shard.value
        if isinstance(shard, Status):
            raise shard.error()
        return shard

    def _value_of(self, work: Execution) -> int | Status:
        """What an execution gave, told as this executor would tell it now."""
        if work.value is BROKEN:
            return self._broken(work.runtime)
        assert work.value is not None
        return self.describe(work.value, work.runtime) if isinstance(work.value, Status) else work.value

    def _read(self, group: int, device: int, deliver: Callable[[Any, Status | None], None]) -> None:
        """Deliver a shard's bytes when they are known, whatever the next orders do to the shard."""
        shard = self._group(group)[device]
        if isinstance(shard, Execution):
            work, finish = shard, self.waiters.register(deliver)
            work.when_done(lambda: _hand_over(self._value_of(work), finish))
        elif isinstance(shard, Pending):
            promise = shard
            promise.when_done(lambda: _hand_over(promise.value, deliver))
        else:
            _hand_over(shard, deliver)

    def _order_free(self, groups: list[int], attached: list[bytes]) -> None:
        for group in groups:
            self.store.pop(group, None)

    def _order_put(self, group: int, kind: int, memory_kind: Any, parts: list[Any], attached: list[bytes]) -> None:
        shards: dict[int, Shard] = {}
        for devices, _, _, index, token in parts:
            value = int.from_bytes(attached[index], "little") if index is not None else self._claim(token, None)
            for device in devices:
                shards[device] = value
        self.store[group] = shards

    def _order_copy(
        self, group: int, memory_kind: Any, copies: list[Any], assemblies: list[Any], attached: list[bytes]
    ) -> None:
        shards: dict[int, Shard] = {}
        for target, source_group, source_device in copies:
            shards[target] = self._group(source_group)[source_device]
        for devices, _, _, ((_, _, source_group, source_device, token, source_executor),) in assemblies:
            if token is not None:
                promise = self._claim(token, source_executor)
            else:
                promise = Promise()
                self._read(source_group, source_device, _resolver(promise))
            shards |= dict.fromkeys(devices, promise)
        self.store[group] = shards

    def _order_send(self, group: int, device: int, targets: list[Any], attached: list[bytes]) -> None:
        self._read(group, device, lambda value, error: self._push(error if error is not None else value, targets))

    def _push(self, value: int | Status, targets: list[Any]) -> None:
        for token, _, port, executor, _ in targets:
            delay = self.world.random.uniform(0.001, 0.02)
            self.pushing += 1
            self.after(delay, self._deliver, value, token, port, executor, self.world.now)

    def _deliver(self, value: int | Status, token: int, port: int, executor: int, since: float) -> None:
        target = self.cluster.executors.get(port)
        if (
            target is not None
            and not self.world.can_reach(self.machine, target.machine)
            and self.world.random.random() < 0.1
        ):
            self.pushing -= 1
            return  # swallowed by the network, and nobody is told
        if target is not None and target.alive and self.world.can_reach(self.machine, target.machine):
            self.pushing -= 1
            target.run(target.resolve_promise, token, value)
        elif target is not None and target.alive and self.world.now - since < self.settings.transfer_timeout_seconds:
            self.after(0.05, self._deliver, value, token, port, executor, since)
        else:
            self.pushing -= 1
            failed = statuses.data_loss(f"bytes could not be sent to 10.0.0.1:{port}")
            self.send(["transfer_failed", token, int(failed.code), failed.message, executor])

    def _order_fetch(self, request: int, group: int, device: int, strides: Any, attached: list[bytes]) -> None:
        runtime = self.runtime

        def deliver(value: Any, error: Status | None) -> None:
            if error is not None:
                self._reply_error(request, error, runtime)
            else:
                self.send(["reply", request], (value.to_bytes(8, "little"),))

        self._read(group, device, deliver)

    def _order_ready(self, request: int, groups: list[int], attached: list[bytes]) -> None:
        runtime = self.runtime
        shards = [(number, device) for number in groups for device in self._group(number)]

        left = len(shards)

        def arrived(_: Any, error: Status | None) -> None:
            nonlocal left
            if left <= 0:
                return
            left = 0 if error is not None else left - 1
            if error is not None:
                self._reply_error(request, error, runtime)
            elif left == 0:
                self.send(["reply", request])

        for number, device in shards:
            self._read(number, device, arrived)


def _hand_over(value: int | Status | None, deliver: Callable[[Any, Status | None], None]) -> None:
    assert value is not None
    if isinstance(value, Status):
        deliver(None, value)
    else:
        deliver(value, None)


def _resolver(promise: Promise) -> Callable[[Any, Status | None], None]:
    return lambda value, error: promise.resolve(value if error is None else error)
