"""Starting and ending the supervisor's child processes so that none outlives it."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ridgeway.processes import die_with_parent

Process = asyncio.subprocess.Process


async def spawn(
    command: Sequence[str], environment: Mapping[str, str], log: Path, stdout_pipe: bool = False
) -> Process:
    """A child in a session of its own (no terminal, no Ctrl-C), which the kernel kills when this process ends.

    Args:
      command: program and arguments.
      environment: all of its environment.
      log: stdout and stderr are appended to this file.
      stdout_pipe: stdout is to be read by the caller instead.

    Raises:
      OSError: it cannot be started.
    """
    parent = os.getpid()
    with _log_file(log) as file:
        return await asyncio.create_subprocess_exec(
            *command,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if stdout_pipe else file,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )


def _log_file(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")  # A worker without a log, on a full disk, is better than none.


def kill_group(process: Process) -> None:
    """SIGKILL a child made by `spawn` and everything that still is in its session's group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # All gone.


def terminate(process: Process) -> None:
    """SIGTERM a child, if it still runs. A stopped one cannot hear it and is killed."""
    if process.returncode is None:
        try:
            process.terminate()
        except ProcessLookupError:
            pass


def interrupt(process: Process) -> None:
    """SIGINT a child, if it still runs: it ends at once, where SIGTERM would have a worker save its state first."""
    if process.returncode is None:
        try:
            process.send_signal(signal.SIGINT)
        except ProcessLookupError:
            pass


async def wait_all(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait for children to end; returns those that have not after so many seconds."""
    waits = [asyncio.ensure_future(process.wait()) for process in processes]
    if waits:
        await asyncio.wait(waits, timeout=seconds)
    for wait in waits:
        wait.cancel()
    return [process for process in processes if process.returncode is None]


def last_line(log: Path, limit_bytes: int = 8192) -> str:
    """The last line of a log that is not empty; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
