"""Bringing host buffers to executors: in the order, or after it, but never to some executors and not to others."""

from typing import Any

import pytest
from remembering_head import Head

from ridgeway.protocol import messages, shardings
from ridgeway.protocol.status import Code, data_loss
from ridgeway.proxy.arrays import Array
from ridgeway.proxy.compile_cache import CompileCache
from ridgeway.proxy.dispatch import Dispatcher, HostPart
from ridgeway.proxy.host_buffers import HostBufferStore
from ridgeway.proxy.programs import Programs

KIND_U8 = 6


class Session:
    """A dispatcher over three hosts with two devices each, and one client's buffers."""

    def __init__(self) -> None:
        self.head = Head()
        manager = self.head.manager
        self.executors = self.head.hosts()
        programs = Programs(manager, CompileCache(None, 0), "test", lambda kind, **fields: None)
        self.dispatcher = Dispatcher(manager, programs)
        self.buffers = HostBufferStore(1000, 1000.0)

    def put(self, *handles: int) -> Array:
        """An array over devices 0, 2 and 4, with a host buffer for each of them or one for all."""
        proto = messages.ShardingProto()
        proto.MergeFromString(shardings.hlo_sharding_proto((0, 2, 4), b""))
        array = Array(KIND_U8, (3,), shardings.parse(proto))
        wholes = [range(3)] if len(handles) == 1 else [range(i, i + 1) for i in range(3)]
        parts = [HostPart(indices, (3,), None, handle) for indices, handle in zip(wholes, handles, strict=True)]
        self.dispatcher.put(array, parts, self.buffers)
        return array

    def sent(self, kind: str) -> list[list[Any]]:
        """What each of the executors was sent of a kind, without the kind."""
        return [[message[1:] for message in self.head.sent(executor, kind)] for executor in self.executors]


@pytest.fixture
def session() -> Session:
    return Session()


def test_buffers_that_are_here_go_with_the_order(session: Session) -> None:
    for handle in (1, 2, 3):
        session.buffers.put(handle, b"abc")
    session.put(1, 2, 3)
    for device, orders in zip((0, 2, 4), session.sent("put"), strict=True):
        ((_, kind, _, ((devices, shape, strides, index, token),)),) = orders
        assert (kind, devices, shape, strides, index, token) == (KIND_U8, [device], (3,), None, 0, None)
    assert session.buffers.bytes == 0
    assert session.sent("data") == [[], [], []]


def test_one_buffer_that_comes_later_is_promised_to_all_and_sent_to_all(session: Session) -> None:
    session.put(1)
    tokens = {orders[0][3][0][4] for orders in session.sent("put")}
    (token,) = tokens
    assert token is not None
    session.buffers.put(1, b"abc")
    assert session.sent("data") == [[[token]]] * 3
    assert session.buffers.bytes == 0


def test_buffers_of_one_array_are_sent_only_when_all_are_here(session: Session) -> None:
    session.buffers.put(2, b"abc")
    session.put(1, 2, 3)
    session.buffers.put(3, b"abc")
    assert session.sent("data") == [[], [], []]
    # Meanwhile they count as the session's.
    assert session.buffers.bytes == 6
    session.buffers.put(1, b"abc")
    tokens = [orders[0][3][0][4] for orders in session.sent("put")]
    assert session.sent("data") == [[[token]] for token in tokens]
    assert len(set(tokens)) == 3
    assert session.buffers.bytes == 0


def test_one_buffer_that_does_not_come_fails_the_array_on_all_its_executors(session: Session) -> None:
    session.buffers.put(2, b"abc")
    session.put(1, 2, 3)
    session.buffers.fail(1, data_loss("it cannot be copied"))
    for orders, failures in zip(session.sent("put"), session.sent("data_failed"), strict=True):
        assert failures == [[orders[0][3][0][4], Code.DATA_LOSS, "it cannot be copied"]]
    assert session.sent("data") == [[], [], []]
    # What was here, and what still comes, is of no more use.
    session.buffers.put(3, b"abc")
    assert session.buffers.bytes == 0


def test_a_client_that_goes_away_fails_its_array_on_all_executors(session: Session) -> None:
    session.buffers.put(2, b"abc")
    session.put(1, 2, 3)
    session.buffers.close()
    for failures in session.sent("data_failed"):
        ((_, code, text),) = failures
        assert (code, text) == (Code.DATA_LOSS, "the client went away")


def test_an_array_for_a_lost_host_fails_and_its_buffers_are_dropped(session: Session) -> None:
    session.head.close_agent(session.executors[1], "it was killed")
    session.buffers.put(1, b"abc")
    array = session.put(1, 2, 3)
    session.buffers.put(2, b"abc")
    problem = array.problem(session.head.manager)
    assert problem is not None
    assert "it was killed" in problem.message
    assert session.buffers.bytes == 0
    assert session.sent("put") == [[], [], []]


def test_an_array_for_a_host_on_its_way_back_is_held_with_its_buffers(session: Session) -> None:
    single = messages.ShardingProto()
    single.MergeFromString(shardings.single_device_sharding_proto(2))
    array = Array(KIND_U8, (3,), shardings.parse(single))
    session.head.close_executor(session.executors[1])
    session.head.told()
    session.buffers.put(1, b"abc")
    session.dispatcher.put(array, [HostPart(range(1), (3,), None, 1)], session.buffers)
    assert array.held is not None
    replacement = session.head.executor(session.executors[1].agent)
    assert array.held is None
    assert array.problem(session.head.manager) is None
    assert len(session.head.sent(replacement, "put")) == 1
