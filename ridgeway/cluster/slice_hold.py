"""Work for a slice that is down, held for a bounded time instead of refused.

pathwaysutils asks every slice whether it lives, and asks again only ten seconds later if one said no.  Holding the
question until the replacement is there (or surely not coming soon) makes recovery start when the slice does.  Only
work that lies wholly on that slice is held, so nothing else waits.

A controller that would go on without the slice (replica-resize) asks the same question, and must not be kept: the
head cannot know its mind, but it can see what is the case.

* Until a controller has been told of a loss, nothing is held: what it still sends to the lost slice is the work that
  is to tell it.
* A slice on its way back (its agents have joined, or the launcher said that it starts one) is held for, up to
  ``probe_hold_seconds`` from the first question.  A launcher says so when it starts a process, not while it still
  waits for a machine, so nothing is held meanwhile.
* Right after a loss nobody can say yet: held until ``replacement_notice_seconds`` after the loss.
* Asked again after a refusal at least ``probe_retry_seconds`` ago, with nothing over several slices in between, the
  controller has nothing to do but wait for the slice: held up to ``probe_hold_seconds`` though nobody announced it,
  but no longer than until another slice comes back, which may be all that it needs.
"""

import dataclasses
import enum
from collections.abc import Callable

from ridgeway.protocol.status import Status, resource_exhausted
from ridgeway.settings import Settings

Continuation = Callable[[Status | None], None]
"""Called once: with None when the slice is up, or with the error that the work ends in."""


class Reason(enum.Enum):
    """Why work is held."""

    ANNOUNCED = "announced"
    NOTICE = "notice"
    """The loss is so fresh that a replacement may yet be announced."""
    AWAITED = "awaited"
    """The controller does nothing but ask for it."""


class Hold:
    """Work that waits for something, in order. ``cause`` says for what: "slice 2"."""

    def __init__(self, cause: str, limit: int):
        self._cause = cause
        self._limit = limit
        self._backlog: list[Continuation] = []

    def defer(self, continuation: Continuation) -> None:
        """Hold one piece of work; over the limit it fails at once."""
        if len(self._backlog) >= self._limit:
            continuation(
                resource_exhausted(
                    f"more than {self._limit} operations wait for {self._cause} (pending_order_limit)"
                )
            )
        else:
            self._backlog.append(continuation)

    def finish(self, error: Status | None) -> None:
        """Let everything go on, or fail."""
        backlog, self._backlog = self._backlog, []
        for continuation in backlog:
            continuation(error)


class SliceHold(Hold):
    """The held work of one slice."""

    def __init__(self, slice_index: int, opened: float, deadline: float, limit: int, reason: Reason = Reason.ANNOUNCED):
        super().__init__(f"slice {slice_index}", limit)
        self.slice_index = slice_index
        self.opened = opened
        self.deadline = deadline
        self.reason = reason


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A hold to finish: its slice is up, or is not."""

    hold: SliceHold
    up: bool


class SliceHolds:
    """What is held, and what is known of slices that are away. Pure: times in seconds of any one clock are passed."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self.given_up: dict[int, str] = {}
        """Slice -> why no replacement will come."""
        self._open: dict[int, SliceHold] = {}
        self._expected: dict[int, float] = {}
        """slice -> until when a replacement is believed to come"""
        self._lost_at: dict[int, float] = {}
        self._told_at = float("-inf")
        self._refused_at: dict[int, float] = {}

    # ---- what happens

    def lost(self, now: float, slice_index: int) -> None:
        """A host of a slice was lost."""
        self._lost_at[slice_index] = now

    def told(self, now: float) -> None:
        """A controller was answered with an error that means a lost slice."""
        self._told_at = now

    def expect(self, now: float, slice_index: int) -> None:
        """A replacement for a host of this slice is being started."""
        self._expected[slice_index] = now + self._settings.replacement_expected_seconds
        self.given_up.pop(slice_index, None)

    def give_up(self, slice_index: int, reason: str) -> list[Ended]:
        """No replacement will come."""
        self.given_up[slice_index] = reason
        self._expected.pop(slice_index, None)
        return self._end(slice_index, False)

    def up(self, now: float, slice_index: int) -> list[Ended]:
        """Every host of a slice is ready."""
        for known in (self._expected, self.given_up, self._lost_at, self._refused_at):
            known.pop(slice_index, None)
        soon = now + self._settings.replacement_notice_seconds
        for hold in self._open.values():
            if hold.reason is Reason.AWAITED:
                hold.deadline = min(hold.deadline, soon)
        return self._end(slice_index, True)

    @property
    def watching(self) -> bool:
        """Whether it matters that `spanned` is called."""
        return bool(self._refused_at)

    def spanned(self) -> None:
        """A controller has work over several slices: it does not sit and wait for one."""
        self._refused_at.clear()

    def due(self, now: float, is_joining: Callable[[int], bool]) -> list[Ended]:
        """Time has passed: the holds that have waited long enough."""
        ended: list[Ended] = []
        for hold in list(self._open.values()):
            if hold.reason is not Reason.ANNOUNCED and self._announced(now, hold.slice_index, is_joining):
                hold.reason = Reason.ANNOUNCED
                hold.deadline = hold.opened + self._settings.probe_hold_seconds
            if now >= hold.deadline:
                self._refused_at.setdefault(hold.slice_index, hold.opened)
                ended += self._end(hold.slice_index, False)
        return ended

    # ---- the question

    def find(self, now: float, slice_index: int, is_joining: Callable[[int], bool]) -> tuple[SliceHold | None, bool]:
        """Where work on a slice that is down should wait, None: nowhere; and whether that hold is new."""
        settings = self._settings
        if settings.probe_hold_seconds <= 0 or slice_index in self.given_up:
            return None, False
        hold = self._open.get(slice_index)
        if hold is not None:
            return hold, False
        lost_at = self._lost_at.get(slice_index)
        if lost_at is not None and self._told_at < lost_at:
            return None, False
        refused_at = self._refused_at.get(slice_index)
        deadline = now + settings.probe_hold_seconds
        if self._announced(now, slice_index, is_joining):
            reason = Reason.ANNOUNCED
        elif lost_at is not None and now < lost_at + settings.replacement_notice_seconds:
            reason, deadline = Reason.NOTICE, lost_at + settings.replacement_notice_seconds
        elif refused_at is not None and now >= refused_at + settings.probe_retry_seconds:
            reason = Reason.AWAITED
        else:
            self._refused_at.setdefault(slice_index, now)
            return None, False
        hold = self._open[slice_index] = SliceHold(slice_index, now, deadline, settings.pending_order_limit, reason)
        return hold, True

    def _announced(self, now: float, slice_index: int, is_joining: Callable[[int], bool]) -> bool:
        return self._expected.get(slice_index, float("-inf")) > now or is_joining(slice_index)

    def _end(self, slice_index: int, up: bool) -> list[Ended]:
        hold = self._open.pop(slice_index, None)
        return [] if hold is None else [Ended(hold, up)]
