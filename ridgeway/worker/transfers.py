"""Bytes from executor to executor, never through the head.

Every executor listens on a transfer port; the sender connects (authenticated like every link), keeps the connection,
and pushes ``["push", token, dtype kind, shape]`` with one buffer, or ``["failed", token, code, message]``.
"""

import socket
import threading

import numpy as np

from ridgeway.protocol import dtypes
from ridgeway.protocol.status import Code, Status
from ridgeway.transport import authentication, blocking_link
from ridgeway.transport.blocking_link import BlockingLink
from ridgeway.transport.frames import FrameError
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import device_runtime
from ridgeway.worker.buffers import PromiseTable

BACKLOG = 64


class TransferServer:
    """Receives shards and resolves their promises."""

    def __init__(self, address: str, secret: str, promises: PromiseTable, handshake_timeout_seconds: float):
        self._secret = secret
        self._promises = promises
        self._handshake_timeout_seconds = handshake_timeout_seconds
        self._listener = socket.create_server((address, 0), backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="transfer-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            device_runtime.spare_socket_from_abort(connection)
            threading.Thread(target=self._serve, args=(connection,), name="transfer-receive", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            link = blocking_link.accept(connection, self._secret, self._handshake_timeout_seconds)
            while True:
                message, buffers = link.receive()
                if message[0] == "push":
                    _, token, kind, shape = message
                    data = np.frombuffer(buffers[0], dtype=dtypes.dtype_of_kind(kind)).reshape(shape)
                    self._promises.resolve(token, data)
                elif message[0] == "failed":
                    _, token, code, text = message
                    self._promises.resolve(token, Status(Code(code), text))
        except (authentication.AuthenticationError, LinkClosed, FrameError):
            pass
        finally:
            try:
                device_runtime.forget_socket(connection)
            except OSError:
                pass
            connection.close()


class TransferClient:
    """Pushes shards to other executors over kept connections."""

    def __init__(self, secret: str, timeout_seconds: float):
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._links: dict[tuple[str, int], BlockingLink] = {}
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self._lock = threading.Lock()

    def push(self, host: str, port: int, token: int, data: np.ndarray) -> None:
        """Send one shard.

        Raises:
          OSError: the other executor cannot be reached or went away (the head knows, or will soon).
        """
        contiguous = np.ascontiguousarray(data)
        message = ["push", token, dtypes.kind_of_dtype(contiguous.dtype), list(data.shape)]
        self._send(host, port, message, [contiguous.reshape(-1).view(np.uint8)])

    def fail(self, host: str, port: int, token: int, status: Status) -> None:
        """Say that a shard will not come.

        Raises:
          OSError: as `push`.
        """
        self._send(host, port, ["failed", token, int(status.code), status.message], [])

    def _send(self, host: str, port: int, message: list, buffers: list) -> None:
        address = (host, port)
        with self._lock:
            lock = self._locks.setdefault(address, threading.Lock())
        with lock:
            link = self._links.get(address)
            if link is None:
                link = blocking_link.connect(host, port, self._secret, self._timeout_seconds)
                device_runtime.spare_socket_from_abort(link.socket)
                link.set_timeout(self._timeout_seconds)
                self._links[address] = link
            try:
                link.send(message, buffers)
            except LinkClosed:
                del self._links[address]
                device_runtime.forget_socket(link.socket)
                link.close()
                raise
