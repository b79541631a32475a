"""Arrays in storage: what a persistence request leaves there, read and written with tensorstore.

An array is a folder in zarr format (https://zarr-specs.readthedocs.io), as Orbax writes it without OCDBT: one file for
each chunk, named by its position (``0.3``), and a *mark* that describes them, without which no reader takes the folder
for an array.  There are two marks for the same chunks, ``.zarray`` for readers of version 2 and ``zarr.json`` for those
of version 3, because Orbax looks for the one or the other and the request does not say which.  Chunks are stored, not
compressed, as gzip streams of level 0: a reader of any kind then checks their CRC, and a damaged file is an error and
not a wrong number.

Nothing half-written is ever taken for whole: the chunks of several executors go into a folder beside the array
(``<name>.partial-<write>``), and only when all are there one executor adds the marks and renames the folder.  Object
stores cannot rename: there the chunks go where they belong, after the marks were removed, and the marks come last.

Nothing here is quick: it runs on threads of its own.
"""

import errno
import itertools
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.locations import Location
from ridgeway.protocol.status import Code, Status, StatusError

ZARR2_MARK, ZARR3_MARK, OCDBT_MARK = ".zarray", "zarr.json", "manifest.ocdbt"
SLAB_BYTES = 64 << 20
"""About how much is read or written at once, between two looks at the clock."""
UNDER_WAY_SECONDS = 30.0
"""How long a chunk that is being written may take after its request was called off or late."""
_S3_VARIABLES = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}  # fmt: skip
_CHUNK_KEY = re.compile(r"\d+(?:\.\d+)*")

Remaining = Callable[[], float]
"""Seconds that are left for the request.

Raises:
  StatusError: none, or it was called off.
"""

_context: Any = None
_context_lock = threading.Lock()


def _shared_context() -> Any:
    global _context
    with _context_lock:
        if _context is None:
            # Each byte is read or written once: a cache would only double the memory.
            _context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 8}})
        return _context


def _kvstore(location: Location) -> dict[str, Any]:
    """The JSON of a tensorstore key-value store, for this host: tensorstore takes credentials from AWS's variables, but
    not where S3-compatible storage is."""
    found = location.kvstore()
    if location.driver == "s3":
        for member, names in _S3_VARIABLES.items():
            value = next((value for name in names if (value := os.environ.get(name))), None)
            if value is not None:
                found[member] = value
    return found


class StoredArray:
    """One array at its place. ``shape`` and ``chunk`` in elements."""

    def __init__(self, location: Location, name: str, kind: int, shape: tuple[int, ...], chunk: tuple[int, ...] = ()):
        self.location = location
        self.name = name
        self.dtype = dtypes.dtype_of_kind(kind)
        self.shape = shape
        self.chunk = chunk
        self._lock = threading.Lock()
        self._store: Any = None

    def __str__(self) -> str:
        return f"array {self.name!r} in {self.location}"

    # ---- writing

    def write(self, write: str, start: tuple[int, ...], data: np.ndarray, remaining: Remaining) -> None:
        """Write a part that begins at ``start`` and consists of whole chunks (but at the end of a dimension).

        Raises:
          StatusError: it could not be written, or there is no time left.
        """
        with explained(f"{self} could not be written"):
            store = self._opened(lambda: self._open_to_write(write, remaining))
            rows = self.chunk[0] if self.chunk else 1
            for slab in _slabs(start, data.shape, rows, data.itemsize):
                # Each chunk is waited for, also when another one has failed: what failed is removed afterwards, and no
                # late chunk may put it back. tensorstore's result of a larger write is there with its first error.
                remaining()
                writing = [store[where].write(data[_within(where, start)]) for where in _chunks(slab, self.chunk)]
                errors = [error for future in writing if (error := _outcome(future, remaining)) is not None]
                if errors:
                    raise errors[0]

    def _open_to_write(self, write: str, remaining: Remaining) -> Any:
        self._refuse_what_is_no_array()
        where = self._while_writing(write)
        if not self.location.is_local:
            store = ts.KvStore.open(_kvstore(where), context=_shared_context()).result(timeout=remaining())
            for mark in (ZARR2_MARK, ZARR3_MARK):
                store.write(mark, None).result(timeout=remaining())
        spec = {
            "driver": "zarr", "kvstore": _kvstore(where), "metadata": self._metadata2(),
            "store_data_equal_to_fill_value": True,
        }  # fmt: skip
        opened = ts.open(spec, open=True, assume_metadata=True, context=_shared_context())
        return opened.result(timeout=remaining())

    def commit(self, write: str, remaining: Remaining) -> None:
        """All parts were written: make an array of them.

        Raises:
          StatusError: parts are missing, so not all executors write to the same storage; or as `write`.
        """
        with explained(f"{self} could not be completed"):
            where = self._while_writing(write)
            store = ts.KvStore.open(_kvstore(where), context=_shared_context()).result(timeout=remaining())
            expected = math.prod(self._grid())
            found = sum(map(self._is_chunk, store.list().result(timeout=remaining())))
            if found != expected:
                raise statuses.failed_precondition(
                    f"{found} of {expected} chunks are there, seen from the host that completes it: do all hosts "
                    "have the same storage at that location?"
                ).error()
            for mark, metadata in ((ZARR3_MARK, self._metadata3()), (ZARR2_MARK, self._metadata2())):
                store.write(mark, json.dumps(metadata, indent=1).encode()).result(timeout=remaining())
            if self.location.is_local:
                self._rename(write)

    def discard(self, write: str) -> None:
        """Remove what a write that failed has left."""
        if self.location.is_local:
            shutil.rmtree(self._while_writing(write).path, ignore_errors=True)

    def _while_writing(self, write: str) -> Location:
        return self.location.folder(f"{self.name}.partial-{write}" if self.location.is_local else self.name)

    def _grid(self) -> list[int]:
        return [-(-size // chunk) for size, chunk in zip(self.shape, self.chunk, strict=True)]

    def _is_chunk(self, key: bytes) -> bool:
        text = key.decode(errors="replace")
        if not _CHUNK_KEY.fullmatch(text):
            return False
        position = [int(part) for part in text.split(".")]
        grid = self._grid() or [1]
        return len(position) == len(grid) and all(index < count for index, count in zip(position, grid, strict=True))

    def _metadata2(self) -> dict[str, Any]:
        # What numpy does not know tensorstore's zarr names by ml_dtypes' name: "bfloat16".
        dtype = self.dtype.str if self.dtype.isbuiltin == 1 else self.dtype.name
        return {
            "zarr_format": 2, "shape": list(self.shape), "chunks": list(self.chunk), "dtype": dtype,
            "compressor": {"id": "gzip", "level": 0}, "fill_value": None, "filters": None, "order": "C",
            "dimension_separator": ".",
        }  # fmt: skip

    def _metadata3(self) -> dict[str, Any]:
        nothing = {"b": False, "c": [0, 0]}.get(self.dtype.kind, 0)
        return {
            "zarr_format": 3, "node_type": "array", "shape": list(self.shape), "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "gzip", "configuration": {"level": 0}},
            ],
            "fill_value": nothing, "attributes": {},
        }  # fmt: skip

    def _refuse_what_is_no_array(self) -> None:
        """Nothing that is there and is not an array is ever replaced.

        Raises:
          StatusError: FAILED_PRECONDITION.
        """
        if not self.location.is_local:
            return
        path = self.location.folder(self.name).path
        if not os.path.lexists(path.rstrip("/")):
            return
        is_array = any(os.path.isfile(path + mark) for mark in (ZARR2_MARK, ZARR3_MARK))
        if not is_array or any(entry.is_dir() for entry in os.scandir(path)):
            raise statuses.failed_precondition(f"{path} is there already and is not an array alone").error()

    def _rename(self, write: str) -> None:
        final, partial = self.location.folder(self.name).path.rstrip("/"), self._while_writing(write).path.rstrip("/")
        self._refuse_what_is_no_array()
        replaced = None
        if os.path.lexists(final):
            replaced = f"{final}.replaced-{write}"
            os.rename(final, replaced)
        os.rename(partial, final)
        folder = os.open(os.path.dirname(final), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the files are on disk already, by tensorstore
        finally:
            os.close(folder)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    # ---- reading

    def read(self, start: tuple[int, ...], shape: tuple[int, ...], remaining: Remaining) -> np.ndarray:
        """A part of the array, in the dtype asked for, row-major.

        Raises:
          StatusError: there is no such array, or not of this shape, or it is damaged (none of which is an error that
            is worth trying again); or there is no time left.
        """
        with explained(f"{self} could not be read"):
            store = self._opened(lambda: self._open_to_read(remaining))
            data = np.empty(shape, self.dtype)
            rows = store.chunk_layout.read_chunk.shape[0] if self.shape else 1
            for where in _slabs(start, shape, rows, data.itemsize):
                data[_within(where, start)] = store[where].read(order="C").result(timeout=remaining())
            return data

    def _open_to_read(self, remaining: Remaining) -> Any:
        spec = self._find(remaining) | {"fill_missing_data_reads": False}
        store = ts.open(spec, open=True, context=_shared_context()).result(timeout=remaining())
        if store.shape != self.shape:
            raise statuses.invalid_argument(
                f"its shape is {list(store.shape)}, but {list(self.shape)} was asked for"
            ).error()
        wanted = ts.dtype(self.dtype)
        return store if store.dtype == wanted else ts.cast(store, wanted)

    def _find(self, remaining: Remaining) -> dict[str, Any]:
        """The format: what this class writes, or whatever else Orbax does."""
        inside = {"driver": "ocdbt", "base": _kvstore(self.location), "path": f"{self.name}/"}
        candidates = [_kvstore(self.location.folder(self.name))]
        if self._has(_kvstore(self.location), OCDBT_MARK, remaining):
            candidates.append(inside)
        for kvstore in candidates:
            for mark, driver in ((ZARR2_MARK, "zarr"), (ZARR3_MARK, "zarr3")):
                if self._has(kvstore, mark, remaining):
                    return {"driver": driver, "kvstore": kvstore}
        raise statuses.failed_precondition(
            "there is none that was written completely (with a .zarray or zarr.json), as seen from this host"
        ).error()

    def _has(self, kvstore: dict[str, Any], key: str, remaining: Remaining) -> bool:
        store = ts.KvStore.open(kvstore, context=_shared_context()).result(timeout=remaining())
        return store.read(key).result(timeout=remaining()).state == "value"

    def _opened(self, make: Callable[[], Any]) -> Any:
        with self._lock:
            if self._store is None:
                self._store = make()
            return self._store


def _slabs(
    start: tuple[int, ...], shape: tuple[int, ...], chunk_rows: int, item_bytes: int
) -> Iterator[tuple[slice, ...]]:
    """A region cut along its first dimension at borders of chunks, into parts of about `SLAB_BYTES`."""
    if math.prod(shape) == 0:
        return
    if not shape:
        yield ()
        return
    rest = tuple(slice(s, s + size) for s, size in zip(start[1:], shape[1:], strict=True))
    row_bytes = item_bytes * math.prod(shape[1:])
    rows = chunk_rows * max(1, SLAB_BYTES // max(1, chunk_rows * row_bytes))
    begin, end = start[0], start[0] + shape[0]
    while begin < end:
        stop = min(end, (begin // rows + 1) * rows)
        yield (slice(begin, stop), *rest)
        begin = stop


def _chunks(region: tuple[slice, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """The chunks that a region consists of."""
    ranges = [
        [slice(begin, min(begin + size, part.stop)) for begin in range(part.start, part.stop, size)]
        for part, size in zip(region, chunk, strict=True)
    ]
    return itertools.product(*ranges)


def _within(where: tuple[slice, ...], start: tuple[int, ...]) -> tuple[slice, ...]:
    """A region in coordinates that begin at ``start``."""
    return tuple(slice(part.start - s, part.stop - s) for part, s in zip(where, start, strict=True))


def _outcome(future: Any, remaining: Remaining) -> Exception | None:
    """The error of a write that is under way, which being called off does not end."""
    called_off = None
    try:
        seconds = remaining()
    except StatusError as error:
        called_off, seconds = error, UNDER_WAY_SECONDS
    try:
        future.result(timeout=seconds)
    except Exception as error:
        return called_off or error
    return called_off


# ---- errors

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_ALLOWED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_OS_ERROR = re.compile(r"\s*\[os_error_code='(\d+)'\]")
_CODE = re.compile(r"^([A-Z_]+): ")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_NOISE = re.compile(r"\s*\[(?:tensorstore_spec|source locations|os_error_code)=.*", re.DOTALL)


class explained:
    """``with explained("what failed"):`` whatever is raised inside becomes a `StatusError` that says it."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            status = describe(error)
            what = self._what[0].upper() + self._what[1:]
            raise Status(status.code, statuses.without_retried_words(f"{what}: {status.message}")).error() from error


def describe(error: Exception) -> Status:
    """The status of a storage error.

    No code or text among them is one that elastic managers take for a lost slice, but that of a missed deadline: what
    storage refuses or does not have it refuses again.
    """
    if isinstance(error, StatusError):
        return error.status
    if isinstance(error, TimeoutError) and error.errno is None:
        return statuses.deadline_exceeded("storage did not answer within the request's timeout")
    match = _OS_ERROR.search(str(error))
    # tensorstore joins paths by a zero byte, and writes a digit that follows one as an escape too.
    text = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)) if escape[1] != "00" else "/", _NOISE.sub("", str(error)))
    number = int(match[1]) if match else getattr(error, "errno", None)
    match = _CODE.match(text)
    code = Code.__members__.get(match[1]) if match else None
    text = text[match.end() :] if match and code is not None else text
    if number in _NO_SPACE:
        return statuses.resource_exhausted(text)
    if number in _NOT_ALLOWED:
        return Status(Code.PERMISSION_DENIED, statuses.without_retried_words(text))
    if isinstance(error, MemoryError):
        return statuses.resource_exhausted(f"no memory left: {text}")
    if code is None:
        kinds = {OSError: Code.FAILED_PRECONDITION, ValueError: Code.INVALID_ARGUMENT}  # such as a dtype zarr has not
        code = next((code for kind, code in kinds.items() if isinstance(error, kind)), Code.UNKNOWN)
    elif code in statuses.RETRIED_CODES:
        code = Code.FAILED_PRECONDITION
    return Status(code, statuses.without_retried_words(text))
