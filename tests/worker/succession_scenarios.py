"""What `test_worker_succession` does in processes of its own, that have imported jax."""

import socket
import threading
from typing import Any

import ml_dtypes
import numpy as np

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.transport.blocking_link import BlockingLink
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import succession
from ridgeway.worker.buffers import BufferStore, HostShard, PromisedShard, shard_group
from ridgeway.worker.failures import GenerationFailure
from ridgeway.worker.program_source import ProgramSource
from ridgeway.worker.promises import Promise, PromiseTable
from ridgeway.worker.succession import Legacy, NotNow

LOST = statuses.data_loss("slice 1 host 0 was lost")
FAILURE = GenerationFailure(Code.ABORTED, "collective failed", 4)


def _store() -> BufferStore:
    store = BufferStore(1.0)
    samples = [
        np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 3), np.int32), np.float64(2.5).reshape(()),
        np.array([1.5, -0.25], ml_dtypes.bfloat16), np.array([True, False]), np.array([1 + 2j], np.complex64),
        np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)), np.array([1, -2, 3], ml_dtypes.int4),
    ]  # fmt: skip
    for number, data in enumerate(samples):
        store.set(number, shard_group({10: HostShard(data, None), 11: HostShard(data, "pinned_host")}))
    store.set(50, shard_group({10: LOST, 11: FAILURE}))
    arrived = Promise()
    arrived.resolve(b"\1\2\3")
    failed = Promise()
    failed.resolve(LOST)
    store.set(51, shard_group({
        10: PromisedShard(arrived, lambda data: np.frombuffer(data, np.uint8), "device"),
        11: PromisedShard(failed, lambda data: data, None),
    }))  # fmt: skip
    snapshot = HostShard(np.arange(8.0), "pinned_host")
    store.set(60, shard_group({10: snapshot}, memory_kind="pinned_host"))
    store.set(61, shard_group(dict.fromkeys((10, 11), snapshot), memory_kind="pinned_host"))
    for number in range(1000, 1000 + 2 * succession.GROUPS_PER_MESSAGE):
        store.set(number, shard_group({10: HostShard(np.array([number]), None)}))
    return store


def _programs() -> dict[str, ProgramSource]:
    arrays = (((4,), np.dtype(np.float32)),)
    return {"p": ProgramSource("p", "jit_p", b"options", ((10, 11),), arrays, arrays, (None,), b"executable", ())}


def _promises() -> PromiseTable:
    table = PromiseTable()
    table.resolve(7, bytearray(b"from the head"))
    table.resolve(8, np.array([3, 4], np.int64))
    table.resolve(9, FAILURE)
    table.peer_lost(3, LOST)
    return table


class _Heir(threading.Thread):
    """The other end."""

    def __init__(self, channel: socket.socket):
        super().__init__(daemon=True)
        self.link_end, link = socket.socketpair()
        self._descriptors = [channel.detach(), link.detach()]
        self.legacy: Legacy | None = None
        self.committed = False
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            channel, self.legacy = succession.inherit(self._descriptors)
            succession.commit(channel)
            self.committed = True
        except LinkClosed as error:
            self.error = error


def everything_arrives(link: Any) -> dict[str, Any]:
    """Hand over samples of all that there is; what the successor has."""
    store, promises = _store(), _promises()
    ours, theirs = socket.socketpair()
    heir = _Heir(theirs)
    channel = BlockingLink(ours)
    succession.bequeath(channel, store, _programs(), promises, {"first_device": 10, "request": 5})
    assert not heir.committed
    succession.let_go(channel)
    heir.join(60.0)
    legacy = heir.legacy
    assert heir.committed and legacy is not None, heir.error
    heir.link_end.sendall(b"x")
    assert legacy.link.socket.recv(1) == b"x"
    before, after = {number: shards for number, _, shards in store.legacy()}, legacy.store
    # What was shared still is, and what was asked to be in host memory stays there.
    assert {number for number, group in after.items() if group.in_host_memory} == {60, 61}
    assert after[60].shards[10].data is after[61].shards[10].data is after[61].shards[11].data
    assert set(before) == set(after)
    for number, shards in before.items():
        inherited = after[number].shards
        assert inherited is not None and set(inherited) == set(shards)
        for device, shard in shards.items():
            if isinstance(shard, HostShard):
                same = inherited[device]
                assert (same.data.dtype, same.data.shape) == (shard.data.dtype, shard.data.shape)
                assert same.data.tobytes() == np.ascontiguousarray(shard.data).tobytes()
                assert same.memory_kind == shard.memory_kind
            elif isinstance(shard, Status):
                assert inherited[device] == shard and type(inherited[device]) is type(shard)
    promised = after[51].shards
    assert promised is not None
    assert promised[10].data.tolist() == [1, 2, 3] and promised[10].memory_kind == "device"
    assert promised[11] == LOST
    assert legacy.programs == _programs()
    # What came before its order is there for it, and what will not come is known.
    table = PromiseTable()
    table.inherit(legacy.promises, legacy.state["lost_peers"])
    assert bytes(table.claim(7, None).wait(0.0)) == b"from the head"
    assert table.claim(8, 2).wait(0.0).tolist() == [3, 4]
    assert table.claim(9, 2).value_or_error() == FAILURE
    assert table.claim(20, 3).value_or_error() == LOST
    return {key: legacy.state[key] for key in ("first_device", "request")}


def bytes_on_their_way_are_not_handed_over(link: Any) -> list[str]:
    """Nobody could give them to the successor."""
    reasons = []
    table = PromiseTable()
    promise = table.claim(1, 7)
    assert table.awaited == 1
    store = BufferStore(1.0)
    store.set(1, shard_group({10: PromisedShard(promise, lambda data: data, None)}))
    ours, theirs = socket.socketpair()
    heir = _Heir(theirs)
    channel = BlockingLink(ours)
    try:
        succession.bequeath(channel, store, {}, table, {})
    except NotNow as error:
        reasons.append(str(error))
    # The predecessor goes on; its successor ends.
    channel.close()
    heir.join(60.0)
    assert heir.error is not None and not heir.committed
    promise.resolve(b"here")
    assert table.awaited == 0
    return reasons


def a_successor_that_dies_changes_nothing(link: Any) -> list[str]:
    """Before it is ready, and after."""
    reasons = []
    ours, theirs = socket.socketpair()
    theirs.close()
    try:
        succession.bequeath(BlockingLink(ours), _store(), {}, _promises(), {})
    except NotNow as error:
        reasons.append(str(error))
    ours, theirs = socket.socketpair()
    template, ours_too = socket.socketpair()
    ours_too.close()
    try:
        succession.ask_for_successor(template, [ours])
    except NotNow as error:
        reasons.append(str(error))
    return reasons
