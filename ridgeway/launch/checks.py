"""What is looked at before anything is started: a failed check is a `CheckError` that says what to do."""

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from ridgeway.cluster.topology import Topology

#: Measured with jax 0.12: agent, template, executor and compiler of one host, before any array.
WORKER_BYTES = 150 << 20
#: Threads and buffers of one CPU device.
DEVICE_BYTES = 5 << 20
HEAD_BYTES = 150 << 20


class CheckError(Exception):
    """Something that would not work; the message says what and what to do."""


def make_topology(slices: str | int, hosts_per_slice: str | int, devices_per_host: str | int) -> Topology:
    """The cluster's shape from three texts or numbers.

    Raises:
      CheckError: one is not a positive integer.
    """
    numbers: list[int] = []
    for name, value in (
        ("slices", slices),
        ("hosts per slice", hosts_per_slice),
        ("devices per host", devices_per_host),
    ):
        text = str(value).strip()
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            raise CheckError(f"{name} is {text!r}; a topology is three positive integers, as in 3x1x2")
        numbers.append(int(text))
    return Topology(*numbers)


def parse_topology(text: str) -> Topology:
    """The shape in ``SLICESxHOSTSxDEVICES``.

    Raises:
      CheckError: not three positive integers.
    """
    parts = text.lower().split("x")
    if len(parts) != 3:
        raise CheckError(
            f"topology {text!r} is not three positive integers, slices x hosts per slice x devices per host, "
            "as in 3x1x2"
        )
    return make_topology(*parts)


def check_port_free(host: str, port: int, option: str) -> None:
    """Raises:
    CheckError: something listens on the port, or this user may not.
    """
    if port == 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CheckError(
                f"port {port} on {host} cannot be used ({error.strerror}); stop what uses it, or choose "
                f"another with {option} (0: any free one)"
            ) from None


def cluster_bytes(topology: Topology, standbys: int) -> int:
    """Memory that a cluster on this machine takes before any array is made."""
    workers = topology.slots + standbys
    return HEAD_BYTES + workers * (WORKER_BYTES + topology.devices_per_host * DEVICE_BYTES)


def available_bytes() -> int:
    """Memory that can be had on this machine without swapping, within this container's limit (cgroup v2)."""
    import psutil

    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            available = min(available, max(0, int(limit) - int((group / "memory.current").read_text())))
    except (OSError, ValueError):
        pass  # No cgroup v2, or the root group, which has no limit.
    return available


def check_memory(topology: Topology, standbys: int, available: int) -> None:
    """Raises:
    CheckError: the cluster does not fit in ``available`` bytes.
    """
    needed = cluster_bytes(topology, standbys)
    if needed > available:
        raise CheckError(
            f"a {topology} cluster with {standbys} standbys needs about {_gib(needed)} before any array is "
            f"made, and {_gib(available)} are available here; lower --slices, --hosts-per-slice, "
            "--devices-per-host or --standby, or insist with --allow-overcommit"
        )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB"


def check_command(command: Sequence[str]) -> None:
    """Raises:
    CheckError: there is no command, or no such program.
    """
    if not command:
        raise CheckError("no command to run; write it after --, as in: ridgeway run --slices 3 -- python train.py")
    if shutil.which(command[0]) is None:
        hint = "it is not executable" if Path(command[0]).is_file() else "it is not on PATH"
        raise CheckError(f"command {command[0]!r} not found ({hint}); give an absolute path or correct PATH")
