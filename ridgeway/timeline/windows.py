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

#: The start of a step so long after a loss, with no error raised, shows that the session was not interrupted.
#: Programs are dispatched ahead, so one started right after a loss may still fail.
STEPPING_ON_SECONDS = 5.0

#: The head records what a loss leads to while it deals with it, some of it before the loss itself.
EARLY_SECONDS = 0.25

#: How long before the end of a cluster its workers may leave.
SHUTDOWN_SECONDS = 5.0

#: What a session does only when something was lost; the head records it only then.
_NOTICE = frozenset({"error_raised", "program_started", "program_completed", "arrays_made", "recovery_completed"})

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
    """Name of the step program."""
    step_told: bool = False
    """It was told at the loss, not some time before."""
    early: list[Moment] = dataclasses.field(default_factory=list)
    """What the loss led to although it was recorded just before."""
    losses: list[Moment] = dataclasses.field(default_factory=list)
    end: int = -1
    """Position of its last moment."""
    outcome: str = UNFINISHED
    concerned: bool = False
    """The session did anything that it would not have done without the loss."""
    down: set[int | None] = dataclasses.field(default_factory=set)
    """Lost slices that are not back."""
    aware: bool = False
    """The session was told since the last loss: what it starts is a new attempt."""
    step_started: int | None = None
    """Position at which the step program was first started since."""

    def lose(self, moment: Moment) -> None:
        """One more loss."""
        self.losses.append(moment)
        self.down.add(moment.integer("slice"))
        self.aware = False
        self.step_started = None
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

    def follow(self, position: int, moment: Moment) -> bool:
        """Take in a moment of the session; whether the recovery is over with it."""
        self.concerned = self.concerned or moment.kind in _NOTICE
        match moment.kind:
            case "session_ended":
                self.close(position, SESSION_ENDED)
            case "recovery_completed":
                self.close(position, COMPLETED)
            case "step_program":
                # The first name told: a later one may be that of a program that only restores.
                if moment.text("name") and not self.step_told:
                    self.step, self.step_told = moment.text("name"), True
            case "error_raised":
                self.aware = True
                self.step_started = None
            case "program_started" if self._is_step(moment):
                if self.step_started is None:
                    self.step_started = position
                if not self.aware and moment.instant - self.losses[-1].instant > STEPPING_ON_SECONDS:
                    # It was never interrupted; the first step since the loss is as good an end as any.
                    self.close(self.step_started, COMPLETED)
            case "program_completed" if self._is_step(moment) and moment.fields.get("ok") is not False:
                # Steps that were under way at the loss may still complete. They are not the next step.
                seconds = moment.seconds("seconds")
                if seconds is None:
                    next_step = self.aware or self.step_started is not None
                else:
                    next_step = moment.instant - seconds >= self.losses[-1].instant
                if next_step:
                    self.close(position, COMPLETED)
        return self.outcome != UNFINISHED

    def _is_step(self, moment: Moment) -> bool:
        return self.step is not None and moment.text("name") == self.step


def session_windows(moments: Sequence[Moment], session: SessionName) -> list[Window]:
    """The recoveries of one session, among its moments and those of the cluster during its life.

    Losses of which the session took no notice are left out.
    """
    closed: list[Window] = []
    window: Window | None = None
    step: str | None = None
    step_at = float("-inf")
    early: list[Moment] = []
    for position, moment in enumerate(moments):
        if moment.kind == "host_lost":
            if window is not None and window.unnoticed(moment):
                window = None
            if window is None:
                early = [m for m in early if moment.instant - m.instant <= EARLY_SECONDS]
                told = moment.instant - step_at <= EARLY_SECONDS
                again = bool(closed) and closed[-1].joins(moment)
                window = closed.pop() if again else Window(position, step, told, early)
            window.lose(moment)
            if any(m.kind == "error_raised" for m in early):
                window.concerned = window.aware = True
            early = []
            continue
        if window is None and moment.kind in ("survivors_aborted", "error_raised"):
            early.append(moment)
        if moment.kind == "step_program" and moment.text("name"):
            step, step_at = moment.text("name"), moment.instant
        if window is None:
            continue
        if moment.kind == "slice_ready":
            window.down.discard(moment.integer("slice"))
        elif moment.session == session and window.follow(position, moment):
            closed.append(window)
            window = None
    if window is not None:
        window.close(len(moments) - 1, UNFINISHED)
        closed.append(window)
    return [window for window in closed if window.concerned]


def shutdown_losses(run: Run) -> set[int]:
    """Indices of the losses that are the cluster's own end, not a failure.

    Workers leave when a cluster is taken down. Theirs are the losses just before `cluster_stopped`, with no
    session left and no return.
    """
    indices: set[int] = set()
    recent: list[Moment] = []
    sessions: set[SessionName | None] = set()
    for moment in run.moments:
        match moment.kind:
            case "session_started":
                sessions.add(moment.session)
            case "session_ended":
                sessions.discard(moment.session)
            case "host_lost" if not sessions:
                recent.append(moment)
            case "slice_ready":
                recent = [loss for loss in recent if loss.integer("slice") != moment.integer("slice")]
            case "cluster_stopped":
                indices.update(m.index for m in recent if moment.instant - m.instant <= SHUTDOWN_SECONDS)
    return indices


def repair_windows(moments: Sequence[Moment], told: Collection[int]) -> list[Window]:
    """From losses that no session suffered from to all slices being back.

    Args:
      moments: those of the cluster, without the sessions'.
      told: indices of the losses to leave out: those that sessions suffered from, those that are no failures.
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
