"""Hosts that were told to leave and are to come back as they were: the pure table of suspensions.

A suspension belongs to a slot and to the executor whose state it is (its *owner*).  It goes through::

    saving -> saved -> restoring -> over, everything is as before
       `---------`---------`-----> failed: what the owner held is lost, as in any other loss

*saving*: the preemption is announced; the owner finishes what it was ordered, leaves its generation with the other
members and writes what it holds.  *saved*: its worker has left, a replacement is awaited.  *restoring*: the
replacement's executor reads the state back; when that one dies, the next may try, as long as there is time.
`membership` does the transitions, this module knows the phases, the deadlines and the words.
"""

import dataclasses
import enum

from ridgeway.cluster.membership_effects import Loss


class Phase(enum.Enum):
    """How far a suspension is."""

    SAVING = "saving"
    SAVED = "saved"
    RESTORING = "restoring"


@dataclasses.dataclass(slots=True)
class Suspension:
    """One host's suspension. Times are seconds of the cluster's clock."""

    slot: int
    executor: int
    """The owner: whose state it is. Its number is stale once the state is saved."""
    agent: int
    """The incarnation that leaves."""
    notice_seconds: float
    announced: float
    deadline: float
    """While saving: when the notice is over; after that: when waiting for a replacement is."""
    phase: Phase = Phase.SAVING
    replacement: int | None = None
    """The executor that restores."""
    bytes: int = 0
    restore_began: float = 0.0

    def loss(self, what: str) -> Loss:
        """Why everything that the owner held is lost after all."""
        return Loss(False, f"preempted with {self.notice_seconds:g} s notice, and {what}")


class Suspensions:
    """All suspensions, by slot."""

    def __init__(self, suspend_timeout_seconds: float):
        self._suspend_timeout_seconds = suspend_timeout_seconds
        self._by_slot: dict[int, Suspension] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._by_slot

    def get(self, slot: int | None) -> Suspension | None:
        """The suspension of a slot."""
        return None if slot is None else self._by_slot.get(slot)

    def phase(self, slot: int | None) -> Phase | None:
        """How far a slot's suspension is; None if it has none."""
        suspension = self.get(slot)
        return None if suspension is None else suspension.phase

    def of_owner(self, executor: int) -> Suspension | None:
        """The suspension whose state is that of an executor which is still saving it."""
        return next((s for s in self._by_slot.values() if s.phase is Phase.SAVING and s.executor == executor), None)

    def of_replacement(self, executor: int) -> Suspension | None:
        """The suspension that an executor restores."""
        return next((s for s in self._by_slot.values() if s.replacement == executor), None)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots with a suspension, ascending."""
        return tuple(sorted(self._by_slot))

    # ---- transitions

    def announce(self, now: float, slot: int, executor: int, agent: int, notice_seconds: float) -> Suspension:
        """A ready host is going to leave."""
        assert slot not in self._by_slot, "one suspension of a slot at a time"
        made = Suspension(slot, executor, agent, notice_seconds, now, now + notice_seconds)
        self._by_slot[slot] = made
        return made

    def hasten(self, now: float, slot: int, notice_seconds: float) -> None:
        """It was announced once more: the nearer end counts."""
        suspension = self._by_slot[slot]
        suspension.deadline = min(suspension.deadline, now + notice_seconds)

    def saved(self, now: float, suspension: Suspension, size: int) -> None:
        """The state is written, and its worker goes."""
        suspension.phase = Phase.SAVED
        suspension.deadline = now + self._suspend_timeout_seconds
        suspension.bytes = size

    def restoring(self, now: float, suspension: Suspension, replacement: int) -> None:
        """A replacement's executor reads the state."""
        suspension.phase = Phase.RESTORING
        suspension.replacement = replacement
        suspension.restore_began = now

    def replacement_lost(self, suspension: Suspension) -> None:
        """The state waits for the next one."""
        suspension.phase = Phase.SAVED
        suspension.replacement = None

    def end(self, suspension: Suspension) -> None:
        """Over, or failed."""
        del self._by_slot[suspension.slot]

    def forgive(self, seconds: float) -> None:
        """The head itself stood still for so long. A notice goes on all the same: the host's end does not wait."""
        for suspension in self._by_slot.values():
            if suspension.phase is not Phase.SAVING:
                suspension.deadline += seconds

    def overdue(self, now: float) -> list[tuple[Suspension, Loss]]:
        """Those whose time is over, and the loss that each of them becomes."""
        late = [suspension for suspension in self._by_slot.values() if now >= suspension.deadline]
        return [(suspension, suspension.loss(self._too_late(suspension))) for suspension in late]

    def _too_late(self, suspension: Suspension) -> str:
        if suspension.phase is Phase.SAVING:
            return "its state was not saved in that time"
        what = "its replacement was not ready" if suspension.phase is Phase.SAVED else "its state was not restored"
        return f"{what} within {self._suspend_timeout_seconds:g} s (suspend_timeout_seconds)"

    def check_invariants(self, active: dict[int, int]) -> None:
        """Used by simulations.

        Raises:
          AssertionError: a suspended host is in use, or one that saves is not.
        """
        for slot, suspension in self._by_slot.items():
            assert suspension.slot == slot
            if suspension.phase is Phase.SAVING:
                assert active.get(slot) == suspension.executor, "an executor saves a state that is not its own"
            else:
                assert slot not in active, "a suspended slot is in use"
            assert (suspension.replacement is not None) == (suspension.phase is Phase.RESTORING)
