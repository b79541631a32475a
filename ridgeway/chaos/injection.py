"""Carrying out one fault on a running cluster of this machine, and undoing what does not last."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ridgeway.chaos import network
from ridgeway.chaos.plan import NETWORK_KINDS, Fault, Host, Kind
from ridgeway.launch.cluster_folder import ClusterRecord
from ridgeway.launch.control import ControlClient

#: One stop and one run of a slow host, and the part of it that is a stop.
SLOW_PERIOD_SECONDS = 0.1
SLOW_STOPPED = 0.8
#: Only a file system of its own, of at most this size, is filled.
DISK_LIMIT_BYTES = 1 << 30
DISK_BLOCK_BYTES = 1 << 20
FILLER = "ridgeway-chaos-filler"

Undo = Callable[[], None]

_EXECUTOR_SIGNALS = {
    Kind.KILL_EXECUTOR: signal.SIGKILL,
    Kind.ILLEGAL_INSTRUCTION: signal.SIGILL,
    Kind.STOP_EXECUTOR: signal.SIGSTOP,
    Kind.PAUSE_EXECUTOR: signal.SIGSTOP,
}


class InjectionError(Exception):
    """A fault cannot be carried out here; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Victim:
    """A host as it was when it was hit."""

    host: Host
    pid: int
    """Of its agent."""
    executor_pid: int | None
    address: str


@dataclasses.dataclass(slots=True)
class Struck:
    """What was done."""

    fault: Fault
    time: float
    """Monotonic clock."""
    wall: float
    victims: list[Victim]
    """Empty: nobody was there to be hit."""
    pids: list[int]
    """Processes that got a signal."""
    undone_at: float | None = None


class Injector:
    """Carries faults out, and undoes them when their time is over, in threads of its own.

    Args:
      record: the cluster; its workers must be processes of this machine.
      client: a control link of the injector's own.
      disk: the folder whose file system `Kind.FULL_DISK` fills; None: that cannot be done.
    """

    def __init__(self, record: ClusterRecord, client: ControlClient, disk: Path | None = None):
        self._record = record
        self._client = client
        self._disk = disk
        self._lasting: list[tuple[threading.Event, threading.Thread]] = []
        if disk is not None:
            check_disk(disk)

    def hosts(self) -> dict[Host, dict[str, Any]]:
        """The hosts as the head shows them."""
        status = self._client.request("status")
        return {(h["slice"], h["host"]): h for piece in status["slices"] for h in piece["hosts"]}

    def kinds(self) -> set[Kind]:
        """What can be done to this cluster."""
        found = {kind for kind in Kind if kind not in NETWORK_KINDS and kind is not Kind.FULL_DISK}
        pids = [host["pid"] for host in self.hosts().values() if host["pid"] is not None]
        if pids and all(network.has_own_network(pid, self._record.head_pid) for pid in pids):
            found |= NETWORK_KINDS
        if self._disk is not None:
            found.add(Kind.FULL_DISK)
        return found

    def strike(self, fault: Fault) -> Struck:
        """Do it now; returns at once, also when it lasts.

        Raises:
          InjectionError: this machine does not allow it.
          ControlError: the head does not answer.
        """
        hosts = self.hosts()
        victims = [
            Victim(where, found["pid"], found["executor_pid"], found.get("address") or "")
            for where in fault.hosts
            if (found := hosts[where])["pid"] is not None
        ]
        struck = Struck(fault, time.monotonic(), time.time(), victims, [])
        if fault.kind in NETWORK_KINDS:
            self._cut(struck, hosts)
        elif fault.kind is Kind.FULL_DISK:
            self._lasts(struck, self._fill_disk())
        else:
            self._signal(struck)
        return struck

    def end(self) -> None:
        """Undo what lasts still."""
        for over, _ in self._lasting:
            over.set()
        for _, thread in self._lasting:
            thread.join()
        self._lasting.clear()

    # ---- signals

    def _signal(self, struck: Struck) -> None:
        kind = struck.fault.kind
        stopped: list[psutil.Process] = []
        for victim in struck.victims:
            processes = _targets(kind, victim)
            number = _EXECUTOR_SIGNALS.get(kind)
            if number is None:
                number = {Kind.TERMINATE: signal.SIGTERM}.get(kind, signal.SIGKILL)
            if kind in (Kind.STOP_WORKER, Kind.PAUSE_WORKER, Kind.SLOW_HOST):
                number = signal.SIGSTOP
            for process in processes:
                if _send(process, number):
                    struck.pids.append(process.pid)
                    stopped.append(process)
        if kind is Kind.SLOW_HOST:
            self._beside(struck, lambda over: _slow_down(stopped, over, struck.fault.duration_seconds))
        elif struck.fault.duration_seconds:
            self._lasts(struck, lambda: _continue(stopped))

    # ---- the network

    def _cut(self, struck: Struck, hosts: dict[Host, dict[str, Any]]) -> None:
        everybody = {
            where: network.Place(host["pid"], host.get("address") or "")
            for where, host in hosts.items()
            if host["pid"] is not None
        }
        head = network.Place(self._record.head_pid, self._record.head_host)
        undo = contextlib.ExitStack()
        try:
            for victim in struck.victims:
                place = everybody[victim.host]
                others = [*(p for where, p in everybody.items() if where != victim.host), head]
                match struck.fault.kind:
                    case Kind.CUT_HOST:
                        undo.callback(network.cut(place))
                    case Kind.CUT_OUTBOUND:
                        undo.callback(network.silence(place, others))
                    case Kind.CUT_INBOUND:
                        for other in others:
                            undo.callback(network.silence(other, [place]))
                    case Kind.CUT_PAIR:
                        rivals = [everybody[other.host] for other in struck.victims if other is not victim]
                        undo.callback(network.silence(place, rivals))
        except network.NetworkError as error:
            undo.close()
            raise InjectionError(f"{struck.fault.kind} cannot be done: {error}") from None
        self._lasts(struck, undo.close)

    # ---- the disk

    def _fill_disk(self) -> Undo:
        if self._disk is None:
            raise InjectionError(f"{Kind.FULL_DISK} needs a folder on a small file system of its own; see --disk")
        check_disk(self._disk)
        filler = self._disk / FILLER
        descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        block = DISK_BLOCK_BYTES
        try:
            while block:
                try:
                    os.write(descriptor, b"\0" * block)
                except OSError:
                    block //= 2
        finally:
            os.close(descriptor)
        return lambda: filler.unlink(missing_ok=True)

    # ---- what lasts

    def _lasts(self, struck: Struck, undo: Undo) -> None:
        def wait(over: threading.Event) -> None:
            over.wait(struck.fault.duration_seconds)
            try:
                undo()
            except network.NetworkError:
                pass  # its processes, and the namespace with them, are gone

        self._beside(struck, wait)

    def _beside(self, struck: Struck, work: Callable[[threading.Event], None]) -> None:
        over = threading.Event()

        def run() -> None:
            work(over)
            struck.undone_at = time.monotonic()

        thread = threading.Thread(target=run, name=f"fault-{struck.fault.number}", daemon=True)
        self._lasting = [(event, other) for event, other in self._lasting if other.is_alive()]
        self._lasting.append((over, thread))
        thread.start()


def check_disk(folder: Path) -> None:
    """Raises:
    InjectionError: filling the folder's file system would fill more than a small one that is there for it.
    """
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise InjectionError(f"--disk {folder}: {error.strerror}") from None
    if found.f_blocks * found.f_frsize > DISK_LIMIT_BYTES or folder.stat().st_dev == Path("/").stat().st_dev:
        raise InjectionError(
            f"--disk {folder} is not on a small file system of its own (at most {DISK_LIMIT_BYTES >> 20} MiB); "
            "mount one: mount -t tmpfs -o size=64m none FOLDER"
        )


def _targets(kind: Kind, victim: Victim) -> list[psutil.Process]:
    """The processes that get the signal."""
    try:
        agent = psutil.Process(victim.pid)
        children = agent.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    if kind in _EXECUTOR_SIGNALS:
        return [process for process in children if process.pid == victim.executor_pid]
    if kind in (Kind.KILL_AGENT, Kind.TERMINATE):
        return [agent]
    if kind is Kind.KILL_TEMPLATE:
        return [process for process in children if process.ppid() == agent.pid][:1]
    if kind is Kind.KILL_COMPILER:
        grandchildren = [p for p in children if p.ppid() != agent.pid and p.pid != victim.executor_pid]
        return grandchildren[:1]
    if kind is Kind.OUT_OF_MEMORY:
        return sorted([agent, *children], key=_memory, reverse=True)[:1]
    return [agent, *children]


def _memory(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def _send(process: psutil.Process, number: int) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def _continue(processes: list[psutil.Process]) -> None:
    for process in processes:
        _send(process, signal.SIGCONT)


def _slow_down(processes: list[psutil.Process], over: threading.Event, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not over.is_set():
        for process in processes:
            _send(process, signal.SIGSTOP)
        over.wait(SLOW_PERIOD_SECONDS * SLOW_STOPPED)
        _continue(processes)
        over.wait(SLOW_PERIOD_SECONDS * (1 - SLOW_STOPPED))
    _continue(processes)
