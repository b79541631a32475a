"""The gRPC service that jaxlib's IFRT proxy client connects to (``xla.ifrt.proxy.GrpcIfrtService``)."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.protocol import callback_link, messages, profile_link, versions
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import StatusError
from ridgeway.proxy.host_callbacks import CallbackStream
from ridgeway.proxy.large_transfers import LargeTransfers, folder_from
from ridgeway.proxy.services import Services
from ridgeway.proxy.session import Session

SESSION_METADATA = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
HOST_BUFFER_METADATA = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
LOOKUP_CHUNK_BYTES = 2 << 20
TICK_SECONDS = 0.25
#: gRPC drops calls at random (CANCELLED, upon which jaxlib's client disconnects) when more than 1000 wait to be taken
#: up. A restore stores thousands of host buffers at once, one call each.
PENDING_CALL_LIMIT = 1_000_000
#: The same for calls that have waited so long: 30 by default, which a stopped (SIGSTOP) head may well exceed.
PENDING_CALL_SECONDS = 3600
#: What gRPC takes of a host buffer whose turn has not come. Left to itself it takes up to 4 MiB of each, of thousands.
STREAM_WINDOW_BYTES = 768 << 10
#: No host buffer can be larger.
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _until(subscribe: Callable[[Callable[[], None]], None], timeout_seconds: float | None) -> None:
    """Wait for a callback, or for the timeout."""
    happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    subscribe(lambda: _set(happened))
    await asyncio.wait([happened], timeout=timeout_seconds)


@contextlib.asynccontextmanager
async def _turn(session: Session, about: Any) -> AsyncIterator[None]:
    """Wait until a host buffer may come in, and make room for the next one afterwards."""
    let_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    number = session.uploads.ask(about.handle, about.buffer_size, lambda: _set(let_in))
    try:
        await let_in
        yield
    finally:
        if not session.uploads.forget(number):
            session.uploads.ended(about.buffer_size)


class ProxyServer:
    """Sessions over gRPC; everything runs in one event loop."""

    def __init__(self, services: Services):
        self._services = services
        self._large_transfers = LargeTransfers(
            folder_from(services.settings.large_transfer_folder, os.environ), services.sessions.__contains__
        )
        self._session_numbers = itertools.count(1)
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Serve; returns the port.

        Raises:
          OSError: the address cannot be used.
        """
        limit = self._services.settings.request_limit_bytes
        server = grpc.aio.server(options=[
            ("grpc.max_receive_message_length", min(limit, 2**31 - 1)), ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0), ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.server.max_pending_requests", PENDING_CALL_LIMIT),
            ("grpc.server.max_pending_requests_hard_limit", PENDING_CALL_LIMIT),
            ("grpc.server_max_unrequested_time_in_server", PENDING_CALL_SECONDS),
            ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
        ])  # fmt: skip
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE_NAME, {
            "GetVersion": grpc.unary_unary_rpc_method_handler(self._get_version),
            "IfrtSession": grpc.stream_stream_rpc_method_handler(self._session),
            "HostBufferStore": grpc.stream_unary_rpc_method_handler(self._store),
            "HostBufferLookup": grpc.unary_stream_rpc_method_handler(self._lookup),
            "HostBufferReadFromDisk": grpc.unary_unary_rpc_method_handler(self._read_from_disk),
            "HostBufferDelete": grpc.unary_unary_rpc_method_handler(self._delete),
        }),))  # fmt: skip
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(callback_link.SERVICE, {
            callback_link.METHOD: grpc.stream_stream_rpc_method_handler(self._host_callbacks),
        }),))  # fmt: skip
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(profile_link.SERVICE, {
            profile_link.METHOD: grpc.stream_stream_rpc_method_handler(self._profile),
        }),))  # fmt: skip
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"{host}:{port}: {error}") from None
        if bound == 0:
            raise OSError(f"{host}:{port} cannot be used")
        await server.start()
        self._server = server
        return bound

    async def run_ticks(self) -> None:
        """Apply the sessions' deadlines until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            sessions = list(self._services.sessions.values())
            for session in sessions:
                session.tick()
            self._services.observer.tick(sessions)

    async def stop(self, grace_seconds: float) -> None:
        """Stop serving; calls in flight get the grace."""
        if self._server is not None:
            await self._server.stop(grace_seconds)

    async def _get_version(self, data: bytes, context: Any) -> bytes:
        request = messages.GrpcGetVersionRequest.FromString(data)
        try:
            version = versions.negotiate(
                versions.version_from_proto(request.min_version), versions.version_from_proto(request.max_version)
            )
        except StatusError as error:
            self._services.emit("client_refused", client=context.peer(), reason=error.status.message)
            await context.abort(_GRPC_CODES[int(error.status.code)], error.status.message)
            raise AssertionError("abort raises") from None
        response = messages.GrpcGetVersionResponse()
        versions.fill_version_proto(response.version, version)
        return response.SerializeToString()

    async def _session(self, requests: Any, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        raw = metadata.get(SESSION_METADATA)
        proto = messages.GrpcIfrtSessionMetadata.FromString(raw or b"")
        try:
            offered = versions.version_from_proto(proto.version)
            version = versions.negotiate(offered, offered)
        except StatusError as error:
            await context.abort(_GRPC_CODES[int(error.status.code)], error.status.message)
            raise AssertionError("abort raises") from None
        services = self._services
        responses: asyncio.Queue[bytes | None] = asyncio.Queue()
        limit = services.settings.session_response_limit
        overflow = asyncio.Event()

        def send(data: bytes) -> None:
            if responses.qsize() >= limit:
                overflow.set()
            else:
                responses.put_nowait(data)

        session = Session(next(self._session_numbers), services, version, str(context.peer()), send)
        services.sessions[session.number] = session

        async def write() -> None:
            while (data := await responses.get()) is not None:
                await context.write(data)

        writer = asyncio.create_task(write())
        reason = "the client disconnected"
        try:
            async for data in requests:
                crowded = self._crowded()
                session.on_request(data)
                if session.gate.full:
                    await self._until_room(session)
                if overflow.is_set():
                    reason = "the client reads no responses (session_response_limit)"
                    break
                await self._relieve(session, crowded)
                if writer.done():
                    break
        except StatusError as error:
            reason = error.status.message
            await context.abort(_GRPC_CODES[int(error.status.code)], error.status.message)
        except (asyncio.CancelledError, grpc.aio.AioRpcError, grpc.aio.UsageError):
            reason = "the client's connection ended"
            raise
        finally:
            session.end(reason)
            responses.put_nowait(None)
            writer.cancel()

    async def _host_callbacks(self, requests: Any, context: Any) -> None:
        """A client's plugin runs host callbacks and prints what workers print."""
        outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        stream = CallbackStream(outgoing.put_nowait, outgoing.qsize)
        registry = self._services.callbacks
        client: callback_link.Client = ()

        async def write() -> None:
            while True:
                await context.write(await outgoing.get())

        writer = asyncio.create_task(write())
        try:
            async for data in requests:
                message = callback_link.unpack(data)
                if message[0] == "hello":
                    client = tuple(message[1:])
                    registry.opened(client, stream)
                    outgoing.put_nowait(callback_link.pack(["ready"]))
                elif message[0] == "follow":
                    registry.follow(int(message[1]), stream)
                elif message[0] == "flush":
                    outgoing.put_nowait(callback_link.pack(["flushed", message[1]]))
                else:
                    stream.on_message(message)
        except (ValueError, TypeError) as error:
            await self._abort(context, statuses.invalid_argument(f"host callbacks: {error}"))
        finally:
            registry.closed(client, stream)
            writer.cancel()

    async def _until_room(self, session: Session) -> None:
        """Read no more while so many requests are held; the suspension's deadlines bound the wait."""
        room = asyncio.Event()
        session.gate.when_room(room.set)
        await room.wait()

    async def _profile(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        """A client's profiler records the cluster too."""
        try:
            async for answer in self._services.profiler.serve_client(requests):
                yield answer
        except (ValueError, TypeError) as error:
            await self._abort(context, statuses.invalid_argument(f"profile: {error}"))

    def _crowded(self) -> dict[ExecutorLink, int]:
        """The executors that have far more to do than they have got to, and how much they were ordered."""
        return {e: e.ordered for e in self._services.manager.slots if e is not None and e.backlog.is_full}

    async def _relieve(self, session: Session, crowded_before: dict[ExecutorLink, int]) -> None:
        """Make this session wait while an executor that its last request gave more has far too much to do, or while
        far too many results wait to be taken by the client. Other sessions go on."""
        for executor, ordered in self._crowded().items():
            if crowded_before.get(executor) != ordered:
                # An executor that gets nowhere is lost in time, which ends the wait.
                await _until(executor.backlog.when_relieved, None)
        if session.fetches_too_much:
            # If the client does not take them it is its own memory limit that it runs into.
            await _until(session.when_fetched, self._services.settings.host_buffer_timeout_seconds)

    def _session_by_number(self, number: int) -> Session | None:
        return self._services.sessions.get(number)

    async def _session_of(self, about: Any, context: Any) -> Session:
        """The session that a call about a host buffer names; ends the call if there is none."""
        session = self._session_by_number(about.session_id)
        if session is None:
            await self._abort(context, statuses.invalid_argument(f"there is no session {about.session_id}"))
            raise AssertionError("abort raises")
        return session

    async def _store(self, requests: Any, context: Any) -> bytes:
        metadata = dict(context.invocation_metadata() or ())
        about = messages.GrpcHostBufferStoreMetadata.FromString(metadata.get(HOST_BUFFER_METADATA) or b"")
        session = await self._session_of(about, context)
        if about.buffer_size > MEMORY_BYTES:
            await self._abort(context, statuses.invalid_argument(
                f"host buffer {about.handle}: {about.buffer_size} bytes are more than this host's memory"))
        async with _turn(session, about):
            await self._receive(session, about, requests, context)
        return messages.GrpcHostBufferStoreResponse().SerializeToString()

    async def _receive(self, session: Session, about: Any, requests: Any, context: Any) -> None:
        chunks, size = [], 0
        async for data in requests:
            chunk = messages.GrpcHostBufferStoreRequest.FromString(data).data
            size += len(chunk)
            session.buffers.gets_on()
            if size > about.buffer_size:
                await self._abort(context, statuses.invalid_argument(
                    f"host buffer {about.handle}: more bytes than the {about.buffer_size} that were announced"))
            if session.ended:
                await self._abort(context, statuses.invalid_argument(f"session {about.session_id} is over"))
            chunks.append(chunk)
        if size != about.buffer_size:
            await self._abort(context, statuses.invalid_argument(
                f"host buffer {about.handle}: {size} bytes arrived, {about.buffer_size} were announced"))
        try:
            session.buffers.put(about.handle, chunks[0] if len(chunks) == 1 else b"".join(chunks))
        except StatusError as error:
            await self._abort(context, error.status)

    async def _read_from_disk(self, data: bytes, context: Any) -> bytes:
        about = messages.GrpcHostBufferReadFromDiskRequest.FromString(data).metadata
        session = await self._session_of(about, context)
        try:
            async with _turn(session, about):
                began = time.time() - (time.monotonic() - session.started)
                taken = await self._large_transfers.read(session.number, about.handle, about.buffer_size, began)
                session.buffers.put(about.handle, taken)
        except StatusError as error:
            # An error here would make jaxlib's client disconnect; so it becomes the array's value.
            session.buffers.fail(about.handle, error.status)
        return messages.GrpcHostBufferReadFromDiskResponse().SerializeToString()

    async def _abort(self, context: Any, status: statuses.Status) -> None:
        await context.abort(_GRPC_CODES[int(status.code)], status.message)

    async def _lookup(self, data: bytes, context: Any) -> None:
        request = messages.GrpcHostBufferLookupRequest.FromString(data)
        session = await self._session_of(request, context)
        arrived: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        session.buffers.look_up(request.handle, lambda value: None if arrived.done() else arrived.set_result(value))
        found = await arrived
        if isinstance(found, statuses.Status):
            await self._abort(context, found)
            raise AssertionError("abort raises")
        view = memoryview(found)
        for start in range(0, max(len(view), 1), LOOKUP_CHUNK_BYTES):
            chunk = messages.GrpcHostBufferLookupResponse(data=bytes(view[start : start + LOOKUP_CHUNK_BYTES]))
            await context.write(chunk.SerializeToString())

    async def _delete(self, data: bytes, context: Any) -> bytes:
        request = messages.GrpcHostBufferDeleteRequest.FromString(data)
        session = self._session_by_number(request.session_id)
        if session is not None:
            session.buffers.forget(request.handle)
        return messages.GrpcHostBufferDeleteResponse().SerializeToString()
