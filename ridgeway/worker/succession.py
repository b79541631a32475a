"""How an executor is succeeded by a fresh process without anybody noticing.

A survivor keeps, of generations that ended badly, what XLA and gloo do not let go of: now and then a whole client in
which an execution never returned. Nothing in the process can free that, but a new process has none of it. So a worn
executor, when all that it holds is in host memory and nothing is under way (the head orders
it right behind leaving a generation), asks its template for a *successor* and gives it what it has::

    executor -> template    a line, with the sockets: this channel's other end, the link to the head, the listener
                            and the connections of the transfer server
    executor -> successor   ["groups", [...]] with the shards' bytes, ["programs", [...]], ["promises", [...]],
                            ["state", {...}]
    successor -> executor   ["ready"]: it has a client of its own and everything above
    executor -> successor   ["go"], and exits with `EXIT_SUCCEEDED`; from here on the successor is the executor

The number, the sockets and all handles stay valid. Until "go" the old process can go on as if nothing had been asked.
"""

import array
import dataclasses
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ridgeway.protocol import dtypes
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.transport.blocking_link import BlockingLink
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import buffers, program_source
from ridgeway.worker.failures import GenerationFailure
from ridgeway.worker.program_source import ProgramSource
from ridgeway.worker.promises import PromiseTable
from ridgeway.worker.template import DESCRIPTORS_LIMIT, EXIT_SUCCEEDED, SUCCESSOR_REQUEST

__all__ = ["EXIT_SUCCEEDED", "Legacy", "NotNow", "ask_for_successor", "bequeath", "commit", "inherit", "let_go"]

GROUPS_PER_MESSAGE = 500
STEP_TIMEOUT_SECONDS = 20.0
"""Each thing that one of the two waits for from the other."""


class NotNow(Exception):
    """The executor cannot be succeeded at this moment; it goes on as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Legacy:
    """What a successor starts with."""

    link: BlockingLink
    sockets: tuple[socket.socket, ...]
    """Of the transfer server."""
    store: dict[int, buffers.Group]
    programs: dict[str, ProgramSource]
    promises: dict[int, Any]
    state: dict[str, Any]


# ---- the old process


def ask_for_successor(template: socket.socket, sockets: Sequence[socket.socket]) -> None:
    """Have the template fork a process that has these sockets.

    Raises:
      NotNow: there are too many of them, or the template does not answer.
    """
    if len(sockets) > DESCRIPTORS_LIMIT:
        raise NotNow(f"{len(sockets)} sockets are open")
    descriptors = array.array("i", [each.fileno() for each in sockets])
    try:
        template.sendmsg([SUCCESSOR_REQUEST], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    except OSError as error:
        raise NotNow(f"the template cannot be asked: {error}") from None


def bequeath(
    channel: BlockingLink, store: buffers.BufferStore, programs: dict[str, ProgramSource],
    promises: PromiseTable, state: dict[str, Any],
) -> None:  # fmt: skip
    """Send everything, and return when the successor is ready.

    Raises:
      NotNow: bytes are still on their way, or the successor failed.
    """
    channel.set_timeout(STEP_TIMEOUT_SECONDS)
    try:
        for rows, attached in _pack_groups(store):
            channel.send(["groups", rows], attached)
        for source in programs.values():
            channel.send(["program", source.to_fields()], [source.serialized])
        tokens, lost = promises.legacy()
        rows, attached = [], []
        for token, value in tokens.items():
            rows.append([token, *_pack_value(value, attached)])
        channel.send(["promises", rows], attached)
        state = state | {"lost_peers": [[peer, *_pack_status(status)] for peer, status in lost.items()]}
        channel.send(["state", state])
        answer, _ = channel.receive()
    except LinkClosed as error:
        raise NotNow(f"the successor failed: {error}") from None
    if answer[0] != "ready":
        raise NotNow(f"the successor said {answer[0]}")


def _pack_groups(store: buffers.BufferStore) -> Iterator[tuple[list[Any], list[Any]]]:
    """Messages of rows, and the bytes of arrays that have not been sent yet: groups may share theirs."""
    rows: list[Any] = []
    attached: list[Any] = []
    sent: dict[int, tuple[int, Any]] = {}
    """id of an array (or of a promise) -> its number among all that were sent, and what keeps the id its own"""
    for number, in_host_memory, group in store.legacy():
        shards = []
        for device, shard in group.items():
            key: Any = None
            if isinstance(shard, buffers.PromisedShard):
                if not shard.promise.resolved:
                    raise NotNow(f"bytes of buffer group {number} are on their way")
                key, shard = shard.promise, _kept(shard)
            if isinstance(shard, buffers.HostShard):
                key = shard.data if key is None else key
                known = sent.get(id(key))
                if known is None:
                    fields = _pack_array(shard.data, attached)
                    known = sent[id(key)] = (len(sent), key)
                    shards.append([device, "bytes", known[0], shard.memory_kind, *fields])
                else:
                    shards.append([device, "bytes", known[0], shard.memory_kind])
            else:
                shards.append([device, "status", *_pack_status(shard)])
        rows.append([number, in_host_memory, shards])
        if len(rows) == GROUPS_PER_MESSAGE:
            yield rows, attached
            rows, attached = [], []
    yield rows, attached


def _kept(shard: buffers.PromisedShard) -> Any:
    """What a promised shard is, its bytes being here."""
    try:
        return buffers.HostShard(shard.decode(shard.promise.wait(0.0)), shard.memory_kind)
    except StatusError as error:
        return error.status


def _pack_array(data: np.ndarray, attached: list[Any]) -> list[Any]:
    attached.append(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return [dtypes.kind_of_dtype(data.dtype), list(data.shape), len(attached) - 1]


def _pack_status(status: Status) -> list[Any]:
    generation = status.generation if isinstance(status, GenerationFailure) else 0
    return [int(status.code), status.message, generation]


def _pack_value(value: Any, attached: list[Any]) -> list[Any]:
    if isinstance(value, Status):
        return ["status", *_pack_status(value)]
    if isinstance(value, np.ndarray):
        return ["array", *_pack_array(value, attached)]
    attached.append(value)
    return ["raw", len(attached) - 1]


def let_go(channel: BlockingLink) -> None:
    """Tell the successor that it is the executor from here on.

    Raises:
      NotNow: it has died meanwhile.
    """
    try:
        channel.send(["go"])
    except LinkClosed as error:
        raise NotNow(f"the successor failed: {error}") from None


# ---- the successor


def inherit(descriptors: Sequence[int]) -> tuple[BlockingLink, Legacy]:
    """Take over what a predecessor sends; returns the channel to it as well, on which `commit` is said.

    Raises:
      LinkClosed: the predecessor ended, or changed its mind.
    """
    channel_socket, link_socket, *others = [socket.socket(fileno=number) for number in descriptors]
    channel = BlockingLink(channel_socket)
    channel.set_timeout(STEP_TIMEOUT_SECONDS)
    store: dict[int, buffers.Group] = {}
    arrays: dict[int, np.ndarray] = {}
    programs: dict[str, ProgramSource] = {}
    promises: dict[int, Any] = {}
    while True:
        message, attached = channel.receive()
        match message:
            case ["groups", rows]:
                for number, in_host_memory, shards in rows:
                    group = store[number] = buffers.shard_group(
                        {device: _unpack_shard(fields, attached, arrays) for device, *fields in shards}
                    )
                    group.in_host_memory = in_host_memory
            case ["program", fields]:
                source = program_source.from_fields(fields, bytes(attached[0]))
                programs[source.program] = source
            case ["promises", rows]:
                promises = {token: _unpack_value(fields, attached) for token, *fields in rows}
            case ["state", dict(state)]:
                state["lost_peers"] = {peer: _unpack_status(fields) for peer, *fields in state["lost_peers"]}
                link = BlockingLink(link_socket)
                return channel, Legacy(link, tuple(others), store, programs, promises, state)
            case _:
                raise LinkClosed(f"the predecessor sent {message[0]}")


def commit(channel: BlockingLink) -> None:
    """Say that everything is here, and wait until the predecessor lets go.

    Raises:
      LinkClosed: it did not.
    """
    channel.send(["ready"])
    answer, _ = channel.receive()
    if answer != ["go"]:
        raise LinkClosed(f"the predecessor said {answer[0]}")
    channel.close()


def _unpack_shard(fields: list[Any], attached: list[bytearray], arrays: dict[int, np.ndarray]) -> Any:
    match fields:
        case ["bytes", number, memory_kind]:
            return buffers.HostShard(arrays[number], memory_kind)
        case ["bytes", number, memory_kind, kind, shape, index]:
            arrays[number] = _unpack_array(kind, shape, attached[index])
            return buffers.HostShard(arrays[number], memory_kind)
        case ["status", *status]:
            return _unpack_status(status)
    raise LinkClosed(f"the predecessor sent a shard that is {fields[0]}")


def _unpack_array(kind: int, shape: list[int], data: bytearray) -> np.ndarray:
    return np.frombuffer(data, dtype=dtypes.dtype_of_kind(kind)).reshape(shape)


def _unpack_status(fields: Sequence[Any]) -> Status:
    code, message, generation = fields
    return GenerationFailure(Code(code), message, generation) if generation else Status(Code(code), message)


def _unpack_value(fields: list[Any], attached: list[bytearray]) -> Any:
    match fields:
        case ["status", *status]:
            return _unpack_status(status)
        case ["array", kind, shape, index]:
            return _unpack_array(kind, shape, attached[index])
        case ["raw", index]:
            return attached[index]
    raise LinkClosed(f"the predecessor sent a promise that is {fields[0]}")
