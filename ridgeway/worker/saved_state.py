"""What an executor holds, in a folder: written when its host is preempted, read by the one that takes its place.

::

    state       the shards' bytes, one after the other, each distinct one once
    index.json  groups, shards and where their bytes are, with a checksum of each

The index is written last.  Its own checksum, the *mark*, travels by way of the head: a folder whose index does not have
that mark is not the state that was saved, whatever is in it.  Element types are named by their IFRT kinds and every
element takes whole bytes, so types narrower than a byte come back as they were.
"""

import dataclasses
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ridgeway.protocol import dtypes
from ridgeway.protocol.status import Code, Status
from ridgeway.worker.buffers import Group, HostShard, shard_group
from ridgeway.worker.failures import GenerationFailure

FORMAT = "ridgeway.state/1"
STATE_FILE = "state"
INDEX_FILE = "index.json"
THREADS = 4
CHUNK_BYTES = 16 << 20
"""What is written, read or summed up at once."""


class StateError(Exception):
    """A state that cannot be saved, or is not what was saved; the text says where and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """What was written."""

    mark: str
    bytes: int
    groups: int


class _Bytes:
    """The distinct bytes among the shards, and where each goes."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self.arrays: list[np.ndarray] = []
        self.offsets: list[int] = []
        self.total = 0

    def add(self, data: np.ndarray) -> int:
        """The number of an array's bytes; replicas that share memory share it."""
        number = self._known.get(id(data))
        if number is None:
            number = self._known[id(data)] = len(self.arrays)
            self.arrays.append(data)
            self.offsets.append(self.total)
            self.total += data.nbytes
        return number


def save(
    groups: Mapping[int, Group], folder: Path, slot: int, deadline: float, progress: Callable[[], None]
) -> Saved:
    """Write groups whose shards are all `HostShard` or `Status`.

    Args:
      groups: by number.
      folder: is made, mode 0700; must not exist, its parent must.
      slot: whose state it is.
      deadline: when it must be done, by `time.monotonic`.
      progress: called now and then, from several threads.

    Raises:
      StateError: it cannot be written, or not in time.
    """
    content = _Bytes()
    listed = [[number, group.in_host_memory, _describe_group(group, content)] for number, group in groups.items()]
    try:
        space = os.statvfs(folder.parent)
        if content.total > space.f_bavail * space.f_frsize:
            raise StateError(
                f"{content.total} bytes do not fit in {folder.parent}, which has "
                f"{space.f_bavail * space.f_frsize} free; use another --scratch-folder"
            )
        os.mkdir(folder, 0o700)
        descriptor = os.open(folder / STATE_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:

            def write(number: int) -> int:
                return _write(descriptor, content.arrays[number], content.offsets[number], deadline, progress)

            with ThreadPoolExecutor(THREADS, thread_name_prefix="save") as pool:
                sums = list(pool.map(write, range(len(content.arrays))))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        blobs = [
            [offset, data.nbytes, total]
            for offset, data, total in zip(content.offsets, content.arrays, sums, strict=True)
        ]
        index = json.dumps({"format": FORMAT, "slot": slot, "blobs": blobs, "groups": listed}).encode()
        _write_file(folder / INDEX_FILE, index)
    except FileNotFoundError:
        raise StateError(
            f"there is no folder {folder.parent} on this host; name one that all workers share with --scratch-folder"
        ) from None
    except OSError as error:
        raise StateError(f"cannot write {folder}: {error.strerror or error}") from None
    return Saved(hashlib.sha256(index).hexdigest(), content.total, len(listed))


def load(folder: Path, slot: int, mark: str, progress: Callable[[], None]) -> dict[int, Group]:
    """The groups that `save` wrote with this mark, all in host memory.

    Raises:
      StateError: they are not there, or are not what was written.
    """
    try:
        index = (folder / INDEX_FILE).read_bytes()
        if hashlib.sha256(index).hexdigest() != mark:
            raise StateError(f"{folder / INDEX_FILE} is not the index that was written")
        content: dict[str, Any] = json.loads(index)
        if content["format"] != FORMAT or content["slot"] != slot:
            raise StateError(f"{folder} has the state of slot {content['slot']}, in the format {content['format']}")
        descriptor = os.open(folder / STATE_FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:

            def read(blob: list[int]) -> bytearray:
                return _read(descriptor, *blob, folder=folder, progress=progress)

            with ThreadPoolExecutor(THREADS, thread_name_prefix="restore") as pool:
                blobs = list(pool.map(read, content["blobs"]))
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise StateError(f"there is no {error.filename} on this host") from None
    except OSError as error:
        raise StateError(f"cannot read {folder}: {error.strerror or error}") from None
    shared: dict[tuple[Any, ...], np.ndarray] = {}
    return {
        number: _restore_group(described, in_host_memory, blobs, shared)
        for number, in_host_memory, described in content["groups"]
    }


def _describe_group(group: Group, content: _Bytes) -> list[Any]:
    assert group.shards is not None
    return [[device, _describe(shard, content)] for device, shard in group.shards.items()]


def _describe(shard: Any, content: _Bytes) -> list[Any]:
    if isinstance(shard, HostShard):
        data = shard.data
        return ["bytes", content.add(data), dtypes.kind_of_dtype(data.dtype), data.shape, shard.memory_kind]
    if isinstance(shard, GenerationFailure):
        return ["error", int(shard.code), shard.message, shard.generation]
    assert isinstance(shard, Status), f"a shard that is neither bytes nor an error: {shard!r}"
    return ["error", int(shard.code), shard.message, 0]


def _restore_group(
    described: list[Any], in_host_memory: bool, blobs: list[bytearray], shared: dict[tuple[Any, ...], np.ndarray]
) -> Group:
    shards: dict[int, Any] = {}
    for device, (what, *fields) in described:
        if what == "bytes":
            number, kind, shape, memory_kind = fields
            key = (number, kind, *shape)
            data = shared.get(key)
            if data is None:
                dtype = dtypes.dtype_of_kind(kind)
                # An empty buffer is an error to numpy.
                data = np.frombuffer(blobs[number], dtype).reshape(shape) if blobs[number] else np.empty(shape, dtype)
                shared[key] = data
            shards[device] = HostShard(data, memory_kind)
        else:
            code, message, generation = fields
            error = Status(Code(code), message)
            shards[device] = GenerationFailure(Code(code), message, generation) if generation else error
    group = shard_group(shards)
    group.in_host_memory = in_host_memory
    return group


def _plain_bytes(data: np.ndarray) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def _write(descriptor: int, data: np.ndarray, offset: int, deadline: float, progress: Callable[[], None]) -> int:
    view = _plain_bytes(data)
    total = 0
    for start in range(0, len(view), CHUNK_BYTES):
        if time.monotonic() > deadline:
            raise StateError("the notice was over before everything was written")
        chunk = view[start : start + CHUNK_BYTES]
        total = zlib.crc32(chunk, total)
        written = 0
        while written < len(chunk):
            written += os.pwrite(descriptor, chunk[written:], offset + start + written)
        progress()
    return total


def _read(
    descriptor: int, offset: int, length: int, expected: int, folder: Path, progress: Callable[[], None]
) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    total = done = 0
    while done < length:
        count = os.preadv(descriptor, [view[done : done + CHUNK_BYTES]], offset + done)
        if count == 0:
            raise StateError(f"{folder / STATE_FILE} ends too early")
        total = zlib.crc32(view[done : done + count], total)
        done += count
        progress()
    if total != expected:
        raise StateError(f"{folder / STATE_FILE} was damaged: {length} bytes at {offset} have another checksum")
    return data


def _write_file(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
