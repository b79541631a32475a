"""Frames as bytes."""

import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeway.transport import frames

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=12,
)


def join(pieces: list[frames.Buffer]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


def parse(data: bytes) -> tuple[list, list[bytes]]:
    """A whole frame, as a reader takes it apart."""
    length, count = frames.parse_prefix(data[: frames.PREFIX.size])
    position = frames.PREFIX.size
    lengths = frames.parse_lengths(data[position : position + 8 * count])
    position += 8 * count
    message = frames.unpack_body(data[position : position + length])
    position += length
    buffers = []
    for size in lengths:
        buffers.append(data[position : position + size])
        position += size
    assert position == len(data)
    return message, buffers


@given(kind=st.text(), fields=st.lists(VALUES, max_size=5), buffers=st.lists(st.binary(max_size=50), max_size=5))
def test_what_is_packed_is_unpacked(kind: str, fields: list, buffers: list[bytes]) -> None:
    message = [kind, *fields]
    assert parse(join(frames.pack_with_buffers(message, buffers))) == (message, buffers)
    assert parse(frames.pack(message)) == (message, [])


def test_tuples_arrive_as_lists() -> None:
    assert parse(frames.pack(("kind", (1, (2, 3)))))[0] == ["kind", [1, [2, 3]]]


def test_buffers_may_be_views_of_wider_elements() -> None:
    view = memoryview(struct.pack("<3I", 1, 2, 3)).cast("I")
    message, (buffer,) = parse(join(frames.pack_with_buffers(["put"], [view])))
    assert message == ["put"]
    assert buffer == view.tobytes()


def test_more_buffers_than_a_frame_holds_are_refused_by_the_sender() -> None:
    with pytest.raises(frames.FrameError, match=str(frames.BUFFER_COUNT_LIMIT)):
        frames.pack_with_buffers(["put"], [b""] * (frames.BUFFER_COUNT_LIMIT + 1))


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    assert frames.parse_prefix(frames.PREFIX.pack(frames.BODY_LIMIT_BYTES, 3)) == (frames.BODY_LIMIT_BYTES, 3)
    with pytest.raises(frames.FrameError, match="at most"):
        frames.parse_prefix(frames.PREFIX.pack(frames.BODY_LIMIT_BYTES + 1, 0))


def test_a_buffer_over_the_limit_is_refused_before_it_is_read() -> None:
    lengths = struct.pack("<3Q", 1, frames.BUFFER_LIMIT_BYTES, 2)
    assert frames.parse_lengths(lengths) == [1, frames.BUFFER_LIMIT_BYTES, 2]
    with pytest.raises(frames.FrameError, match="at most"):
        frames.parse_lengths(struct.pack("<2Q", 1, frames.BUFFER_LIMIT_BYTES + 1))


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", msgpack.packb({"kind": 1}), msgpack.packb([]), msgpack.packb([1, 2]), msgpack.packb("kind"),
     msgpack.packb(["kind"]) + b"\x00", msgpack.packb(["kind", 1])[:-1], b"\xdd\xff\xff\xff\xff"],
)  # fmt: skip
def test_a_body_that_is_no_message_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(frames.FrameError, match="not a message"):
        frames.unpack_body(body)


@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_a_frame_error(body: bytes) -> None:
    try:
        message = frames.unpack_body(body)
    except frames.FrameError:
        return
    assert isinstance(message[0], str)
