"""Which executors share an XLA world: the pure state machine of generations.

An executor starts alone: programs on its own devices need nobody else.  A generation is formed when a program
first spans executors that share none yet; it takes in everybody who shares one with a member already, so that
generations never overlap.  It ends with the first loss of a member, or a failure among its members, or by
merging into a larger one.  All orders to an executor are in one sequence, so a program may be dispatched right
behind the order to enter its generation; nobody waits here.
"""

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Enter:
    """Order every member, in rank order, to leave what it is in and to enter the generation."""

    generation: int
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """Have members stop the generation's collectives now (out of band), and those in ``leaving`` leave it (in
    order); the others have orders to enter a later generation already."""

    generation: int
    members: tuple[int, ...]
    leaving: tuple[int, ...]
    cause: str


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """Order members to leave the generation in an orderly way: what they were ordered before comes to its end."""

    generation: int
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """Every member has entered."""

    generation: int
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Recycle:
    """A member did not leave in time after an abort: kill it."""

    executor: int
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Retire:
    """Nobody is in the generation any more: its key-value service can go."""

    generation: int


Effect = Enter | Abort | Leave | Ready | Recycle | Retire


@dataclasses.dataclass(slots=True)
class Generation:
    """One generation."""

    number: int
    members: tuple[int, ...]
    entered: set[int] = dataclasses.field(default_factory=set)
    aborted: bool = False
    cause: str = ""
    remaining: set[int] = dataclasses.field(default_factory=set)
    """Members that may still be attached to its key-value service."""
    dissolved: frozenset[int] = frozenset()
    """Members that were ordered to leave it while it stood."""

    @property
    def ready(self) -> bool:
        """Whether every member has entered and none has been ordered to leave, lost, or gone on to a later one (and
        perhaps lost there)."""
        return not self.aborted and not self.dissolved and len(self.entered) == len(self.members) == len(self.remaining)


class Generations:
    """Every generation that is not retired, and where each executor is."""

    def __init__(self) -> None:
        self.generations: dict[int, Generation] = {}
        self.current: dict[int, int] = {}
        """executor -> the generation that its last orders were for; absent: alone"""
        self._leaving: dict[tuple[int, int], float] = {}
        """(executor, aborted generation) -> when it was told to leave"""
        self._next = 0

    def add(self, executor: int) -> None:
        """An executor became active."""
        self.current.pop(executor, None)

    def generation_of(self, executor: int) -> Generation | None:
        """The generation that an order sent now would run in."""
        number = self.current.get(executor)
        return None if number is None else self.generations[number]

    def need(self, executors: Iterable[int]) -> list[Effect]:
        """A program spans these executors (in ascending slot order; all of them live)."""
        wanted = tuple(dict.fromkeys(executors))
        if len(wanted) == 1:
            return []
        present = {self.current.get(executor) for executor in wanted}
        if len(present) == 1 and None not in present:
            return []
        members = list(wanted)
        for number in sorted(n for n in present if n is not None):
            members += [
                m for m in self.generations[number].members if m not in members and self.current.get(m) == number
            ]
        self._next += 1
        generation = Generation(self._next, tuple(members), remaining=set(members))
        self.generations[generation.number] = generation
        for member in members:
            self.current[member] = generation.number
        return [Enter(generation.number, generation.members)]

    def entered(self, executor: int, number: int) -> list[Effect]:
        """A member has made its client. Said again, or by somebody who is lost, it means nothing."""
        generation = self.generations.get(number)
        if generation is None or executor not in generation.remaining or executor in generation.entered:
            return []
        effects = self._detach_from_earlier(executor, number)
        generation.entered.add(executor)
        if generation.ready:
            effects.append(Ready(number, generation.members))
        return effects

    def dissolve(self, executor: int) -> list[Effect]:
        """An executor is to be alone after what it was ordered so far: everybody leaves its generation, and nobody in
        the middle of anything."""
        number = self.current.get(executor)
        if number is None:
            return []
        generation = self.generations[number]
        leaving = tuple(m for m in generation.members if self.current.get(m) == number)
        for member in leaving:
            del self.current[member]
        generation.dissolved |= set(leaving)
        return [Leave(number, leaving)]

    def failed(self, now: float, number: int, cause: str) -> list[Effect]:
        """Something broke among the members: entering failed, or one rejected what others run."""
        generation = self.generations.get(number)
        if generation is None or generation.aborted:
            return []
        return self._abort(now, generation, cause, lost=None)

    def lost(self, now: float, executor: int, cause: str) -> list[Effect]:
        """An executor is gone."""
        effects: list[Effect] = []
        self.current.pop(executor, None)
        for key in [key for key in self._leaving if key[0] == executor]:
            del self._leaving[key]
        for generation in list(self.generations.values()):
            if executor in generation.members and not generation.aborted and executor in generation.remaining:
                effects += self._abort(now, generation, cause, lost=executor)
        for generation in list(self.generations.values()):
            effects += self._detach(executor, generation)
        return effects

    def left(self, executor: int, number: int) -> list[Effect]:
        """A member has left an aborted generation, and with it every earlier one: orders are in sequence."""
        effects = self._detach_from_earlier(executor, number)
        self._leaving.pop((executor, number), None)
        generation = self.generations.get(number)
        return effects if generation is None else effects + self._detach(executor, generation)

    def forgive(self, seconds: float) -> None:
        """The head itself stood still for so long: who left meanwhile could not be heard."""
        for key in self._leaving:
            self._leaving[key] += seconds

    def tick(self, now: float, drain_deadline_seconds: float, progressed: Mapping[int, float]) -> list[Effect]:
        """Time has passed: whoever should have left by now, and has not even progressed (``executor -> when``)
        for as long, is recycled."""
        for executor, number in self._leaving:
            if self._is_entering_earlier(executor, number):
                self._leaving[(executor, number)] = now
        late = [
            (executor, generation)
            for (executor, generation), since in self._leaving.items()
            if now - max(since, progressed.get(executor, since)) >= drain_deadline_seconds
        ]
        for key in late:
            del self._leaving[key]
        return [Recycle(executor, generation) for executor, generation in late]

    def _is_entering_earlier(self, executor: int, number: int) -> bool:
        """Whether an executor is still busy with an earlier generation's making, which has a deadline of its own: it
        cannot leave the later one before, and that is not its fault."""
        return any(
            generation.number < number
            and not generation.aborted
            and executor in generation.remaining
            and executor not in generation.entered
            for generation in self.generations.values()
        )

    def _abort(self, now: float, generation: Generation, cause: str, lost: int | None) -> list[Effect]:
        generation.aborted = True
        generation.cause = cause
        members = tuple(m for m in generation.members if m != lost and m in generation.remaining)
        leaving = tuple(m for m in members if self.current.get(m) == generation.number)
        for member in leaving:
            del self.current[member]
            self._leaving[(member, generation.number)] = now
        for member in generation.dissolved.intersection(members):
            # Was going to leave anyway, at the end of something that now has no end.
            self._leaving[(member, generation.number)] = now
        return [Abort(generation.number, members, leaving, cause)]

    def _detach_from_earlier(self, executor: int, number: int) -> list[Effect]:
        effects: list[Effect] = []
        for generation in list(self.generations.values()):
            if generation.number < number and executor in generation.remaining:
                self._leaving.pop((executor, generation.number), None)
                effects += self._detach(executor, generation)
        return effects

    def _detach(self, executor: int, generation: Generation) -> list[Effect]:
        generation.remaining.discard(executor)
        if not generation.remaining and generation.number in self.generations:
            in_use = any(number == generation.number for number in self.current.values())
            if not in_use:
                del self.generations[generation.number]
                return [Retire(generation.number)]
        return []

    def check_invariants(self, live: Iterable[int]) -> None:
        """Used by simulations.

        Raises:
          AssertionError: an executor in two generations, or in one that was aborted.
        """
        live = set(live)
        for executor, number in self.current.items():
            assert executor in live, f"executor {executor} is lost but in generation {number}"
            assert not self.generations[number].aborted, f"executor {executor} in aborted generation {number}"
            assert executor in self.generations[number].members
        for generation in self.generations.values():
            assert len(set(generation.members)) == len(generation.members)
