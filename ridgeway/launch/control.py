"""The control link to a head: ask for its status, follow its events, have it do something.

``["request", id, verb, {...}]`` is answered by ``["reply", id, {...}]`` or ``["error", id, code, message]``;
after ``subscribe`` events arrive as ``["event", {...}]``.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ridgeway.launch.cluster_folder import ClusterRecord
from ridgeway.transport import blocking_link, stream_link
from ridgeway.transport.authentication import AuthenticationError
from ridgeway.transport.frames import FrameError
from ridgeway.transport.stream_link import LinkClosed

CONNECT_TIMEOUT_SECONDS = 5.0
REQUEST_TIMEOUT_SECONDS = 10.0


class ControlError(Exception):
    """The head cannot be reached or said no; the message is for the user."""


def _hello() -> list[Any]:
    return ["hello", {"role": "control", "pid": os.getpid()}]


def _check_welcome(answer: list[Any]) -> None:
    if answer[0] != "welcome":
        raise ControlError(f"the head refused this command: {answer[-1]}")


class ControlClient:
    """For commands: one request after the other."""

    def __init__(self, link: blocking_link.BlockingLink, where: str):
        self._link = link
        self._where = where
        self._next = 0

    def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask and wait for the answer.

        Raises:
          ControlError: no answer in time, or the head said no.
        """
        self._next += 1
        self._link.set_timeout(REQUEST_TIMEOUT_SECONDS)
        try:
            self._link.send(["request", self._next, verb, arguments])
            while True:
                message, _ = self._link.receive()
                match message:
                    case ["reply", int(number), dict(content)] if number == self._next:
                        return content
                    case ["error", int(number), str(), str(text), *_] if number == self._next:
                        raise ControlError(text)
        except (LinkClosed, FrameError) as error:
            raise ControlError(f"the head at {self._where} did not answer {verb}: {error}") from None

    def follow(self, since: int, quiet_seconds: float | None = None) -> Iterator[dict[str, Any]]:
        """Events from a sequence number on, those to come included; ends when the head does, or after so many seconds
        without an event.

        Raises:
          ControlError: the head said no.
        """
        self._next += 1
        self._link.set_timeout(quiet_seconds)
        try:
            self._link.send(["request", self._next, "subscribe", {"since": since}])
            while True:
                message, _ = self._link.receive()
                match message:
                    case ["event", dict(event)]:
                        yield event
                    case ["error", int(number), str(), str(text), *_] if number == self._next:
                        raise ControlError(text)
        except LinkClosed:
            return
        except FrameError as error:
            raise ControlError(f"the head at {self._where} sent something unreadable: {error}") from None


@contextlib.contextmanager
def connect(record: ClusterRecord) -> Iterator[ControlClient]:
    """A control link to a running cluster.

    Raises:
      ControlError: its head cannot be reached.
    """
    where = f"{record.head_host}:{record.cluster_port}"
    try:
        link = blocking_link.connect(record.head_host, record.cluster_port, record.secret, CONNECT_TIMEOUT_SECONDS)
    except (AuthenticationError, OSError) as error:
        raise ControlError(f"cannot reach the head of cluster {record.name!r} at {where}: {error}") from None
    try:
        link.set_timeout(CONNECT_TIMEOUT_SECONDS)
        try:
            link.send(_hello())
            answer, _ = link.receive()
        except (LinkClosed, FrameError) as error:
            raise ControlError(f"the head at {where} did not answer: {error}") from None
        _check_welcome(answer)
        yield ControlClient(link, where)
    finally:
        link.close()


class ControlStream:
    """For the supervisor: requests and the stream of events over one link, in an event loop."""

    def __init__(self, link: stream_link.StreamLink):
        self._link = link
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask and wait for the answer; `follow` must be running.

        Raises:
          ControlError: no answer in time, or the head said no.
        """
        self._next += 1
        number = self._next
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._link.send(["request", number, verb, arguments])
        try:
            return await asyncio.wait_for(future, REQUEST_TIMEOUT_SECONDS)
        except TimeoutError:
            raise ControlError(f"the head did not answer {verb} in {REQUEST_TIMEOUT_SECONDS:g} s") from None
        finally:
            self._waiting.pop(number, None)

    async def follow(self, since: int, handle: Callable[[dict[str, Any]], None]) -> None:
        """Hand on the events from a sequence number on, and answers; returns when the link ends."""
        self._next += 1
        self._link.send(["request", self._next, "subscribe", {"since": since}])
        try:
            while True:
                message, _ = await self._link.receive()
                match message:
                    case ["event", dict(event)]:
                        handle(event)
                    case ["reply", int(number), dict(content)] if number in self._waiting:
                        self._resolve(number, content)
                    case ["error", int(number), str(), str(text), *_] if number in self._waiting:
                        self._resolve(number, ControlError(text))
        except (LinkClosed, FrameError):
            return
        finally:
            for number in list(self._waiting):
                self._resolve(number, ControlError("the link to the head closed"))

    def _resolve(self, number: int, result: dict[str, Any] | Exception) -> None:
        future = self._waiting[number]
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


@contextlib.asynccontextmanager
async def open_stream(host: str, port: int, secret: str) -> AsyncIterator[ControlStream]:
    """A control link for the supervisor.

    Raises:
      ControlError: the head cannot be reached.
    """
    try:
        link = await stream_link.open_link(host, port, secret, CONNECT_TIMEOUT_SECONDS)
    except (ConnectionError, OSError, TimeoutError) as error:
        raise ControlError(f"cannot reach the head at {host}:{port}: {error or 'timed out'}") from None
    try:
        link.send(_hello())
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                answer, _ = await link.receive()
        except (LinkClosed, FrameError, TimeoutError) as error:
            raise ControlError(f"the head at {host}:{port} did not answer: {error or 'timed out'}") from None
        _check_welcome(answer)
        yield ControlStream(link)
    finally:
        link.close()
