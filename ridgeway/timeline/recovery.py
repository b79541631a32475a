"""From events to recoveries: what was lost, and where every second from the kill to the next step went.

Everything here is a pure function of the events; nothing raises on a stream that is cut off, out of order or
wrong. Two decisions give the result its meaning:

- Phases follow each other without a gap, so they sum to the total. Each is named after the milestone that
  ends it. A milestone that came late (the error reached the program after the slice was back) pushes those
  after it: they then take no time of their own, since nobody waited for them.
- Where a milestone is not in the events, the seconds around it cannot be told apart. They are shown as a
  phase `unattributed` that says what is missing, not given to a neighbour.
"""

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ridgeway.proxy.session_account import PROBE_PROGRAMS
from ridgeway.timeline.phases import UNATTRIBUTED, Mark, Phase, Span, merge, share_out
from ridgeway.timeline.stream import Moment, Run, SessionName, by_session, read_runs
from ridgeway.timeline.windows import (
    COMPLETED,
    EARLY_SECONDS,
    JOINT_LOSS_SECONDS,
    SESSION_ENDED,
    Kills,
    Window,
    repair_windows,
    session_windows,
    shutdown_losses,
)

#: `arrays_made` comes at the end of a window of 0.1 s. So close to a probe it may speak of the probe's own array.
ARRAYS_MADE_WINDOW_SECONDS = 0.15

RESUME = "resume"
RESIZE = "resize"
UNDISTURBED = "undisturbed"


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """One host that was lost, or only its executor."""

    slice: int | None
    host: int | None
    time: float
    """Wall time at which the head noticed, seconds."""
    seconds: float
    """The same, from the start of the recovery."""
    code: str
    cause: str
    executor_only: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Milestone:
    """An instant of the recovery as the events have it, before any ordering."""

    name: str
    """A key of `phases.TITLES`."""
    time: float
    """Wall time, seconds."""
    seconds: float
    """From the start of the recovery."""
    source: str
    """The kind of event that it was taken from, or `given` for a kill that the caller stated."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """From a loss (or the kill that caused it) to the next step of one session."""

    number: int
    """Counts from 1, in order of start."""
    session: SessionName | None
    """None: no session used what was lost."""
    losses: tuple[Loss, ...]
    outcome: str
    """`completed`: a step was done again. `repaired`: no session was concerned, and all slices are back.
    `session_ended`: the session ended before. `unfinished`: the events end before."""
    mode: str | None
    """`resume`: with the lost slices back. `resize`: with some of them down. `undisturbed`: the session's
    steps went on. None: not known (yet)."""
    start_time: float
    """Wall time of the kill, or of the loss where no kill is known; seconds."""
    seconds: float
    """Total."""
    phases: tuple[Phase, ...]
    milestones: tuple[Milestone, ...]
    """In order of time."""
    step_program: str | None
    compile_hits: int
    compile_misses: int

    @property
    def kill_known(self) -> bool:
        """Whether it begins with the kill; else it begins when the loss was noticed."""
        return any(milestone.name == "killed" for milestone in self.milestones)

    @property
    def unattributed_seconds(self) -> float:
        """Seconds that the events do not explain."""
        return self.phase_seconds(UNATTRIBUTED)

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices that lost a host, ascending."""
        return tuple(sorted({loss.slice for loss in self.losses if loss.slice is not None}))

    def phase_seconds(self, name: str) -> float:
        """Seconds of all parts of a phase."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)


def find_recoveries(events: Iterable[Any], killed_at: Collection[float] = ()) -> list[Recovery]:
    """Every recovery in the events, in order of start.

    A loss that several sessions suffer from is a recovery of each of them; one that none suffers from is a
    recovery without a session, over when all slices are back.

    Args:
      events: event dictionaries in the order in which they were emitted.
      killed_at: wall times (seconds) of kills that the caller did itself; each belongs to the first loss
        after it. Kills done through the head are in the events as `signal_delivered`.
    """
    found: list[Recovery] = []
    for run in read_runs(events):
        kills = Kills(run, killed_at)
        told = shutdown_losses(run)
        for session, moments in by_session(run).items():
            for window in session_windows(moments, session):
                told.update(moment.index for moment in window.losses)
                found.append(_Account(run, moments, window, session, kills).recovery())
        cluster = [moment for moment in run.moments if moment.session is None]
        for window in repair_windows(cluster, told):
            found.append(_Account(run, cluster, window, None, kills).recovery())
    found.sort(key=lambda recovery: recovery.start_time)
    return [dataclasses.replace(recovery, number=number) for number, recovery in enumerate(found, 1)]


class _Account:
    """Finds the milestones of one recovery and has its seconds shared out among phases."""

    def __init__(
        self, run: Run, moments: Sequence[Moment], window: Window, session: SessionName | None, kills: Kills
    ) -> None:
        self._run = run
        self._view = [*window.early, *moments[window.begin : window.end + 1]]
        self._window = window
        self._session = session
        self._done = window.outcome == COMPLETED
        self._detected = window.losses[0].instant
        self._end = self._view[-1].instant
        kill = kills.of(window.losses)
        self._killed = Mark("killed", *(kill or (None, "")), required=False)
        self._start = self._detected if kill is None else kill[0]

    def recovery(self) -> Recovery:
        """The finished account. Its number is given later."""
        mode, marks = self._marks()
        compiled = self._all("compiled")
        compiling = merge(map(self._span, compiled), self._start, self._end)
        phases = share_out(marks, self._end, self._ending(), self._generations(marks), compiling)
        return Recovery(
            number=0,
            session=self._session,
            losses=self._losses(),
            outcome=self._window.outcome,
            mode=mode,
            start_time=self._start + self._run.wall_offset,
            seconds=self._end - self._start,
            phases=phases,
            milestones=self._milestones(marks),
            step_program=self._window.step,
            compile_hits=sum(moment.text("cache") == "hit" for moment in compiled),
            compile_misses=sum(moment.text("cache") == "miss" for moment in compiled),
        )

    def _losses(self) -> tuple[Loss, ...]:
        found: list[Loss] = []
        for moment in self._window.losses:
            loss = Loss(
                *moment.host,
                time=moment.instant + self._run.wall_offset,
                seconds=moment.instant - self._start,
                code=moment.text("code"),
                cause=moment.text("cause"),
                executor_only=moment.flag("executor_only"),
            )
            for index, other in enumerate(found):
                same = (other.slice, other.host) == (loss.slice, loss.host) and other.executor_only
                if same and loss.seconds - other.seconds <= JOINT_LOSS_SECONDS:
                    # One death, noticed twice: the executor's connection closed before its agent's.
                    found[index] = dataclasses.replace(other, executor_only=loss.executor_only)
                    break
            else:
                found.append(loss)
        return tuple(found)

    def _milestones(self, marks: Iterable[Mark]) -> tuple[Milestone, ...]:
        known = [(mark.name, mark.instant, mark.source) for mark in marks if mark.instant is not None]
        # Every generation, also those that nobody waited for.
        known += [(moment.kind, moment.instant, moment.kind) for moment in self._all("generation_ready")]
        return tuple(
            Milestone(name, instant + self._run.wall_offset, instant - self._start, source)
            for name, instant, source in sorted(known, key=lambda item: item[1])
        )

    def _generations(self, marks: Iterable[Mark]) -> list[Span]:
        """When generations were made that the session waited for: those after the slices were settled."""
        names = ("slice_available", "resize_decided", "slices_accepted", "function_reentered")
        settled = next((m.instant for m in marks if m.name in names and m.instant is not None), None)
        if settled is None:
            return []
        started = {m.integer("generation"): m.instant for m in self._all("generation_started")}
        spans = []
        for moment in self._all("generation_ready"):
            first, last = self._span(moment)
            if moment.seconds("seconds") is None:
                first = started.get(moment.integer("generation"), last)
            spans.append((first, last))
        return merge(spans, settled, self._end)

    def _span(self, moment: Moment) -> Span:
        """The stretch of time that an event with `seconds` looks back on."""
        return moment.instant - (moment.seconds("seconds") or 0.0), moment.instant

    def _ending(self) -> str:
        if self._window.outcome == SESSION_ENDED:
            reason = self._view[-1].text("reason")
            return f"the session ended ({reason})" if reason else "the session ended"
        return "not over when the events end"

    def _all(self, *kinds: str) -> list[Moment]:
        return [moment for moment in self._view if moment.kind in kinds]

    # ---- milestones

    def _marks(self) -> tuple[str | None, list[Mark]]:
        """How the recovery went, and its milestones in their order."""
        errors = self._all("error_raised")
        # One from just before the loss counts only if none follows.
        aborts = self._all("survivors_aborted")
        aborted = next((m for m in aborts if m.index > self._window.losses[0].index), next(iter(aborts), None))
        done = [Mark("first_step_done", self._end, self._view[-1].kind)] if self._done else []
        marks = [self._killed, Mark("detected", self._detected, "host_lost")]
        if self._undisturbed():
            return UNDISTURBED, [*marks, _mark("survivors_aborted", aborted, required=False), *done]
        abort = _mark("survivors_aborted", aborted, required=self._had_survivors())
        if self._session is None:
            mode, arrival, _ = self._arrival([], None, None, self._end)
            return mode, [*marks, abort, arrival]
        error = _mark("error_raised", errors[0] if errors else None)
        # Neither waits for the other.
        late = aborted is not None and bool(errors) and aborted.index > errors[0].index
        marks += [error, abort] if late else [abort, error]
        if errors and errors[-1].instant - errors[0].instant > JOINT_LOSS_SECONDS:
            marks.append(_mark("attempt_failed", errors[-1]))
        base = errors[-1].index if errors else self._window.losses[-1].index
        # The head tells of an answer only where it held a probe; else of the probe's program.
        probes = [m for m in self._all("program_started") if self._is_probe(m)] + self._all("probe_answered")
        probes = sorted((m for m in probes if m.index > base), key=lambda moment: moment.index)
        step_start = self._step_start(probes[0].index if probes else base)
        if step_start is not None:
            # A thread of pathwaysutils goes on probing the slices that are down while others train.
            probes = [moment for moment in probes if moment.instant <= step_start]
        decision, entry = self._entry(base, probes)
        settled = self._end if step_start is None else step_start
        mode, arrival, accepted = self._arrival(probes, decision, entry, settled)
        restored = self._restored(base if entry is None else entry.index - 1, step_start)
        return mode, [*marks, arrival, accepted, _mark("function_reentered", entry), restored, *done]

    def _undisturbed(self) -> bool:
        """Whether the session stepped on: no error, no probes but of slices that are down anyway."""
        lost = {moment.integer("slice") for moment in self._window.losses}
        probes = self._all("probe_answered")
        return (
            self._done
            and not self._all("error_raised")
            and not any(moment.flag("ok") or moment.integer("slice") not in lost for moment in probes)
        )

    def _had_survivors(self) -> bool:
        """Whether the lost hosts were in a generation with others, as far as is known; if unknown, yes."""
        losses = self._window.losses
        lost = {moment.host for moment in losses if moment.instant - self._detected <= JOINT_LOSS_SECONDS}
        over: set[int | None] = set()
        for moment in reversed(self._run.moments[: losses[0].index]):
            match moment.kind:
                case "generation_aborted" if self._detected - moment.instant > EARLY_SECONDS:
                    over.add(moment.integer("generation"))
                case "generation_started" | "generation_ready":
                    members = _members(moment)
                    if not members.isdisjoint(lost):
                        return moment.integer("generation") not in over and bool(members - lost)
                case "cluster_started":
                    # Nothing has spanned these hosts yet.
                    return False
        return True

    def _step_start(self, after: int) -> float | None:
        """When the step began whose end is the recovery's end."""
        last = self._view[-1]
        if not self._done:
            return None
        seconds = last.seconds("seconds") if last.kind == "program_completed" else None
        if seconds is not None:
            return max(last.instant - seconds, self._detected)
        starts = [m for m in self._all("program_started") if m.index > after and not self._is_probe(m)]
        named = [moment.instant for moment in starts if moment.text("name") == self._window.step]
        if named:
            return named[0]
        # Not known by name: the head saw the end of the program that was started last.
        return starts[-1].instant if starts and last.kind == "recovery_completed" else None

    def _entry(self, base: int, probes: Sequence[Moment]) -> tuple[Moment | None, Moment | None]:
        """The last of the probes before the function was entered again, and its first activity."""
        # A program that is no probe proves that the function runs. Arrays do not: probes make some, too.
        after = probes[0].index if probes else base
        programs = (m for m in self._all("compiled", "program_started") if m.index > after)
        program = next((moment for moment in programs if not self._is_probe(moment)), None)
        if program is None and not self._done:
            return (probes[-1] if probes else None), None
        limit = self._view[-1].index if program is None else program.index
        decision = next((moment for moment in reversed(probes) if moment.index < limit), None)
        after = base if decision is None else decision.index
        arrays = (moment for moment in self._arrays() if after < moment.index < limit)
        return decision, next(arrays, program)

    def _arrival(
        self, probes: Sequence[Moment], decision: Moment | None, entry: Moment | None, settled: float
    ) -> tuple[str | None, Mark, Mark]:
        """The mode; when the lost slices were back, or were done without; when the controller took them."""
        if decision is not None:
            settled = decision.instant
            probes = [moment for moment in probes if moment.index <= decision.index]
        answers = [moment for moment in probes if moment.kind == "probe_answered"]
        lost = {loss.integer("slice"): loss.index for loss in self._window.losses}
        lost.pop(None, None)
        back = [
            self._back(slice_index, [m for m in answers if m.index > index], index, settled)
            for slice_index, index in lost.items()
        ]
        if None not in back:
            last = max((m for m in back if m is not None), key=lambda moment: moment.index, default=None)
            mode = None if last is None else RESUME
            return mode, _mark("slice_available", last), _mark("slices_accepted", decision, required=False)
        unknown = Mark("slices_accepted", None, required=False)
        if entry is not None or self._done:
            # Without probes nobody decides: the function is just entered again.
            return RESIZE, _mark("resize_decided", decision, required=bool(probes)), unknown
        return None, Mark("slice_available", None), unknown

    def _back(self, slice_index: int | None, answers: Iterable[Moment], lost: int, settled: float) -> Moment | None:
        """What first said that a slice was back, up to an instant; None: it was down then."""
        told = [moment for moment in answers if moment.integer("slice") == slice_index]
        if told and not told[-1].flag("ok"):
            # What the controller saw counts, even if the slice was back a moment later.
            return None
        said = [
            moment
            for moment in self._all("slice_ready")
            if moment.integer("slice") == slice_index and moment.index > lost and moment.instant <= settled
        ]
        said += [moment for moment in told if moment.flag("ok")]
        return min(said, key=lambda moment: moment.index, default=None)

    def _restored(self, after: int, step_start: float | None) -> Mark:
        """The last data put before the first step; failing that, the last other program done before it."""
        if not self._done:
            # More may come.
            return Mark("state_restored", None)
        limit = self._end if step_start is None else step_start
        before = [m for m in self._view[:-1] if m.index > after and m.instant <= limit]
        indices = {moment.index for moment in before}
        arrays = [moment for moment in self._arrays() if moment.index in indices]
        programs = [
            moment
            for moment in before
            if moment.kind == "program_completed"
            and moment.text("name") != self._window.step
            and not self._is_probe(moment)
        ]
        found = arrays or programs
        return _mark("state_restored", found[-1] if found else None)

    def _arrays(self) -> list[Moment]:
        """Where the session put data that was not just that of a probe."""
        probes = [
            moment.instant
            for moment in self._all("program_started", "probe_held", "probe_answered")
            if moment.kind != "program_started" or self._is_probe(moment)
        ]
        return [
            moment
            for moment in self._all("arrays_made")
            if bisect.bisect_left(probes, moment.instant - ARRAYS_MADE_WINDOW_SECONDS)
            == bisect.bisect_right(probes, moment.instant + ARRAYS_MADE_WINDOW_SECONDS)
        ]

    def _is_probe(self, moment: Moment) -> bool:
        """By its name, or because the event says so itself."""
        name = moment.text("name")
        return moment.flag("probe") or (name in PROBE_PROGRAMS and name != self._window.step)


def _mark(name: str, moment: Moment | None, required: bool = True) -> Mark:
    if moment is None:
        return Mark(name, None, required=required)
    return Mark(name, moment.instant, moment.kind, required)


def _members(moment: Moment) -> set[tuple[Any, Any]]:
    members = moment.fields.get("members")
    if not isinstance(members, list | tuple):
        return set()
    return {
        (member[0], member[1])
        for member in members
        if isinstance(member, list | tuple) and len(member) == 2 and all(isinstance(number, int) for number in member)
    }
