"""From events to suspensions: which hosts left as announced, and how long their programs paused. Pure, and as
tolerant of what an event contains as `recovery`."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ridgeway.timeline.stream import Moment, Run, read_runs

RESUMED = "resumed"
LOST = "lost"
UNFINISHED = "unfinished"
LEFT = "left"
"""It held nothing."""


@dataclasses.dataclass(slots=True)
class Suspension:
    """One announced preemption of one host."""

    slice: int | None
    host: int | None
    time: float
    """Wall time of the announcement, seconds."""
    notice_seconds: float | None
    reason: str
    outcome: str = UNFINISHED
    """`resumed`: everything was as before. `lost`: it became an ordinary loss. `left`: it held nothing yet.
    `unfinished`: the events end before."""
    seconds: float | None = None
    """From the announcement to the outcome."""
    saved_seconds: float | None = None
    """From the announcement to the state being saved."""
    waited_seconds: float | None = None
    """From there to a replacement that began to restore."""
    restore_seconds: float | None = None
    bytes: int | None = None
    cause: str = ""
    """Why it was lost."""
    paused: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds that sessions were held, by session."""


def find_suspensions(events: Iterable[Any]) -> list[Suspension]:
    """Every announced preemption in the events, in order."""
    return [suspension for run in read_runs(events) for suspension in _of_run(run)]


def _of_run(run: Run) -> list[Suspension]:
    found: list[Suspension] = []
    begun: dict[tuple[int | None, int | None], tuple[Suspension, float]] = {}
    held: dict[str, list[Suspension]] = {}
    for moment in run.moments:
        key = moment.host
        current = begun.get(key)
        match moment.kind:
            case "preemption_announced" if current is None:
                made = Suspension(
                    *key, moment.instant + run.wall_offset, moment.seconds("notice_seconds"), moment.text("reason")
                )
                found.append(made)
                begun[key] = made, moment.instant
            case "host_suspended" if current is not None:
                current[0].bytes = moment.integer("bytes")
                current[0].saved_seconds = moment.instant - current[1]
            case "host_resumed" if current is not None:
                suspension, at = begun.pop(key)
                _end(suspension, RESUMED, moment.instant - at)
                suspension.restore_seconds = moment.seconds("restore_seconds")
                spent = (suspension.saved_seconds or 0.0) + (suspension.restore_seconds or 0.0)
                suspension.waited_seconds = max(0.0, moment.instant - at - spent)
            case "host_lost" if current is not None and not moment.flag("was_joining"):
                suspension, at = begun.pop(key)
                _end(suspension, LOST, moment.instant - at)
                suspension.cause = moment.text("cause")
            case "host_joining" if current is not None and current[0].saved_seconds is None:
                suspension, at = begun.pop(key)
                _end(suspension, LEFT, moment.instant - at)
            case "session_held":
                hosts = _hosts(moment)
                held[str(moment.session)] = [s for k, (s, _) in begun.items() if k in hosts]
            case "session_released":
                for suspension in held.pop(str(moment.session), ()):
                    suspension.paused[str(moment.session)] = moment.seconds("seconds") or 0.0
    return found


def _end(suspension: Suspension, outcome: str, seconds: float) -> None:
    suspension.outcome = outcome
    suspension.seconds = seconds


def _hosts(moment: Moment) -> set[tuple[int, int]]:
    hosts = moment.fields.get("hosts")
    if not isinstance(hosts, list):
        return set()
    return {(place[0], place[1]) for place in hosts if isinstance(place, list) and len(place) == 2}


def describe(suspension: Suspension) -> str:
    """One line."""
    place = f"slice {_number(suspension.slice)} host {_number(suspension.host)}"
    notice = "" if suspension.notice_seconds is None else f" with {suspension.notice_seconds:g} s notice"
    text = f"preemption of {place}{notice} ({suspension.reason or 'no reason given'}): "
    if suspension.outcome == RESUMED:
        paused = max(suspension.paused.values(), default=None)
        pause = "no program used it" if paused is None else f"programs paused for {paused:.3f} s"
        return (
            f"{text}back as it was after {suspension.seconds or 0.0:.3f} s, {pause} "
            f"(saving {suspension.saved_seconds or 0.0:.3f}, waiting {suspension.waited_seconds or 0.0:.3f}, "
            f"restoring {suspension.restore_seconds or 0.0:.3f}; {(suspension.bytes or 0) / 1e6:.1f} MB)"
        )
    if suspension.outcome == LOST:
        return f"{text}lost after {suspension.seconds or 0.0:.3f} s: {suspension.cause or 'no cause given'}"
    if suspension.outcome == LEFT:
        return f"{text}it held nothing yet, and was replaced"
    return f"{text}not over yet"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)
