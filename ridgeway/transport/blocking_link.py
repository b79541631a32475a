"""A link for plain threads: the executor's and the compiler's end, and short commands."""

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from ridgeway.transport import authentication, frames
from ridgeway.transport.frames import Buffer, Message
from ridgeway.transport.stream_link import LinkClosed


class BlockingLink:
    """One authenticated connection; `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._send_lock = threading.Lock()

    @property
    def socket(self) -> socket.socket:
        """The connection, for those who must know its descriptor."""
        return self._socket

    @property
    def sending(self) -> threading.Lock:
        """Whoever holds it is sure that no frame is begun or half sent; `send` waits meanwhile."""
        return self._send_lock

    def send(self, message: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send one frame, waiting for the kernel to take it.

        Raises:
          LinkClosed: the connection broke.
        """
        pieces = frames.pack_with_buffers(message, buffers) if buffers else [frames.pack(message)]
        try:
            with self._send_lock:
                for piece in pieces:
                    self._socket.sendall(piece)
        except OSError as error:
            raise LinkClosed(str(error)) from None

    def receive(self) -> tuple[Message, list[bytearray]]:
        """The next frame; waits as long as the socket's timeout says (for ever by default: the head's death
        closes the connection).

        Raises:
          LinkClosed: the connection ended.
          frames.FrameError: the other end sent something that is not a frame.
        """
        body_length, buffer_count = frames.parse_prefix(bytes(self._read(frames.PREFIX.size)))
        lengths = frames.parse_lengths(bytes(self._read(8 * buffer_count))) if buffer_count else []
        message = frames.unpack_body(self._read(body_length))
        return message, [self._read(length) for length in lengths]

    def _read(self, length: int) -> bytearray:
        return read_exactly(self._socket, length)

    def set_timeout(self, seconds: float | None) -> None:
        """Deadline of each following read and write; None waits for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close; a thread that waits in `receive` sees `LinkClosed`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


def read_exactly(connection: socket.socket, length: int, deadline: float | None = None) -> bytearray:
    """``length`` bytes from a socket, all of them before ``deadline`` (of `time.monotonic`): a socket's own timeout
    begins anew with each byte.

    Raises:
      LinkClosed: the connection ended or timed out before that.
    """
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            if deadline is not None:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
            count = connection.recv_into(view)
        except OSError as error:
            raise LinkClosed(str(error)) from None
        if count == 0:
            raise LinkClosed("connection closed by the other end")
        view = view[count:]
    return data


def connect(
    host: str, port: int, secret: str, timeout_seconds: float, tls: ssl.SSLContext | None = None
) -> BlockingLink:
    """Connect to a head (or to an executor's transfer port) and prove the secret.

    Raises:
      authentication.AuthenticationError: the peer has another secret, or is no Ridgeway process.
      OSError: it cannot be reached in time.
    """
    deadline = time.monotonic() + timeout_seconds
    connection = socket.create_connection((host, port), timeout_seconds)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.wrap_socket(connection, server_hostname=host)
        try:
            greeting = read_exactly(connection, authentication.GREETING_BYTES, deadline)
            server_nonce = authentication.parse_greeting(bytes(greeting))
            client_nonce = authentication.new_nonce()
            connection.sendall(client_nonce + authentication.proof(secret, b"client", server_nonce, client_nonce))
            if bytes(read_exactly(connection, 1, deadline)) != authentication.ACCEPTED:
                raise authentication.AuthenticationError(f"{host}:{port} has another cluster secret")
            candidate = bytes(read_exactly(connection, authentication.PROOF_BYTES, deadline))
        except LinkClosed as error:
            raise authentication.AuthenticationError(f"{host}:{port} closed the handshake: {error}") from None
        if not authentication.is_proof(candidate, secret, b"server", server_nonce, client_nonce):
            raise authentication.AuthenticationError(f"{host}:{port} does not know the cluster secret")
        connection.settimeout(None)
        return BlockingLink(connection)
    except BaseException:
        connection.close()
        raise


def accept(connection: socket.socket, secret: str, timeout_seconds: float) -> BlockingLink:
    """The accepting side of the handshake, on a plain socket.

    Raises:
      authentication.AuthenticationError: the peer does not know the secret, or took too long.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        connection.settimeout(timeout_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server_nonce = authentication.new_nonce()
        connection.sendall(authentication.MAGIC + server_nonce)
        answer = bytes(read_exactly(connection, authentication.NONCE_BYTES + authentication.PROOF_BYTES, deadline))
        client_nonce, candidate = answer[: authentication.NONCE_BYTES], answer[authentication.NONCE_BYTES :]
        if not authentication.is_proof(candidate, secret, b"client", server_nonce, client_nonce):
            connection.sendall(authentication.REFUSED)
            raise authentication.AuthenticationError("wrong cluster secret")
        connection.sendall(
            authentication.ACCEPTED + authentication.proof(secret, b"server", server_nonce, client_nonce)
        )
    except (OSError, LinkClosed) as error:
        connection.close()
        if isinstance(error, authentication.AuthenticationError):
            raise
        raise authentication.AuthenticationError(f"handshake not finished: {error}") from None
    connection.settimeout(None)
    return BlockingLink(connection)
