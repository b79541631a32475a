"""Orders about buffers: bring bytes in, move them, answer for them."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import buffers, device_runtime
from ridgeway.worker.device_runtime import Runtime
from ridgeway.worker.promises import Promise
from ridgeway.worker.resharding import Assembly, cut, reinterpret
from ridgeway.worker.waiting import Deliver

if TYPE_CHECKING:
    from ridgeway.worker.executor import Executor


class BufferOrders:
    """Handlers by order name, for one executor."""

    def __init__(self, executor: "Executor"):
        self._executor = executor
        self._store = executor.store
        self.handlers: dict[str, Callable[..., None]] = {
            "free": self.free, "put": self.put, "copy": self.copy, "bitcast": self.bitcast, "send": self.send,
            "fetch": self.fetch, "ready": self.ready,
        }  # fmt: skip

    def free(self, groups: list[int], attached: list[bytearray]) -> None:
        """Forget groups."""
        self._store.free(groups)

    def put(self, group: int, kind: int, memory_kind: str | None, parts: list[Any], attached: list[bytearray]) -> None:
        """Make a group of host bytes. ``parts``: [[devices], shape, strides or None, index of the attached buffer or
        None, token of a promise or None]."""
        shards: dict[int, Any] = {}
        for devices, shape, strides, index, token in parts:
            decode = _decoder(kind, tuple(shape), None if strides is None else tuple(strides))
            if index is not None:
                try:
                    shard: Any = buffers.HostShard(decode(attached[index]), memory_kind)
                except StatusError as error:
                    shard = error.status
            else:
                shard = buffers.PromisedShard(self._executor.promises.claim(token, None), decode, memory_kind)
            for device in devices:
                shards[device] = shard
        self._store.set(group, buffers.shard_group(shards, memory_kind=memory_kind))

    def copy(
        self, group: int, memory_kind: str | None, copies: list[Any], assemblies: list[Any], attached: list[bytearray]
    ) -> None:
        """Make a group of other shards.

        ``copies``: [target device, source group, source device], whole shards that are here.
        ``assemblies``: [[target devices], dtype kind, shape or None, pieces], shards made of pieces: [where it goes or
        None for the whole shard, what is taken of the source or None for all of it, source group, source device, token,
        executor]; of a piece that another executor sends only the token and that executor are given.
        """
        runtime = self._executor.runtime
        shards: dict[int, Any] = {}
        for target, source_group, source_device in copies:
            try:
                source = self._store.peek(source_group, source_device)
                if isinstance(source, (buffers.HostShard, buffers.PromisedShard)):
                    shards[target] = source.with_memory_kind(memory_kind)
                elif memory_kind in buffers.HOST_MEMORY_KINDS:
                    shards[target] = self._to_host(source_group, source_device, memory_kind)
                else:
                    source = self._store.shard(source_group, source_device, runtime)
                    shards[target] = runtime.copy(source, target, memory_kind)
            except Exception as error:
                shards[target] = self._executor.describe(error, runtime)
        readers: dict[tuple[int, int], list[tuple[Any, Any, Assembly]]] = {}
        for devices, kind, shape, pieces in assemblies:
            assembly = Assembly(tuple(shape or ()), dtypes.dtype_of_kind(kind), len(pieces))
            for where, taken, source_group, source_device, token, source_executor in pieces:
                if token is None:
                    readers.setdefault((source_group, source_device), []).append((where, taken, assembly))
                else:
                    promise = self._executor.promises.claim(token, source_executor)
                    promise.when_resolved(lambda value, where=where, assembly=assembly: assembly.place(where, value))
            shards |= dict.fromkeys(devices, buffers.PromisedShard(assembly.promise, _as_is, memory_kind))
        for (source_group, source_device), places in readers.items():
            self.read(source_group, source_device, _placer(places))
        made = buffers.shard_group(shards, runtime, memory_kind)
        made.spans = any(self._store.spans(source_group) for _, source_group, _ in copies)
        self._store.set(group, made)

    def _to_host(self, group: int, device: int, memory_kind: str | None) -> buffers.PromisedShard:
        """A shard's bytes in memory of this process, once they are computed."""
        promise = Promise()

        def deliver(data: Any, error: Status | None) -> None:
            try:
                # What came is a view of the client's memory, which would keep a whole generation's client alive.
                promise.resolve(error or np.array(data, copy=True))
            except MemoryError as problem:
                promise.resolve(statuses.resource_exhausted(f"host memory: {problem}"))

        self.read(group, device, deliver, bulk=True)
        return buffers.PromisedShard(promise, _as_is, memory_kind)

    def bitcast(
        self, group: int, kind: int, memory_kind: str | None, parts: list[Any], attached: list[bytearray]
    ) -> None:
        """Make a group of the same bytes as another dtype. ``parts``: [device, shape, source group]."""
        dtype = dtypes.dtype_of_kind(kind)
        shards: dict[int, Any] = {}
        for device, shape, source_group in parts:
            promise = Promise()

            def deliver(data: Any, error: Status | None, shape: Any = shape, promise: Any = promise) -> None:
                try:
                    promise.resolve(error or reinterpret(data, dtype, tuple(shape)))
                except ValueError as problem:
                    promise.resolve(statuses.invalid_argument(f"bitcast: {problem}"))

            shards[device] = buffers.PromisedShard(promise, _as_is, memory_kind)
            self.read(source_group, device, deliver)
        self._store.set(group, buffers.shard_group(shards, memory_kind=memory_kind))

    def send(self, group: int, device: int, targets: list[Any], attached: list[bytearray]) -> None:
        """Send a shard's bytes to other executors. ``targets``: [token, host, port, executor, the part to send or
        None]."""
        self.read(group, device, lambda data, error: self._push(data, error, targets))

    def _push(self, data: np.ndarray | None, error: Status | None, targets: list[Any]) -> None:
        transfers = self._executor.transfers
        for token, host, port, target, taken in targets:

            def failed(broken: OSError, token: int = token, host: str = host, target: int = target) -> None:
                # Either the target is lost, which the head tells everybody, or the connection between the two is.
                message = f"bytes could not be sent to {host}: {broken}"
                try:
                    self._executor.link.send(["transfer_failed", token, int(Code.DATA_LOSS), message, target])
                except LinkClosed:
                    pass  # the reader sees it too, and ends the process

            if error is not None or data is None:
                transfers.fail(host, port, token, error or statuses.internal("no bytes"), failed)
            else:
                transfers.push(host, port, token, cut(data, taken), failed)

    def read(self, group: int, device: int, deliver: Deliver, bulk: bool = False) -> None:
        """Deliver a shard's bytes when they are known, whatever the next orders do to the shard. ``bulk``: many come
        at once, and nothing that others wait for shall queue behind them."""
        executor = self._executor
        runtime = executor.runtime
        try:
            shard = self._store.peek(group, device)
            if isinstance(shard, Status):
                deliver(None, shard)
            elif isinstance(shard, buffers.PromisedShard):
                shard.promise.when_resolved(_decoded(shard.decode, deliver))
            elif isinstance(shard, buffers.HostShard):
                data = shard.data
                executor.waiters.submit(lambda: data, deliver)
            else:
                held = self._held(self._store.shard(group, device, runtime), device, runtime)
                array = None if isinstance(held, np.ndarray) else held
                spans = array is not None and self._store.spans(group)
                wait = (lambda: held) if array is None else (lambda: device_runtime.to_host(held))
                executor.waiters.submit(wait, deliver, spans, bulk, array)
        except Exception as error:
            deliver(None, executor.describe(error, runtime))

    def _held(self, shard: Any, device: int, runtime: Runtime) -> Any:
        """Bytes that stay readable when the shard is donated."""
        if shard.is_ready():
            return device_runtime.to_host(shard)
        return runtime.copy(shard, device, device_runtime.memory_kind_of(shard))

    def fetch(
        self, request: int, group: int, device: int, strides: list[int] | None, attached: list[bytearray]
    ) -> None:
        """Answer with a shard's bytes, laid out with ``strides``."""
        answer = self._executor.answer(request, self._executor.runtime, attach=True)
        layout = None if strides is None else tuple(strides)

        def deliver(data: Any, error: Status | None) -> None:
            try:
                encoded = None if error is not None else dtypes.encode_host_buffer(data, layout)
            except StatusError as problem:
                answer(None, problem.status)
            else:
                answer(encoded, error)

        self.read(group, device, deliver)

    def ready(self, request: int, groups: list[int], attached: list[bytearray]) -> None:
        """Answer when every shard of the groups is computed."""
        executor = self._executor
        runtime = executor.runtime
        arrays: list[Any] = []
        promised: list[buffers.PromisedShard] = []
        try:
            for number in groups:
                group = self._store.group(number)
                if group.array is not None and group.shards is None:
                    arrays.append(group.array)
                    continue
                assert group.shards is not None
                for device, shard in group.shards.items():
                    if isinstance(shard, buffers.PromisedShard):
                        promised.append(shard)
                    elif not isinstance(shard, buffers.HostShard):
                        arrays.append(self._store.shard(number, device, runtime))
        except Exception as error:
            executor.reply_error(request, executor.describe(error, runtime), runtime)
            return

        def wait() -> None:
            for array in arrays:
                try:
                    array.block_until_ready()
                except Exception:
                    if not device_runtime.is_deleted(array):  # donated since: whoever took it reports its errors
                        raise

        answer = executor.answer(request, runtime)

        def computed(_: Any, error: Status | None) -> None:
            if error is not None:
                answer(None, error)
            else:
                when_all(promised, lambda error: answer(None, error))

        if arrays:
            executor.waiters.submit(wait, computed, any(self._store.spans(number) for number in groups))
        else:
            computed(None, None)


def _placer(places: list[tuple[Any, Any, Assembly]]) -> Deliver:
    def deliver(data: Any, error: Status | None) -> None:
        for where, taken, assembly in places:
            assembly.place(where, error or cut(data, taken))

    return deliver


def _decoded(decode: Callable[[Any], np.ndarray], deliver: Deliver) -> Callable[[Any], None]:
    def resolved(value: Any) -> None:
        if isinstance(value, Status):
            deliver(None, value)
            return
        try:
            data = decode(value)
        except StatusError as error:
            deliver(None, error.status)
        else:
            deliver(data, None)

    return resolved


def when_all(shards: list[buffers.PromisedShard], done: Callable[[Status | None], None]) -> None:
    """``done(None)`` when the bytes of all are here, or the first error; on the thread that resolves the last one.

    An order may name thousands of shards, so none is looked at from within another one's callback.
    """
    lock = threading.Lock()
    left = len(shards)

    def one(_: Any, error: Status | None) -> None:
        nonlocal left
        with lock:
            if left == 0:
                return  # an error was enough
            left = 0 if error is not None else left - 1
            if left > 0:
                return
        done(error)

    if not shards:
        done(None)
    for shard in shards:
        shard.promise.when_resolved(_decoded(shard.decode, one))


def _decoder(kind: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Callable[[Any], np.ndarray]:
    return lambda data: dtypes.decode_host_buffer(data, kind, shape, strides)


def _as_is(data: np.ndarray) -> np.ndarray:
    return data
