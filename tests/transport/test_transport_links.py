"""Frames over real sockets: between two threads, and between a thread and an event loop."""

import asyncio
import hashlib
import random
import socket
import struct
import threading
from typing import Any

import pytest
from sockets import HOST, PATIENCE_SECONDS, Background, blocking_pair, with_stream_server

from ridgeway.transport import blocking_link, frames, stream_link
from ridgeway.transport.blocking_link import BlockingLink
from ridgeway.transport.frames import FrameError
from ridgeway.transport.stream_link import LinkClosed, StreamLink

BIG_BYTES = 3 * stream_link.READ_LIMIT_BYTES + 17


class Pair:
    """Both ends of a link between threads; closes them."""

    def __init__(self) -> None:
        self.one, self.other = blocking_pair()
        for link in (self.one, self.other):
            link.set_timeout(PATIENCE_SECONDS)

    def __enter__(self) -> tuple[BlockingLink, BlockingLink]:
        return self.one, self.other

    def __exit__(self, *_: object) -> None:
        self.one.close()
        self.other.close()


# ---- between threads


def test_messages_and_buffers_arrive_as_they_were_sent() -> None:
    with Pair() as (one, other):
        big = random.Random(1).randbytes(BIG_BYTES)
        sending = Background(lambda: one.send(["put", 7, None, {"a": [1.5, "é"]}], [b"", big, memoryview(b"xyz")]))
        message, buffers = other.receive()
        sending.result()
        assert message == ["put", 7, None, {"a": [1.5, "é"]}]
        assert [bytes(buffer) for buffer in buffers] == [b"", big, b"xyz"]
        other.send(["reply", 7])
        assert one.receive() == (["reply", 7], [])


def test_frames_of_many_threads_are_whole_and_each_threads_are_in_order() -> None:
    senders, messages = 8, 60
    with Pair() as (one, other):

        def send(sender: int) -> None:
            chance = random.Random(sender)
            for number in range(messages):
                buffers = [chance.randbytes(chance.choice((0, 1, 1000, 70_000))) for _ in range(chance.randint(0, 3))]
                digests = [hashlib.sha256(buffer).digest() for buffer in buffers]
                one.send(["from", sender, number, digests], buffers)

        threads = [Background(lambda sender=sender: send(sender)) for sender in range(senders)]
        last = dict.fromkeys(range(senders), -1)
        for _ in range(senders * messages):
            (_, sender, number, digests), buffers = other.receive()
            assert number == last[sender] + 1
            last[sender] = number
            assert [hashlib.sha256(buffer).digest() for buffer in buffers] == digests
        for thread in threads:
            thread.result()


def test_both_ends_may_send_at_once_more_than_the_kernel_holds() -> None:
    with Pair() as (one, other):
        big = bytes(BIG_BYTES)
        sending = [Background(lambda link=link: link.send(["put"], [big, big])) for link in (one, other)]
        receiving = [Background(link.receive) for link in (one, other)]
        for thread in receiving:
            message, buffers = thread.result()
            assert message == ["put"]
            assert [len(buffer) for buffer in buffers] == [BIG_BYTES, BIG_BYTES]
        for thread in sending:
            thread.result()


def test_closing_wakes_the_thread_that_receives() -> None:
    with Pair() as (one, _):
        receiving = Background(one.receive)
        one.close()
        with pytest.raises(LinkClosed):
            receiving.result()


def test_the_other_ends_closing_is_seen() -> None:
    with Pair() as (one, other):
        other.send(["last"])
        other.close()
        assert one.receive() == (["last"], [])
        with pytest.raises(LinkClosed, match="closed by the other end"):
            one.receive()


def test_sending_on_a_closed_link_says_so() -> None:
    with Pair() as (one, _):
        one.close()
        with pytest.raises(LinkClosed):
            one.send(["late"])


def test_a_peer_that_does_not_read_is_given_up_in_time() -> None:
    with Pair() as (one, _):
        one.set_timeout(0.3)
        with pytest.raises(LinkClosed):
            one.send(["put"], [bytes(64 << 20)])


def test_a_peer_that_sends_nothing_is_given_up_in_time() -> None:
    with Pair() as (one, _):
        one.set_timeout(0.2)
        with pytest.raises(LinkClosed):
            one.receive()


BROKEN_FRAMES = [
    (frames.PREFIX.pack(frames.BODY_LIMIT_BYTES + 1, 0), FrameError),
    (frames.PREFIX.pack(4, 1) + struct.pack("<Q", frames.BUFFER_LIMIT_BYTES + 1) + b"\x91\xa1a", FrameError),
    (frames.PREFIX.pack(1, 0) + b"\xc1", FrameError),
    (b"GET / HTTP/1.1\r\n", FrameError),
    (frames.PREFIX.pack(100, 0) + b"\x91", LinkClosed),
    (frames.PREFIX.pack(3, 1) + struct.pack("<Q", 10) + b"\x91\xa1a" + b"12345", LinkClosed),
    (frames.PREFIX.pack(3, 2) + b"\x00", LinkClosed),
    (b"\x01\x02", LinkClosed),
]
BROKEN_FRAME_NAMES = [
    "body over the limit", "buffer over the limit", "no message", "another protocol", "cut in the body",
    "cut in a buffer", "cut in the lengths", "cut in the prefix",
]  # fmt: skip


@pytest.mark.parametrize(("data", "error"), BROKEN_FRAMES, ids=BROKEN_FRAME_NAMES)
def test_a_thread_is_told_of_what_is_no_frame(data: bytes, error: type[Exception]) -> None:
    with Pair() as (one, other):
        other.send(["first"])
        other.socket.sendall(data)
        other.socket.shutdown(socket.SHUT_WR)
        assert one.receive()[0] == ["first"]
        with pytest.raises(error):
            one.receive()


# ---- between a thread and an event loop


def client_of(port: int, act: Any) -> "asyncio.Future[Any]":
    """Run ``act(link)`` on a link to the server, in a thread of its own."""

    def run() -> Any:
        link = blocking_link.connect(HOST, port, "s", 5.0)
        link.set_timeout(PATIENCE_SECONDS)
        try:
            return act(link)
        finally:
            link.close()

    return asyncio.get_running_loop().run_in_executor(None, run)


def test_a_stream_carries_messages_and_buffers_both_ways() -> None:
    big = random.Random(2).randbytes(BIG_BYTES)

    def act(link: BlockingLink) -> None:
        link.send(["put", 1], [big, b""])
        assert link.receive() == (["reply", 1], [bytearray(big)])
        assert link.receive() == (["execute", 2], [])

    async def test(port: int, accepted: "asyncio.Future[StreamLink]") -> None:
        client = client_of(port, act)
        link = await accepted
        assert link.peer_address == HOST
        message, buffers = await link.receive()
        assert (message, buffers) == (["put", 1], [big, b""])
        link.send(["reply", 1], [buffers[0]])
        link.send_packed(frames.pack(["execute", 2]))
        await client
        with pytest.raises(LinkClosed):
            await link.receive()

    with_stream_server(test)


def test_two_event_loops_ends_understand_each_other() -> None:
    async def test(port: int, accepted: "asyncio.Future[StreamLink]") -> None:
        one = await stream_link.open_link(HOST, port, "s", 5.0)
        other = await accepted
        one.send(["a"], [b"12", b"3"])
        assert await other.receive() == (["a"], [b"12", b"3"])
        other.send(["b"])
        assert await one.receive() == (["b"], [])
        one.close()
        with pytest.raises(LinkClosed):
            await other.receive()

    with_stream_server(test)


@pytest.mark.parametrize(("data", "error"), BROKEN_FRAMES, ids=BROKEN_FRAME_NAMES)
def test_an_event_loop_is_told_of_what_is_no_frame(data: bytes, error: type[Exception]) -> None:
    def act(link: BlockingLink) -> None:
        link.send(["first"])
        link.socket.sendall(data)
        link.socket.shutdown(socket.SHUT_WR)

    async def test(port: int, accepted: "asyncio.Future[StreamLink]") -> None:
        client = client_of(port, act)
        link = await accepted
        assert (await link.receive())[0] == ["first"]
        with pytest.raises(error):
            await link.receive()
        await client

    with_stream_server(test)


def test_what_a_slow_reader_has_not_taken_is_counted_and_can_be_waited_for() -> None:
    go_on = threading.Event()

    def act(link: BlockingLink) -> int:
        assert go_on.wait(PATIENCE_SECONDS)
        return len(link.receive()[1][0])

    async def test(port: int, accepted: "asyncio.Future[StreamLink]") -> None:
        client = client_of(port, act)
        link = await accepted
        link.send(["put"], [bytes(32 << 20)])
        assert link.unsent_bytes > 0
        go_on.set()
        await link.drain()
        assert await client == 32 << 20

    with_stream_server(test)


def test_closing_gently_lets_what_was_sent_arrive() -> None:
    def act(link: BlockingLink) -> list[Any]:
        message, _ = link.receive()
        with pytest.raises(LinkClosed):
            link.receive()
        return message

    async def test(port: int, accepted: "asyncio.Future[StreamLink]") -> None:
        client = client_of(port, act)
        link = await accepted
        link.send(["refused", "INVALID_ARGUMENT", "taken"])
        await link.close_gently(5.0)
        assert await client == ["refused", "INVALID_ARGUMENT", "taken"]

    with_stream_server(test)


def test_closing_gently_does_not_wait_for_ever_for_a_reader_that_is_gone_quiet() -> None:
    stop = threading.Event()

    async def test(port: int, accepted: "asyncio.Future[StreamLink]") -> None:
        client = client_of(port, lambda link: stop.wait(PATIENCE_SECONDS))
        link = await accepted
        link.send(["put"], [bytes(64 << 20)])
        await link.close_gently(0.2)
        with pytest.raises(LinkClosed):
            await link.receive()
        stop.set()
        assert await client

    with_stream_server(test)


def test_sending_on_a_closed_stream_is_dropped_and_its_reader_sees_the_end() -> None:
    def act(link: BlockingLink) -> None:
        with pytest.raises(LinkClosed):
            link.receive()

    async def test(port: int, accepted: "asyncio.Future[StreamLink]") -> None:
        client = client_of(port, act)
        link = await accepted
        link.close()
        link.send(["late"], [b"x"])
        link.send_packed(frames.pack(["late"]))
        with pytest.raises(LinkClosed):
            await link.receive()
        await client

    with_stream_server(test)
