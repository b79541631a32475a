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


def cut(place: Place) -> Undo:
    """Take a host's interfaces down.

    Raises:
      NetworkError: it could not be done; nothing is changed.
    """
    links: list[dict[str, Any]] = json.loads(_ip(place, "-j", "link", "show", "up") or "[]")
    # Those that are down are there too, as empty objects.
    names = [link["ifname"] for link in links if "ifname" in link and "LOOPBACK" not in link.get("flags", ())]
    if not names:
        raise NetworkError(f"the host at {place.address} has no interface that is up")
    # Routes that the kernel does not make by itself when an interface comes up again.
    routes = [line.split() for line in _ip(place, "route", "show").splitlines() if "proto kernel" not in line]
    done: list[str] = []

    def undo() -> None:
        for name in done:
            _ip(place, "link", "set", name, "up")
        for route in routes:
            _ip(place, "route", "replace", *[word for word in route if word != "linkdown"])

    try:
        for name in names:
            _ip(place, "link", "set", name, "down")
            done.append(name)
    except NetworkError:
        undo()
        raise
    return undo


def silence(sender: Place, receivers: Sequence[Place]) -> Undo:
    """Let nothing that one host sends get to some others.

    Raises:
      NetworkError: it could not be done; nothing is changed.
    """
    done: list[Place] = []

    def undo() -> None:
        for receiver in done:
            _ip(sender, "route", "del", "blackhole", receiver.address)

    try:
        for receiver in receivers:
            _ip(sender, "route", "add", "blackhole", receiver.address)
            done.append(receiver)
    except NetworkError:
        undo()
        raise
    return undo


def _ip(place: Place, *arguments: str) -> str:
    command = ["nsenter", "--target", str(place.pid), "--net", "ip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"`{' '.join(command)}`: {error}") from None
    if done.returncode != 0:
        raise NetworkError(f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout
