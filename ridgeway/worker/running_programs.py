"""Which programs an executor is running, in memory that outlives it: its parent reads them when it has died.

The pages are made by the template before it forks, so that both have them.  Layout: uint64 begun, uint64 ended, then a
ring of slots with one text each, of the newest executions.  Executions end in the order in which they begin.
"""

import mmap
import struct
import threading

_HEAD = struct.Struct("<QQ")
SLOTS = 64
_SLOT_BYTES = 256
_LENGTH = struct.Struct("<H")


class RunningPrograms:
    """Written by the executor, read by the template."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + SLOTS * _SLOT_BYTES)
        self._lock = threading.Lock()
        self._begun = 0
        self._ended = 0

    def begin(self, program: str, name: str) -> None:
        """An execution of a program (or its loading) begins."""
        text = f"{program}\0{name}".encode()[: _SLOT_BYTES - _LENGTH.size]
        with self._lock:
            offset = _HEAD.size + self._begun % SLOTS * _SLOT_BYTES
            self._memory[offset : offset + _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text
            self._begun += 1
            _HEAD.pack_into(self._memory, 0, self._begun, self._ended)

    def end(self) -> None:
        """The first that has not ended, has."""
        with self._lock:
            self._ended += 1
            _HEAD.pack_into(self._memory, 0, self._begun, self._ended)

    def read(self) -> list[tuple[str, str]]:
        """Program and name of what has begun and not ended, the oldest first, each once."""
        begun, ended = _HEAD.unpack_from(self._memory)
        found: dict[tuple[str, str], None] = {}
        for number in range(max(ended, begun - SLOTS), begun):
            offset = _HEAD.size + number % SLOTS * _SLOT_BYTES
            (length,) = _LENGTH.unpack_from(self._memory, offset)
            start = offset + _LENGTH.size
            text = self._memory[start : start + length].decode(errors="replace")
            program, _, name = text.partition("\0")
            found[program, name] = None
        return list(found)

    def adopt(self) -> None:
        """In the forked child: this is where its executor writes."""
        global _of_this_process
        _of_this_process = self

    def close(self) -> None:
        """Give the memory back; the process that used it has ended."""
        self._memory.close()


_of_this_process: RunningPrograms | None = None


def of_this_process() -> RunningPrograms:
    """What the template made for this process; in one that no template made, memory that nobody else reads."""
    return _of_this_process or RunningPrograms()
