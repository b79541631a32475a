"""Both kinds of link's ends on real sockets of the loopback address."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from ridgeway.transport import blocking_link, stream_link
from ridgeway.transport.blocking_link import BlockingLink
from ridgeway.transport.stream_link import StreamLink

HOST = "127.0.0.1"
PATIENCE_SECONDS = 20.0
"""More than anything here takes; only a hang reaches it."""


class Background:
    """A function in a thread of its own; `result` gives what it returned or raises what it raised."""

    def __init__(self, function: Callable[[], Any]):
        self._result: Any = None
        self._error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result


def listener() -> socket.socket:
    """A listening socket on a port of the kernel's choice."""
    made = socket.create_server((HOST, 0))
    made.settimeout(PATIENCE_SECONDS)
    return made


def blocking_pair(secret: str = "s", timeout_seconds: float = 5.0) -> tuple[BlockingLink, BlockingLink]:
    """(connecting end, accepting end) of a link between threads."""
    with listener() as server:
        accepting = Background(lambda: blocking_link.accept(server.accept()[0], secret, timeout_seconds))
        connecting = blocking_link.connect(HOST, server.getsockname()[1], secret, timeout_seconds)
        return connecting, accepting.result()


def with_stream_server(
    test: Callable[[int, "asyncio.Future[StreamLink]"], Coroutine[Any, Any, None]],
    secret: str = "s",
    timeout_seconds: float = 5.0,
) -> None:
    """Run ``test(port, link)`` beside a server that accepts one link, or fails the future with why it did not."""

    async def run() -> None:
        accepted: asyncio.Future[StreamLink] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                accepted.set_result(await stream_link.accept_link(reader, writer, secret, timeout_seconds))
            except Exception as error:
                accepted.set_exception(error)
                writer.transport.abort()

        server = await asyncio.start_server(serve, HOST, 0, limit=stream_link.READ_LIMIT_BYTES)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await test(server.sockets[0].getsockname()[1], accepted)
        finally:
            server.close()
            if accepted.done() and not accepted.cancelled() and accepted.exception() is None:
                accepted.result().close()

    asyncio.run(run())
