"""What user code prints, for the log as ever and line by line for somebody else."""

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

LINE_CHARACTERS = 65_536

Say = Callable[[str, str], None]
"""Called with the name of the stream and one line without its end."""


class CapturedStream(io.TextIOBase):
    """Stands in for ``sys.stdout`` or ``sys.stderr`` of one process; a process that it forks only writes the log."""

    def __init__(self, name: str, original: Any, say: Say):
        self._name = name
        self._original = original
        self._say = say
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._line = ""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As of the stream it stands in for."""
        return self._original.encoding

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The log's descriptor."""
        return self._original.fileno()

    def isatty(self) -> bool:
        """Nobody looks at the log while it is written."""
        return False

    def write(self, text: str) -> int:
        """Write; whole lines are passed on."""
        self._original.write(text)
        if os.getpid() != self._process:
            return len(text)
        with self._lock:
            *lines, rest = (self._line + text).split("\n")
            self._line = rest[:LINE_CHARACTERS]
            for line in lines:
                self._say(self._name, line[:LINE_CHARACTERS])
        return len(text)

    def flush(self) -> None:
        """Of the log; a line that has not ended waits for its end, or for `end_line`."""
        self._original.flush()

    def end_line(self) -> None:
        """Pass on a line that has not ended."""
        with self._lock:
            line, self._line = self._line, ""
            if line and os.getpid() == self._process:
                self._say(self._name, line)


def capture(say: Say) -> Callable[[], None]:
    """Capture both streams; returns what passes on lines that have not ended."""
    captured = [CapturedStream("stdout", sys.stdout, say), CapturedStream("stderr", sys.stderr, say)]
    sys.stdout, sys.stderr = captured

    def end_lines() -> None:
        for stream in captured:
            stream.end_line()

    return end_lines
