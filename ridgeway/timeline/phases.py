"""Sharing the seconds of a recovery out among phases, so that they follow each other and sum to the total."""

import dataclasses
from collections.abc import Iterable, Sequence

UNATTRIBUTED = "unattributed"

#: Milestones, and so phases, in their order, with their titles for people.
TITLES = {
    "killed": "killed",
    "detected": "loss detected",
    "survivors_aborted": "survivors aborted",
    "error_raised": "error raised in controller",
    "attempt_failed": "another attempt failed",
    "slice_available": "slice available",
    "resize_decided": "resize decided",
    "slices_accepted": "slices accepted by controller",
    "function_reentered": "function re-entered",
    "generation_ready": "new generation ready",
    "state_restored": "state restored",
    "first_step_done": "first step done",
    UNATTRIBUTED: "unattributed",
}

#: A part of a phase shorter than this goes to the generation that cuts it off.
SLIVER_SECONDS = 0.001

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a recovery. A stretch that the making of a generation interrupts has two parts."""

    name: str
    """The milestone that it leads to, or `unattributed`."""
    begin_seconds: float
    """From the start of the recovery."""
    seconds: float
    compiling_seconds: float
    """How much of it the cluster spent compiling (or loading compiled programs) for the session."""
    note: str
    """For `unattributed`: which milestones are missing."""

    @property
    def title(self) -> str:
        """What people read."""
        return TITLES[self.name]


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """A milestone to be placed."""

    name: str
    instant: float | None
    """None: the events do not have it."""
    source: str = ""
    """The kind of event that it was taken from, or `given`."""
    required: bool = True
    """Without it the seconds up to the next one are unattributed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    name: str
    begin: float
    end: float
    note: str = ""


def share_out(
    marks: Sequence[Mark], end: float, ending: str, generations: Sequence[Span], compiling: Sequence[Span]
) -> tuple[Phase, ...]:
    """The phases between the first known milestone and `end`.

    A milestone earlier than one before it takes no time of its own: nobody waited for it any more.

    Args:
      marks: in their order; at least one is known.
      end: of the recovery.
      ending: why the last milestone is not at the end, for people.
      generations: when generations were made that the session waited for (`merge` made them). Each is a
        phase of its own and cuts the one in which it lies in two.
      compiling: likewise; only counted.
    """
    stretches: list[_Stretch] = []
    previous: Mark | None = None
    missing: list[str] = []
    start = position = end
    for mark in marks:
        if mark.instant is None:
            missing += [TITLES[mark.name]] if mark.required else []
            continue
        instant = min(mark.instant, end)
        if previous is None:
            start = position = instant
        elif missing:
            note = f"from {TITLES[previous.name]} to {TITLES[mark.name]}: no instant for {', '.join(missing)}"
            stretches.append(_Stretch(UNATTRIBUTED, position, max(position, instant), note))
        else:
            stretches.append(_Stretch(mark.name, position, max(position, instant)))
        position = max(position, instant)
        previous = mark
        missing = []
    if previous is not None and position < end:
        stretches.append(_Stretch(UNATTRIBUTED, position, end, f"after {TITLES[previous.name]}: {ending}"))
    return tuple(
        Phase(part.name, part.begin - start, part.end - part.begin, _overlap(compiling, part), part.note)
        for stretch in stretches
        for part in _cut(stretch, generations)
        if part.end > part.begin or part.name != UNATTRIBUTED
    )


def merge(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """What of the spans lies between `begin` and `end`: ascending, without overlap, none empty."""
    merged: list[Span] = []
    for first, last in sorted((max(first, begin), min(last, end)) for first, last in spans):
        if first >= last:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _cut(stretch: _Stretch, spans: Iterable[Span]) -> list[_Stretch]:
    parts: list[_Stretch] = []
    position = stretch.begin
    for first, last in spans:
        if first >= stretch.end or last <= stretch.begin:
            continue
        first, last = max(first, stretch.begin), min(last, stretch.end)
        # Slivers would only be noise: an order is recorded a moment before what it sets off.
        first = position if first - position < SLIVER_SECONDS else first
        last = stretch.end if stretch.end - last < SLIVER_SECONDS else last
        if first > position:
            parts.append(dataclasses.replace(stretch, begin=position, end=first))
        parts.append(_Stretch("generation_ready", first, last))
        position = last
    if position < stretch.end or not parts:
        parts.append(dataclasses.replace(stretch, begin=position))
    return parts


def _overlap(spans: Iterable[Span], part: _Stretch) -> float:
    return sum(max(0.0, min(last, part.end) - max(first, part.begin)) for first, last in spans)
