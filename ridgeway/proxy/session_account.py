"""Goodput: what the wall clock of one session was spent on, told from the requests that the head sees of it.

Pure: the caller passes instants (seconds of one monotonic clock, ascending) with what happened at them; `seconds` and
`undecided` add up to the session's age at every moment, and once it has ended nothing is undecided. A step costs one
tuple; everything else is done once for many steps.

What the head can tell, and what it takes for it:

* The **step program** is told to it by the caller (the program with the most arguments among those that recur). A
  program that was taken for the step for less than `PHASE_SECONDS`, before one with more arguments recurred, was a
  part of the start; after a longer time it was a step of an earlier phase of the work, and stays one.
* **Stepping** is the time from one dispatch of the step program to the next. Programs are dispatched ahead, so the
  head compares an interval with what a step takes in the long run, and saves up what intervals were shorter. Only the
  excess of an interval that is clearly longer needs another explanation, looked for in this order: compiling, data
  put on devices (restoring), copies to the host (saving), a slice of the session's that is down (waiting for
  hardware), waiting for results of programs (still stepping: an evaluation, say). The rest is unattributed. So a
  stall shorter than half a step counts as stepping, and so does a slow input pipeline that slows every step.
* **Saving** is what copies to the host add to a step; a copy that steps run beside costs nothing.
* **Waiting for hardware** is the time from a loss (of a silent host: from when its step should have been done) until
  the controller enters its function again, as far as the session was disturbed. **Restoring** is the time from there
  to the first step that completes, without compiling.
* **Repeating** are steps done for the second time. The head cannot see step numbers, so it counts executions of the
  step program: after a recovery it takes the session to be where the last *whole save* began, one in which at least
  half of the state that the step program carries from its arguments to its results was copied to the host (or to host
  memory on the workers), or at its beginning when there was none; steps are repeated until the count from before the
  loss is reached. A save whose files were not yet complete at the loss makes it count too few; a save by another way
  than through the session's requests makes it count too many.
* **Before the first step** compiling, putting data on devices that add up to at least half of the state (restoring)
  and slices that are down are told apart; tracing, imports and reading data are the program's own and unattributed.
"""

import itertools
import statistics
from collections.abc import Collection
from typing import Any, NamedTuple

STEPPING = "stepping"
COMPILING = "compiling"
WAITING_FOR_HARDWARE = "waiting_for_hardware"
RESTORING = "restoring"
SAVING = "saving"
REPEATING = "repeating"
UNATTRIBUTED = "unattributed"
PROBE_PROGRAMS = frozenset({"jit__fun", "pmap__plus_one", "jit__plus_one"})
"""Names of programs with which pathwaysutils asks whether a slice is up: `jax.pmap` of `_plus_one` in
pathwaysutils/elastic/elastic.py (0.1.13). jax 0.12 compiles every pmap as a module `jit__fun`."""

CATEGORIES = (STEPPING, COMPILING, WAITING_FOR_HARDWARE, RESTORING, SAVING, REPEATING, UNATTRIBUTED)

PHASE_SECONDS = 120.0
LONG_FACTOR = 1.5
"""An interval this many times as long as a step, and `LONG_SECONDS` more, has an excess to be explained."""
LONG_SECONDS = 0.02
STEPS_TO_JUDGE = 5
"""Intervals from which on it is known what a step takes."""
STEPS_REMEMBERED = 256
STEPS_AHEAD = 64
"""Steps dispatched ahead whose time may be spent in a later interval."""
SETTLE_EVERY = 64
UNDECIDED_STEPS = 4096
PUT_GAP_SECONDS = 0.5
"""Data put on devices within so long of other data belongs to one activity..."""
COPY_GAP_SECONDS = 1.0
"""... and copies to the host to one save, unless that is complete..."""
SAVE_COMPLETE = 0.9
"""... which it is with so much of the state."""
LOSS_UNNOTICED_SECONDS = 10.0
"""A session that stepped for so long after a loss, without an error, had no part in it."""


class Busy:
    """For how long something went on, whether once or several times at the same moment."""

    __slots__ = ("_count", "_seconds", "_since")

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """One more."""
        if self._count == 0:
            self._since = now
        self._count += 1

    def end(self, now: float) -> None:
        """One less."""
        if self._count == 0:
            return
        self._count -= 1
        if self._count == 0:
            self._seconds += now - self._since

    def total(self, now: float) -> float:
        """Seconds so far."""
        return self._seconds if self._count == 0 else self._seconds + now - self._since

    @property
    def idle(self) -> bool:
        """Whether it does not go on now."""
        return self._count == 0


class Mark(NamedTuple):
    """An instant, and how much of each activity there had been by then. A later mark compares as greater."""

    at: float
    compiling: float
    saving: float
    waiting: float
    down: float
    putting: float
    put_bytes: int


class SessionAccount:
    """The account of one session."""

    def __init__(self, started: float):
        self.started = started
        self.steps = 0
        """executions of the step program, repeated ones included"""
        self.repeated_steps = 0
        self.saves = 0
        self.recoveries = 0
        self.compile_hits = 0
        self.compile_misses = 0
        self.step_program: str | None = None
        self.ended = False
        self._seconds: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._carried_bytes = 0
        self._slices: frozenset[int] | None = None
        self._down: frozenset[int] = frozenset()
        self._compiling, self._saving, self._waiting, self._slice_down = Busy(), Busy(), Busy(), Busy()
        self._reading = Busy()
        self._putting = 0.0
        self._put_bytes = 0
        self._last_put = float("-inf")

        # Of the stage: before the first step there are no steps, in a recovery `_recovery` is set.
        self._base = Mark(started, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
        """up to where everything is decided, unless there are steps"""
        self._pending: list[Mark] = []
        """dispatches of steps that are not decided; everything before the first is"""
        self._origin: tuple[Mark, dict[str, float]] | None = (self._base, dict(self._seconds))
        """where the start began, to be looked at again if another program proves to be the step"""
        self._phase_began = started
        self._recovery: _Recovery | None = None
        self._lost: Mark | None = None
        """a loss of which it is not known whether the session has a part in it"""
        self._lost_silently = False
        self._steps_before_loss = 0

        self._position = 0
        """steps decided, counted from the beginning of the work"""
        self._farthest = 0
        self._saved_position = 0
        self._save_begun = 0
        self._save_began_at = started
        self._save_bytes = 0
        self._save_whole = False
        self._last_copy = float("-inf")
        self._step_seconds = 0.0
        self._steps_timed = 0.0
        self._ahead_seconds = 0.0

    # ---- results

    def seconds(self) -> dict[str, float]:
        """What is decided so far, by category."""
        return dict(self._seconds)

    def undecided(self, now: float) -> float:
        """Seconds that are not in `seconds` yet."""
        return 0.0 if self.ended else now - (self._pending[0].at if self._pending else self._base.at)

    def report(self, now: float) -> dict[str, Any]:
        """The account as plain values: ``seconds`` by category and ``undecided_seconds`` add up to ``wall_seconds``."""
        seconds = {name: round(value, 4) for name, value in self._seconds.items()}
        undecided = round(self.undecided(now), 4)
        typical = self._typical()
        return {
            "wall_seconds": round(sum(seconds.values()) + undecided, 4),
            "seconds": seconds,
            "undecided_seconds": undecided,
            "step_program": self.step_program,
            "step_seconds": None if typical is None else round(typical, 4),
            "steps": self.steps,
            "repeated_steps": self.repeated_steps,
            "saves": self.saves,
            "recoveries": self.recoveries,
            "compile_hits": self.compile_hits,
            "compile_misses": self.compile_misses,
        }

    # ---- what goes on

    def mark(self, now: float) -> Mark:
        """The present state of all activities."""
        return Mark(
            now, self._compiling.total(now), self._saving.total(now), self._waiting.total(now),
            self._slice_down.total(now), self._putting + self._reading.total(now), self._put_bytes,
        )  # fmt: skip

    def compile_began(self, now: float) -> None:
        """A program is being compiled, or taken from the cache."""
        self._compiling.begin(now)

    def compile_ended(self, now: float) -> None:
        """It is there, or could not be compiled."""
        self._compiling.end(now)

    def compiled(self, now: float, hit: bool, probe: bool) -> None:
        """A program is there, from the cache or not."""
        self.compile_hits += hit
        self.compile_misses += not hit
        if not probe:
            self.program(now)

    def wait_began(self, now: float) -> None:
        """The controller waits for a result."""
        self._waiting.begin(now)

    def wait_ended(self, now: float) -> None:
        """It has it."""
        self._waiting.end(now)

    def is_state(self, size: int) -> bool:
        """Whether a copy of so many bytes to the host is one of state, not of a loss or another metric."""
        return size >= min(4096, max(64, self._carried_bytes // 1000))

    def copy_began(self, now: float) -> None:
        """State is being copied to the host."""
        position = self._position + len(self._pending)
        complete = 0 < SAVE_COMPLETE * self._carried_bytes <= self._save_bytes and position > self._save_begun
        if self._saving.idle and (complete or now - self._last_copy > COPY_GAP_SECONDS):
            self._save_begun = position
            self._save_began_at = now
            self._save_bytes = 0
            self._save_whole = False
        self._saving.begin(now)

    def copy_ended(self, now: float, size: int) -> None:
        """It is there, all bytes of it (0: it failed)."""
        self._saving.end(now)
        self._last_copy = now
        self._save_bytes += size
        self._look_for_save()

    def _look_for_save(self) -> None:
        if not self._save_whole and 0 < self._carried_bytes <= 2 * self._save_bytes:
            self._save_whole = True
            self.saves += 1
            if self._recovery is None:
                self._saved_position = self._save_begun

    def put(self, now: float, size: int) -> None:
        """Data were put on devices."""
        gap = now - self._last_put
        if gap < PUT_GAP_SECONDS:
            self._putting += gap
        self._last_put = now
        self._put_bytes += size
        if self._recovery is not None:
            self._recovery.arrays(self.mark(now))

    def read_began(self, now: float) -> None:
        """Workers read data from storage on to devices."""
        self._reading.begin(now)
        if self._recovery is not None:
            self._recovery.arrays(self.mark(now))

    def read_ended(self, now: float, size: int) -> None:
        """So many bytes are there (0: it failed)."""
        self._reading.end(now)
        self._put_bytes += size

    def slices_down(self, now: float, down: Collection[int]) -> None:
        """So many slices of the cluster are down."""
        before = self._uses(self._down)
        self._down = frozenset(down)
        self._slices_changed(now, before)

    def _uses(self, slices: frozenset[int]) -> bool:
        return bool(slices if self._slices is None else slices & self._slices)

    def _slices_changed(self, now: float, before: bool) -> None:
        after = self._uses(self._down)
        if after and not before:
            self._slice_down.begin(now)
        elif before and not after:
            self._slice_down.end(now)

    # ---- steps

    def step_program_found(
        self, now: float, name: str, carried_bytes: int, slices: Collection[int], first: Mark
    ) -> None:
        """From now on this is the step program; ``first`` is the mark of its first execution.

        Args:
          carried_bytes: of the arrays that it takes and gives again, that is of the state.
          slices: on which it runs.
        """
        if self.step_program is not None and self._origin is not None and first.at - self._phase_began < PHASE_SECONDS:
            # What recurred so far belonged to the start.
            self._base, seconds = self._origin
            self._seconds = dict(seconds)
            self._pending = []
            self._position = self._farthest = self._saved_position = self.steps = self.repeated_steps = 0
            self.saves = 0
            self._steps_timed = self._step_seconds = self._ahead_seconds = 0.0
        elif self._pending:
            self._settle_steps(force=True)
            self._base = self._pending.pop()
            self._steps_timed = self._step_seconds = self._ahead_seconds = 0.0
        self.step_program = name
        self._carried_bytes = carried_bytes
        self.runs_on(now, slices)
        self._phase_began = first.at
        if self._recovery is not None:
            return
        first = max(first, self._base)
        if self._lost is not None:
            self._steps_before_loss = int(first.at <= self._lost.at)
        self._settle_other(self._base, first)
        if not self.saves and self._save_began_at >= first.at:
            # The first step was perhaps saved when it was not known yet how much a state is.
            self._save_begun = 1
            self._save_whole = False
            self._look_for_save()
        self._pending = [first]

    def runs_on(self, now: float, slices: Collection[int]) -> None:
        """The slices that the step program runs on (fewer after a resize)."""
        before = self._uses(self._down)
        self._slices = frozenset(slices)
        self._slices_changed(now, before)

    def step(self, now: float) -> None:
        """The step program is dispatched."""
        if self._recovery is not None:
            self._recovery.step(self.mark(now))
            return
        self._pending.append(self.mark(now))
        if len(self._pending) > SETTLE_EVERY:
            if self._lost is None:
                self._settle_steps()
            elif len(self._pending) > UNDECIDED_STEPS:
                self.undisturbed()

    def tick(self, now: float) -> None:
        """Decide what can be decided by now."""
        if self.ended:
            return
        if self._recovery is not None:
            if self._recovery.entry is None:
                self._settle_recovery(self.mark(now))
        elif self._lost is None:
            self._settle_steps()

    def _typical(self) -> float | None:
        return self._step_seconds / self._steps_timed if self._steps_timed else None

    def _settle_steps(self, force: bool = False) -> None:
        """Decide the intervals between steps; the last step's goes on."""
        pending = self._pending
        if len(pending) < 2:
            return
        if not self._steps_timed:
            if len(pending) <= STEPS_TO_JUDGE and not force:
                return
            intervals = [
                max(0.0, b.at - a.at - (b.compiling - a.compiling))
                for a, b in itertools.pairwise(pending)
            ]
            self._step_seconds, self._steps_timed = statistics.median(intervals), 1.0
        for a, b in itertools.pairwise(pending):
            self._settle_step(a, b)
        del pending[:-1]

    def _settle_step(self, a: Mark, b: Mark, broken_off: bool = False) -> None:
        """Decide what the time from the dispatch of a step at ``a`` to the next one, or to a loss, at ``b`` was."""
        silent = broken_off and self._lost_silently
        rest = self._take(COMPILING, b.compiling - a.compiling, b.at - a.at)
        typical = self._typical() or 0.0
        stepping = rest
        if rest > LONG_FACTOR * typical + LONG_SECONDS or (silent and rest > typical):
            stepping = min(rest, typical + self._ahead_seconds)
            excess = rest - stepping
            if silent:
                excess = self._take(WAITING_FOR_HARDWARE, excess, excess)
            excess = self._explain(a, b, excess)
            waited = min(excess, b.waiting - a.waiting)
            stepping += waited
            self._take(UNATTRIBUTED, excess - waited, excess - waited)
        repeated = self._position < self._farthest
        self._take(REPEATING if repeated else STEPPING, stepping, stepping)
        if broken_off:
            return
        self._position += 1
        self._farthest = max(self._farthest, self._position)
        self.steps += 1
        self.repeated_steps += repeated
        self._ahead_seconds = min(max(0.0, self._ahead_seconds + typical - stepping), STEPS_AHEAD * typical)
        self._step_seconds += stepping
        self._steps_timed += 1.0
        if self._steps_timed > STEPS_REMEMBERED:
            self._step_seconds /= 2
            self._steps_timed /= 2

    def _settle_other(self, a: Mark, b: Mark) -> None:
        """Decide a stretch without steps."""
        rest = self._take(COMPILING, b.compiling - a.compiling, b.at - a.at)
        rest = self._explain(a, b, rest)
        self._take(UNATTRIBUTED, rest, rest)
        self._base = b

    def _explain(self, a: Mark, b: Mark, excess: float) -> float:
        """Find reasons for time in which no step was done; returns what is left."""
        if 0 < self._carried_bytes <= 2 * (b.put_bytes - a.put_bytes):
            excess = self._take(RESTORING, b.putting - a.putting, excess)
        excess = self._take(SAVING, b.saving - a.saving, excess)
        return self._take(WAITING_FOR_HARDWARE, b.down - a.down, excess)

    def _take(self, category: str, seconds: float, available: float) -> float:
        """Put up to so many of the available seconds under a category; returns what is left."""
        taken = max(0.0, min(seconds, available))
        self._seconds[category] += taken
        return max(0.0, available - taken)

    # ---- losses

    def lost(self, now: float, silent: bool) -> None:
        """An executor was lost, perhaps none that this session needs; ``silent``: it had stopped some time before."""
        mark = self.mark(now)
        if self._recovery is not None:
            self._settle_recovery(mark)
            self._recovery = _Recovery()
            return
        if self._lost is not None:
            if now - self._lost.at <= LOSS_UNNOTICED_SECONDS:
                self._lost_silently = self._lost_silently or silent
                return
            self.undisturbed()
        self._settle_steps(force=True)
        self._lost = mark
        self._lost_silently = silent
        self._steps_before_loss = len(self._pending)

    def undisturbed(self) -> None:
        """What was lost was nothing of this session's."""
        self._lost = None
        if self._recovery is None:
            self._settle_steps()

    def error(self, now: float) -> None:
        """The loss reached the controller as an error."""
        if self._recovery is not None:
            self._recovery = _Recovery()
            return
        lost = self._lost or self.mark(now)
        # What was dispatched since the loss was never done.
        steps = self._pending[: self._steps_before_loss] if self._lost is not None else self._pending
        if steps:
            self._pending = steps
            self._settle_steps(force=True)
            self._settle_step(self._pending[-1], lost, broken_off=True)
        else:
            lost = max(lost, self._base)
            self._settle_other(self._base, lost)
        self._pending = []
        self._base = lost
        self._lost = None
        self._origin = None
        self._recovery = _Recovery()

    def probe(self, now: float) -> None:
        """The controller asks whether a slice is up."""
        if self._recovery is not None:
            self._recovery.probe()

    def program(self, now: float) -> None:
        """A program that is neither a probe nor the step is dispatched."""
        if self._recovery is not None:
            self._recovery.program(self.mark(now))

    def recovered(self, now: float, started: float) -> None:
        """A step that was dispatched at ``started`` is complete: the session is at work again."""
        recovery = self._recovery
        if recovery is None:
            self._lost = None
            return
        before = sum(mark.at <= started for mark in recovery.steps)
        steps = recovery.steps[max(0, before - 1) :] or [self.mark(now)]
        self._settle_recovery(steps[0])
        self._recovery = None
        self.recoveries += 1
        self._pending = steps
        self._position = min(self._saved_position, self._farthest)
        self._ahead_seconds = 0.0

    def _settle_recovery(self, until: Mark) -> None:
        recovery = self._recovery
        assert recovery is not None
        entry = recovery.entry or until
        if entry.at > until.at:
            entry = until
        for category, a, b in ((WAITING_FOR_HARDWARE, self._base, entry), (RESTORING, entry, until)):
            rest = self._take(COMPILING, b.compiling - a.compiling, b.at - a.at)
            self._take(category, rest, rest)
        self._base = until

    # ---- the end

    def end(self, now: float) -> None:
        """The session is over: everything is decided."""
        if self.ended:
            return
        mark = self.mark(now)
        self._lost = None
        if self._recovery is not None:
            self._settle_recovery(mark)
        elif self._pending:
            self._settle_steps(force=True)
            self._settle_step(self._pending[-1], mark)
        else:
            self._settle_other(self._base, mark)
        self._pending = []
        self.ended = True


class _Recovery:
    """From an error to the next step: when the controller entered its function again."""

    __slots__ = ("_by_program", "_probed", "entry", "steps")

    def __init__(self) -> None:
        self.entry: Mark | None = None
        self.steps: list[Mark] = []
        """dispatches of the step program"""
        self._probed = False
        self._by_program = False

    def probe(self) -> None:
        """Asking for slices comes before the function, but a thread goes on asking beside it for those down; what was
        dispatched before the first question belonged to the attempt that failed."""
        if not (self._probed and self._by_program):
            self.entry = None
            self._by_program = False
            self.steps = []
        self._probed = True

    def arrays(self, mark: Mark) -> None:
        """A probe makes arrays too; then it follows and says so."""
        if self.entry is None:
            self.entry = mark

    def program(self, mark: Mark) -> None:
        """Only the function has programs that are no probes."""
        if self.entry is None:
            self.entry = mark
        self._by_program = True

    def step(self, mark: Mark) -> None:
        """The step program."""
        self.program(mark)
        if len(self.steps) < UNDECIDED_STEPS:
            self.steps.append(mark)
