"""A client far ahead of its devices, or that asks for far more than it takes, waits: the head's memory is bounded.

The head is real, and so is the client's end of its port; the worker is this test, so that it can stand still.
"""

import contextlib
import os
import queue
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import e2e_harness as harness
import psutil
import pytest
from e2e_harness import until
from places import ROOT, child_set_up
from port_client import F32, PortClient

from ridgeway.protocol import messages, shardings
from ridgeway.transport import blocking_link
from ridgeway.transport.authentication import new_secret
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker.process_identity import hello_versions

pytestmark = harness.MARKS

LIMIT = 16 << 20
LIMITS = {
    "link_buffer_limit_bytes": LIMIT, "host_buffer_limit_bytes": LIMIT, "upload_window_bytes": LIMIT // 4,
    "heartbeat_timeout_seconds": 300, "suspect_after_seconds": 300, "progress_deadline_seconds": 300,
}  # fmt: skip
COUNT, SIZE, CHUNK = 100, 4 << 20, 1 << 20
#: The limit in both directions, windows of gRPC, what Python keeps of freed memory; all that is put are 400 MiB.
BOUND = 160 << 20


class Worker:
    """An agent and its executor, which does nothing until `going` is set."""

    def __init__(self, port: int, secret: str):
        self.going = threading.Event()
        self.received = 0
        self.first_bytes: list[bytes] = []
        """of what was put, in the order of the orders"""
        self._values: dict[int, bytes] = {}
        self._arrived = threading.Condition()
        self._orders: queue.SimpleQueue[tuple[list[Any], list[bytearray]]] = queue.SimpleQueue()
        versions = hello_versions()
        self._agent = blocking_link.connect("127.0.0.1", port, secret, 30.0)
        self._agent.send(["hello", {"role": "agent", "slice": 0, "host": 0, "versions": versions, "pid": 1}])
        welcome = self._agent.receive()[0][1]
        while (message := self._agent.receive()[0])[0] != "start_executor":
            pass
        self._executor = blocking_link.connect("127.0.0.1", port, secret, 30.0)
        self._executor.send(["hello", {
            "role": "executor", "agent": welcome["agent"], "executor": message[1], "pid": 2, "versions": versions,
            "transfer_host": "127.0.0.1", "transfer_port": 1, "head": welcome["head"],
        }])  # fmt: skip
        assert self._executor.receive()[0][0] == "welcome"
        for work in (self._drop_heartbeats, self._read, self._work):
            threading.Thread(target=work, daemon=True).start()

    def _drop_heartbeats(self) -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                self._agent.receive()

    def _read(self) -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                message, buffers = self._executor.receive()
                self.received += sum(len(buffer) for buffer in buffers)
                if message[0] == "data":
                    with self._arrived:
                        self._values[message[1]] = bytes(buffers[0][:4])
                        self._arrived.notify()
                else:
                    self._orders.put((message, buffers))

    def _work(self) -> None:
        while True:
            message, buffers = self._orders.get()
            self.going.wait()
            with contextlib.suppress(LinkClosed):
                if message[0] == "reached":
                    self._executor.send(["reply", message[1]])
                elif message[0] == "fetch":
                    self._executor.send(["reply", message[1]], [bytes(SIZE)])
                elif message[0] == "put":
                    token = message[4][0][4]
                    self.first_bytes.append(bytes(buffers[0][:4]) if token is None else self._promised(token))

    def _promised(self, token: int) -> bytes:
        with self._arrived:
            self._arrived.wait_for(lambda: token in self._values)
            return self._values[token]


class Setting:
    """A head, its worker and one client."""

    def __init__(self, head: psutil.Process, worker: Worker, client: PortClient):
        self.worker = worker
        self.client = client
        number = client.send("init_request", client.body("init_request"))
        self.session: int = until(lambda: client.answers.get(number)).init_response.session_id
        self._head = head
        self._before = head.memory_info().rss

    def assert_memory_is_bounded(self) -> None:
        grown = self._head.memory_info().rss - self._before
        assert grown < BOUND, f"{grown >> 20} MiB more"

    def store(self, handle: int) -> None:
        """Send a host buffer that begins with its handle."""
        header = messages.GrpcHostBufferStoreMetadata(session_id=self.session, handle=handle, buffer_size=SIZE)
        chunk = messages.GrpcHostBufferStoreRequest(data=struct.pack("<I", handle) + bytes(CHUNK - 4))
        chunks = iter([chunk.SerializeToString()] * (SIZE // CHUNK))
        assert self.client.call("HostBufferStore", chunks, header.SerializeToString()).value[0] == 0

    def put(self, handle: int) -> None:
        """Ask for an array of a host buffer."""
        body = self.client.body("make_array_from_host_buffer_request")
        body.dtype.kind = F32
        body.shape.dims.append(SIZE // 4)
        body.sharding.MergeFromString(shardings.single_device_sharding_proto(0))
        body.host_buffer_handle = body.array_handle = handle
        self.client.send("make_array_from_host_buffer_request", body)

    def take(self, handle: int) -> int:
        """Look a result up, and forget it; returns its size."""
        size = len(self.client.look_up(self.session, handle))
        request = messages.GrpcHostBufferDeleteRequest(session_id=self.session, handle=handle)
        assert self.client.call_one("HostBufferDelete", request.SerializeToString())
        return size


@pytest.fixture
def setting() -> Iterator[Setting]:
    secret = new_secret()
    command = [
        sys.executable, "-m", "ridgeway.proxy.head", "--slices=1", "--hosts-per-slice=1", "--devices-per-host=1",
        "--cluster-port=0", "--proxy-port=0", *(f"--set={name}={value}" for name, value in LIMITS.items()),
    ]  # fmt: skip
    environment = {**os.environ, "RIDGEWAY_CLUSTER_SECRET": secret, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=child_set_up()
    ) as head:
        try:
            assert head.stdout is not None
            cluster_port, proxy_port = (int(n) for n in re.findall(r":(\d+)", head.stdout.readline())[:2])
            worker = Worker(cluster_port, secret)
            with contextlib.closing(PortClient(proxy_port)) as client:
                yield Setting(psutil.Process(head.pid), worker, client)
        finally:
            head.kill()


def test_puts_far_ahead_of_the_devices_wait(setting: Setting) -> None:
    handles = range(1000, 1000 + COUNT)
    stores = [threading.Thread(target=setting.store, args=(handle,), daemon=True) for handle in handles]
    for store, handle in zip(stores, handles, strict=True):
        store.start()
        setting.put(handle)
    worker = setting.worker
    until(lambda: worker.received > LIMIT)
    setting.assert_memory_is_bounded()
    # What executors were promised comes, and no more than they may have waiting.
    assert worker.received < 2 * LIMIT
    worker.going.set()
    until(lambda: len(worker.first_bytes) == COUNT)
    assert worker.first_bytes == [struct.pack("<I", handle) for handle in handles]
    for store in stores:
        store.join()
    setting.assert_memory_is_bounded()


def test_results_that_nobody_takes_yet_wait_on_the_workers(setting: Setting) -> None:
    setting.worker.going.set()
    setting.store(1)
    setting.put(1)
    for handle in range(5000, 5000 + COUNT):
        body = setting.client.body("copy_to_host_buffer_request")
        body.array_handle, body.host_buffer_handle = 1, handle
        setting.client.send("copy_to_host_buffer_request", body)
    assert [setting.take(5000)] == [SIZE]
    setting.assert_memory_is_bounded()
    assert [setting.take(handle) for handle in range(5001, 5000 + COUNT)] == [SIZE] * (COUNT - 1)
    setting.assert_memory_is_bounded()
