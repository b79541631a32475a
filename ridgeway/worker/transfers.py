"""Bytes from executor to executor, never through the head.

Every executor listens on a transfer port; the sender connects (authenticated like every link), keeps the connection,
and pushes ``["push", token, dtype kind, shape]`` with one buffer, or
``["failed", token, code, message, generation]``: the generation whose end it is (see `failures`), or 0.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ridgeway.protocol import dtypes
from ridgeway.protocol.status import Code, Status
from ridgeway.transport import authentication, blocking_link
from ridgeway.transport.blocking_link import BlockingLink
from ridgeway.transport.frames import FrameError
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import device_runtime
from ridgeway.worker.failures import GenerationFailure
from ridgeway.worker.gate import Gate
from ridgeway.worker.promises import PromiseTable

BACKLOG = 64
ACCEPT_AGAIN_SECONDS = 0.1
IDLE_SECONDS = 60.0
"""A connection to another executor is closed when nothing was sent for so long."""


class TransferServer:
    """Receives shards and resolves their promises.

    Args:
      inherited: the sockets of a predecessor of this process: its listener, then its authenticated connections. The
        gate is closed then, for the predecessor to let go first.
    """

    def __init__(
        self, address: str, secret: str, promises: PromiseTable, handshake_timeout_seconds: float,
        inherited: Sequence[socket.socket] = (),
    ):  # fmt: skip
        self._secret = secret
        self._promises = promises
        self._handshake_timeout_seconds = handshake_timeout_seconds
        self._listener = inherited[0] if inherited else socket.create_server((address, 0), backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self.gate = Gate(closed=bool(inherited))
        self._connections: dict[socket.socket, None] = {}
        self.gate.enter()
        for connection in inherited[1:]:
            self.gate.enter()
            self._start("transfer-receive", self._serve_inherited, connection)
        self._start("transfer-accept", self._accept)

    def sockets(self) -> list[socket.socket]:
        """What a successor inherits; to be asked for while the gate is closed."""
        return [self._listener, *self._connections]

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            self.gate.wait(self._listener)
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                # The peer went away before, or there are no descriptors just now: others come later.
                print(f"transfers: a connection could not be accepted: {error}", flush=True)
                time.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            device_runtime.spare_socket_from_abort(connection)
            self.gate.enter()
            self._start("transfer-receive", self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._receive(blocking_link.accept(connection, self._secret, self._handshake_timeout_seconds))
        except (authentication.AuthenticationError, LinkClosed, FrameError):
            pass
        finally:
            self._close(connection)

    def _serve_inherited(self, connection: socket.socket) -> None:
        try:
            self._receive(BlockingLink(connection))
        except (LinkClosed, FrameError):
            pass
        finally:
            self._close(connection)

    def _receive(self, link: BlockingLink) -> None:
        self._connections[link.socket] = None
        while True:
            self.gate.wait(link.socket)
            message, buffers = link.receive()
            if message[0] == "push":
                _, token, kind, shape = message
                data = np.frombuffer(buffers[0], dtype=dtypes.dtype_of_kind(kind)).reshape(shape)
                self._promises.resolve(token, data)
            elif message[0] == "failed":
                _, token, code, text, generation = message
                status = Status(Code(code), text)
                if generation:
                    status = GenerationFailure(Code(code), text, generation)
                self._promises.resolve(token, status)

    def _close(self, connection: socket.socket) -> None:
        self._connections.pop(connection, None)
        self.gate.leave()
        try:
            device_runtime.forget_socket(connection)
        except OSError:
            pass
        connection.close()


Failed = Callable[[OSError], None]


class TransferClient:
    """Pushes shards to other executors, each over its own connection and thread, so that one that is stopped holds
    up nobody else. Nothing here waits for the network but those threads."""

    def __init__(self, secret: str, timeout_seconds: float):
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._queues: dict[tuple[str, int], queue.SimpleQueue[tuple[list[Any], list[Any], Failed]]] = {}
        self._lock = threading.Lock()
        self._unsent = 0

    def push(self, host: str, port: int, token: int, data: np.ndarray, failed: Failed) -> None:
        """Send one shard, or a part of one; ``failed`` is called on another thread if it cannot be sent (the head
        knows, or will soon, why)."""
        message = ["push", token, dtypes.kind_of_dtype(data.dtype), list(data.shape)]
        self._enqueue(host, port, message, [data], failed)

    def fail(self, host: str, port: int, token: int, status: Status, failed: Failed) -> None:
        """Say that a shard will not come."""
        generation = status.generation if isinstance(status, GenerationFailure) else 0
        self._enqueue(host, port, ["failed", token, int(status.code), status.message, generation], [], failed)

    @property
    def unsent(self) -> int:
        """Messages that the kernel has not taken yet."""
        return self._unsent

    def _enqueue(self, host: str, port: int, message: list[Any], arrays: list[np.ndarray], failed: Failed) -> None:
        address = (host, port)
        with self._lock:
            waiting = self._queues.get(address)
            if waiting is None:
                waiting = self._queues[address] = queue.SimpleQueue()
                name = f"transfer-send-{host}:{port}"
                threading.Thread(target=self._send_all, args=(address, waiting), name=name, daemon=True).start()
            self._unsent += 1
            waiting.put((message, arrays, failed))

    def _send_all(self, address: tuple[str, int], waiting: "queue.SimpleQueue[Any]") -> None:
        link: BlockingLink | None = None
        while True:
            try:
                message, arrays, failed = waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if not waiting.empty():
                        continue
                    del self._queues[address]
                _close(link)
                return
            try:
                if link is None:
                    link = self._connect(address)
                link.send(message, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays])
            except OSError as error:
                _close(link)
                link = None
                failed(error)
            finally:
                with self._lock:
                    self._unsent -= 1

    def _connect(self, address: tuple[str, int]) -> BlockingLink:
        link = blocking_link.connect(*address, self._secret, self._timeout_seconds)
        device_runtime.spare_socket_from_abort(link.socket)
        link.set_timeout(self._timeout_seconds)
        return link


def _close(link: BlockingLink | None) -> None:
    if link is not None:
        try:
            device_runtime.forget_socket(link.socket)
        except OSError:
            pass  # it is closed already
        link.close()
