"""One client's session: its tables, and its requests in strict order.

Handles restart at 1 in every client, so every table is the session's own.  A request is handled at once and in
order; what cannot be known yet is answered later, by its ``op_id``.  Nothing here waits.
"""

import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from ridgeway.protocol import dtypes, messages, shardings
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import OK, Status, StatusError, fill_status_proto
from ridgeway.protocol.versions import ProxyVersion
from ridgeway.proxy import plugin_programs
from ridgeway.proxy.arrays import Array
from ridgeway.proxy.executables import Executable
from ridgeway.proxy.host_buffers import HostBufferStore
from ridgeway.proxy.host_callbacks import SessionCallbacks
from ridgeway.proxy.plugin_programs import PluginProgram
from ridgeway.proxy.python_calls import SessionPython
from ridgeway.proxy.services import Services
from ridgeway.proxy.suspension_gate import SuspensionGate
from ridgeway.proxy.touching import slots_touched
from ridgeway.proxy.uploads import Uploads
from ridgeway.proxy.user_contexts import UserContexts

SERVER_HANDLES_FROM = 1 << 40
"""Handles made here start far above those the client makes."""
TEXT_LIMIT = 4000

_RESULT_ARRAYS = {
    "make_array_from_host_buffer": ("array_handle",),
    "make_arrays_from_host_buffer_shards": ("array_handles",),
    "make_error_arrays": ("array_handles",),
    "assemble_array_from_single_device_arrays": ("result_handle",),
    "disassemble_into_single_device_arrays": ("result_handles",),
    "fully_replicated_shard": ("result_handle",),
    "copy_arrays": ("result_handles",),
    "remap_arrays": ("result_handles",),
    "bitcast_arrays": ("result_handles",),
    "reshard_arrays": ("result_handles",),
    "loaded_executable_execute": ("result_array_handle",),
}
"""Fields with the handles that a request of each kind makes arrays for."""
_NOWHERE = (shardings.SINGLE_DEVICE, b"")

LATER = object()
"""What a handler returns when the response follows through `Session.respond`."""


class Future:
    """Something the client may ask the outcome of."""

    __slots__ = ("_callbacks", "outcome")

    def __init__(self, outcome: Status | None = None):
        self.outcome = outcome
        self._callbacks: list[Callable[[Status], None]] = []

    def resolve(self, status: Status | None) -> None:
        """Set the outcome; None is success."""
        self.outcome = OK if status is None else status
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self.outcome)

    def when_done(self, callback: Callable[[Status], None]) -> None:
        """Call back with the outcome, at once if it is known."""
        if self.outcome is not None:
            callback(self.outcome)
        else:
            self._callbacks.append(callback)


class Session:
    """Tables and dispatch of one client."""

    def __init__(
        self, number: int, services: Services, version: ProxyVersion, client: str, send: Callable[[bytes], None]
    ):
        self.number = number
        self.services = services
        self.version = version
        self.client = client
        self.started = time.monotonic()
        self.arrays: dict[int, Array] = {}
        self.executables: dict[int, Executable] = {}
        self.plugin_programs: dict[int, PluginProgram] = {}
        self.futures: dict[int, Future] = {}
        self.buffers = HostBufferStore(
            services.settings.host_buffer_limit_bytes, services.settings.host_buffer_timeout_seconds
        )
        self.uploads = Uploads(
            services.settings.upload_window_bytes, services.settings.host_buffer_limit_bytes, self.buffers.is_wanted,
            lambda: self.buffers.bytes - self.buffers.result_bytes,
        )  # fmt: skip
        self.buffers.on_wanted = self.uploads.wanted
        self.buffers.on_taken = self._buffer_taken
        self.fetching_bytes = 0
        """of arrays that the client has asked for and that are on their way to the head"""
        self._when_fetched: list[Callable[[], None]] = []
        self.contexts = UserContexts()
        self.callbacks = SessionCallbacks(services.callbacks, self.new_handle)
        self.python = SessionPython(services, number)
        self.gate = SuspensionGate(
            services.manager.suspender, number, services.settings.pending_order_limit, services.emit
        )
        self._ticked = self.started
        self.requests = 0
        self.ended = False
        self._send = send
        self._next_handle = SERVER_HANDLES_FROM

    # ---- tables

    def new_handle(self) -> int:
        """A handle that the client never makes."""
        self._next_handle += 1
        return self._next_handle

    def array(self, handle: int) -> Array:
        """An array by handle.

        Raises:
          StatusError: INVALID_ARGUMENT, there is none (the client's mistake, never to be retried).
        """
        array = self.arrays.get(handle)
        if array is None:
            raise statuses.invalid_argument(f"this session has no array {handle}").error()
        return array

    def bind_array(self, handle: int, array: Array) -> int:
        """Enter an array under a handle (0: one is made); returns the handle."""
        handle = handle or self.new_handle()
        old = self.arrays.get(handle)
        if old is not None:
            old.release()
        self.arrays[handle] = array
        return handle

    def executable(self, handle: int) -> Executable:
        """An executable by handle.

        Raises:
          StatusError: INVALID_ARGUMENT, there is none.
        """
        executable = self.executables.get(handle)
        if executable is None:
            raise statuses.invalid_argument(f"this session has no executable {handle}").error()
        return executable

    def new_future(self, outcome: Status | None = None, handle: int = 0) -> tuple[int, Future]:
        """A future under a new handle, or under the client's."""
        future = Future(outcome)
        return self.keep_future(future, handle), future

    def keep_future(self, future: "Future", handle: int = 0) -> int:
        """Give a future a new handle, or the client's."""
        handle = handle or self.new_handle()
        self.futures[handle] = future
        return handle

    # ---- requests

    def on_request(self, data: bytes) -> None:
        """Handle one serialized `IfrtRequest`, at once or when what it touches is not suspended any more; every outcome
        becomes a response."""
        try:
            request = messages.IfrtRequest.FromString(data)
        except Exception:
            # Without an op_id nobody could be answered: the stream cannot be trusted any more.
            raise statuses.invalid_argument("a message that is not an IfrtRequest").error() from None
        self.requests += 1
        operation = request.request_metadata.op_id
        self.contexts.asked(operation, request.request_metadata.user_context_id)
        kind = request.WhichOneof("request")
        if kind is None:
            self.respond(operation, messages.IfrtResponse(), statuses.unimplemented(
                "this request is of a kind that this server's jaxlib does not know"))
            return
        name = kind[: -len("_request")]
        body = getattr(request, kind)
        self.gate.admit(lambda: slots_touched(self, name, body), lambda: self._handle(operation, name, body))

    def _handle(self, operation: int, name: str, request: Any) -> None:
        handler = self.services.handlers.get(name)
        if handler is None:
            self.respond(operation, messages.IfrtResponse(), statuses.unimplemented(f"request {name} is not supported"))
            return
        response = messages.IfrtResponse()
        answer = getattr(response, name + "_response")
        answer.SetInParent()
        recording = self.services.profiler.recording
        begin = 0 if recording is None else time.time_ns()
        try:
            result = handler(self, request, answer, _Later(self, operation, response, name, begin))
        except StatusError as error:
            self._fail(operation, name, request, response, error.status)
        except DecodeError as error:
            status = statuses.invalid_argument(f"a part of the request {name} cannot be read: {error}")
            self._fail(operation, name, request, response, status)
        except Exception as error:
            self.services.report_bug(name, error)
            status = statuses.internal(f"the proxy failed at {name}: {error!r}")
            self._fail(operation, name, request, response, status)
        else:
            if result is not LATER:
                self.respond(operation, response, OK)
        if recording is not None:
            recording.handled(self.number, name, begin, time.time_ns())

    def _fail(self, operation: int, name: str, request: Any, response: Any, status: Status) -> None:
        """Answer with an error, which becomes the value of all that the request was to make: the client does not wait
        for responses about handles that it made itself."""
        for field in _RESULT_ARRAYS.get(name, ()):
            handles = getattr(request, field)
            for handle in (handles,) if isinstance(handles, int) else handles:
                if handle:
                    array = Array(dtypes.KIND_UNSPECIFIED, (), shardings.parse_blob(*_NOWHERE))
                    array.fail(status)
                    self.bind_array(handle, array)
        if name == "loaded_executable_execute" and request.result_status_handle:
            self.new_future(status, request.result_status_handle)
        self.respond(operation, response, status, name)

    def respond(self, operation: int, response: Any, status: Status, name: str = "") -> None:
        """Send a response; an error that names a loss may wait a moment for what is known of it."""
        if status.code is statuses.Code.OK:
            self._respond(operation, response, status, name)
        else:
            self.services.manager.explanations.when_explained(
                status, lambda explained: self._respond(operation, response, explained, name)
            )

    def _respond(self, operation: int, response: Any, status: Status, name: str) -> None:
        if self.ended:
            return
        ok = status.code is statuses.Code.OK
        if not ok:
            # jaxlib's client takes an answer that is there for a success, whatever the status says.
            response = messages.IfrtResponse()
        metadata = response.response_metadata
        metadata.op_id = operation
        metadata.seq_num, destroyed = self.contexts.answered(operation, ok)
        metadata.destroyed_user_context_ids.extend(destroyed)
        if ok:
            metadata.status.SetInParent()
        else:
            if len(status.message) > TEXT_LIMIT:
                status = Status(status.code, status.message[:TEXT_LIMIT] + " ...")
            fill_status_proto(metadata.status, status)
            self.services.observer.error_raised(self, status, name)
        self._send(response.SerializeToString())

    # ---- life

    def _buffer_taken(self) -> None:
        self.uploads.look()
        if self._when_fetched and not self.fetches_too_much:
            waiting, self._when_fetched = self._when_fetched, []
            for callback in waiting:
                callback()

    @property
    def fetches_too_much(self) -> bool:
        """Whether so many results wait for the client, or are on their way here, that it has to take some first."""
        return self.fetching_bytes + self.buffers.result_bytes > self.services.settings.host_buffer_limit_bytes

    def when_fetched(self, callback: Callable[[], None]) -> None:
        """Call back when the client has taken enough results."""
        self._when_fetched.append(callback)
        self._buffer_taken()

    @property
    def bytes_described(self) -> int:
        """Host buffer bytes that the head holds for this session."""
        return self.buffers.bytes

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays that it has on the workers, each array counted once."""
        return sum(dtypes.array_bytes(a.kind, a.shape) for a in self.arrays.values() if a.groups is not None)

    def tick(self) -> None:
        """Apply deadlines; what waits for requests that are held has more time."""
        now = time.monotonic()
        if self.gate.closed:
            self.buffers.postpone(now - self._ticked)
        self._ticked = now
        self.buffers.tick()
        self.python.tick()

    def end(self, reason: str) -> None:
        """The client is gone: free all it held."""
        if self.ended:
            return
        self.ended = True
        self.gate.close()
        self.python.close()
        held = len(self.arrays)
        for array in self.arrays.values():
            array.release()
        self.arrays.clear()
        for executable in self.executables.values():
            self.services.programs.release(executable)
        self.executables.clear()
        for program in self.plugin_programs.values():
            plugin_programs.close(program, self)
        self.plugin_programs.clear()
        self.callbacks.close()
        self.futures.clear()
        self.buffers.close()
        self.uploads.close()
        self.services.session_ended(self, reason, held)


class _Later:
    """Lets a handler answer after it has returned `LATER`."""

    __slots__ = ("_begin", "_name", "_operation", "_response", "_session")

    def __init__(self, session: Session, operation: int, response: Any, name: str, begin: int):
        self._session = session
        self._operation = operation
        self._response = response
        self._name = name
        self._begin = begin
        """nanoseconds since 1970 if a profile is being recorded, else 0"""

    def __call__(self, status: Status | None) -> None:
        recording = self._session.services.profiler.recording
        if recording is not None and self._begin:
            recording.answered(self._session.number, self._name, self._begin, time.time_ns())
        self._session.respond(self._operation, self._response, OK if status is None else status, self._name)
