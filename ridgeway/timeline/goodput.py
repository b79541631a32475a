"""Goodput: what each session's wall clock was spent on, from the accounts that the head records (event `goodput`).

What the head takes for what is said at `ridgeway.proxy.session_account`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ridgeway.proxy import session_account as account
from ridgeway.timeline.stream import Moment, SessionName, clock_value, read_runs

#: Categories in the order in which they are shown, with their titles for people.
TITLES = {
    account.STEPPING: "stepping",
    account.COMPILING: "compiling",
    account.WAITING_FOR_HARDWARE: "waiting for hardware",
    account.RESTORING: "restoring",
    account.SAVING: "saving",
    account.REPEATING: "repeating lost steps",
    account.UNATTRIBUTED: "unattributed",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Goodput:
    """The account of one session."""

    session: SessionName
    client: str
    start_time: float
    """Wall time at which the session began, seconds."""
    ended: bool
    """Whether the session is over; else this is the last account that was recorded."""
    wall_seconds: float
    """From the start to the end, or to the last account; `seconds` and `undecided_seconds` add up to it."""
    seconds: dict[str, float]
    """By category, all of `TITLES`."""
    undecided_seconds: float
    """Not told apart yet; 0 once the session is over."""
    steps: int
    repeated_steps: int
    saves: int
    recoveries: int
    step_program: str | None
    step_seconds: float | None
    """What a step takes."""
    compile_hits: int
    compile_misses: int

    @property
    def goodput(self) -> float:
        """The share of the wall clock that went into steps not done before, 0 to 1."""
        return self.seconds[account.STEPPING] / self.wall_seconds if self.wall_seconds else 0.0


def find_goodput(events: Iterable[Any]) -> list[Goodput]:
    """The last account of every session that has one, in order of their starts."""
    found: list[Goodput] = []
    for run in read_runs(events):
        started: dict[SessionName, Moment] = {}
        last: dict[SessionName, Moment] = {}
        ended: set[SessionName] = set()
        for moment in run.moments:
            session = moment.session
            if session is None:
                continue
            match moment.kind:
                case "session_started":
                    started[session] = moment
                case "session_ended":
                    ended.add(session)
                case "goodput":
                    last[session] = moment
        for session, moment in last.items():
            begin = started.get(session)
            client = "" if begin is None else begin.text("client")
            found.append(_read(session, moment, client, run.wall_offset, session in ended))
    return sorted(found, key=lambda goodput: goodput.start_time)


def _read(session: SessionName, moment: Moment, client: str, wall_offset: float, ended: bool) -> Goodput:
    told = moment.fields.get("seconds")
    told = told if isinstance(told, Mapping) else {}
    seconds = {name: max(0.0, clock_value(told.get(name)) or 0.0) for name in TITLES}
    undecided = moment.seconds("undecided_seconds") or 0.0
    wall = sum(seconds.values()) + undecided
    return Goodput(
        session=session,
        client=client,
        start_time=moment.instant - wall + wall_offset,
        ended=ended,
        wall_seconds=wall,
        seconds=seconds,
        undecided_seconds=undecided,
        steps=moment.integer("steps") or 0,
        repeated_steps=moment.integer("repeated_steps") or 0,
        saves=moment.integer("saves") or 0,
        recoveries=moment.integer("recoveries") or 0,
        step_program=moment.text("step_program") or None,
        step_seconds=moment.seconds("step_seconds"),
        compile_hits=moment.integer("compile_hits") or 0,
        compile_misses=moment.integer("compile_misses") or 0,
    )


def to_json(goodput: Goodput) -> dict[str, Any]:
    """Plain values; "goodput" is the share of stepping."""
    return {**dataclasses.asdict(goodput), "goodput": goodput.goodput}


def describe(report: Mapping[str, Any]) -> str:
    """One line about an account as the head tells it: ``goodput 83 %: stepping 50.2 s, compiling 3.1 s, ...``."""
    seconds, undecided, wall = report["seconds"], report["undecided_seconds"], report["wall_seconds"]
    parts = [f"{title} {seconds[name]:.1f} s" for name, title in TITLES.items() if seconds[name] >= 0.05]
    if undecided >= 0.05:
        parts.append(f"not told apart yet {undecided:.1f} s")
    share = 100 * seconds[account.STEPPING] / wall if wall else 0.0
    return f"goodput {share:.0f} %: {', '.join(parts) or 'nothing yet'}"


def render(goodput: Goodput) -> Group:
    """A table for people."""
    state = "(ended)" if goodput.ended else "so far"
    head = f"Session {goodput.session}: goodput {100 * goodput.goodput:.0f} % of {goodput.wall_seconds:.1f} s {state}"
    steps = _count(goodput.steps, "step")
    if goodput.step_program and goodput.step_seconds is not None:
        steps += f" of {goodput.step_program}, {goodput.step_seconds:.3f} s each"
    if goodput.repeated_steps:
        steps += f"; {goodput.repeated_steps} of them done again after a loss"
    counts = f"{_count(goodput.saves, 'save')}, {_count(goodput.recoveries, 'recovery', 'recoveries')}"
    compiled = f"{_count(goodput.compile_misses, 'program')} compiled, {goodput.compile_hits} from the cache"
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    table.add_column("spent on", "wall clock", min_width=30)
    table.add_column("seconds", f"{goodput.wall_seconds:.3f}", justify="right", no_wrap=True)
    table.add_column("share", "100 %", justify="right", no_wrap=True)
    rows = [(title, goodput.seconds[name]) for name, title in TITLES.items()]
    if goodput.undecided_seconds:
        rows.append(("not told apart yet", goodput.undecided_seconds))
    for title, seconds in rows:
        share = f"{100 * seconds / goodput.wall_seconds:.0f} %" if goodput.wall_seconds else ""
        table.add_row(title, f"{seconds:.3f}", share)
    return Group(
        Text(head, overflow="fold"), Text(steps, overflow="fold"), Text(f"{counts}; {compiled}", overflow="fold"), table
    )


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
