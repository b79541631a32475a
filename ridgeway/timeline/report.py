"""Recoveries and goodput for people and for programs: tables as text, JSON, and (from `plots`) a picture.

The JSON form (`SCHEMA`); times are wall seconds since 1970, all else in seconds is relative::

    {"schema": "ridgeway.timeline/1",
     "recoveries": [{
       "number": int,                  from 1, in order of start
       "session": int | str | null,    null: no session used what was lost
       "outcome": "completed" | "repaired" | "session_ended" | "unfinished",
       "mode": "resume" | "resize" | "undisturbed" | null,
       "slices": [int],                that lost a host
       "losses": [{"slice", "host", "time", "seconds" from the start, "code", "cause", "executor_only": bool}],
       "start_time": float,            of the kill, or of the loss where "kill_known" is false
       "kill_known": bool,
       "seconds": float,               from there to the next step; the phases sum to it
       "unattributed_seconds": float,
       "phases": [{"name", "title", "begin_seconds", "seconds", "compiling_seconds", "note"}],
       "milestones": [{"name", "time", "seconds" from the start, "source"}],   as measured, unordered by need
       "step_program": str | null,
       "compile_hits": int, "compile_misses": int}],
     "suspensions": [{                 announced preemptions; see `suspensions.Suspension`
       "slice", "host", "time", "notice_seconds", "reason",
       "outcome": "resumed" | "lost" | "left" | "unfinished",
       "seconds", "saved_seconds", "waited_seconds", "restore_seconds", "bytes", "cause",
       "paused": {session: seconds}}],
     "summary": {
       "count": int,                   recoveries of sessions that a loss disturbed and that step again
       "median_seconds": float | null, "max_seconds": float | null,
       "undisturbed": int, "repaired": int, "session_ended": int, "unfinished": int,
       "phases": {name: {"count", "median_seconds", "max_seconds"}}},          over those that have it
     "goodput": [{                     one for each session, in order of start
       "session": int | str, "client": str, "start_time": float, "ended": bool,
       "wall_seconds": float,          "seconds" and "undecided_seconds" add up to it
       "seconds": {"stepping", "compiling", "waiting_for_hardware", "restoring", "saving", "repeating", "unattributed"},
       "undecided_seconds": float,     0 once the session is over
       "goodput": float,               share of "stepping", 0 to 1
       "steps": int, "repeated_steps": int, "saves": int, "recoveries": int,
       "step_program": str | null, "step_seconds": float | null, "compile_hits": int, "compile_misses": int}]}

Names of phases and milestones are the keys of `phases.TITLES`; a name can come twice among the phases of one
recovery, when the making of a generation cuts a phase in two.
"""

import dataclasses
import io
import json
import statistics
import textwrap
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ridgeway.timeline import goodput as accounts
from ridgeway.timeline.goodput import Goodput
from ridgeway.timeline.phases import TITLES, UNATTRIBUTED
from ridgeway.timeline.plots import plot
from ridgeway.timeline.recovery import RESIZE, RESUME, UNDISTURBED, Recovery, find_recoveries
from ridgeway.timeline.suspensions import Suspension, find_suspensions
from ridgeway.timeline.suspensions import describe as describe_suspension
from ridgeway.timeline.windows import COMPLETED, REPAIRED, SESSION_ENDED, UNFINISHED

__all__ = ["SCHEMA", "plot", "render", "summarize", "to_json"]

SCHEMA = "ridgeway.timeline/1"

#: Characters in a line of the text form.
WIDTH = 100

_ENDINGS = {
    COMPLETED: "back to stepping",
    REPAIRED: "no session was concerned, all slices are back",
    SESSION_ENDED: "the session ended",
    UNFINISHED: "not over yet",
}
_MODES = {
    RESUME: "with all slices",
    RESIZE: "with fewer slices",
    UNDISTURBED: "never interrupted",
}


def render(
    events: Iterable[Any],
    output: Path | None = None,
    as_json: bool = False,
    killed_at: Collection[float] = (),
) -> str:
    """The recoveries in the events, and what the sessions' time was spent on, as text or as JSON.

    Args:
      events: as `events.read_events` gives them, or as the head sends them.
      output: a file to write the same into; the text is then UTF-8.
      as_json: the JSON form documented above instead of tables.
      killed_at: wall times of kills, as for `find_recoveries`.

    Raises:
      OSError: `output` cannot be written.
    """
    events = list(events)
    recoveries, suspensions = find_recoveries(events, killed_at), find_suspensions(events)
    goodput = accounts.find_goodput(events)
    if as_json:
        content = json.dumps(to_json(recoveries, goodput, suspensions), indent=2) + "\n"
    else:
        content = _suspension_lines(suspensions) + _tables(recoveries, goodput)
    if output is not None:
        output.write_text(content, encoding="utf-8")
    return content


def to_json(
    recoveries: Sequence[Recovery], goodput: Sequence[Goodput] = (), suspensions: Sequence[Suspension] = ()
) -> dict[str, Any]:
    """The JSON form, as plain values."""
    return {
        "schema": SCHEMA,
        "recoveries": [_plain(recovery) for recovery in recoveries],
        "suspensions": [dataclasses.asdict(suspension) for suspension in suspensions],
        "summary": summarize(recoveries),
        "goodput": [accounts.to_json(account) for account in goodput],
    }


def summarize(recoveries: Iterable[Recovery]) -> dict[str, Any]:
    """The summary of the JSON form."""
    recoveries = list(recoveries)
    counted = [r for r in recoveries if r.outcome == COMPLETED and r.mode != UNDISTURBED]
    spent: dict[str, list[float]] = {name: [] for name in TITLES}
    for recovery in counted:
        for name in {phase.name for phase in recovery.phases}:
            spent[name].append(recovery.phase_seconds(name))
    return {
        "count": len(counted),
        **_spread([recovery.seconds for recovery in counted]),
        "undisturbed": sum(r.outcome == COMPLETED and r.mode == UNDISTURBED for r in recoveries),
        **{outcome: sum(r.outcome == outcome for r in recoveries) for outcome in _ENDINGS if outcome != COMPLETED},
        "phases": {name: {"count": len(v), **_spread(v)} for name, v in spent.items() if v},
    }


def describe(recovery: Recovery) -> str:
    """One line: what was lost and how it went on."""
    hosts = sorted({(loss.slice, loss.host) for loss in recovery.losses}, key=str)
    lost = ", ".join(f"slice {_number(slice_index)} host {_number(host)}" for slice_index, host in hosts)
    ending = _ENDINGS[recovery.outcome]
    mode = _MODES.get(recovery.mode or "") if recovery.outcome == COMPLETED else None
    return f"loss of {lost}: {ending}{f', {mode}' if mode else ''}"


def _suspension_lines(suspensions: Sequence[Suspension]) -> str:
    if not suspensions:
        return ""
    lines = [textwrap.fill(describe_suspension(s), WIDTH, subsequent_indent="  ") for s in suspensions]
    return "\n".join(["Announced preemptions:", *lines, "", ""])


def _tables(recoveries: Sequence[Recovery], goodput: Sequence[Goodput]) -> str:
    if not recoveries and not goodput:
        return "No loss in these events, so no recovery.\n"
    # A console of its own, without colours: the result goes to files and into logs.
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    for recovery in recoveries:
        console.print(_one(recovery))
    if recoveries:
        console.print(_summary(summarize(recoveries)))
    else:
        console.print("No loss in these events, so no recovery.")
    for account in goodput:
        console.print()
        console.print(accounts.render(account))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).rstrip("\n") + "\n"


def _one(recovery: Recovery) -> Group:
    head = Text(f"Recovery {recovery.number}: {describe(recovery)}", overflow="fold")
    start = "killed" if recovery.kill_known else "detected (no kill is known)"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recovery.start_time))
    session = "" if recovery.session is None else f"; session {recovery.session}"
    losses = Table.grid(padding=(0, 2))
    losses.add_column(justify="right", no_wrap=True)
    losses.add_column(no_wrap=True)
    losses.add_column(no_wrap=True)
    losses.add_column(overflow="fold")
    for loss in recovery.losses:
        what = "executor" if loss.executor_only else "host"
        why = ": ".join(part for part in (loss.code, loss.cause) if part) or "no cause given"
        where = f"slice {_number(loss.slice)} host {_number(loss.host)}"
        losses.add_row(f"{loss.seconds:10.3f} s", f"{what} lost", where, Text(why))

    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    table.add_column("phase", "total", min_width=30)
    table.add_column("until", f"{recovery.seconds:.3f}", justify="right", no_wrap=True)
    table.add_column("seconds", f"{recovery.seconds:.3f}", justify="right", no_wrap=True)
    table.add_column("share", "100 %" if recovery.seconds else "", justify="right", no_wrap=True)
    compiling = sum(phase.compiling_seconds for phase in recovery.phases)
    table.add_column("of it compiling", _blank(compiling), justify="right", no_wrap=True)
    for phase in recovery.phases:
        share = f"{100 * phase.seconds / recovery.seconds:.0f} %" if recovery.seconds else ""
        title: RenderableType = phase.title
        if phase.note:
            title = Group(title, Padding(Text(phase.note, overflow="fold"), (0, 0, 0, 2)))
        until = f"{phase.begin_seconds + phase.seconds:.3f}"
        table.add_row(title, until, f"{phase.seconds:.3f}", share, _blank(phase.compiling_seconds))
    if not any(phase.name == UNATTRIBUTED for phase in recovery.phases):
        table.add_row(TITLES[UNATTRIBUTED], "", "0.000", "0 %" if recovery.seconds else "", "")
    return Group(head, Text(f"{start} at {at}{session}"), losses, table)


def _summary(summary: dict[str, Any]) -> Group:
    count = summary["count"]
    line = f"Recoveries: {count}"
    if count:
        line += f"; kill to next step {summary['median_seconds']:.3f} s median, {summary['max_seconds']:.3f} s at most"
    others = [
        f"{summary[key]} {label}"
        for key, label in (
            ("undisturbed", "without interruption"),
            (REPAIRED, "with no session concerned"),
            (SESSION_ENDED, "cut short by the end of the session"),
            (UNFINISHED, "not over"),
        )
        if summary[key]
    ]
    parts: list[Any] = [Text(line, overflow="fold")]
    if others:
        parts.append(Text(f"Not counted: {', '.join(others)}", overflow="fold"))
    if count > 1:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("phase", min_width=30)
        table.add_column("times", justify="right")
        table.add_column("median", justify="right")
        table.add_column("max", justify="right")
        for name, spread in summary["phases"].items():
            table.add_row(
                TITLES[name], str(spread["count"]), f"{spread['median_seconds']:.3f}", f"{spread['max_seconds']:.3f}"
            )
        parts.append(table)
    return Group(*parts)


def _plain(recovery: Recovery) -> dict[str, Any]:
    plain = dataclasses.asdict(recovery)
    phases = [{**dataclasses.asdict(phase), "title": phase.title} for phase in recovery.phases]
    return {
        **plain,
        "slices": recovery.slices,
        "kill_known": recovery.kill_known,
        "unattributed_seconds": recovery.unattributed_seconds,
        "phases": phases,
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "median_seconds": statistics.median(values) if values else None,
        "max_seconds": max(values, default=None),
    }


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _blank(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds else ""
