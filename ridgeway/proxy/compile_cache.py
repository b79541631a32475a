"""The persistent compile cache: one file per program, bounded in bytes, oldest use goes first.

A file is ``magic | sha256 of the rest | uint32 metadata length | MessagePack metadata | serialized executable``.
It is written aside and renamed, so that it is there whole or not at all; a damaged or foreign one is ignored and
removed.  The folder is only read by the user who owns it: loading an executable runs its code.
"""

import hashlib
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import msgpack

from ridgeway.transport import frames

MAGIC = b"RIDGEWAY-PROGRAM-1\n"
_LENGTH = struct.Struct("<I")
_SUFFIX = ".program"
_PARTIAL = ".partial-"
ABANDONED_AFTER_SECONDS = 86_400.0
"""A file that was not renamed for so long is what a process left behind that died while it wrote."""


class CompileCache:
    """Blocking; the head calls it from a thread."""

    def __init__(self, folder: Path | None, limit_bytes: int):
        self._folder = folder
        self._limit_bytes = limit_bytes
        self.hits = 0
        self.misses = 0
        self.kept_bytes = 0
        """size of all kept programs, when last looked at"""
        self.problem: str | None = None
        """why programs are not kept, once writing has failed"""
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                self.problem = f"compile cache {folder}: {error.strerror}"
                self._folder = None
        self.kept_bytes = self.total_bytes()

    def load(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """Metadata and serialized executable, or None."""
        if self._folder is None:
            self.misses += 1
            return None
        path = self._folder / (key + _SUFFIX)
        try:
            data = path.read_bytes()
        except OSError:
            self.misses += 1
            return None
        found = _decode(data)
        if found is None:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                pass  # of a read-only folder: it is ignored each time
            self.misses += 1
            return None
        try:
            os.utime(path)
        except OSError:
            pass  # only the order of removal suffers
        self.hits += 1
        return found

    def store(self, key: str, metadata: dict[str, Any], serialized: bytes) -> None:
        """Keep a program; a full or read-only disk is noted in `problem`, nothing else."""
        if self._folder is None:
            return
        packed = frames.pack_body(metadata)
        rest = _LENGTH.pack(len(packed)) + packed + serialized
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=_PARTIAL, delete=False) as file:
                try:
                    file.write(MAGIC + hashlib.sha256(rest).digest() + rest)
                    file.close()
                    os.replace(file.name, self._folder / (key + _SUFFIX))
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._trim()
        except OSError as error:
            self.problem = f"compile cache {self._folder}: {error.strerror or error}"

    @property
    def folder(self) -> Path | None:
        """Where programs are kept; None: nowhere."""
        return self._folder

    def total_bytes(self) -> int:
        """Size of all kept programs."""
        return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        if self._folder is None:
            return []
        files = []
        for path in self._folder.glob("*" + _SUFFIX):
            try:
                info = path.stat()
            except OSError:
                continue
            files.append((info.st_mtime, info.st_size, path))
        return sorted(files)

    def _trim(self) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        self.kept_bytes = total
        assert self._folder is not None
        abandoned = time.time() - ABANDONED_AFTER_SECONDS
        for path in self._folder.glob(_PARTIAL + "*"):
            try:
                if path.stat().st_mtime < abandoned:
                    path.unlink()
            except FileNotFoundError:
                pass  # renamed, or removed by another head


def _decode(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    start = len(MAGIC)
    body = start + hashlib.sha256().digest_size
    if not data.startswith(MAGIC) or hashlib.sha256(data[body:]).digest() != data[start:body]:
        return None
    try:
        (length,) = _LENGTH.unpack_from(data, body)
        end = body + _LENGTH.size + length
        metadata = msgpack.unpackb(data[body + _LENGTH.size : end], raw=False, strict_map_key=False)
    except (ValueError, struct.error, msgpack.UnpackException):
        return None
    return (metadata, data[end:]) if isinstance(metadata, dict) else None
