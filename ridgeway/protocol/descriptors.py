"""The protocol's own description, read out of the installed jaxlib.

jaxlib ships the client half of the IFRT proxy and with it, inside its shared library, the serialized
`FileDescriptorProto` of every message. Message classes made from those always fit the installed release.
Nothing here imports jax or loads jaxlib's native code: the library is read as a file.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError

from ridgeway.protocol import versions

_logger = logging.getLogger(__name__)

#: Name of the library that holds jaxlib's C++ code since jax 0.6; older and newer layouts are found by
#: scanning.
_LIBRARY_NAME = "libjax_common.so"

#: Files whose messages, with all they depend on, go into the pool.
_ROOT_PREFIXES = (
    "xla/python/ifrt", "xla/python/pjrt_ifrt/", "xla/pjrt/proto/", "xla/pjrt/distributed/protocol.proto",
    "xla/service/hlo.proto", "tsl/profiler/protobuf/",
)  # fmt: skip

#: Messages without which no session can be served.
REQUIRED_MESSAGES = (
    "tensorflow.StatusProto",
    "xla.CompileOptionsProto",
    "xla.OpSharding",
    "xla.ifrt.AttributeMapProto",
    "xla.ifrt.HloShardingProto",
    "xla.ifrt.SingleDeviceShardingProto",
    "xla.ifrt.XlaCompileOptionsProto",
    "xla.ifrt.proxy.GrpcGetVersionRequest",
    "xla.ifrt.proxy.GrpcHostBufferStoreMetadata",
    "xla.ifrt.proxy.GrpcIfrtSessionMetadata",
    "xla.ifrt.proxy.IfrtRequest",
    "xla.ifrt.proxy.IfrtResponse",
)

_CACHE_MAGIC = b"ridgeway descriptors 3\n"


class DescriptorError(RuntimeError):
    """The installed jaxlib does not describe the protocol, or is not there at all."""


def jaxlib_version() -> str:
    """Version of the installed jaxlib, without importing it.

    Raises:
        DescriptorError: jaxlib is not installed.
    """
    try:
        return importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        raise DescriptorError(_advice("jaxlib is not installed.")) from None


def _advice(problem: str) -> str:
    return f"{problem} Ridgeway supports jax and jaxlib {versions.SUPPORTED_JAX}; install one of those."


def library_candidates() -> list[Path]:
    """Shared libraries of the installed jaxlib, the likeliest first.

    Raises:
        DescriptorError: jaxlib is not installed or holds no shared library.
    """
    spec = importlib.util.find_spec("jaxlib")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if not folders:
        raise DescriptorError(_advice("jaxlib is not installed."))
    preferred = [path for path in (folder / _LIBRARY_NAME for folder in folders) if path.is_file()]
    others: set[Path] = set()
    for folder in folders:
        for pattern in ("*.so", "*.so.*", "*.dylib", "*.pyd"):
            others.update(folder.rglob(pattern))
    # The descriptions sit beside most of the code, so the largest library is the best guess.
    rest = sorted(others.difference(preferred), key=lambda path: (-path.stat().st_size, str(path)))
    if not preferred and not rest:
        raise DescriptorError(_advice(f"jaxlib in {folders[0]} holds no shared library."))
    return preferred + rest


# --- reading a library --------------------------------------------------------------------------------------

# A serialized FileDescriptorProto starts with its name (field 1) and its package (field 2).
_START = re.compile(rb"\x0a([\x06-\x7f])((?:xla|google|tsl|tensorflow)/[\w/.]+?\.proto)\x12")

# Fields of FileDescriptorProto and their wire types. They are written in ascending order.
_WIRE_TYPES = {1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2, 9: 2, 10: 0, 11: 0, 12: 2, 14: 0, 15: 2}
_SYNTAX_FIELD = 12
_EDITION_FIELD = 14
# Public and weak dependencies are written right behind the dependencies, so their numbers break the order.
_UNORDERED_FIELDS = (10, 11)
_FIELD_LIMIT_BYTES = 2_000_000


def _read_varint(data: mmap.mmap | bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def _field_ends(data: mmap.mmap | bytes, start: int) -> list[int]:
    """Where a FileDescriptorProto that starts at `start` may end: one offset behind each field that fits."""
    ends: list[int] = []
    position, previous, size = start, 0, len(data)
    while position < size:
        try:
            tag, after = _read_varint(data, position)
            field = tag >> 3
            if _WIRE_TYPES.get(field) != tag & 7:
                break
            if field < previous and field not in _UNORDERED_FIELDS:
                break
            value, after = _read_varint(data, after)
        except (IndexError, ValueError):
            break
        if tag & 7 == 2:
            if value > _FIELD_LIMIT_BYTES or after + value > size:
                break
            content, after = after, after + value
            last = field == _SYNTAX_FIELD and data[content:after] != b"editions"
        else:
            last = field == _EDITION_FIELD
        position = after
        ends.append(position)
        if last:
            break
        if field not in _UNORDERED_FIELDS:
            previous = field
    return ends


def extract(data: mmap.mmap | bytes) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """All file descriptions in the bytes of a library, by file name; the first of each name wins."""
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    for match in _START.finditer(data):
        if match.group(1)[0] != len(match.group(2)):
            continue
        name = match.group(2).decode("ascii")
        if name in files:
            continue
        for end in reversed(_field_ends(data, match.start())):
            try:
                file = descriptor_pb2.FileDescriptorProto.FromString(data[match.start() : end])
            except (DecodeError, ValueError):
                continue
            # The bare name with a package is what a coincidence would look like; a real file declares
            # something.
            if file.message_type or file.enum_type or file.extension or file.service:
                files[name] = file
                break
    return files


def _needed(
    files: dict[str, descriptor_pb2.FileDescriptorProto],
) -> list[descriptor_pb2.FileDescriptorProto]:
    """The protocol's files and what they depend on, dependencies first. A file that lacks one is left out."""
    ordered: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    dropped: set[str] = set()

    def visit(name: str) -> bool:
        if name in ordered:
            return True
        if name not in files or name in dropped:
            return False
        file = files[name]
        # Marked first, so that a cycle in damaged data ends.
        dropped.add(name)
        if not all([visit(dependency) for dependency in file.dependency]):
            return False
        dropped.discard(name)
        ordered[name] = file
        return True

    for name in sorted(files):
        if name.startswith(_ROOT_PREFIXES):
            visit(name)
    return list(ordered.values())


def _message_names(files: Iterable[descriptor_pb2.FileDescriptorProto]) -> set[str]:
    return {f"{file.package}.{message.name}" for file in files for message in file.message_type}


def _missing(files: Iterable[descriptor_pb2.FileDescriptorProto]) -> list[str]:
    present = _message_names(files)
    return [name for name in REQUIRED_MESSAGES if name not in present]


def _read_library(path: Path) -> list[descriptor_pb2.FileDescriptorProto]:
    if path.stat().st_size == 0:
        return []
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _needed(extract(data))


# --- the cache ----------------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """Where the extracted descriptions are kept: `$XDG_CACHE_HOME/ridgeway`, else `~/.cache/ridgeway`.

    None for a user without a home folder, as in some containers.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore a relative path.
    if base and os.path.isabs(base):
        return Path(base) / "ridgeway"
    try:
        return Path.home() / ".cache" / "ridgeway"
    except RuntimeError:
        return None


def _cache_path(version: str, library: Path) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    stat = library.stat()
    # With the roots: releases of Ridgeway that need other messages do not read each other's.
    identity = f"{version}\n{library.name}\n{stat.st_size}\n{stat.st_mtime_ns}\n{_ROOT_PREFIXES}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return folder / f"descriptors-{re.sub(r'[^\w.+-]', '_', version)}-{key}.bin"


def _read_cache(path: Path | None) -> list[descriptor_pb2.FileDescriptorProto] | None:
    """The cached files, or None if there are none or the cache is damaged."""
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    head = len(_CACHE_MAGIC)
    payload = content[head + 32 :]
    if content[:head] != _CACHE_MAGIC or hashlib.sha256(payload).digest() != content[head : head + 32]:
        _logger.info("Ignoring the damaged cache file %s; it will be written anew.", path)
        return None
    try:
        files = list(descriptor_pb2.FileDescriptorSet.FromString(payload).file)
    except DecodeError:
        return None
    return None if _missing(files) else files


def _write_cache(path: Path | None, files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    if path is None:
        return
    payload = descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as stream:
            temporary = stream.name
            stream.write(_CACHE_MAGIC + hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except OSError as error:
        # Without a cache every start reads the library, which is slower but right.
        _logger.info("Could not keep the protocol's descriptions in %s: %s.", path, error)
        if temporary is not None:
            try:
                os.unlink(temporary)
            except OSError:
                pass


# --- the pool -----------------------------------------------------------------------------------------------


def load_files() -> list[descriptor_pb2.FileDescriptorProto]:
    """The protocol's file descriptions, dependencies first, from the cache or from jaxlib's library.

    Raises:
        DescriptorError: as `load_pool`.
    """
    version = jaxlib_version()
    candidates = library_candidates()
    best: list[str] = list(REQUIRED_MESSAGES)
    for library in candidates:
        try:
            cache = _cache_path(version, library)
            files = _read_cache(cache)
            if files is not None:
                return files
            files = _read_library(library)
        except OSError as error:
            _logger.warning("Could not read %s: %s.", library, error)
            continue
        missing = _missing(files)
        if not missing:
            _write_cache(cache, files)
            return files
        if len(missing) < len(best):
            best = missing
    raise DescriptorError(
        _advice(
            f"The installed jaxlib {version} does not describe the IFRT proxy message"
            f"{'s' if len(best) > 1 else ''} {', '.join(best)} (looked into {len(candidates)} "
            f"librar{'ies' if len(candidates) > 1 else 'y'}, first {candidates[0]})."
        )
    )


@functools.cache
def load_pool() -> descriptor_pool.DescriptorPool:
    """A pool of its own with every message of the IFRT proxy protocol, made once per process.

    Takes some milliseconds from the cache, and a few tenths of a second when the library must be read.

    Raises:
        DescriptorError: jaxlib is missing, or does not describe a message in `REQUIRED_MESSAGES`; says which
            jaxlib was found and which releases are supported.
    """
    pool = descriptor_pool.DescriptorPool()
    for file in load_files():
        pool.AddSerializedFile(file.SerializeToString())
    return pool
