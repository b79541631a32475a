"""Where the processes of tests live: folders of their own, and a mark in the environment by which every process that
descends from them is found again, whoever its parent is by then. And the proof that nothing of them is left."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ridgeway.processes import die_with_parent

ROOT = Path(__file__).parents[1]
MARK = "RIDGEWAY_TEST_MARK"
#: Far more than anything here takes, for a machine that is busy with other things.
DEADLINE_SECONDS = 90.0
POLL_SECONDS = 0.02


def until(
    condition: Callable[[], Any],
    describe: Callable[[], object] = lambda: "never came true",
    seconds: float = DEADLINE_SECONDS,
) -> Any:
    """Wait until ``condition()`` is true; returns its value. Fails with what ``describe()`` says."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, describe()
        time.sleep(POLL_SECONDS)
    return value


def child_set_up() -> Callable[[], None]:
    """What a child does first. Should the tests be killed, it ends, and with it all that it supervises; it hears
    Ctrl-C also where the tests run in the background, where shells have it ignored."""
    parent = os.getpid()

    def set_up() -> None:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return set_up


class Running:
    """A process whose output is read all the time."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((process.stdout, self.stdout), (process.stderr, self.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    @property
    def output(self) -> str:
        """All of stdout so far."""
        return "\n".join(self.stdout)

    def says(self, pattern: str, stream: str = "stderr", after: int = 0) -> str:
        """Wait for a line (from line number ``after`` on) that has a pattern; returns it."""
        lines: list[str] = getattr(self, stream)
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            over = self.process.poll() is not None
            if over:
                self._join_readers()
            for line in list(lines)[after:]:
                if re.search(pattern, line):
                    return line
            assert not over and time.monotonic() < end, f"never said {pattern!r}:\n{self.describe()}"
            time.sleep(POLL_SECONDS)

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(DEADLINE_SECONDS)

    def describe(self) -> str:
        """Everything it said."""
        return "\n".join(["-- stdout", *self.stdout[-200:], "-- stderr", *self.stderr[-200:]])

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Its exit code, negative if a signal ended it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.describe()}") from None
        self._join_readers()
        return code


def _listened_on(connections: Sequence[Any]) -> set[int]:
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


class MarkedPlace:
    """One of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        for name in ("run", "state", "cache", "tmp"):
            (folder / name).mkdir(mode=0o700)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RIDGEWAY_", "JAX_", "IFRT_", "XLA_"))
        }
        self.environment = {
            **kept,
            MARK: self.mark,
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self._ports: set[int] = set()

    @property
    def runtime(self) -> Path:
        """The folder of running clusters."""
        return self.folder / "run" / f"ridgeway-{os.getuid()}"

    def launch(self, command: Sequence[str], **environment: str) -> Running:
        """Start a process."""
        process = subprocess.Popen(
            list(command),
            env={**self.environment, **environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=child_set_up(),
        )
        return Running(process)

    def processes(self) -> list[psutil.Process]:
        """Every living process that descends from this place."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def note_ports(self) -> None:
        """Remember on which ports processes of this place listen now."""
        for process in self.processes():
            try:
                connections = process.net_connections("tcp")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._ports |= _listened_on(connections)

    def assert_nothing_left(self) -> None:
        """No process, no listening socket, no runtime folder, no temporary file."""
        until(lambda: not self.processes(), lambda: f"left: {[(p.pid, p.cmdline()) for p in self.processes()]}")
        # A socket that nobody owns any more belongs to no process; others on this machine may have got the number.
        left = [connection for connection in psutil.net_connections("tcp") if connection.pid is None]
        assert not _listened_on(left) & self._ports
        assert not self.runtime.exists() or list(self.runtime.iterdir()) == []
        assert list((self.folder / "tmp").iterdir()) == []

    def end(self) -> None:
        """Kill what a failed test left."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
