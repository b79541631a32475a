"""Whatever comes in at the server's port: an error for that call or that session, and nothing else happens."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import e2e_harness as harness
import grpc
import psutil
import pytest
from e2e_harness import Cluster, until
from port_client import AnyMessage, PortClient

from ridgeway.protocol import callback_link, messages
from ridgeway.protocol.status import Code

pytestmark = harness.MARKS

REQUESTS = 1200
SEEDS = range(6)
REAL_ARRAYS = 5


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two slices of one host with two devices; what is announced and does not come is given up soon."""
    folder = tmp_path_factory.mktemp("attacked")
    with harness.cluster_in(folder, "2x1x2", "--set", "host_buffer_timeout_seconds=2") as made:
        yield made


@pytest.fixture
def unharmed(attacked: Cluster) -> Iterator[Cluster]:
    """The cluster, with another program at work, which must not notice anything."""
    head = attacked.status()["head"]["pid"]
    executors = {slot: host.executor_pid for slot, host in attacked.wait_whole().items()}
    with attacked.controller() as other:
        results = "result = [float(kept.sum()), float(mix(sharded(devices_of(0, 1)), 3).sum())]"
        before = other.run(f"kept = sharded(devices_of(0, 1)); {results}")
        yield attacked
        assert other.run(results) == before
    attacked.wait_sessions(0)
    assert attacked.status()["head"]["pid"] == head
    assert {slot: host.executor_pid for slot, host in attacked.hosts().items()} == executors
    for log in Path(attacked.place.folder).rglob("head*.log"):
        assert "bug at" not in log.read_text(errors="replace")


def start_session(cluster: Cluster) -> tuple[PortClient, int]:
    """A client and its session's number."""
    client = PortClient(cluster.record.proxy_port)
    init = client.send("init_request", client.body("init_request"))
    answer = until(lambda: client.answers.get(init))
    return client, answer.init_response.session_id


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_with_anything_in_them(unharmed: Cluster, seed: int) -> None:
    client, session = start_session(unharmed)
    with contextlib.closing(client):
        for handle in range(1, REAL_ARRAYS + 1):
            client.make_array(session, handle, handle % 4)
        anything = AnyMessage(seed)
        sent = {client.send(kind, body): kind for kind, body in (anything.request() for _ in range(REQUESTS))}
        until(
            lambda: sent.keys() <= client.answers.keys(),
            lambda: {number: kind for number, kind in sent.items() if number not in client.answers},
        )
        codes = {number: client.answers[number].response_metadata.status.code for number in sent}
        bugs = {sent[number]: client.answers[number] for number, code in codes.items() if code == Code.INTERNAL}
        assert not bugs, bugs
        assert not client.ended.is_set()


def test_bytes_that_are_no_request_end_that_session(unharmed: Cluster) -> None:
    rng = random.Random(0)
    whole = messages.IfrtRequest()
    whole.request_metadata.op_id = 7
    whole.check_future_request.future_handle = 3
    for data in (rng.randbytes(100), whole.SerializeToString()[:-3] + b"\xff", b"\xff" * 5000):
        client, _ = start_session(unharmed)
        with contextlib.closing(client):
            client.send_bytes(data)
            assert client.ended.wait(harness.DEADLINE_SECONDS)
            assert client.end is grpc.StatusCode.INVALID_ARGUMENT


def test_a_request_before_the_first_and_one_of_no_kind(unharmed: Cluster) -> None:
    client = PortClient(unharmed.record.proxy_port)
    with contextlib.closing(client):
        unknown = client.body("destruct_array_request")
        unknown.array_handle.append(3)
        number = client.send("destruct_array_request", unknown)
        assert until(lambda: client.answers.get(number)).response_metadata.status.code == Code.OK
        empty = messages.IfrtRequest()
        empty.request_metadata.op_id = 99
        client.send_bytes(empty.SerializeToString())
        assert until(lambda: client.answers.get(99)).response_metadata.status.code == Code.UNIMPLEMENTED


def test_handles_of_another_session_are_no_handles(unharmed: Cluster) -> None:
    one, session = start_session(unharmed)
    other, _ = start_session(unharmed)
    with contextlib.closing(one), contextlib.closing(other):
        one.make_array(session, 41, 0)
        body = other.body("copy_to_host_buffer_request")
        body.array_handle, body.host_buffer_handle = 41, 1
        number = other.send("copy_to_host_buffer_request", body)
        status = until(lambda: other.answers.get(number)).response_metadata.status
        assert status.code == Code.INVALID_ARGUMENT and "no array 41" in status.message
        number = one.send("copy_to_host_buffer_request", body)
        assert until(lambda: one.answers.get(number)).response_metadata.status.code == Code.OK


def test_host_buffers_that_are_not_what_was_announced(unharmed: Cluster) -> None:
    client, session = start_session(unharmed)
    chunk = messages.GrpcHostBufferStoreRequest(data=bytes(100)).SerializeToString()
    with contextlib.closing(client):
        assert client.store(session, 1, 100, [chunk]) is grpc.StatusCode.OK
        for announced, chunks in ((50, [chunk]), (300, [chunk]), (1 << 50, [chunk])):
            assert client.store(session, 2, announced, chunks) is grpc.StatusCode.INVALID_ARGUMENT
        assert client.store(session + 1000, 3, 100, [chunk]) is grpc.StatusCode.INVALID_ARGUMENT
        assert client.call("HostBufferStore", iter([b"\xff\xff"]), b"\xff\xff") is not grpc.StatusCode.OK
        assert client.call("NoSuchMethod", iter([chunk]), b"") is grpc.StatusCode.UNIMPLEMENTED


def test_a_client_that_reads_no_answers_does_not_fill_the_servers_memory(unharmed: Cluster) -> None:
    head = psutil.Process(unharmed.status()["head"]["pid"])
    before = head.memory_info().rss
    client, _ = start_session(unharmed)
    with contextlib.closing(client):
        body = client.body("make_array_from_host_buffer_request")  # refused, with an answer that nobody needs
        for _ in range(20_000):
            client.send("make_array_from_host_buffer_request", body)
        until(lambda: len(client.answers) > 20_000)
        assert head.memory_info().rss < before + (128 << 20)


def test_garbage_on_the_stream_for_host_callbacks(unharmed: Cluster) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{unharmed.record.proxy_port}") as channel:
        for data in (b"", b"\xff\xff\xff", callback_link.pack(["result"]), callback_link.pack(["result", 5, b"x"])):
            stream = channel.stream_stream(callback_link.PATH)(iter([data]), timeout=30)
            with contextlib.suppress(grpc.RpcError):
                assert list(stream) == []
