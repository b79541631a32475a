"""The command `ridgeway` as a user's process, in a world of its own: folders, temporary files, a mark by which
every process that descends from it is found again."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
MARK = "RIDGEWAY_TEST_MARK"
DEADLINE_SECONDS = 60.0


@dataclasses.dataclass
class Running:
    """A command that runs; what it writes is read all the time."""

    process: subprocess.Popen[str]
    stdout: list[str] = dataclasses.field(default_factory=list)
    stderr: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.stdout), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))

    def says(self, pattern: str, stream: str = "stderr") -> str:
        """Wait for a line that has a pattern; returns it."""
        lines: list[str] = getattr(self, stream)
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            over = self.process.poll() is not None
            if over:
                self._join_readers()
            for line in list(lines):
                if re.search(pattern, line):
                    return line
            assert not over and time.monotonic() < end, f"never said {pattern!r}:\n{self.describe()}"
            time.sleep(0.02)

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(DEADLINE_SECONDS)

    def describe(self) -> str:
        """Everything it said."""
        return "\n".join(["-- stdout", *self.stdout, "-- stderr", *self.stderr])

    def wait(self) -> int:
        """The exit code."""
        try:
            code = self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.describe()}") from None
        self._join_readers()
        return code


def until(condition: Callable[[], Any], describe: Callable[[], str] = lambda: "never came true") -> Any:
    """Wait for a condition, with a deadline; returns its value."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < end, describe()
        time.sleep(0.02)
    return value


class World:
    """Where commands run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        for name in ("run", "state", "cache", "tmp"):
            (folder / name).mkdir(mode=0o700)
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("RIDGEWAY_", "JAX_", "IFRT_"))}
        self.environment = {
            **kept,
            MARK: self.mark,
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "120",
        }

    @property
    def runtime(self) -> Path:
        """The folder of running clusters."""
        return self.folder / "run" / f"ridgeway-{os.getuid()}"

    def start(self, *arguments: str, **environment: str) -> Running:
        """Start `ridgeway arguments...`."""
        process = subprocess.Popen(
            [sys.executable, "-m", "ridgeway.cli.main", *arguments],
            env={**self.environment, **environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return Running(process)

    def call(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `ridgeway arguments...`."""
        running = self.start(*arguments, **environment)
        code = running.wait()
        return code, "\n".join(running.stdout), "\n".join(running.stderr)

    def status(self) -> dict[str, Any]:
        """What `ridgeway status --json` says."""
        code, output, errors = self.call("status", "--json")
        assert code == 0, errors
        return json.loads(output)

    def hosts(self) -> list[dict[str, Any]]:
        """All hosts of the status, in order."""
        return [host for piece in self.status()["slices"] for host in piece["hosts"]]

    def processes(self) -> list[psutil.Process]:
        """Every living process that descends from this world's commands."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def assert_nothing_left(self) -> None:
        """No process, no runtime folder, no temporary file."""
        until(lambda: not self.processes(), lambda: f"left: {[p.cmdline() for p in self.processes()]}")
        assert not self.runtime.exists() or list(self.runtime.iterdir()) == []
        assert list((self.folder / "tmp").iterdir()) == []

    def end(self) -> None:
        """Kill what a failed test left."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
