"""Host callbacks between workers and the client's stream, without either."""

import asyncio
from typing import Any, cast

import pytest
import virtual_time

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.protocol import callback_link, dtypes, messages
from ridgeway.protocol.status import Code, StatusError
from ridgeway.proxy.host_callbacks import CallbackStream, HostCallbackRegistry, SessionCallbacks

F64 = dtypes.kind_by_name("F64")


class Worker:
    """What a worker is told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[Any], list[bytes]]] = []

    def send_aside(self, message: list[Any], buffers: list[bytes] | None = None) -> None:
        self.told.append((message, buffers or []))


class Client:
    """A client with the plugin, as the server sees it."""

    def __init__(self, registry: HostCallbackRegistry):
        self.id = callback_link.new_client()
        self.asked: list[list[Any]] = []
        self.stream = CallbackStream(lambda data: self.asked.append(callback_link.unpack(data)))
        self.session = SessionCallbacks(registry, iter(range(100, 200)).__next__)
        registry.opened(self.id, self.stream)

    def announce(self, number: int) -> bytes:
        """What jaxlib's client sends of a callback f32[2,3] -> f64[]."""
        proto = messages.XlaHostCallbackProto()
        for length in callback_link.callback_name(self.id, number):
            operand = proto.operands.add()
            operand.shape.element_type = 1
            operand.shape.dimensions.append(length)
        operand = proto.operands.add()
        operand.shape.element_type = 11
        operand.shape.dimensions.extend([2, 3])
        proto.results.add().shape.element_type = 12
        return proto.SerializeToString()


@pytest.fixture
def registry() -> HostCallbackRegistry:
    return HostCallbackRegistry(connect_seconds=10.0)


@pytest.fixture
def client(registry: HostCallbackRegistry) -> Client:
    return Client(registry)


def call(registry: HostCallbackRegistry, number: int, token: int = -1) -> Worker:
    worker = Worker()
    registry.called(cast(ExecutorLink, worker), number, token, [[2, 3]], b"operands")
    return worker


def test_a_call_goes_to_the_client_and_its_result_back(registry: HostCallbackRegistry, client: Client) -> None:
    _, callback = client.session.load(client.announce(7))
    assert callback.results == [(F64, ())]
    worker = call(registry, callback.number, token=-5)
    [[kind, number, client_number, shapes, operands]] = client.asked
    assert (kind, client_number, shapes, operands, worker.told) == ("call", 7, [[2, 3]], b"operands", [])
    client.stream.on_message(["result", number, b"12345678"])
    client.stream.on_message(["result", number, b"once more"])
    assert worker.told == [(["data", -5], [b"12345678"])]


def test_what_a_callback_raises_is_not_taken_for_a_lost_slice(registry: HostCallbackRegistry, client: Client) -> None:
    _, callback = client.session.load(client.announce(1))
    worker = call(registry, callback.number)
    client.stream.on_message(["failed", client.asked[0][1], "Traceback ... DATA_LOSS"])
    [([_, _, code, text], _)] = worker.told
    assert code == Code.UNKNOWN and "Traceback" in text and "DATA_LOSS" not in text


def test_dropping_the_program_ends_its_calls_and_the_poll(registry: HostCallbackRegistry, client: Client) -> None:
    handle, callback = client.session.load(client.announce(1))
    polled: list[Any] = []
    client.session.poll(handle, polled.append)
    worker = call(registry, callback.number)
    assert polled == []
    client.session.unload((handle,))
    assert polled == [None] and worker.told[0][0][0] == "data_failed"
    assert call(registry, callback.number).told[0][0][0] == "data_failed"
    client.session.poll(handle, polled.append)
    assert polled == [None, None]


def test_a_client_that_is_gone_fails_its_calls_only(registry: HostCallbackRegistry, client: Client) -> None:
    other = Client(registry)
    _, mine = client.session.load(client.announce(1))
    _, others = other.session.load(other.announce(1))
    first, second = call(registry, mine.number), call(registry, others.number)
    registry.closed(client.id, client.stream)
    client.session.close()
    assert first.told[0][0][0] == "data_failed" and second.told == []
    assert call(registry, mine.number).told[0][0][0] == "data_failed"
    other.stream.on_message(["result", other.asked[0][1], b"fine"])
    assert second.told == [(["data", -1], [b"fine"])]


def test_a_callback_that_the_plugin_has_not_made_is_refused(client: Client) -> None:
    proto = messages.XlaHostCallbackProto()
    proto.operands.add().shape.element_type = 11
    for serialized in (proto.SerializeToString(), b"", b"\xff\xff"):
        with pytest.raises(StatusError) as caught:
            client.session.load(serialized)
        assert caught.value.status.code is Code.UNIMPLEMENTED


def test_what_a_compilation_asks_goes_to_the_client_of_its_session(registry: HostCallbackRegistry) -> None:
    async def test() -> None:
        client = Client(registry)
        early = asyncio.create_task(registry.ask(3, b"first"))
        other = asyncio.create_task(registry.ask(4, b"of nobody"))
        await asyncio.sleep(1)
        assert client.asked == []  # its plugin has not said yet which session it is
        registry.follow(3, client.stream)
        await asyncio.sleep(1)
        late = asyncio.create_task(registry.ask(3, b"second"))
        await asyncio.sleep(1)
        [[kind, first, question], [_, second, _]] = client.asked
        assert (kind, question) == ("ask", b"first")
        client.stream.on_message(["result", second, b"answer to it"])
        client.stream.on_message(["failed", first, "Traceback ... DATA_LOSS: no"])
        assert await late == b"answer to it"
        with pytest.raises(StatusError) as raised:
            await early
        assert raised.value.status.code is Code.UNKNOWN and "DATA_LOSS" not in raised.value.status.message
        with pytest.raises(StatusError, match="needs Ridgeway installed") as raised:
            await other
        assert raised.value.status.code is Code.UNIMPLEMENTED

    virtual_time.run(test())


def test_a_client_that_goes_away_leaves_no_question_open(registry: HostCallbackRegistry) -> None:
    async def test() -> None:
        client = Client(registry)
        registry.follow(3, client.stream)
        asked = asyncio.create_task(registry.ask(3, b"question"))
        await asyncio.sleep(1)
        registry.closed(client.id, client.stream)
        with pytest.raises(StatusError) as raised:
            await asked
        assert raised.value.status.code is Code.UNAVAILABLE

    virtual_time.run(test())
