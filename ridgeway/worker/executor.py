"""The executor: the process that owns a host's devices and runs the head's orders, one after the other.

Three kinds of thread: the *reader* takes messages from the head, acts at once on those that stand outside the
sequence (abort, bytes for a promise) and queues the rest; the *order thread* runs orders in sequence and never
answers from memory what it can start asynchronously; *waiters* wait for results and send replies.

Orders and their fields are described in `ridgeway.worker.orders`.
"""

import os
import queue
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ridgeway import settings as runtime_settings
from ridgeway.cluster.processes import memory_bytes
from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.transport import authentication, blocking_link
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import buffers, device_runtime, program_source
from ridgeway.worker.device_runtime import EnteringGeneration, Runtime
from ridgeway.worker.process_identity import hello_versions
from ridgeway.worker.transfers import TransferClient, TransferServer

WAITER_THREADS = 16
EXIT_HEAD_GONE = 3
EXIT_REFUSED = 2


class Executor:
    """State of one executor process."""

    def __init__(self, link: blocking_link.BlockingLink, arguments: dict[str, Any]):
        self.link = link
        self.settings = runtime_settings.Settings(**arguments["settings"])
        self.address: str = arguments["address"]
        self.devices_per_host: int = arguments["devices_per_host"]
        self.first_device = 0
        self.promises = buffers.PromiseTable()
        self.store = buffers.BufferStore(self.settings.transfer_timeout_seconds)
        self.transfers = TransferClient(arguments["secret"], self.settings.transfer_timeout_seconds)
        self.server = TransferServer(
            self.address, arguments["secret"], self.promises, self.settings.handshake_timeout_seconds
        )
        self.sources: dict[str, program_source.ProgramSource] = {}
        self.orders: queue.SimpleQueue[tuple[list[Any], list[bytearray]]] = queue.SimpleQueue()
        self.waiters = ThreadPoolExecutor(WAITER_THREADS, thread_name_prefix="waiter")
        self.completions: queue.SimpleQueue[tuple[int, Any, Runtime, str, int | None]] = queue.SimpleQueue()
        self.dispatched = 0
        self.completed = 0
        self.runtime = device_runtime.runtime_alone(0, self.devices_per_host)
        self.entering: EnteringGeneration | None = None
        self.services: dict[int, queue.SimpleQueue[str]] = {}
        self.cancelled: dict[int, Status] = {}
        """generations that were aborted before this executor entered them"""
        self.lock = threading.Lock()
        self.received = 0

    # ---- threads

    def run(self) -> int:
        """Serve until the head is gone; returns the exit code."""
        for target, name in ((self._orders, "orders"), (self._completions, "completions"), (self._heartbeats, "heartbeats")):
            threading.Thread(target=target, name=name, daemon=True).start()
        try:
            while True:
                message, attached = self.link.receive()
                aside = getattr(self, f"aside_{message[0]}", None)
                if aside is not None:
                    aside(*message[1:], attached=attached)
                else:
                    self.received += 1
                    self.orders.put((message, attached))
        except LinkClosed:
            return EXIT_HEAD_GONE

    def _orders(self) -> None:
        while True:
            message, attached = self.orders.get()
            try:
                getattr(self, f"order_{message[0]}")(*message[1:], attached=attached)
            except LinkClosed:
                return
            except BaseException:
                # Head and executor no longer agree on what there is here: nothing this process holds can be trusted.
                traceback.print_exc()
                os._exit(70)
            self.dispatched += 1

    def _heartbeats(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self.heartbeat()
            except LinkClosed:
                return
            pause.wait(self.settings.heartbeat_interval_seconds)

    def heartbeat(self) -> None:
        """Tell the head that this process lives, and how far it is."""
        outstanding = self.dispatched < self.received or not self.completions.empty() or self.running is not None
        self.link.send(["heartbeat", self.dispatched, self.completed, outstanding, memory_bytes(os.getpid()), self.store.size])

    running: str | None = None

    def _completions(self) -> None:
        while True:
            execution, token, runtime, name, request = self.completions.get()
            self.running = name
            try:
                token.block_until_ready()
                if request is not None:
                    self.reply(request)
            except LinkClosed:
                return
            except Exception as error:
                self._execution_failed(execution, self._describe(error, runtime), runtime)
                if request is not None:
                    self._reply_error_if_head(request, error, runtime)
            self.running = None
            self.completed += 1

    def _execution_failed(self, execution: int, status: Status, runtime: Runtime) -> None:
        try:
            self.link.send(["execution_failed", execution, *self._error_fields(status, runtime)])
        except LinkClosed:
            pass

    # ---- errors

    def _describe(self, error: BaseException, runtime: Runtime) -> Status:
        """The status of an exception that came from ``runtime``; the first cause wins over its consequences."""
        if runtime.aborted is not None:
            return runtime.aborted
        if isinstance(error, StatusError):
            return error.status
        text = str(error)
        if statuses.is_collective_failure(text):
            return Status(Code.ABORTED, f"collective failed: {text[:500]}")
        return statuses.classify_runtime_error(text)

    def _error_fields(self, status: Status, runtime: Runtime) -> list[Any]:
        collective = status.code is Code.ABORTED and runtime.generation > 0
        return [int(status.code), status.message, collective, runtime.generation]

    def reply(self, request: int, *fields: Any, attached: tuple = ()) -> None:
        """Answer a request."""
        self.link.send(["reply", request, *fields], attached)

    def reply_error(self, request: int, error: BaseException, runtime: Runtime) -> None:
        """Answer a request with an error."""
        self.link.send(["error", request, *self._error_fields(self._describe(error, runtime), runtime)])

    # ---- outside the sequence

    def aside_data(self, token: int, attached: list[bytearray]) -> None:
        self.promises.resolve(token, attached[0])

    def aside_data_failed(self, token: int, code: int, message: str, attached: list[bytearray]) -> None:
        self.promises.resolve(token, Status(Code(code), message))

    def aside_peer_lost(self, executor: int, code: int, message: str, attached: list[bytearray]) -> None:
        self.promises.peer_lost(executor, Status(Code(code), message))

    def aside_service(self, generation: int, address: str, attached: list[bytearray]) -> None:
        self._service(generation).put(address)

    def _service(self, generation: int) -> "queue.SimpleQueue[str]":
        with self.lock:
            return self.services.setdefault(generation, queue.SimpleQueue())

    def aside_abort(self, generation: int, code: int, message: str, attached: list[bytearray]) -> None:
        cause = Status(Code(code), message)
        with self.lock:
            self.cancelled[generation] = cause
            entering, runtime = self.entering, self.runtime
        self._service(generation).put("")
        if entering is not None and entering.generation == generation:
            entering.abort(cause)
        if runtime.generation == generation:
            runtime.abort(cause, self._heartbeat_or_nothing)

    def _heartbeat_or_nothing(self) -> None:
        try:
            self.heartbeat()
        except LinkClosed:
            pass

    # ---- orders: generations

    def order_assign(self, slot: int, first_device: int, attached: list[bytearray]) -> None:
        self.first_device = first_device
        self._leave()

    def _leave(self) -> None:
        """Bring everything to host memory and go on alone."""
        old = self.runtime
        lost = self.store.drain(old, lambda error: self._describe(error, old))
        old.close()
        with self.lock:
            self.runtime = device_runtime.runtime_alone(self.first_device, self.devices_per_host)
        if lost:
            print(f"leaving generation {old.generation}: {lost} shards lost", flush=True)

    def order_leave_generation(self, request: int, generation: int, attached: list[bytearray]) -> None:
        if self.runtime.generation == generation:
            self._leave()
        with self.lock:
            self.services.pop(generation, None)
            self.cancelled.pop(generation, None)
        self.reply(request)

    def order_enter_generation(
        self, request: int, generation: int, rank: int, first_devices: list[int], attached: list[bytearray]
    ) -> None:
        self._leave()
        entering = EnteringGeneration(
            generation, rank, first_devices, self.devices_per_host, self.settings.generation_create_timeout_seconds
        )
        with self.lock:
            self.entering = entering
            cancelled = self.cancelled.get(generation)
        try:
            if cancelled is not None:
                raise cancelled.error()
            try:
                service = self._service(generation).get(timeout=self.settings.generation_create_timeout_seconds)
            except queue.Empty:
                raise statuses.deadline_exceeded("the head named no key-value service in time").error() from None
            if not service:
                raise self.cancelled[generation].error()
            runtime = entering.run(service, self.address)
        except Exception as error:
            with self.lock:
                self.entering = None
            status = entering.aborted or (error.status if isinstance(error, StatusError) else Status(Code.ABORTED, str(error)[:300]))
            self.link.send(["error", request, int(status.code), status.message, True, generation])
            return
        with self.lock:
            self.entering = None
            self.runtime = runtime
            cancelled = self.cancelled.get(generation)
        if cancelled is not None:
            runtime.abort(cancelled, self._heartbeat_or_nothing)
        self.reply(request)

    # ---- orders: programs

    def order_load(self, *fields: Any, attached: list[bytearray]) -> None:
        source = program_source.from_fields(list(fields), bytes(attached[0]))
        self.sources[source.program] = source

    def order_unload(self, programs: list[str], attached: list[bytearray]) -> None:
        for program in programs:
            self.sources.pop(program, None)
            self.runtime.programs.pop(program, None)

    def order_execute(
        self, execution: int, program: str, arguments: list[Any], results: list[int], kept: list[int],
        attached: list[bytearray], request: int | None = None,
    ) -> None:
        runtime = self.runtime
        source = self.sources[program]
        local = tuple(d for d in source.devices if d in runtime.local)
        try:
            if runtime.aborted is not None and len(source.devices) > len(local):
                raise runtime.aborted.error()
            if not runtime.has_devices(source.devices):
                raise Status(Code.ABORTED, "the generation of this program does not stand").error()
            loaded = runtime.load(source)
            arrays = [
                self.store.argument(argument, index, loaded, runtime)
                if type(argument) is int
                else loaded.assemble(index, self._mixed(argument, local, runtime))
                for index, argument in enumerate(arguments)
            ]
            for index in kept:
                arrays[index] = loaded.assemble(
                    index, [runtime.copy(s, d) for s, d in zip(device_runtime.shards_of(arrays[index]), local, strict=True)]
                )
            token, outputs = loaded.execute(arrays)
        except Exception as error:
            status = self._describe(error, runtime)
            if status.code is Code.INTERNAL:
                traceback.print_exc()
            for result in results:
                self.store.poison(result, local, status)
            self._execution_failed(execution, status, runtime)
            if request is not None:
                self.reply_error(request, error, runtime)
            self.completed += 1
            return
        for result, output in zip(results, outputs, strict=True):
            self.store.set(result, buffers.result_group(output, loaded.local, runtime))
        self.completions.put((execution, token, runtime, source.name, request))

    def order_execute_and_tell(self, request: int, *fields: Any, attached: list[bytearray]) -> None:
        self.order_execute(*fields, attached=attached, request=request)

    def _mixed(self, argument: list[Any], local: tuple[int, ...], runtime: Runtime) -> list[Any]:
        """Shards of an array whose shards lie in several groups: pairs (device, group)."""
        group_of = dict(argument)
        return [self.store.shard(group_of[device], device, runtime) for device in local]

    # ---- orders: buffers

    def order_free(self, groups: list[int], attached: list[bytearray]) -> None:
        self.store.free(groups)

    def order_put(
        self, group: int, kind: int, memory_kind: str | None, parts: list[Any], attached: list[bytearray]
    ) -> None:
        """``parts``: [[devices], shape, strides or None, buffer index or None, token or None]"""
        shards: dict[int, Any] = {}
        for devices, shape, strides, index, token in parts:
            shape = tuple(shape)
            strides = None if strides is None else tuple(strides)

            def decode(data: Any, shape: tuple[int, ...] = shape, strides: tuple[int, ...] | None = strides) -> np.ndarray:
                return dtypes.decode_host_buffer(data, kind, shape, strides)

            if index is not None:
                try:
                    shard: Any = buffers.HostShard(decode(attached[index]), memory_kind)
                except StatusError as error:
                    shard = error.status
            else:
                shard = buffers.PromisedShard(self.promises.claim(token, None), decode, memory_kind)
            for device in devices:
                shards[device] = shard
        self.store.set(group, buffers.shard_group(shards))

    def order_copy(self, group: int, memory_kind: str | None, parts: list[Any], attached: list[bytearray]) -> None:
        """``parts``: [target device, source group or None, source device, token or None, source executor]"""
        runtime = self.runtime
        shards: dict[int, Any] = {}
        for target, source_group, source_device, token, source_executor in parts:
            if token is not None:
                promise = self.promises.claim(token, source_executor)
                shards[target] = buffers.PromisedShard(promise, _as_is, memory_kind)
                continue
            try:
                shards[target] = runtime.copy(self.store.shard(source_group, source_device, runtime), target, memory_kind)
            except Exception as error:
                shards[target] = self._describe(error, runtime)
        self.store.set(group, buffers.shard_group(shards, runtime))

    def order_send(
        self, group: int, device: int, targets: list[Any], attached: list[bytearray]
    ) -> None:
        """``targets``: [token, host, port]; the shard's bytes go to each."""
        runtime = self.runtime
        try:
            shard = self._held(group, device)
        except Exception as error:
            shard = self._describe(error, runtime)
        self.waiters.submit(self._send, shard, targets, runtime)

    def _send(self, shard: Any, targets: list[Any], runtime: Runtime) -> None:
        status = shard if isinstance(shard, Status) else None
        data = None
        if status is None:
            try:
                data = np.asarray(shard)
            except Exception as error:
                status = self._describe(error, runtime)
        for token, host, port in targets:
            try:
                if status is None:
                    assert data is not None
                    self.transfers.push(host, port, token, data)
                else:
                    self.transfers.fail(host, port, token, status)
            except OSError as error:
                # Either the target is lost, which the head tells everybody, or the connection between the two is.
                failed = statuses.data_loss(f"bytes could not be sent to {host}:{port}: {error}")
                try:
                    self.link.send(["transfer_failed", token, int(failed.code), failed.message])
                except LinkClosed:
                    return

    def _held(self, group: int, device: int) -> Any:
        """A shard whose bytes can be read later, whatever the next orders donate."""
        shard = self.store.shard(group, device, self.runtime)
        if shard.is_ready():
            return np.asarray(shard)
        return self.runtime.copy(shard, device, device_runtime.memory_kind_of(shard))

    def order_fetch(self, request: int, group: int, device: int, strides: list[int] | None, attached: list[bytearray]) -> None:
        runtime = self.runtime
        try:
            held = self._held(group, device)
        except Exception as error:
            self.reply_error(request, error, runtime)
            return
        self.waiters.submit(self._fetch, request, held, strides, runtime)

    def _fetch(self, request: int, held: Any, strides: list[int] | None, runtime: Runtime) -> None:
        try:
            data = dtypes.encode_host_buffer(np.asarray(held), None if strides is None else tuple(strides))
        except Exception as error:
            self._reply_error_if_head(request, error, runtime)
            return
        try:
            self.reply(request, attached=(data,))
        except LinkClosed:
            pass

    def _reply_error_if_head(self, request: int, error: BaseException, runtime: Runtime) -> None:
        try:
            self.reply_error(request, error, runtime)
        except LinkClosed:
            pass

    def order_ready(self, request: int, groups: list[int], attached: list[bytearray]) -> None:
        runtime = self.runtime
        arrays: list[Any] = []
        try:
            for number in groups:
                group = self.store.group(number)
                if group.array is not None and group.shards is None:
                    arrays.append(group.array)
                else:
                    assert group.shards is not None
                    arrays += [self.store.shard(number, device, runtime) for device in list(group.shards)]
        except Exception as error:
            self.reply_error(request, error, runtime)
            return
        self.waiters.submit(self._ready, request, arrays, runtime)

    def _ready(self, request: int, arrays: list[Any], runtime: Runtime) -> None:
        try:
            for array in arrays:
                try:
                    array.block_until_ready()
                except Exception:
                    if not device_runtime.is_deleted(array):  # donated since: whoever took it reports its errors
                        raise
            self.reply(request)
        except LinkClosed:
            pass
        except Exception as error:
            self._reply_error_if_head(request, error, runtime)


def _as_is(data: np.ndarray) -> np.ndarray:
    return data


def main(arguments: dict[str, Any]) -> int:
    """Entry of the forked process; ``arguments`` as an agent's template gives them."""
    try:
        link = blocking_link.connect(
            arguments["head_host"], arguments["head_port"], arguments["secret"],
            arguments["settings"]["executor_start_timeout_seconds"],
        )
    except (OSError, authentication.AuthenticationError) as error:
        print(f"executor {arguments['executor']}: {error}", flush=True)
        return EXIT_HEAD_GONE
    executor = Executor(link, arguments)
    link.send(["hello", {
        "role": "executor", "agent": arguments["agent"], "executor": arguments["executor"], "pid": os.getpid(),
        "versions": hello_versions(), "transfer_host": executor.address, "transfer_port": executor.server.port,
    }])  # fmt: skip
    link.set_timeout(arguments["settings"]["executor_start_timeout_seconds"])
    try:
        answer, _ = link.receive()
    except LinkClosed as error:
        print(f"executor {arguments['executor']}: {error}", flush=True)
        return EXIT_HEAD_GONE
    if answer[0] != "welcome":
        print(f"executor {arguments['executor']}: refused: {answer[-1]}", flush=True)
        return EXIT_REFUSED
    link.set_timeout(None)
    return executor.run()
