"""Generations: events in, effects out, with a death at each arrow of their life."""

import pytest

from ridgeway.cluster.generations import Abort, Effect, Enter, Generations, Ready, Recycle, Retire

DRAIN_SECONDS = 1.0


class World:
    """Generations among executors 1, 2, 3, ..., all of them live until `lose`."""

    def __init__(self, executors: int = 4):
        self.machine = Generations()
        self.live = set(range(1, executors + 1))
        for executor in sorted(self.live):
            self.machine.add(executor)

    def need(self, *executors: int) -> list[Effect]:
        return self._checked(self.machine.need(executors))

    def enter(self, number: int, *executors: int) -> list[Effect]:
        effects: list[Effect] = []
        for executor in executors:
            effects += self._checked(self.machine.entered(executor, number))
        return effects

    def form(self, *executors: int) -> int:
        """A generation that is ready; its number."""
        (enter,) = self.need(*executors)
        assert isinstance(enter, Enter)
        self.enter(enter.generation, *enter.members)
        generation = self.machine.generations[enter.generation]
        assert generation.ready
        return enter.generation

    def lose(self, executor: int, now: float = 0.0, cause: str = "killed") -> list[Effect]:
        self.live.discard(executor)
        return self._checked(self.machine.lost(now, executor, cause))

    def leave(self, number: int, *executors: int) -> list[Effect]:
        effects: list[Effect] = []
        for executor in executors:
            effects += self._checked(self.machine.left(executor, number))
        return effects

    def fail(self, number: int, now: float = 0.0, cause: str = "broken") -> list[Effect]:
        return self._checked(self.machine.failed(now, number, cause))

    def tick(self, now: float, progressed: dict[int, float] | None = None) -> list[Effect]:
        return self._checked(self.machine.tick(now, DRAIN_SECONDS, progressed or {}))

    def _checked(self, effects: list[Effect]) -> list[Effect]:
        self.machine.check_invariants(self.live)
        return effects


# ---- forming


def test_a_program_on_one_executor_needs_no_generation() -> None:
    world = World()
    assert world.need(2) == []
    assert world.machine.generation_of(2) is None
    assert world.machine.generations == {}


def test_a_generation_is_formed_when_a_program_first_spans_its_members() -> None:
    world = World()
    assert world.need(1, 3) == [Enter(1, (1, 3))]
    assert world.need(1, 3) == []
    assert world.machine.generation_of(2) is None
    current = world.machine.generation_of(3)
    assert current is not None
    assert current.number == 1
    assert not current.ready


def test_a_program_on_part_of_a_generation_needs_no_new_one() -> None:
    world = World()
    world.form(1, 2, 3)
    assert world.need(1, 3) == []
    assert world.need(3, 2) == []
    assert world.need(2) == []


def test_a_generation_is_ready_when_every_member_has_entered() -> None:
    world = World()
    (enter,) = world.need(1, 2, 3)
    assert isinstance(enter, Enter)
    assert world.enter(1, 1, 3) == []
    assert world.enter(1, 2) == [Ready(1, (1, 2, 3))]


def test_an_executor_named_twice_is_one_member() -> None:
    world = World()
    assert world.need(2, 2) == []
    assert world.need(2, 1, 2) == [Enter(1, (2, 1))]


def test_a_new_generation_takes_in_all_that_share_one_with_its_members() -> None:
    world = World(6)
    world.form(1, 2)
    world.form(3, 4)
    (enter,) = world.need(2, 3)
    assert isinstance(enter, Enter)
    assert sorted(enter.members) == [1, 2, 3, 4]
    assert world.machine.generation_of(5) is None


def test_generations_never_overlap() -> None:
    world = World(6)
    for wanted in [(1, 2), (2, 3), (4, 5), (5, 1), (6, 3)]:
        world.need(*wanted)
        numbers = {world.machine.current[executor] for executor in wanted}
        assert len(numbers) == 1
        members = {e for e in world.live if world.machine.current.get(e) in numbers}
        assert members == set(world.machine.generations[numbers.pop()].members)
    assert len(set(world.machine.current.values())) == 1


# ---- a death at each arrow


def test_a_death_before_anybody_entered_aborts_and_all_survivors_leave() -> None:
    world = World()
    world.need(1, 2, 3)
    assert world.lose(2) == [Abort(1, (1, 3), (1, 3), "killed")]
    assert world.machine.generation_of(1) is None
    assert world.leave(1, 1) == []
    assert world.leave(1, 3) == [Retire(1)]


def test_a_death_when_some_have_entered_aborts_for_those_who_have_and_those_who_have_not() -> None:
    world = World()
    world.need(1, 2, 3)
    world.enter(1, 1)
    assert world.lose(2) == [Abort(1, (1, 3), (1, 3), "killed")]
    # The one that was on its way may still say that it has entered; that is not "ready".
    assert world.enter(1, 3) == []
    assert not world.machine.generations[1].ready
    assert world.leave(1, 3, 1) == [Retire(1)]


def test_a_death_when_the_generation_is_ready_aborts_it() -> None:
    world = World()
    number = world.form(1, 2, 3)
    assert world.lose(1, cause="first cause") == [Abort(number, (2, 3), (2, 3), "first cause")]
    assert world.machine.generations[number].cause == "first cause"
    assert world.need(2, 3) == [Enter(2, (2, 3))]


def test_a_second_death_while_survivors_leave_changes_neither_cause_nor_orders() -> None:
    world = World()
    number = world.form(1, 2, 3)
    world.lose(1, cause="first cause")
    assert world.lose(2, cause="second cause") == []
    assert world.machine.generations[number].cause == "first cause"
    assert world.leave(number, 3) == [Retire(number)]


def test_the_death_of_the_last_one_who_leaves_retires_the_generation() -> None:
    world = World()
    number = world.form(1, 2)
    world.lose(1)
    assert world.lose(2) == [Retire(number)]
    assert world.machine.generations == {}


def test_the_death_of_all_members_at_once_retires_the_generation() -> None:
    world = World()
    world.need(1, 2)
    effects = world.lose(1) + world.lose(2)
    assert effects == [Abort(1, (2,), (2,), "killed"), Retire(1)]


def test_a_death_while_merging_aborts_both_and_orders_members_out_of_the_new_one_only() -> None:
    world = World()
    first = world.form(1, 2)
    (enter,) = world.need(1, 2, 3)
    assert isinstance(enter, Enter)
    second = enter.generation
    effects = world.lose(1)
    # Member 2 may still be blocked in the first one's collectives, so it is told of both out of band.
    assert effects == [Abort(first, (2,), (), "killed"), Abort(second, (2, 3), (2, 3), "killed")]
    assert world.machine.current == {}


def test_a_death_of_the_newcomer_while_merging_leaves_the_old_collectives_running() -> None:
    world = World()
    first = world.form(1, 2)
    (enter,) = world.need(1, 2, 3)
    assert isinstance(enter, Enter)
    # Members finish what they run in the first generation on their way; nobody there is lost.
    assert world.lose(3) == [Abort(enter.generation, (1, 2), (1, 2), "killed")]
    assert not world.machine.generations[first].aborted
    effects = world.leave(enter.generation, 1, 2)
    assert Retire(first) in effects
    assert Retire(enter.generation) in effects
    assert world.machine.generations == {}


def test_a_death_in_a_merged_generation_says_nothing_of_the_one_it_has_left() -> None:
    world = World()
    first = world.form(1, 2)
    (enter,) = world.need(1, 2, 3)
    assert isinstance(enter, Enter)
    assert world.enter(enter.generation, 1) == []
    assert world.enter(enter.generation, 2) == [Retire(first)]
    assert world.lose(1) == [Abort(enter.generation, (2, 3), (2, 3), "killed")]


def test_a_death_when_part_of_the_old_generation_has_moved_on_reaches_only_who_is_left() -> None:
    world = World()
    first = world.form(1, 2)
    (enter,) = world.need(1, 2, 3)
    assert isinstance(enter, Enter)
    world.enter(enter.generation, 1)
    # Executor 1 has left the first generation, so its death cannot break what 2 still runs there.
    effects = world.lose(1)
    assert effects == [Abort(enter.generation, (2, 3), (2, 3), "killed")]
    assert not world.machine.generations[first].aborted


def test_survivors_that_leave_may_be_needed_at_once_in_the_next_generation() -> None:
    world = World()
    first = world.form(1, 2, 3)
    world.lose(1)
    (enter,) = world.need(2, 3)
    assert isinstance(enter, Enter)
    # Entering the next one says as well that the aborted one was left.
    assert world.enter(enter.generation, 2) == []
    assert world.enter(enter.generation, 3) == [Retire(first), Ready(enter.generation, (2, 3))]
    assert world.tick(100.0) == []


# ---- failures without a death


def test_a_failure_aborts_for_every_member() -> None:
    world = World()
    number = world.form(1, 2, 3)
    assert world.fail(number) == [Abort(number, (1, 2, 3), (1, 2, 3), "broken")]
    assert world.fail(number) == []
    assert world.leave(number, 1, 2, 3) == [Retire(number)]


def test_a_failure_to_enter_a_merged_generation_retires_the_old_one_too() -> None:
    world = World()
    first = world.form(1, 2)
    (enter,) = world.need(2, 3)
    assert isinstance(enter, Enter)
    world.fail(enter.generation)
    effects = world.leave(enter.generation, 1, 2, 3)
    assert sorted(e.generation for e in effects if isinstance(e, Retire)) == [first, enter.generation]
    assert world.machine.generations == {}


def test_a_failure_of_a_retired_generation_is_nothing() -> None:
    world = World()
    number = world.form(1, 2)
    world.fail(number)
    world.leave(number, 1, 2)
    assert world.fail(number) == []
    assert world.enter(number, 1) == []
    assert world.leave(number, 1) == []


def test_a_failure_of_a_generation_that_was_merged_reaches_those_who_are_still_in_it() -> None:
    world = World()
    first = world.form(1, 2)
    (enter,) = world.need(1, 2, 3)
    assert isinstance(enter, Enter)
    world.enter(enter.generation, 2)
    assert world.fail(first) == [Abort(first, (1,), (), "broken")]
    assert world.machine.generation_of(1) is not None


# ---- leaving in time


def test_who_does_not_leave_in_time_is_recycled_once() -> None:
    world = World()
    number = world.form(1, 2, 3)
    world.lose(1, now=10.0)
    world.leave(number, 2)
    assert world.tick(10.9) == []
    assert world.tick(11.0) == [Recycle(3, number)]
    assert world.tick(12.0) == []


def test_progress_puts_the_drain_deadline_off() -> None:
    world = World()
    number = world.form(1, 2)
    world.lose(1, now=10.0)
    assert world.tick(11.5, {2: 10.8}) == []
    assert world.tick(11.7, {2: 10.8}) == []
    assert world.tick(11.8, {2: 10.8}) == [Recycle(2, number)]


def test_progress_before_the_abort_does_not_shorten_the_drain_deadline() -> None:
    world = World()
    number = world.form(1, 2)
    world.lose(1, now=10.0)
    assert world.tick(10.9, {2: 3.0}) == []
    assert world.tick(11.0, {2: 3.0}) == [Recycle(2, number)]


def test_a_lost_executor_is_not_recycled() -> None:
    world = World()
    world.form(1, 2)
    world.lose(1, now=10.0)
    world.lose(2, now=10.5)
    assert world.tick(20.0) == []


def test_who_has_orders_for_a_later_generation_is_not_recycled_for_an_earlier_one() -> None:
    world = World()
    first = world.form(1, 2)
    (enter,) = world.need(1, 2, 3)
    assert isinstance(enter, Enter)
    world.fail(first, now=10.0)
    assert world.tick(20.0) == []


def test_who_is_held_up_by_the_making_of_an_earlier_generation_is_not_recycled_for_a_later_one() -> None:
    # Found by a history: 2 was cut off from 1 while it made the first generation, which the second, with 3, followed.
    world = World()
    (first,) = world.need(1, 2)
    (second,) = world.need(1, 2, 3)
    assert isinstance(first, Enter) and isinstance(second, Enter)
    world.lose(3, now=10.0)
    assert world.tick(12.0) == []
    # The first has a deadline of its own; once it is over, by failing or by standing, leaving in time counts again.
    world.fail(first.generation, now=12.5)
    assert world.tick(12.9) == []
    assert {effect.executor for effect in world.tick(13.0) if isinstance(effect, Recycle)} == {1, 2}


def test_silence_while_the_head_itself_stood_still_recycles_nobody() -> None:
    world = World()
    number = world.form(1, 2)
    world.lose(1, now=10.0)
    world.machine.forgive(30.0)
    assert world.tick(40.5) == []
    assert world.tick(41.0) == [Recycle(2, number)]


# ---- the check itself


def test_the_invariants_notice_a_lost_executor_in_a_generation() -> None:
    world = World()
    world.form(1, 2)
    with pytest.raises(AssertionError, match="executor 1 is lost"):
        world.machine.check_invariants({2, 3, 4})


def test_the_invariants_notice_work_in_an_aborted_generation() -> None:
    world = World()
    number = world.form(1, 2)
    world.machine.generations[number].aborted = True
    with pytest.raises(AssertionError, match="aborted"):
        world.machine.check_invariants(world.live)
