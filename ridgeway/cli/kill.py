"""`ridgeway kill`: break a worker on purpose."""

import os
import signal
import socket
import time
from typing import Any

import click

from ridgeway.cli import options

#: How long a SIGKILL that went by way of the head may take before it is sent directly.
KILL_BY_HEAD_SECONDS = 1.0
POLL_SECONDS = 0.02


def parse_target(text: str) -> tuple[int, int | None]:
    """``(2, 0)`` of ``slice=2,host=0``; host None for all hosts of the slice.

    Raises:
      click.UsageError: not of that form.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("slice", "host") or name in found or not value.isdecimal():
            raise click.UsageError(f"{text!r} names no worker; write slice=2, or slice=2,host=0 for one host of it")
        found[name] = int(value)
    if "slice" not in found:
        raise click.UsageError(f"{text!r} names no slice; write slice=2, or slice=2,host=0 for one host of it")
    return found["slice"], found.get("host")


@click.command(short_help="Break a worker on purpose.")
@options.cluster_name
@click.argument("where", metavar="slice=S[,host=H]")
@click.option(
    "--signal", "signal_name", type=click.Choice(["KILL", "STOP", "CONT", "TERM"], case_sensitive=False),
    default="KILL", show_default=True, help="What to send.",
)  # fmt: skip
@click.option(
    "--target", type=click.Choice(["worker", "executor"]), default="worker", show_default=True,
    help="The whole worker, or only the process that owns the devices.",
)  # fmt: skip
def kill(name: str | None, where: str, signal_name: str, target: str) -> int:
    """Send a signal to a worker, as an accident would.

    \b
    ridgeway kill slice=2                   the slice's hosts die
    ridgeway kill slice=0 --signal STOP     they fall silent
    ridgeway kill slice=1 --signal TERM     they are told to leave: see `ridgeway preempt`
    """
    from ridgeway.launch import cluster_folder, control
    from ridgeway.launch.daemon import print_line

    slice_index, host_index = parse_target(where)
    if (signal_name.upper(), target) == ("TERM", "executor"):
        raise click.UsageError("an executor leaves SIGTERM to its worker; use --target worker, or --signal KILL")
    number = signal.Signals[f"SIG{signal_name.upper()}"]
    with control.connect(cluster_folder.find(name)) as client:
        status = client.request("status")
        hosts = _hosts(status, slice_index, host_index)
        if number == signal.SIGCONT:
            # Whoever is stopped reads nothing from the head.
            pids = _continue(hosts, target)
        else:
            pids = client.request("signal", slice=slice_index, host=host_index, signal=int(number), target=target)[
                "pids"
            ]
    if number == signal.SIGKILL:
        _see_killed(hosts, pids)
    whom = f"{target} of slice {slice_index}" + (f" host {host_index}" if host_index is not None else "")
    print_line(f"SIG{signal_name.upper()} sent to the {whom} (pid {', '.join(map(str, pids))})")
    return 0


def _hosts(status: dict[str, Any], slice_index: int, host_index: int | None) -> list[dict[str, Any]]:
    from ridgeway.launch.control import ControlError

    slices, hosts, _ = status["topology"]
    if slice_index >= slices or (host_index is not None and host_index >= hosts):
        raise ControlError(
            f"cluster {status['name']!r} has slices 0..{slices - 1} with hosts 0..{hosts - 1}; there is no "
            f"slice {slice_index}" + (f" host {host_index}" if host_index is not None else "")
        )
    found = status["slices"][slice_index]["hosts"]
    return found if host_index is None else [found[host_index]]


def _is_here(host: dict[str, Any]) -> bool:
    return host["hostname"] == socket.gethostname()


def _continue(hosts: list[dict[str, Any]], target: str) -> list[int]:
    import psutil

    from ridgeway.launch.control import ControlError

    pids: list[int] = []
    for host in hosts:
        pid = host["pid"] if target == "worker" else host["executor_pid"]
        if pid is None:
            continue
        if not _is_here(host):
            raise ControlError(
                f"slice {host['slice']} host {host['host']} is on {host['hostname']}, and a stopped worker cannot "
                f"be reached through its link; run there: kill -CONT {pid}"
            )
        try:
            process = psutil.Process(pid)
            for each in [process, *process.children(recursive=True)]:
                each.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            continue
        pids.append(pid)
    if not pids:
        raise ControlError("none of these hosts has a process to continue; see `ridgeway status`")
    return pids


def _see_killed(hosts: list[dict[str, Any]], pids: list[int]) -> None:
    """A stopped agent does not read the head's order to die, so those on this machine are killed directly."""
    import psutil

    end = time.monotonic() + KILL_BY_HEAD_SECONDS
    here = {pid for host in hosts if _is_here(host) for pid in (host["pid"], host["executor_pid"])}
    for pid in pids:
        if pid not in here:
            continue
        while _lives(psutil, pid):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(POLL_SECONDS)


def _lives(psutil: Any, pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
