"""Where each recovery begins and ends among the events, and which kill began it."""

import dataclasses
import signal
from collections.abc import Collection, Sequence

from ridgeway.timeline.stream import Moment, Run, SessionName, clock_value

#: Losses closer together than this are one recovery, also when the first was over before the second came.
JOINT_LOSS_SECONDS = 1.0

#: A kill this long before a loss was noticed is not its cause. Longer than any deadline by default, the
#: longest being the progress deadline.
KILL_MEMORY_SECONDS = 600.0

#: A loss of which a session took no notice for so long is no part of what comes after.
UNNOTICED_SECONDS = 60.0

#: How far a stated wall time of a kill may seem to be after the loss that it caused.
WALL_CLOCK_SLACK_SECONDS = 0.02

COMPLETED = "completed"
REPAIRED = "repaired"
SESSION_ENDED = "session_ended"
UNFINISHED = "unfinished"

#: Events of a session that are no sign of its having noticed a loss.
_NO_NOTICE = frozenset({"session_started", "step_program"})

_HARMLESS_SIGNALS = frozenset(
    {0}
    | {
        int(getattr(signal, name))
        for name in ("SIGCONT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGWINCH")
        if hasattr(signal, name)
    }
)


@dataclasses.dataclass(slots=True)
class Window:
    """Positions of a recovery in a list of moments, and what was learned while finding them."""

    begin: int
    step: str | None
    """Name of the step program, as last told before."""
    losses: list[Moment] = dataclasses.field(default_factory=list)
    end: int = -1
    """Position of its last moment."""
    outcome: str = UNFINISHED
    concerned: bool = False
    """The session did anything at all since the first loss."""
    down: set[int | None] = dataclasses.field(default_factory=set)
    """Lost slices that are not back."""
    aware: bool = False
    """Since the last loss the session was told, or probed with success: what it starts is a new attempt."""
    step_started: bool = False
    """The step program was started since."""
    step_told: bool = False
    """The step program was told again at the loss."""

    def lose(self, moment: Moment) -> None:
        """One more loss."""
        self.losses.append(moment)
        self.down.add(moment.integer("slice"))
        self.aware = False
        self.step_started = False
        self.outcome = UNFINISHED

    def close(self, position: int, outcome: str) -> None:
        """This was its last moment."""
        self.end = position
        self.outcome = outcome

    def unnoticed(self, moment: Moment) -> bool:
        """Whether, by the time of another loss, the session has had no use for what was lost."""
        return not self.concerned and (not self.down or moment.instant - self.losses[-1].instant > UNNOTICED_SECONDS)

    def joins(self, moment: Moment) -> bool:
        """Whether a loss belongs here although the recovery was over."""
        return self.outcome in (COMPLETED, REPAIRED) and moment.instant - self.losses[-1].instant <= JOINT_LOSS_SECONDS

    def ends(self, moment: Moment) -> bool:
        """Whether a moment of the session is the recovery's end. Takes note of what leads there."""
        match moment.kind:
            case "recovery_completed":
                return True
            case "step_program":
                # The first name told since the loss: a later one may be that of a program that only restores.
                if moment.text("name") and not self.step_told:
                    self.step, self.step_told = moment.text("name"), True
            case "error_raised":
                self.aware = True
                self.step_started = False
            case "probe_answered":
                self.aware = self.aware or moment.flag("ok")
            case "program_started":
                self.step_started = self.step_started or self._is_step(moment)
            case "program_completed" if self._is_step(moment) and moment.fields.get("ok") is not False:
                # Steps that were under way at the loss may still complete. They are not the next step.
                seconds = moment.seconds("seconds")
                if seconds is not None:
                    return moment.instant - seconds >= self.losses[-1].instant
                return self.step_started or self.aware
        return False

    def _is_step(self, moment: Moment) -> bool:
        return self.step is not None and moment.text("name") == self.step


def session_windows(moments: Sequence[Moment], session: SessionName) -> list[Window]:
    """The recoveries of one session, among its moments and those of the cluster during its life.

    Losses of which the session took no notice are left out.
    """
    closed: list[Window] = []
    window: Window | None = None
    step: str | None = None
    for position, moment in enumerate(moments):
        if moment.kind == "host_lost":
            if window is not None and window.unnoticed(moment):
                window = None
            if window is None:
                again = bool(closed) and closed[-1].joins(moment)
                window = closed.pop() if again else Window(position, step)
            window.lose(moment)
        elif moment.kind == "slice_ready" and window is not None:
            window.down.discard(moment.integer("slice"))
        elif moment.session == session:
            if moment.kind == "step_program":
                step = moment.text("name") or step
            if window is None:
                continue
            if moment.kind == "session_ended":
                window.close(position, SESSION_ENDED)
            else:
                window.concerned = window.concerned or moment.kind not in _NO_NOTICE
                if window.ends(moment):
                    window.close(position, COMPLETED)
            if window.end == position:
                closed.append(window)
                window = None
    if window is not None:
        window.close(len(moments) - 1, UNFINISHED)
        closed.append(window)
    return [window for window in closed if window.concerned]


def repair_windows(moments: Sequence[Moment], told: Collection[int]) -> list[Window]:
    """From losses that no session suffered from to all slices being back.

    Args:
      moments: those of the cluster, without the sessions'.
      told: indices of the losses that sessions did suffer from.
    """
    closed: list[Window] = []
    window: Window | None = None
    for position, moment in enumerate(moments):
        if moment.kind == "host_lost" and moment.index not in told:
            if window is None:
                again = bool(closed) and closed[-1].joins(moment)
                window = closed.pop() if again else Window(position, None)
            window.lose(moment)
        elif moment.kind == "slice_ready" and window is not None:
            window.down.discard(moment.integer("slice"))
            if not window.down:
                window.close(position, REPAIRED)
                closed.append(window)
                window = None
    if window is not None:
        window.close(len(moments) - 1, UNFINISHED)
        closed.append(window)
    return closed


class Kills:
    """When what was lost had been killed, as far as anybody said so.

    Args:
      run: all its moments.
      killed_at: wall times of kills that somebody did without telling the head. The last one before a loss is
        taken to be that loss's, and no later one's.
    """

    def __init__(self, run: Run, killed_at: Collection[float]) -> None:
        walls = [clock_value(wall) for wall in killed_at]
        stated = sorted((wall - run.wall_offset for wall in walls if wall is not None), reverse=True)
        self._by_loss: dict[int, tuple[bool, float]] = {}
        """Index of a loss to whether its kill was told by a signal, and the kill's instant."""
        signals: dict[tuple[int | None, int | None], float] = {}
        for moment in run.moments:
            slice_index, host = moment.host
            if moment.kind == "signal_delivered":
                if moment.integer("signal") in _HARMLESS_SIGNALS:
                    signals.pop((slice_index, host), None)
                else:
                    signals.setdefault((slice_index, host), moment.instant)
            elif moment.kind == "slice_ready":
                # A signal to the whole slice stays until the slice is whole again: it has several losses.
                signals.pop((slice_index, None), None)
            elif moment.kind == "host_lost":
                kill: float | None = None
                while stated and stated[-1] <= moment.instant + WALL_CLOCK_SLACK_SECONDS:
                    kill = stated.pop()
                if kill is not None and moment.instant - kill <= KILL_MEMORY_SECONDS:
                    self._by_loss[moment.index] = (False, kill)
                    continue
                sent = [signals.pop((slice_index, host), None), signals.get((slice_index, None))]
                known = [instant for instant in sent if instant is not None]
                if known and moment.instant - min(known) <= KILL_MEMORY_SECONDS:
                    self._by_loss[moment.index] = (True, min(known))

    def of(self, losses: Sequence[Moment]) -> tuple[float, str] | None:
        """Instant and source (`given` or `signal_delivered`) of the kill that began a recovery."""
        detected = losses[0].instant
        known = [
            self._by_loss[loss.index]
            for loss in losses
            if loss.index in self._by_loss and loss.instant - detected <= JOINT_LOSS_SECONDS
        ]
        if not known:
            return None
        # A kill that was stated is exact; a signal is told when its delivery is confirmed.
        by_signal, instant = min(known)
        return min(instant, detected), "signal_delivered" if by_signal else "given"
