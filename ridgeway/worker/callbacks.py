"""Host callbacks as a worker's programs see them: Python functions that have the controller run the real ones."""

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker.promises import PromiseTable

_ERROR_MARK = "host callback on the controller: "
_TRACEBACK = "Traceback (most recent call last)"

Arrays = list[tuple[int, tuple[int, ...]]]
"""Dtype kind and shape of each result."""


class CallbackCaller:
    """Sends calls to the head and waits for their results, on XLA's threads."""

    def __init__(
        self, promises: PromiseTable, send: Callable[[list[Any], list[bytes]], None], timeout_seconds: float,
        failed: Callable[[str], None] = lambda text: None,
    ):  # fmt: skip
        """``failed``: told what a callback of a program that executors run together has raised."""
        self._failed = failed
        self._promises = promises
        self._send = send
        self._timeout_seconds = timeout_seconds
        self._tokens = itertools.count(-1, -1)  # the head's tokens are positive
        self._lock = threading.Lock()
        self._calls: dict[int, bool] = {}
        """token of each call that waits -> whether executors together run the program"""

    @property
    def waiting(self) -> int:
        """Calls that the controller has not answered yet."""
        return len(self._calls)

    def abandon(self, cause: Status) -> None:
        """A generation ends: its programs wait no longer."""
        with self._lock:
            tokens = [token for token, spans in self._calls.items() if spans]
        for token in tokens:
            self._promises.resolve(token, cause)

    def function(
        self, callback: int, results: Arrays, spans: bool
    ) -> Callable[..., tuple[Any, ...]]:
        """The function that XLA calls for one callback of a program; a token is passed as None and given back.
        ``spans``: executors run the program together."""

        def call(*arguments: Any) -> tuple[Any, ...]:
            arrays = [np.asarray(argument) for argument in arguments if argument is not None]
            tokens = (None,) * (len(arguments) - len(arrays))
            return tokens + _unpack(self._ask(callback, arrays, spans), results)

        return call

    def _ask(self, callback: int, operands: list[np.ndarray], spans: bool) -> Any:
        with self._lock:
            token = next(self._tokens)
            self._calls[token] = spans
        try:
            promise = self._promises.claim(token, None)
            # A callback on parts of arrays is declared with the whole ones' shapes.
            shapes = [list(array.shape) for array in operands]
            self._send(["callback", callback, token, shapes], [b"".join(array.tobytes() for array in operands)])
            try:
                return promise.wait(self._timeout_seconds)
            except statuses.StatusError as error:
                if spans:
                    self._failed(error.status.message)
                raise RuntimeError(_ERROR_MARK + error.status.message) from None
        except LinkClosed:
            raise RuntimeError("host callback: the head is gone") from None
        finally:
            with self._lock:
                del self._calls[token]


def without_own_frames(text: str) -> str:
    """An error's text in which XLA has put the traceback of `CallbackCaller` before what the controller said."""
    before, mark, after = text.partition(_ERROR_MARK)
    first_line = before.partition(_TRACEBACK)[0]
    return f"{first_line}{after}" if mark else text


def _size(arrays: Arrays) -> int:
    return sum(math.prod(shape) * dtypes.dtype_of_kind(kind).itemsize for kind, shape in arrays)


def _unpack(data: Any, results: Arrays) -> tuple[np.ndarray, ...]:
    if len(data) != _size(results):
        raise RuntimeError(f"host callback: a result of {len(data)} bytes instead of {_size(results)}")
    arrays, offset = [], 0
    for kind, shape in results:
        dtype = dtypes.dtype_of_kind(kind)
        count = math.prod(shape)
        arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
        offset += count * dtype.itemsize
    return tuple(arrays)
