"""Frames: what goes over a link between the head, agents, executors and commands.

A frame is a MessagePack list ``[kind, field, ...]`` plus raw buffers that are not copied into it::

    uint32 body length | uint16 buffer count | uint64 length of each buffer | body | buffers
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgpack

PREFIX = struct.Struct("<IH")
_LENGTH = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview
Message = list[Any]

BODY_LIMIT_BYTES = 256 << 20
BUFFER_COUNT_LIMIT = 65_535
BUFFER_LIMIT_BYTES = 64 << 30


class FrameError(ValueError):
    """Bytes that are not a frame, or a frame over the limits."""


def pack_body(value: Any) -> bytes:
    """MessagePack of plain data."""
    body = msgpack.packb(value, use_bin_type=True)
    assert body is not None  # msgpack's types allow None for streaming packers
    return body


def pack(message: Sequence[Any]) -> bytes:
    """A frame without buffers."""
    body = pack_body(message)
    return PREFIX.pack(len(body), 0) + body


def pack_with_buffers(message: Sequence[Any], buffers: Sequence[Buffer]) -> list[Buffer]:
    """The pieces of a frame, to be written one after the other."""
    if len(buffers) > BUFFER_COUNT_LIMIT:
        raise FrameError(f"{len(buffers)} buffers in a frame; at most {BUFFER_COUNT_LIMIT}")
    body = pack_body(message)
    views = [memoryview(buffer).cast("B") if len(buffer) else memoryview(b"") for buffer in buffers]
    head = PREFIX.pack(len(body), len(views)) + b"".join(_LENGTH.pack(len(view)) for view in views)
    return [head + body, *views]


def parse_prefix(data: bytes) -> tuple[int, int]:
    """Body length and buffer count from the first ``PREFIX.size`` bytes.

    Raises:
      FrameError: the body is over ``BODY_LIMIT_BYTES``.
    """
    body_length, buffer_count = PREFIX.unpack(data)
    if body_length > BODY_LIMIT_BYTES:
        raise FrameError(f"frame of {body_length} bytes; at most {BODY_LIMIT_BYTES}")
    return body_length, buffer_count


def parse_lengths(data: bytes) -> list[int]:
    """The buffers' lengths from ``8 * buffer count`` bytes.

    Raises:
      FrameError: a buffer is over ``BUFFER_LIMIT_BYTES``.
    """
    lengths = [length for (length,) in _LENGTH.iter_unpack(data)]
    if any(length > BUFFER_LIMIT_BYTES for length in lengths):
        raise FrameError(f"buffer of {max(lengths)} bytes; at most {BUFFER_LIMIT_BYTES}")
    return lengths


def unpack_body(data: Buffer) -> Message:
    """The message in a body.

    Raises:
      FrameError: not a MessagePack list that begins with a text.
    """
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True)
    except Exception as error:
        raise FrameError(f"not a message: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise FrameError("not a message: a list that begins with its kind is expected")
    return message
