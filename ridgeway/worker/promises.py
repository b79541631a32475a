"""Host bytes that are on their way to an executor, from the head or from another executor."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status, StatusError

LOST_PEERS_KEPT = 4096
"""An order that names a lost executor is at most as old as the queue of orders."""
LOOK_SECONDS = 0.1
"""How often an order that waits for bytes looks whether it still should."""

Ended = Callable[[], "Status | None"]
"""Asked now and then by what waits for bytes: why to wait no longer, or None."""


def never() -> Status | None:
    """Wait as long as it takes."""
    return None


class WaitEnded(StatusError):
    """Bytes are not waited for any longer; they may still come, so what was to use them is not poisoned by it."""


_calling = threading.local()


def _call_back(callbacks: list[Callable[[Any], None]], value: Any) -> None:
    """Call all of them. Those that resolve further promises do not get deeper into the stack: chains of copies that
    were ordered long before their first bytes are as long as the program likes.

    Raises:
      Exception: the first one that a callback raised, after all were called.
    """
    waiting: deque[tuple[Callable[[Any], None], Any]] | None = getattr(_calling, "waiting", None)
    if waiting is not None:
        waiting.extend((callback, value) for callback in callbacks)
        return
    waiting = _calling.waiting = deque((callback, value) for callback in callbacks)
    first: Exception | None = None
    try:
        while waiting:
            callback, value = waiting.popleft()
            try:
                callback(value)
            except Exception as error:
                first = first or error
    finally:
        _calling.waiting = None
    if first is not None:
        raise first


class Promise:
    """Host bytes that are on their way, from the head or from another executor."""

    __slots__ = ("_arrived", "_callbacks", "_lock", "_value", "claimed", "claimed_at", "source")

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Any], None]] = []
        self._value: Any = None
        self.claimed = False
        self.claimed_at = 0.0
        self.source: int | None = None
        """The executor that sends them, or None: the head."""

    def resolve(self, value: Any) -> None:
        """``value`` is what `wait` returns, or a `Status`."""
        with self._lock:
            if self._arrived.is_set():
                return
            self._value = value
            self._arrived.set()
            callbacks, self._callbacks = self._callbacks, []
        _call_back(callbacks, value)

    def when_resolved(self, callback: Callable[[Any], None]) -> None:
        """Call back with the value, or a `Status`: at once, or on the thread that resolves it, which must not be
        kept."""
        with self._lock:
            if not self._arrived.is_set():
                self._callbacks.append(callback)
                return
        callback(self._value)

    @property
    def resolved(self) -> bool:
        """Whether the bytes, or an error, are here."""
        return self._arrived.is_set()

    @property
    def value(self) -> Any:
        """The bytes; None while they are on their way, or if they will not come."""
        value = self._value if self._arrived.is_set() else None
        return None if isinstance(value, Status) else value

    def value_or_error(self) -> Any:
        """The value, or the `Status` in its place, once it is resolved."""
        return self._value

    def wait(self, timeout_seconds: float, ended: Ended = never) -> Any:
        """The value.

        Raises:
          WaitEnded: ``ended`` says so.
          statuses.StatusError: the bytes will not come, or did not come in time.
        """
        end = time.monotonic() + timeout_seconds
        while not self._arrived.wait(min(LOOK_SECONDS, max(0.0, end - time.monotonic()))):
            cause = ended()
            if cause is not None:
                raise WaitEnded(cause)
            if time.monotonic() >= end:
                raise statuses.deadline_exceeded(
                    f"bytes that were announced did not come within {timeout_seconds} s"
                ).error()
        if isinstance(self._value, Status):
            raise self._value.error()
        return self._value


class PromiseTable:
    """Tokens to promises; orders that use a token and the bytes for it may come in either order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: dict[int, Promise] = {}
        self._lost_peers: OrderedDict[int, Status] = OrderedDict()

    def claim(self, token: int, source: int | None) -> Promise:
        """The promise for a token, by the one order that names it."""
        with self._lock:
            promise = self._promises.pop(token, None) or Promise()
            lost = None if source is None else self._lost_peers.get(source)
            if lost is not None:
                # The news was faster than the order: nothing more comes.
                promise.resolve(lost)
            if not promise.resolved:
                self._promises[token] = promise
            promise.claimed = True
            promise.claimed_at = time.monotonic()
            promise.source = source
            return promise

    def resolve(self, token: int, value: Any) -> None:
        """Bytes or an error for a token arrived."""
        with self._lock:
            promise = self._promises.get(token)
            if promise is None:
                # Unclaimed: nobody has asked to be called back, so nothing runs under the lock.
                self._promises[token] = Promise()
                self._promises[token].resolve(value)
                return
            if promise.claimed:
                del self._promises[token]
        promise.resolve(value)

    @property
    def awaited(self) -> int:
        """Announced, and not here."""
        with self._lock:
            return sum(promise.claimed and not promise.resolved for promise in self._promises.values())

    def legacy(self) -> tuple[dict[int, Any], dict[int, Status]]:
        """What a successor of this process needs, nothing being `awaited`: bytes (or errors) that came before the
        order that will name them, and the lost peers."""
        with self._lock:
            here = {token: promise.value_or_error() for token, promise in self._promises.items() if promise.resolved}
            return here, dict(self._lost_peers)

    def inherit(self, tokens: dict[int, Any], lost_peers: dict[int, Status]) -> None:
        """Begin with a predecessor's `legacy`."""
        for token, value in tokens.items():
            self.resolve(token, value)
        self._lost_peers.update(lost_peers)

    def expire(self, patience_seconds: float) -> None:
        """Fail what was announced so long ago and did not come: the network between two hosts can swallow bytes
        without either of them noticing. Negative tokens are host callbacks, which wait for the controller."""
        now = time.monotonic()
        with self._lock:
            late = [
                token
                for token, promise in self._promises.items()
                if token > 0 and promise.claimed and now - promise.claimed_at >= patience_seconds
            ]
            promises = [self._promises.pop(token) for token in late]
        for promise in promises:
            promise.resolve(statuses.deadline_exceeded(
                f"bytes that were announced did not come within {patience_seconds} s (transfer_timeout_seconds)"
            ))  # fmt: skip

    def peer_lost(self, source: int, status: Status) -> None:
        """What another executor was to send will never come."""
        with self._lock:
            self._lost_peers[source] = status
            if len(self._lost_peers) > LOST_PEERS_KEPT:
                self._lost_peers.popitem(last=False)
            lost = [t for t, promise in self._promises.items() if promise.claimed and promise.source == source]
            promises = [self._promises.pop(token) for token in lost]
        for promise in promises:
            promise.resolve(status)
