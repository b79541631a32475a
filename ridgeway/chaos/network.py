"""Cutting the network of hosts that are network namespaces of this machine (Linux, needs the right to enter them).

A host is cut off by taking its interfaces down, one direction by routes that lead nowhere; both are quiet: nobody is
told, connections just carry nothing. A worker that shares the head's namespace is never touched.
"""

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

COMMAND_TIMEOUT_SECONDS = 20.0
Undo = Callable[[], None]


class NetworkError(Exception):
    """This machine does not allow it, or the host has no network of its own; the message says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A process in some namespace, and the address at which the others reach its host."""

    pid: int
    address: str


def has_own_network(pid: int, other: int) -> bool:
    """Whether two processes are in different network namespaces; False if one of them cannot be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink(f"/proc/{other}/ns/net")
    except OSError:
        return False


class Namespace:
    """The network namespace of a process, held open: a cut is also undone when the process is gone by then, since
    another worker may be started in the same namespace.

    Raises:
      NetworkError: there is no such process, or this machine does not allow to look at it.
    """

    def __init__(self, place: Place):
        path = f"/proc/{place.pid}/ns/net"
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NetworkError(f"{path}: {error.strerror}") from None

    def ip(self, *arguments: str) -> str:
        """What the command prints that is run there.

        Raises:
          NetworkError: it fails.
        """
        command = ["nsenter", f"--net=/proc/self/fd/{self._descriptor}", "ip", *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False,
                pass_fds=(self._descriptor,),
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NetworkError(f"`{' '.join(command)}`: {error}") from None
        if done.returncode != 0:
            raise NetworkError(f"`{' '.join(command)}`: {done.stderr.strip()}")
        return done.stdout

    def undo(self, commands: Sequence[Sequence[str]]) -> None:
        """Run all of them, whatever becomes of each, and let go of the namespace.

        Raises:
          NetworkError: the first failure.
        """
        failures: list[NetworkError] = []
        for arguments in commands:
            try:
                self.ip(*arguments)
            except NetworkError as error:
                failures.append(error)
        os.close(self._descriptor)
        if failures:
            raise failures[0]


def cut(place: Place) -> Undo:
    """Take a host's interfaces down.

    Raises:
      NetworkError: it could not be done; nothing is changed.
    """
    there = Namespace(place)
    commands: list[list[str]] = []
    try:
        links: list[dict[str, Any]] = json.loads(there.ip("-j", "link", "show", "up") or "[]")
        # Those that are down are there too, as empty objects.
        names = [link["ifname"] for link in links if "ifname" in link and "LOOPBACK" not in link.get("flags", ())]
        if not names:
            raise NetworkError(f"the host at {place.address} has no interface that is up")
        # Routes that go with an interface and that the kernel does not make by itself when it comes up again.
        lines = there.ip("route", "show").splitlines()
        routes = [line.split() for line in lines if "proto kernel" not in line and not line.startswith("blackhole")]
        for name in names:
            there.ip("link", "set", name, "down")
            commands.append(["link", "set", name, "up"])
    except NetworkError:
        there.undo(commands)
        raise
    commands += [["route", "replace", *(word for word in route if word != "linkdown")] for route in routes]
    return lambda: there.undo(commands)


def silence(sender: Place, receivers: Sequence[Place]) -> Undo:
    """Let nothing that one host sends get to some others.

    Raises:
      NetworkError: it could not be done; nothing is changed.
    """
    there = Namespace(sender)
    commands: list[list[str]] = []
    try:
        for receiver in receivers:
            there.ip("route", "add", "blackhole", receiver.address)
            commands.append(["route", "del", "blackhole", receiver.address])
    except NetworkError:
        there.undo(commands)
        raise
    return lambda: there.undo(commands)
