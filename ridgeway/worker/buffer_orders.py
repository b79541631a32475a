"""Orders about buffers: bring bytes in, move them, answer for them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status, StatusError
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import buffers, device_runtime

if TYPE_CHECKING:
    from ridgeway.worker.executor import Executor


class BufferOrders:
    """Handlers by order name, for one executor."""

    def __init__(self, executor: "Executor"):
        self._executor = executor
        self._store = executor.store
        self.handlers: dict[str, Callable[..., None]] = {
            "free": self.free, "put": self.put, "copy": self.copy, "send": self.send, "fetch": self.fetch, "ready": self.ready,
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
        self._store.set(group, buffers.shard_group(shards))

    def copy(self, group: int, memory_kind: str | None, parts: list[Any], attached: list[bytearray]) -> None:
        """Make a group of other shards. ``parts``: [target device, source group or None, source device, token of a
        promise or None, the executor that keeps it]."""
        runtime = self._executor.runtime
        shards: dict[int, Any] = {}
        for target, source_group, source_device, token, source_executor in parts:
            if token is not None:
                promise = self._executor.promises.claim(token, source_executor)
                shards[target] = buffers.PromisedShard(promise, _as_is, memory_kind)
                continue
            try:
                source = self._store.shard(source_group, source_device, runtime)
                shards[target] = runtime.copy(source, target, memory_kind)
            except Exception as error:
                shards[target] = self._executor.describe(error, runtime)
        self._store.set(group, buffers.shard_group(shards, runtime))

    def send(self, group: int, device: int, targets: list[Any], attached: list[bytearray]) -> None:
        """Send a shard's bytes to other executors. ``targets``: [token, host, port]."""
        executor = self._executor
        try:
            shard = self._held(group, device)
        except Exception as error:
            status = executor.describe(error, executor.runtime)
            executor.waiters.submit(lambda: None, lambda _, __: self._push(None, status, targets))
            return
        executor.waiters.submit(lambda: np.asarray(shard), lambda data, error: self._push(data, error, targets))

    def _push(self, data: np.ndarray | None, error: Status | None, targets: list[Any]) -> None:
        transfers = self._executor.transfers
        for token, host, port in targets:
            try:
                if error is not None or data is None:
                    transfers.fail(host, port, token, error or statuses.internal("no bytes"))
                else:
                    transfers.push(host, port, token, data)
            except OSError as broken:
                # Either the target is lost, which the head tells everybody, or the connection between the two is.
                failed = statuses.data_loss(f"bytes could not be sent to {host}:{port}: {broken}")
                try:
                    self._executor.link.send(["transfer_failed", token, int(failed.code), failed.message])
                except LinkClosed:
                    return

    def _held(self, group: int, device: int) -> Any:
        """A shard whose bytes can be read later, whatever the next orders donate."""
        runtime = self._executor.runtime
        shard = self._store.shard(group, device, runtime)
        if shard.is_ready():
            return np.asarray(shard)
        return runtime.copy(shard, device, device_runtime.memory_kind_of(shard))

    def fetch(
        self, request: int, group: int, device: int, strides: list[int] | None, attached: list[bytearray]
    ) -> None:
        """Answer with a shard's bytes, laid out with ``strides``."""
        executor = self._executor
        runtime = executor.runtime
        try:
            held = self._held(group, device)
        except Exception as error:
            executor.reply_error(request, executor.describe(error, runtime), runtime)
            return

        def encode() -> bytes:
            return dtypes.encode_host_buffer(np.asarray(held), None if strides is None else tuple(strides))

        executor.waiters.submit(encode, executor.answer(request, runtime, attach=True))

    def ready(self, request: int, groups: list[int], attached: list[bytearray]) -> None:
        """Answer when every shard of the groups is computed."""
        executor = self._executor
        runtime = executor.runtime
        arrays: list[Any] = []
        try:
            for number in groups:
                group = self._store.group(number)
                if group.array is not None and group.shards is None:
                    arrays.append(group.array)
                else:
                    assert group.shards is not None
                    arrays += [self._store.shard(number, device, runtime) for device in list(group.shards)]
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

        executor.waiters.submit(wait, executor.answer(request, runtime))


def _decoder(kind: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Callable[[Any], np.ndarray]:
    return lambda data: dtypes.decode_host_buffer(data, kind, shape, strides)


def _as_is(data: np.ndarray) -> np.ndarray:
    return data
