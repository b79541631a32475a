"""Host callbacks between the workers that call them and the client that runs them.

The client's plugin has a stream to this server on which calls go out and results come back (`protocol.callback_link`).
Questions that a compilation has for the controller's Python (`protocol.compiler_callbacks`) go the same way. jaxlib's
client polls for calls too, but cannot run any: it is told of none until the program is dropped.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.protocol import callback_link, dtypes, messages
from ridgeway.protocol import status as statuses
from ridgeway.protocol.callback_link import Client
from ridgeway.protocol.status import Code, Status

Arrays = list[tuple[int, tuple[int, ...]]]
"""Dtype kind and shape of each result."""
Later = Callable[[Status | None], None]

UNREAD_LINES_LIMIT = 10_000
"""Lines of output that may wait for a client; the rest is counted."""
EARLY_LINES_LIMIT = 1000
"""Lines of output kept for a client whose plugin has not connected yet."""

_DROPPED = statuses.failed_precondition("the program of a host callback was dropped, or its client went away")
_NO_STREAM = statuses.unavailable("the client's connection for host callbacks is closed")
_NOBODY_TO_ASK = statuses.unimplemented(
    "this program calls Python from inside the compiler (jax.debug.inspect_array_sharding, custom_partitioning), which "
    "needs Ridgeway installed in the client's Python, where jax finds it as a plugin"
)


class _Call:
    """A worker waits for the result."""

    __slots__ = ("_executor", "_token", "callback")

    def __init__(self, callback: "HostCallback", executor: ExecutorLink, token: int):
        self.callback = callback
        self._executor = executor
        self._token = token

    def finish(self, result: bytes | Status) -> None:
        if isinstance(result, Status):
            self._executor.send_aside(["data_failed", self._token, int(result.code), result.message])
        else:
            self._executor.send_aside(["data", self._token], [result])


class HostCallback:
    """One callback of one executable."""

    def __init__(self, number: int, client: Client, client_number: int, results: Arrays):
        self.number = number
        self.client = client
        self.client_number = client_number
        self.results = results
        self.poll: Later | None = None
        """the answer to jaxlib's poll"""


class CallbackStream:
    """The stream of one client. ``send`` never blocks; ``unsent`` says how many messages wait."""

    def __init__(self, send: Callable[[bytes], None], unsent: Callable[[], int] = lambda: 0):
        self._send = send
        self._unsent = unsent
        self._lines_dropped = 0
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._asked: dict[int, asyncio.Future[bytes]] = {}

    async def ask(self, question: bytes) -> bytes:
        """The answer of the client's Python to what a compilation asks.

        Raises:
          StatusError: it has none.
        """
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(callback_link.pack(["ask", number, question]))
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    def call(self, call: _Call, shapes: list[list[int]], data: bytes) -> None:
        """Have the client run a callback."""
        number = next(self._numbers)
        self._calls[number] = call
        self._send(callback_link.pack(["call", number, call.callback.client_number, shapes, data]))

    def output(self, place: str, stream: str, line: str) -> None:
        """Have the client print a line of output."""
        if self._unsent() >= UNREAD_LINES_LIMIT:
            self._lines_dropped += 1
            return
        if self._lines_dropped:
            note = f"[{self._lines_dropped} lines were dropped here: they came faster than they were read]"
            self._lines_dropped = 0
            self._send(callback_link.pack(["output", place, stream, note]))
        self._send(callback_link.pack(["output", place, stream, line]))

    def on_message(self, message: list[Any]) -> None:
        """The client has run one.

        Raises:
          ValueError: it is no such message.
        """
        kind, number, value = message
        asked = self._asked.get(number)
        if asked is not None and not asked.done():
            if kind == "result":
                asked.set_result(value)
            else:
                asked.set_exception(Status(Code.UNKNOWN, statuses.without_retried_words(str(value))).error())
        call = self._calls.pop(number, None)
        if call is None:
            return  # it was given up meanwhile
        if kind == "result":
            call.finish(value)
        else:
            call.finish(Status(Code.UNKNOWN, statuses.without_retried_words(str(value))))

    def drop(self, callback: HostCallback) -> None:
        """Nobody waits for this one's results any more."""
        for number in [number for number, call in self._calls.items() if call.callback is callback]:
            self._calls.pop(number).finish(_DROPPED)

    def close(self) -> None:
        """The client is gone."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(_NO_STREAM)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(_NO_STREAM.error())


class HostCallbackRegistry:
    """All callbacks of a head, by the number that workers know them by, and all clients' streams."""

    def __init__(self, connect_seconds: float) -> None:
        self._numbers = itertools.count(1)
        self._callbacks: dict[int, HostCallback] = {}
        self._streams: dict[Client, CallbackStream] = {}
        self._connect_seconds = connect_seconds
        self._followers: dict[int, CallbackStream] = {}
        """by session, who prints its output and knows its Python"""
        self._waiting = asyncio.Event()
        """set, and replaced, when there is one more"""
        self._early_lines: dict[int, deque[tuple[str, str, str]]] = {}

    def follow(self, session: int, stream: CallbackStream) -> None:
        """A client wants the output of its session, and to be asked for it."""
        self._followers[session] = stream
        waiting, self._waiting = self._waiting, asyncio.Event()
        waiting.set()
        for line in self._early_lines.pop(session, ()):
            stream.output(*line)

    async def ask(self, session: int, question: bytes) -> bytes:
        """What the Python of a session's client answers to a compilation.

        Raises:
          StatusError: nothing, or the client has no plugin that could be asked.
        """
        try:
            async with asyncio.timeout(self._connect_seconds):
                while session not in self._followers:
                    await self._waiting.wait()
        except TimeoutError:
            raise _NOBODY_TO_ASK.error() from None
        return await self._followers[session].ask(question)

    def output(self, session: int, place: str, stream: str, line: str) -> None:
        """User code on a worker has printed a line."""
        follower = self._followers.get(session)
        if follower is not None:
            follower.output(place, stream, line)
        else:
            self._early_lines.setdefault(session, deque(maxlen=EARLY_LINES_LIMIT)).append((place, stream, line))

    def session_ended(self, session: int) -> None:
        """Nobody reads its output any more."""
        self._followers.pop(session, None)
        self._early_lines.pop(session, None)

    def opened(self, client: Client, stream: CallbackStream) -> None:
        """A client's plugin has connected."""
        self._streams[client] = stream

    def closed(self, client: Client, stream: CallbackStream) -> None:
        """Its stream has ended."""
        if self._streams.get(client) is stream:
            del self._streams[client]
        for session in [session for session, follower in self._followers.items() if follower is stream]:
            del self._followers[session]
        stream.close()

    def add(self, serialized: bytes) -> HostCallback:
        """A callback from the `XlaHostCallbackProto` that the client sends with a program.

        Raises:
          StatusError: it cannot be read, or only a client without the plugin could run it.
        """
        try:
            proto = messages.XlaHostCallbackProto.FromString(serialized)
            shapes = [info.shape.dimensions for info in proto.operands]
            client, client_number = callback_link.parse_callback_name(shapes[: callback_link.NAME_OPERANDS])
        except Exception:
            raise statuses.unimplemented(
                "host callbacks need Ridgeway installed in the client's Python, where jax finds it as a plugin"
            ).error() from None
        number = next(self._numbers)
        callback = HostCallback(number, client, client_number, _arrays(proto.results))
        self._callbacks[number] = callback
        return callback

    def remove(self, callback: HostCallback) -> None:
        """The executable is dropped."""
        self._callbacks.pop(callback.number, None)
        stream = self._streams.get(callback.client)
        if stream is not None:
            stream.drop(callback)
        poll, callback.poll = callback.poll, None
        if poll is not None:
            poll(None)  # without a call: jaxlib's client stops polling

    def called(
        self, executor: ExecutorLink, number: int, token: int, shapes: list[list[int]], data: bytes
    ) -> None:
        """A worker calls."""
        callback = self._callbacks.get(number)
        if callback is None:
            executor.send_aside(["data_failed", token, int(_DROPPED.code), _DROPPED.message])
            return
        call = _Call(callback, executor, token)
        stream = self._streams.get(callback.client)
        if stream is None:
            call.finish(_NO_STREAM)
        else:
            stream.call(call, shapes, data)


class SessionCallbacks:
    """The callbacks of one session, by their handles."""

    def __init__(self, registry: HostCallbackRegistry, new_handle: Callable[[], int]):
        self._registry = registry
        self._new_handle = new_handle
        self._callbacks: dict[int, HostCallback] = {}

    def load(self, serialized: bytes) -> tuple[int, HostCallback]:
        """A callback of a program that is being compiled, under a new handle.

        Raises:
          StatusError: as `HostCallbackRegistry.add`.
        """
        callback = self._registry.add(serialized)
        handle = self._new_handle()
        self._callbacks[handle] = callback
        return handle, callback

    def unload(self, handles: tuple[int, ...]) -> None:
        """Their program is dropped."""
        for handle in handles:
            callback = self._callbacks.pop(handle, None)
            if callback is not None:
                self._registry.remove(callback)

    def poll(self, handle: int, later: Later) -> None:
        """Answer when the program is dropped."""
        callback = self._callbacks.get(handle)
        if callback is None:
            later(None)
        elif callback.poll is not None:
            later(statuses.failed_precondition("a host callback is polled twice at once"))
        else:
            callback.poll = later

    def close(self) -> None:
        """The client is gone."""
        self.unload(tuple(self._callbacks))


def _arrays(infos: Any) -> Arrays:
    return [(_kind(info.shape), tuple(info.shape.dimensions)) for info in infos]


def _kind(shape: Any) -> int:
    """The dtype kind of an `xla.ShapeProto`: IFRT names its kinds as XLA does."""
    name = shape.DESCRIPTOR.fields_by_name["element_type"].enum_type.values_by_number[shape.element_type].name
    return dtypes.kind_by_name(name)
