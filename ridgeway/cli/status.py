"""`ridgeway status`."""

import json
import sys
from typing import Any

import click

from ridgeway.cli import options

NARROWEST_COLUMNS = 100
_STYLES = {
    "up": "green", "ready": "green", "joining": "yellow", "suspect": "yellow", "draining": "yellow",
    "suspended": "yellow", "restoring": "yellow",
}  # fmt: skip


@click.command(short_help="Show slices, hosts, sessions and memory.")
@options.cluster_name
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def status(name: str | None, as_json: bool) -> int:
    """Show slices, hosts, generations, sessions and memory of a running cluster."""
    from ridgeway.launch import cluster_folder, control

    record = cluster_folder.find(name)
    with control.connect(record) as client:
        state = client.request("status")
    state = {**state, "supervisor_pid": record.supervisor_pid, "logs_folder": record.logs_folder}
    if record.command is not None:
        state["command"] = record.command
    if as_json:
        print(json.dumps(state, indent=2))
    else:
        show(state)
    return 0


def show(state: dict[str, Any]) -> None:
    """Print a status for people."""
    from rich.console import Console
    from rich.table import Table

    from ridgeway.timeline import goodput

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NARROWEST_COLUMNS + 20)
    slices, hosts, devices = state["topology"]
    console.print(
        f"cluster [bold]{state['name']}[/bold] {slices}x{hosts}x{devices}  up {_duration(state['uptime_seconds'])}  "
        f"proxy grpc://{state['proxy_address']}  head pid {state['head']['pid']} "
        f"({_bytes(state['head']['memory_bytes'])})"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (
        ("slice", "right"), ("", "left"), ("host", "right"), ("state", "left"), ("incarnation", "right"),
        ("generation", "right"), ("restarts", "right"), ("pid", "right"), ("executor", "right"),
        ("memory", "right"), ("host arrays", "right"), ("on", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for piece in state["slices"]:
        for index, host in enumerate(piece["hosts"]):
            table.add_row(
                str(piece["slice"]) if index == 0 else "",
                _styled(piece["state"]) if index == 0 else "",
                str(host["host"]),
                _styled(host["state"]),
                _or_dash(host["incarnation"]),
                _or_dash(host["generation"]),
                str(host["restarts"]),
                _or_dash(host["pid"]),
                _or_dash(host["executor_pid"]),
                _bytes(host["memory_bytes"]) if host["memory_bytes"] else "-",
                _bytes(host["host_array_bytes"]) if host["host_array_bytes"] else "-",
                host["hostname"] or "-",
            )
    console.print(table)
    for generation in state["generations"]:
        members = " ".join(f"{s}.{h}" for s, h in generation["members"])
        console.print(f"generation {generation['generation']}: hosts {members}")
    if state["standbys"]:
        console.print("standbys: " + ", ".join(f"pid {s['pid']} {s['state']}" for s in state["standbys"]))
    if not state["sessions"]:
        console.print("no program is connected")
    for session in state["sessions"]:
        console.print(
            f"session {session['session']} {session['client']}: {session['arrays']} arrays "
            f"({_bytes(session.get('array_bytes', 0))}), {session['executables']} executables, "
            f"for {_duration(session['age_seconds'])}"
        )
        if session.get("goodput"):
            console.print(f"  {goodput.describe(session['goodput'])}", soft_wrap=True)
        pythons = [p for p in state["pythons"] if p["session"] == session["session"]]
        if pythons:
            console.print(f"  colocated Python: {', '.join(_python(p) for p in pythons)}", soft_wrap=True)
    cache = state.get("compile_cache") or {}
    line = f"compile cache: {cache.get('hits', 0)} hits, {cache.get('misses', 0)} misses"
    if cache.get("folder"):
        line += f"; {_bytes(cache['bytes'])} of {_bytes(cache['limit_bytes'])} in {cache['folder']}"
    console.print(line, soft_wrap=True)
    if cache.get("problem"):
        console.print(f"programs are not kept: {cache['problem']}", soft_wrap=True)
    if state.get("metrics_address"):
        console.print(f"metrics: http://{state['metrics_address']}/metrics", soft_wrap=True)
    console.print(f"logs: {state['logs_folder']}", soft_wrap=True)
    sys.stdout.flush()


def _python(process: dict[str, Any]) -> str:
    place = f"slice {process['slice']} host {process['host']}"
    return f"{place} {process['state']}" if process["pid"] is None else f"{place} pid {process['pid']}"


def _styled(word: str) -> str:
    style = _STYLES.get(word, "red")
    return f"[{style}]{word}[/{style}]"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _bytes(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
