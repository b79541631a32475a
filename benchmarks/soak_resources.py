"""What the processes of a cluster and its program use, and whether that stays flat."""

import dataclasses
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence

import psutil

METRICS = ("memory", "threads", "sockets", "files")
"""Bytes that are a process's own (not shared with the one it was forked from), and three counts."""

#: The run-in: nothing is compared before this fault.
SETTLED_AFTER = 10
#: Of the rest, the first and the last part that are compared.
COMPARED = 0.25
#: What the last part may have more than the first: so much of it, and so much besides.
GROWTH = 0.10
SLACK = {"memory": 24 << 20, "threads": 3.0, "sockets": 3.0, "files": 4.0}

Usage = dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Everything at one instant: role -> usage of each of its processes."""

    fault: int
    """The number of the last fault before."""
    seconds: float
    """Since the start."""
    devices: int
    """That the program was at work on."""
    roles: dict[str, list[Usage]]

    def total(self, role: str, metric: str) -> float:
        """Of all processes of a role."""
        return sum(usage[metric] for usage in self.roles.get(role, []))

    def largest(self, role: str, metric: str) -> float:
        """Of the one that uses the most."""
        return max((usage[metric] for usage in self.roles.get(role, [])), default=0.0)


def usage_of(process: psutil.Process) -> Usage | None:
    """What one process uses; None if it is gone or its folder cannot be read."""
    try:
        with process.oneshot():
            memory = process.memory_full_info().uss
            threads = process.num_threads()
        folder = f"/proc/{process.pid}/fd"
        links = []
        for name in os.listdir(folder):
            try:
                links.append(os.readlink(f"{folder}/{name}"))
            except OSError:
                continue
    except (psutil.Error, OSError):
        return None
    sockets = sum(link.startswith("socket:") for link in links)
    return {"memory": memory, "threads": threads, "sockets": sockets, "files": len(links) - sockets}


def sample(fault: int, seconds: float, devices: int, processes: Mapping[str, Iterable[int]]) -> Sample:
    """A sample of the processes given by role."""
    roles: dict[str, list[Usage]] = {}
    for role, pids in processes.items():
        for pid in pids:
            try:
                usage = usage_of(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue
            if usage is not None:
                roles.setdefault(role, []).append(usage)
    return Sample(fault, seconds, devices, roles)


@dataclasses.dataclass(frozen=True, slots=True)
class Trend:
    """How one metric of one role went: medians over the first and the last part of the settled samples."""

    role: str
    metric: str
    of: str
    """``total`` of the role's processes, or the ``largest``."""
    first: float
    last: float
    highest: float

    @property
    def flat(self) -> bool:
        """Whether the last part has no more than the first, but for the slack."""
        return self.last <= self.first * (1 + GROWTH) + SLACK[self.metric]


def comparable(samples: Sequence[Sample]) -> list[Sample]:
    """From `SETTLED_AFTER` on those that were taken while the program was at work on the whole mesh.

    On a smaller one there are fewer executors in a generation, with fewer connections and shards.
    """
    whole = max((taken.devices for taken in samples), default=0)
    return [taken for taken in samples if taken.fault >= SETTLED_AFTER and taken.devices == whole]


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """All trends of the `comparable` samples; none if there are too few."""
    settled = comparable(samples)
    part = int(len(settled) * COMPARED)
    if part < 1:
        return []
    found: list[Trend] = []
    for role in sorted({role for taken in settled for role in taken.roles}):
        for metric in METRICS:
            for of in ("total", "largest"):
                values = [getattr(taken, of)(role, metric) for taken in settled]
                first, last = statistics.median(values[:part]), statistics.median(values[-part:])
                found.append(Trend(role, metric, of, first, last, max(values)))
    return found
