"""What the system is asked about processes: dying with the parent, adopting orphans, memory, naming an exit.

Linux only where said so; elsewhere those functions do nothing and say that they did nothing.
"""

import ctypes
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

try:
    import resource
except ImportError:
    resource = None

DESCRIPTORS = 65_536
"""As many as a process here is ever to need."""
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Loaded at import, so that nothing has to be imported between a fork and an exec.
_prctl: Callable[..., int] | None = None
if sys.platform == "linux":
    _prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> bool:
    """Have the kernel send this process a signal the moment the thread that started it ends (Linux).

    Args:
      parent_pid: the parent's process id as it was when it started this process. If it has died since, this
        process ends here: the kernel would not tell it any more.
      signal_number: what is sent.

    Returns:
      False where the system has no such thing; then the child must watch its link to the parent itself.
    """
    if _prctl is None or _prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        return False
    if os.getppid() != parent_pid:
        os._exit(128 + signal_number)
    return True


class _UnfailingOutput(io.RawIOBase):
    """Writes to a descriptor; what cannot be written is dropped."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Bytes taken: all of them when the disk is full or the reader gone."""
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


def never_fail_at_output() -> None:
    """From now on nothing that this process, or one forked from it, prints can raise: a log on a full disk must not
    end what it is the log of."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):
            continue  # closed, or in memory
        raw = io.BufferedWriter(_UnfailingOutput(descriptor))
        text = io.TextIOWrapper(raw, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)


def raise_descriptor_limit() -> None:
    """Use as many descriptors as the system lets this user have: a connection for each session, peer and collective
    soon needs more than the 256 or 1024 that shells start with. Children inherit it."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            pass  # some systems have another limit behind the hard one


def adopt_orphans() -> bool:
    """Become the parent of grandchildren whose parent dies, so that they can be waited for (Linux).

    Returns:
      False where the system has no such thing.
    """
    return _prctl is not None and _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 77`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(exit_code: int) -> str:
    """``killed by SIGKILL`` for -9, ``exited with code 3`` for 3 (codes as `subprocess` gives them)."""
    return f"killed by {signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"


def send_signal(pid: int, signal_number: int) -> bool:
    """Send a signal to one process; False if it is gone already or is not ours."""
    try:
        os.kill(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap_adopted(own_child: int | None) -> list[int]:
    """Wait for orphans that this process adopted and that have ended, so that none stays a zombie (Linux).

    Args:
      own_child: a child that somebody else in this process waits for; it is left alone.

    Returns:
      Their process ids.
    """
    ended: list[int] = []
    while True:
        try:
            # Looked at first, without being taken.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == own_child:
                return ended
            os.waitpid(found.si_pid, os.WNOHANG)
        except ChildProcessError:
            return ended
        ended.append(found.si_pid)


def reset_peak_memory(pid: int) -> bool:
    """Let `peak_memory_bytes` count from now on (Linux); False if that cannot be done."""
    try:
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def peak_memory_bytes(pid: int) -> int:
    """The most memory that was resident at a time (Linux); 0 if the process is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration, IndexError, ValueError):
        return 0


def memory_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
