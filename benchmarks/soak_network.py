"""Hosts as network namespaces, each with one interface to a switch in the namespace of this process."""

import contextlib
import os
import subprocess

SUBNET = "10.83.0"
OWN = 254
COMMAND_TIMEOUT_SECONDS = 30.0


class NotAllowed(Exception):
    """This machine does not let us make network namespaces; the message says what was refused."""


def leave_for_a_namespace_of_our_own() -> None:
    """Put this process, and all that it starts from now on, into a new network namespace with loopback alone.

    Raises:
      NotAllowed: it cannot be made.
    """
    try:
        os.unshare(os.CLONE_NEWNET)
    except OSError as error:
        raise NotAllowed(f"a network namespace: {error.strerror}") from None
    _ip("link", "set", "lo", "up")


def mount_disk(folder: str, mebibytes: int) -> bool:
    """Mount a small file system of its own there; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0700", "none", folder]
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False)
    except OSError:
        return False
    return done.returncode == 0


def unmount_disk(folder: str) -> None:
    """Take it away again, also while somebody has it open."""
    subprocess.run(["umount", "-l", folder], capture_output=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False)


class Switch:
    """Namespaces for hosts 0, 1, ...; host n has the address 10.83.0.(n + 1)."""

    def __init__(self, count: int):
        self._names = [f"rwsoak{os.getpid()}-{number}" for number in range(count)]
        self.own_address = f"{SUBNET}.{OWN}"

    def make(self) -> None:
        """Raises:
        NotAllowed: this machine does not permit it.
        """
        _ip("link", "add", "switch", "type", "bridge")
        _ip("address", "add", f"{self.own_address}/24", "dev", "switch")
        _ip("link", "set", "switch", "up")
        for number, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"port{number}", "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{SUBNET}.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def on(self, number: int) -> tuple[str, ...]:
        """What to write before a command so that it runs on a host."""
        return ("ip", "netns", "exec", self._names[number])

    def remove(self) -> None:
        """End it; the interfaces go with the namespaces."""
        for name in self._names:
            with contextlib.suppress(NotAllowed):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    command = ["ip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAllowed(f"`{' '.join(command)}`: {error}") from None
    if done.returncode != 0:
        raise NotAllowed(f"`{' '.join(command)}`: {done.stderr.strip()}")
