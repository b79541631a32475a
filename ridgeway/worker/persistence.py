"""Orders about storage: write and read this executor's own shards, beside everything else it does.

Only what must happen in order does: the bytes to write are taken (see `BufferOrders.read`), and the groups to read are
made of promises.  The rest runs on threads of its own, which no other order waits for.  One *job* is what one request
has this executor do; it is answered once, with its first error or when all its pieces are done, and never before its
last piece has ended: the head relies on nothing being written any more after the answer.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeway.protocol import status as statuses
from ridgeway.protocol.locations import parse_location
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.worker import buffers
from ridgeway.worker.buffer_orders import BufferOrders
from ridgeway.worker.promises import Promise
from ridgeway.worker.waiting import Deliver

if TYPE_CHECKING:
    from ridgeway.worker.executor import Executor
    from ridgeway.worker.storage import StoredArray

STOPPED_KEPT = 4096
"""Requests called off that may still come: being called off is faster than an order."""

Work = Callable[[Callable[[], float]], None]
"""One piece; gets a function for the seconds that are left, which raises when there are none."""


class Job:
    """What one request has this executor do. ``finished`` is called once, on any thread."""

    def __init__(self, timeout_seconds: float, pieces: int, finished: Callable[[Status | None], None]):
        self._deadline = time.monotonic() + timeout_seconds
        self._timeout_seconds = timeout_seconds
        self._left = pieces
        self._finished = finished
        self._error: Status | None = None
        self._lock = threading.Lock()

    def stop(self, status: Status) -> None:
        """Call it off, or note its first error: pieces that have not ended soon will."""
        with self._lock:
            self._error = self._error or status

    def remaining(self) -> float:
        """Seconds left.

        Raises:
          StatusError: none, or it was called off.
        """
        if self._error is not None:
            raise self._error.error()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise statuses.deadline_exceeded(f"the request's timeout of {self._timeout_seconds:g} s is over").error()
        return left

    def run(self, work: Work) -> Status | None:
        """Do one piece on this thread; returns its error."""
        error = None
        try:
            self.remaining()
            work(self.remaining)
        except StatusError as problem:
            error = problem.status
        except Exception as problem:  # a bug here must not leave the client waiting
            error = statuses.internal(f"storage: {problem!r}")
        self.ended(error)
        return error

    def ended(self, error: Status | None) -> None:
        """One piece less."""
        if error is not None:
            self.stop(error)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finished(self._error)


class PersistenceOrders:
    """Handlers by order name, for one executor."""

    def __init__(self, executor: "Executor", buffer_orders: BufferOrders):
        self._executor = executor
        self._buffers = buffer_orders
        self._threads = ThreadPoolExecutor(max(1, executor.settings.persistence_threads), "persistence")
        self._lock = threading.Lock()
        self._jobs: dict[str, list[Job]] = {}
        self._pieces = 0
        self._stopped: OrderedDict[str, Status] = OrderedDict()
        self.handlers: dict[str, Callable[..., None]] = {
            "persist_write": self.write, "persist_commit": self.commit, "persist_discard": self.discard,
            "persist_read": self.read,
        }  # fmt: skip
        self.aside: dict[str, Callable[..., None]] = {"persist_stop": self.stop}

    def write(
        self, request: int, write: str, timeout_seconds: float, arrays: list[Any], attached: list[bytearray]
    ) -> None:
        """Write parts of arrays; they are none until `commit`. ``arrays``: [array as in `_Stored`, parts], of which a
        part is [group, device, where it begins]."""
        job = self._job(request, write, timeout_seconds, sum(len(parts) for _, parts in arrays))
        for described, parts in arrays:
            stored = _Stored(described)
            for group, device, start in parts:
                self._buffers.read(group, device, self._writer(job, stored, write, tuple(start)))

    def _writer(self, job: Job, stored: "_Stored", write: str, start: tuple[int, ...]) -> Deliver:
        """What to do with a shard's bytes when they are known."""

        def deliver(data: Any, error: Status | None) -> None:
            if error is not None:
                job.ended(error)
            else:
                self._submit(job, lambda remaining: stored.array.write(write, start, data, remaining))

        return deliver

    def commit(
        self, request: int, write: str, timeout_seconds: float, arrays: list[Any], attached: list[bytearray]
    ) -> None:
        """All executors have written their parts of arrays (as in `_Stored`): complete them."""
        job = self._job(request, write, timeout_seconds, len(arrays))
        for described in arrays:
            stored = _Stored(described)
            self._submit(job, lambda remaining, stored=stored: stored.array.commit(write, remaining))

    def discard(self, request: int, write: str, arrays: list[Any], attached: list[bytearray]) -> None:
        """Remove what a failed write has left."""
        job = Job(self._executor.settings.persistence_timeout_seconds, len(arrays), self._answer(request))
        for described in arrays:
            stored = _Stored(described)
            self._submit(job, lambda _, stored=stored: stored.array.discard(write))

    def read(
        self, request: int, read: str, timeout_seconds: float, arrays: list[Any], attached: list[bytearray]
    ) -> None:
        """Make groups of parts of arrays. ``arrays``: [array as in `_Stored`, group, memory kind, parts], of which a
        part is [[devices], where it begins, its shape]."""
        job = self._job(request, read, timeout_seconds, sum(len(parts) for *_, parts in arrays))
        for described, group, memory_kind, parts in arrays:
            stored = _Stored(described)
            shards: dict[int, Any] = {}
            for devices, start, shape in parts:
                promise = Promise()
                shards |= dict.fromkeys(devices, buffers.PromisedShard(promise, _as_is, memory_kind))
                self._submit(job, _reader(stored, tuple(start), tuple(shape), promise), promise.resolve)
            self._executor.store.set(group, buffers.shard_group(shards))

    def stop(self, request: str, code: int, message: str, attached: list[bytearray]) -> None:
        """Call a write or a read off, also one that comes later."""
        status = Status(Code(code), message)
        with self._lock:
            self._stopped[request] = status
            if len(self._stopped) > STOPPED_KEPT:
                self._stopped.popitem(last=False)
            jobs = list(self._jobs.get(request, ()))
        for job in jobs:
            job.stop(status)

    def _job(self, request: int, name: str, timeout_seconds: float, pieces: int) -> Job:
        answer = self._answer(request)

        def finished(error: Status | None) -> None:
            with self._lock:
                jobs = self._jobs[name]
                jobs.remove(job)
                if not jobs:
                    del self._jobs[name]
            answer(error)

        job = Job(timeout_seconds, pieces, finished)
        with self._lock:
            self._jobs.setdefault(name, []).append(job)
            stopped = self._stopped.get(name)
        if stopped is not None:
            job.stop(stopped)
        return job

    def _answer(self, request: int) -> Callable[[Status | None], None]:
        deliver = self._executor.answer(request, self._executor.runtime)
        return lambda error: deliver(None, error)

    def unfinished(self) -> int:
        """How many pieces are being written or read, or wait for a thread."""
        with self._lock:
            return self._pieces

    def _submit(self, job: Job, work: Work, failed: Callable[[Status], None] | None = None) -> None:
        def run() -> None:
            try:
                error = job.run(work)
                if error is not None and failed is not None:
                    failed(error)
            finally:
                with self._lock:
                    self._pieces -= 1

        with self._lock:
            self._pieces += 1
        self._threads.submit(run)


class _Stored:
    """An array at its place, known when it is first used, which is on a thread for storage.

    ``described``: [location, name, dtype kind, shape, chunk shape (empty to read)].
    """

    def __init__(self, described: list[Any]):
        self._described = described
        self._lock = threading.Lock()
        self._array: StoredArray | None = None

    @property
    def array(self) -> "StoredArray":
        with self._lock:
            if self._array is None:
                # tensorstore is large: an executor that is never asked to persist anything does without.
                try:
                    from ridgeway.worker.storage import StoredArray
                except ImportError as error:
                    raise statuses.failed_precondition(
                        f"arrays are kept with tensorstore, which this worker does not have ({error}): install it there"
                    ).error() from error

                location, name, kind, shape, chunk = self._described
                self._array = StoredArray(parse_location(location), name, kind, tuple(shape), tuple(chunk))
            return self._array


def _reader(stored: _Stored, start: tuple[int, ...], shape: tuple[int, ...], promise: buffers.Promise) -> Work:
    return lambda remaining: promise.resolve(stored.array.read(start, shape, remaining))


def _as_is(data: np.ndarray) -> np.ndarray:
    return data
