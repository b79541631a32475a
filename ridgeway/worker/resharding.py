"""Putting a shard together from pieces of other shards, which arrive in any order and on any thread."""

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status
from ridgeway.worker.promises import Promise

Box = Sequence[Sequence[int]]
"""Start and stop along each dimension."""


def cut(data: np.ndarray, box: Box | None) -> np.ndarray:
    """The part of an array that a box names, as a view; None names all of it."""
    return data if box is None else data[tuple(slice(start, stop) for start, stop in box)]


class Assembly:
    """One shard of ``shape`` and ``dtype`` in the making; `promise` resolves to it when all pieces are placed.

    The first error of a piece becomes the value.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, pieces: int):
        self.promise = Promise()
        self._shape = shape
        self._dtype = dtype
        self._left = pieces
        self._array: np.ndarray | None = None
        self._lock = threading.Lock()
        if pieces == 0:
            self.promise.resolve(np.empty(shape, dtype))

    def place(self, where: Box | None, value: Any) -> None:
        """A piece (or a `Status` in its place) arrived; ``where`` None: it is the whole shard."""
        if isinstance(value, Status):
            self.promise.resolve(value)
            return
        if where is None:
            self.promise.resolve(value)
            return
        try:
            with self._lock:
                if self._array is None:
                    self._array = np.empty(self._shape, self._dtype)
                array = self._array
            cut(array, where)[...] = value  # pieces do not overlap
        except (MemoryError, ValueError) as error:
            self.promise.resolve(statuses.resource_exhausted(f"{self._dtype}{list(self._shape)}: {error}"))
            return
        with self._lock:
            self._left -= 1
            complete = self._left == 0
        if complete:
            self.promise.resolve(array)


def reinterpret(data: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The same bytes as an array of another dtype and shape.

    Raises:
      ValueError: they are not as many as it needs.
    """
    if data.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{data.dtype}{list(data.shape)} and {dtype}{list(shape)} differ in size")
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).view(dtype).reshape(shape)
