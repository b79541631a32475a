"""A link inside an asyncio event loop: the head's end of every link, and the agent's."""

import asyncio
import socket
import ssl
import struct
import sys
from collections.abc import Sequence
from typing import Any

from ridgeway.transport import authentication, frames
from ridgeway.transport.frames import Buffer, Message

READ_LIMIT_BYTES = 1 << 20

# `tcpi_last_ack_recv` in `struct tcp_info` of <linux/tcp.h>, the part that every kernel since 2.6 has.
_TCP_INFO_BYTES = 104
_LAST_ACK_OFFSET = 56
_LAST_ACK_MILLISECONDS = struct.Struct("=I")


class LinkClosed(ConnectionError):
    """The other end closed the link, or the connection broke."""


class StreamLink:
    """One authenticated connection that carries frames in both directions, in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._transport = writer.transport

    @property
    def unsent_bytes(self) -> int:
        """Bytes handed to `send` that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size()

    @property
    def peer_address(self) -> str:
        """The other end's IP address, for messages."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else "unknown"

    @property
    def acknowledged_seconds(self) -> float | None:
        """How long ago the other end's kernel last acknowledged what was sent, be its process stopped or not; None
        where the system does not tell."""
        connection = self._writer.get_extra_info("socket")
        if sys.platform != "linux" or connection is None or self._transport.is_closing():
            return None
        try:
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return None
        return _LAST_ACK_MILLISECONDS.unpack_from(information, _LAST_ACK_OFFSET)[0] / 1000

    def send(self, message: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Queue one frame; never blocks. On a closed link it is dropped: the reader sees the closing."""
        if self._transport.is_closing():
            return
        if buffers:
            for piece in frames.pack_with_buffers(message, buffers):
                self._transport.write(piece)
        else:
            self._transport.write(frames.pack(message))

    def send_packed(self, frame: bytes) -> None:
        """Queue a frame made by `frames.pack`, so that one packing serves several links."""
        if not self._transport.is_closing():
            self._transport.write(frame)

    async def drain(self) -> None:
        """Wait until the kernel has taken enough of what was queued."""
        await self._writer.drain()

    async def receive(self) -> tuple[Message, list[bytes]]:
        """The next frame.

        Raises:
          LinkClosed: the connection ended.
          frames.FrameError: the other end sent something that is not a frame.
        """
        try:
            prefix = await self._reader.readexactly(frames.PREFIX.size)
            body_length, buffer_count = frames.parse_prefix(prefix)
            lengths = frames.parse_lengths(await self._reader.readexactly(8 * buffer_count)) if buffer_count else []
            message = frames.unpack_body(await self._reader.readexactly(body_length))
            buffers = [await self._reader.readexactly(length) for length in lengths]
        except (asyncio.IncompleteReadError, ConnectionError, OSError) as error:
            raise LinkClosed(str(error) or "connection closed") from None
        return message, buffers

    def close(self) -> None:
        """Close at once; what is unsent is dropped."""
        self._transport.abort()

    async def close_gently(self, timeout_seconds: float) -> None:
        """Close after what is unsent has gone out, or after the timeout."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout_seconds)
        except (TimeoutError, ConnectionError, OSError):
            self._transport.abort()


async def accept_link(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, timeout_seconds: float
) -> StreamLink:
    """The head's side of the handshake.

    Raises:
      authentication.AuthenticationError: the peer does not know the secret, or took too long.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            server_nonce = authentication.new_nonce()
            writer.write(authentication.MAGIC + server_nonce)
            answer = await reader.readexactly(authentication.NONCE_BYTES + authentication.PROOF_BYTES)
            client_nonce = answer[: authentication.NONCE_BYTES]
            candidate = answer[authentication.NONCE_BYTES :]
            if not authentication.is_proof(candidate, secret, b"client", server_nonce, client_nonce):
                writer.write(authentication.REFUSED)
                await writer.drain()
                raise authentication.AuthenticationError("wrong cluster secret")
            writer.write(authentication.ACCEPTED + authentication.proof(secret, b"server", server_nonce, client_nonce))
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError, TimeoutError) as error:
        raise authentication.AuthenticationError(f"handshake not finished: {error or 'too slow'}") from None
    return StreamLink(reader, writer)


async def open_link(
    host: str, port: int, secret: str, timeout_seconds: float, tls: ssl.SSLContext | None = None
) -> StreamLink:
    """Connect to a head and prove the secret.

    Raises:
      authentication.AuthenticationError: the head has another secret, or is none.
      ConnectionError, OSError, TimeoutError: it cannot be reached in time.
    """
    async with asyncio.timeout(timeout_seconds):
        reader, writer = await asyncio.open_connection(host, port, limit=READ_LIMIT_BYTES, ssl=tls)
        try:
            server_nonce = authentication.parse_greeting(await reader.readexactly(authentication.GREETING_BYTES))
            client_nonce = authentication.new_nonce()
            writer.write(client_nonce + authentication.proof(secret, b"client", server_nonce, client_nonce))
            if await reader.readexactly(1) != authentication.ACCEPTED:
                raise authentication.AuthenticationError(f"the head at {host}:{port} has another cluster secret")
            candidate = await reader.readexactly(authentication.PROOF_BYTES)
            if not authentication.is_proof(candidate, secret, b"server", server_nonce, client_nonce):
                raise authentication.AuthenticationError(f"the head at {host}:{port} does not know the cluster secret")
        except asyncio.IncompleteReadError:
            writer.transport.abort()
            raise authentication.AuthenticationError(f"the head at {host}:{port} closed the handshake") from None
        except BaseException:
            writer.transport.abort()
            raise
    return StreamLink(reader, writer)
