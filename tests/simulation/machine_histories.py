"""Histories of the pure machines alone: any event at any moment, from anybody, also twice, late and out of order."""

import random

from ridgeway.cluster import generations as generation_machine
from ridgeway.cluster import membership as membership_machine
from ridgeway.cluster.generations import Generations
from ridgeway.cluster.membership import HostState, Limits, Loss, Membership
from ridgeway.cluster.suspension import Phase
from ridgeway.cluster.topology import Topology

LIMITS = Limits(
    heartbeat_timeout_seconds=5.0,
    suspect_after_seconds=2.0,
    executor_start_timeout_seconds=8.0,
    progress_deadline_seconds=12.0,
    suspend_timeout_seconds=20.0,
)
DRAIN_SECONDS = 1.0
EVENTS = 80


def run_machine_history(seed: str) -> None:
    """Live through a history.

    Raises:
      AssertionError: a rule was broken; the message says how to see it again.
    """
    try:
        history = _MachineHistory(random.Random(seed))
        for _ in range(EVENTS):
            history.event()
        history.everybody_behaves()
        history.everybody_dies()
    except AssertionError as error:
        replay = f".venv/bin/python tests/simulation/machine_histories.py {seed}"
        raise AssertionError(f"machine history {seed}: {error}\nAgain: {replay}") from error


class _MachineHistory:
    def __init__(self, chance: random.Random):
        self._chance = chance
        shape = chance.choice(((1, 1, 1), (2, 1, 1), (3, 1, 2), (2, 2, 1), (3, 2, 1)))
        self._topology = Topology(*shape)
        self._membership = Membership(self._topology, LIMITS)
        self._generations = Generations()
        self._now = 0.0
        self._agents: list[int] = []
        """every agent there ever was"""
        self._executors: list[tuple[int, int]] = []
        """every (agent, executor) that was ever ordered"""
        self._active: dict[int, int] = {}
        """slot -> executor, as the effects say"""
        self._ever_active: set[int] = set()
        self._suspended: dict[int, int] = {}
        """slot -> executor whose state is saved"""
        self._lost: set[int] = set()
        self._attached: dict[int, set[int]] = {}
        """generation -> members that have not left it"""
        self._aborted: set[int] = set()
        self._dissolved: dict[int, set[int]] = {}
        """generation -> members that were ordered to leave it while it stood"""
        self._retired: set[int] = set()

    # ---- effects

    def _apply(self, effects: list[membership_machine.Effect]) -> None:
        for effect in effects:
            match effect:
                case membership_machine.StartProcess(agent, "executor", number):
                    assert number not in [known for _, known in self._executors], "a number was used twice"
                    self._executors.append((agent, number))
                case membership_machine.ActivateExecutor(number, slot, _):
                    assert slot not in self._active, f"two executors in slot {slot}"
                    assert number not in self._ever_active, f"executor {number} came back"
                    self._active[slot] = number
                    self._ever_active.add(number)
                    self._generations.add(number)
                case membership_machine.LoseExecutor(number, slot, loss):
                    owner = self._active.pop(slot, None) or self._suspended.pop(slot)
                    assert owner == number, f"executor {number} was lost but did not own slot {slot}"
                    assert number not in self._lost, f"executor {number} was lost twice"
                    self._lost.add(number)
                    assert loss.description
                    for members in self._attached.values():
                        members.discard(number)
                    self._follow(self._generations.lost(self._now, number, loss.description))
                case membership_machine.SuspendExecutor(number, slot, _):
                    assert self._active[slot] == number
                    self._follow(self._generations.dissolve(number))
                    assert self._generations.generation_of(number) is None
                case membership_machine.SuspendedExecutor(number, slot):
                    assert self._active.pop(slot) == number
                    self._suspended[slot] = number
                    for members in self._attached.values():
                        members.discard(number)
                case membership_machine.RestoreExecutor(number, slot):
                    assert slot in self._suspended and slot not in self._active
                    assert number not in self._ever_active
                case membership_machine.ResumeExecutor(owner, number, slot):
                    assert self._suspended.pop(slot) == owner
                    assert owner not in self._lost, f"executor {owner} was lost and came back"
                    assert number not in self._ever_active, f"executor {number} came back"
                    self._active[slot] = number
                    self._ever_active.add(number)
                    self._generations.add(number)
                case membership_machine.ReleaseAgent(agent, _):
                    self._agents.remove(agent)
        self._check()

    def _follow(self, effects: list[generation_machine.Effect]) -> None:
        recycled: list[generation_machine.Recycle] = []
        for effect in effects:
            match effect:
                case generation_machine.Enter(number, members):
                    assert set(members) <= set(self._active.values()), "a lost executor was ordered into a generation"
                    assert number not in self._attached
                    self._attached[number] = set(members)
                case generation_machine.Abort(number, members, leaving, cause):
                    assert number not in self._aborted, f"generation {number} was aborted twice"
                    assert cause
                    assert set(leaving) <= set(members) <= self._attached[number]
                    self._aborted.add(number)
                case generation_machine.Leave(number, members):
                    assert number not in self._aborted
                    assert set(members) <= self._attached[number]
                    self._dissolved.setdefault(number, set()).update(members)
                case generation_machine.Ready(number, members):
                    assert number not in self._aborted, f"generation {number} was aborted and became ready"
                    assert number not in self._dissolved, f"generation {number} was dissolved and became ready"
                    assert set(members) <= set(self._active.values())
                case generation_machine.Retire(number):
                    assert number not in self._retired, f"generation {number} was retired twice"
                    assert not self._attached[number], f"generation {number} was retired with members in it"
                    self._retired.add(number)
                case generation_machine.Recycle():
                    recycled.append(effect)
        for effect in recycled:
            loss = Loss(False, f"it did not leave generation {effect.generation}")
            self._apply(self._membership.recycle_executor(self._now, effect.executor, loss))

    def _check(self) -> None:
        self._membership.check_invariants()
        self._generations.check_invariants(self._active.values())
        assert self._membership.active == self._active
        for slot in range(self._topology.slots):
            ready = self._membership.host_state(slot) in (HostState.READY, HostState.SUSPECT)
            assert ready <= (slot in self._active)
        for index in range(self._topology.slices):
            up = all(slot in self._active for slot in self._topology.slots_of_slice(index))
            assert self._membership.slice_is_up(index) == up

    # ---- events

    def event(self) -> None:
        """Anything."""
        chance = self._chance
        membership, generations = self._membership, self._generations
        self._now += chance.choice((0.0, 0.01, 0.1, 0.5, 1.0))
        match chance.randrange(22):
            case 0 | 1:
                self._join(chance.choice((None, *range(self._topology.slots))), chance.random() < 0.3)
            case 2 | 3 | 4 if self._executors:
                self._connect(*chance.choice(self._executors[-4:]))
            case 5 if self._agents:
                agent = chance.choice(self._agents)
                stale = agent not in membership.agents
                self._obey(membership.agent_closed(self._now, agent, "closed"), stale)
            case 6 if self._executors:
                executor = chance.choice(self._executors)[1]
                stale = executor not in membership.executors
                self._obey(membership.executor_closed(self._now, executor, "closed"), stale)
            case 7 if self._agents:
                self._apply(membership.agent_draining(chance.choice(self._agents)))
            case 8:
                self._everybody_speaks(0.7)
            case 9:
                self._apply(membership.tick(self._now))
                self._follow(generations.tick(self._now, DRAIN_SECONDS, {}))
            case 10 | 11 if usable := self._usable():
                count = chance.randint(1, len(usable))
                wanted = chance.sample(usable, count)
                self._follow(generations.need(wanted))
                if count > 1:
                    assert len({generations.current[executor] for executor in wanted}) == 1
            case 12 | 13:
                self._enter_or_leave(everybody=False)
            case 14 if self._attached:
                self._follow(generations.failed(self._now, chance.choice(list(self._attached)), "it broke"))
            case 20:
                slot = chance.randrange(self._topology.slots)
                self._apply(membership.preempt(self._now, slot, chance.choice((0.0, 1.0, 10.0)), "asked"))
            case 18 | 21 if self._executors:
                self._save_or_restore(chance.choice(self._executors[-6:])[1], chance.random() < 0.2)
            case 19 if chance.random() < 0.2:
                index = chance.randrange(self._topology.slices)
                self._apply(membership.abandon_suspended(self._now, index, "nobody comes"))
            case 15:
                self._now += 3.0
                membership.forgive(3.0)
                generations.forgive(3.0)
            case 16 if self._executors:
                executor = chance.choice(self._executors)[1]
                stale = executor not in membership.executors
                self._obey(membership.recycle_executor(self._now, executor, Loss(False, "hung")), stale)
            case 17 if self._ever_active and self._attached:
                # What somebody says of a generation when he is lost already, or of one that is no more.
                gone = sorted(self._ever_active - set(self._active.values()))
                if gone:
                    executor, number = chance.choice(gone), chance.choice(list(self._attached))
                    assert generations.left(executor, number) == [], "a lost executor left a generation"
                    assert generations.entered(executor, number) == [], "a lost executor entered a generation"
                for executor, number in list(generations.current.items()):
                    if executor in generations.generations[number].entered:
                        assert generations.entered(executor, number) == [], "a generation was entered twice"
        self._check()

    def _obey(self, effects: list[membership_machine.Effect], stale: bool) -> None:
        assert not (stale and effects), f"something stale was obeyed: {effects}"
        self._apply(effects)

    def _usable(self) -> list[int]:
        """Executors that get orders: what is suspended is left alone."""
        return [number for slot, number in self._active.items() if slot not in self._membership.suspensions]

    def _join(self, slot: int | None, standby: bool) -> None:
        number = self._membership.new_number()
        effects = self._membership.agent_joined(self._now, number, None if standby else slot, standby)
        if isinstance(effects[0], membership_machine.Welcome):
            self._agents.append(number)
        self._apply(effects)

    def _connect(self, agent: int, executor: int) -> None:
        known = self._membership.agents.get(agent)
        ordered = known is not None and known.executor is not None and known.executor.number == executor
        again = ordered and known is not None and known.executor is not None and known.executor.connected
        effects = self._membership.executor_joined(self._now, agent, executor)
        refused = len(effects) == 1 and isinstance(effects[0], membership_machine.Refuse)
        assert refused == (not ordered or again), f"executor {executor} of agent {agent}: {effects}"
        self._apply(effects)

    def _save_or_restore(self, executor: int, fails: bool) -> None:
        """An executor is done with what it perhaps was ordered; one that saves has left its generation before."""
        membership = self._membership
        if self._membership.suspensions.of_owner(executor) is not None:
            for number in [n for n, members in self._attached.items() if executor in members]:
                self._dissolved.get(number, set()).discard(executor)
                self._attached[number].discard(executor)
                self._follow(self._generations.left(executor, number))
        if fails:
            self._apply(membership.save_failed(self._now, executor, "no space"))
            self._apply(membership.restore_failed(self._now, executor, "damaged"))
        else:
            self._apply(membership.state_saved(self._now, executor, 10, {}))
            self._apply(membership.state_restored(self._now, executor))

    def _everybody_speaks(self, probability: float) -> None:
        for number in self._agents:
            if self._chance.random() < probability:
                self._apply(self._membership.agent_heard(self._now, number))
        for _, number in self._executors:
            if self._chance.random() < probability:
                busy = self._chance.random() < 0.5
                done = self._chance.randint(0, 3)
                self._apply(self._membership.executor_heard(self._now, number, done, done, busy))

    def _enter_or_leave(self, everybody: bool) -> None:
        """Members do what they were ordered to, in the order of the generations: leave the earlier ones first."""
        for number in list(self._attached):
            for executor in sorted(self._attached[number]):
                if not everybody and self._chance.random() < 0.5:
                    continue
                if executor not in self._active.values():
                    continue
                for earlier in range(1, number):
                    self._attached.get(earlier, set()).discard(executor)
                dissolved = executor in self._dissolved.get(number, set())
                if number in self._aborted or (dissolved and (everybody or self._chance.random() < 0.5)):
                    self._dissolved.get(number, set()).discard(executor)
                    self._attached[number].discard(executor)
                    self._follow(self._generations.left(executor, number))
                else:
                    self._follow(self._generations.entered(executor, number))

    # ---- the end

    def everybody_behaves(self) -> None:
        """Liveness: with hosts for all slots, and all of them well, everything comes up and is left in time."""
        self._now += 1.0
        for slot in range(self._topology.slots):
            if self._membership.suspensions.phase(slot) is Phase.SAVING:
                self._save_or_restore(self._active[slot], False)
        for slot in range(self._topology.slots):
            if self._membership.slots[slot] is None:
                self._join(slot, False)
        for agent in list(self._membership.agents.values()):
            if agent.executor is not None and not agent.executor.connected:
                self._connect(agent.number, agent.executor.number)
        for _, executor in list(self._executors):
            self._save_or_restore(executor, False)
        assert not self._suspended
        self._everybody_speaks(1.0)
        assert all(self._membership.slice_is_up(index) for index in range(self._topology.slices))
        everybody = list(self._active.values())
        self._follow(self._generations.need(everybody))
        self._enter_or_leave(everybody=True)
        if len(everybody) > 1:
            generation = self._generations.generation_of(everybody[0])
            assert generation is not None
            assert generation.ready
            assert set(self._generations.generations) == {generation.number}, "earlier generations are kept"
        self._now += DRAIN_SECONDS
        assert self._generations.tick(self._now, DRAIN_SECONDS, {}) == []

    def everybody_dies(self) -> None:
        """Nothing is left behind."""
        for number in list(self._agents):
            self._apply(self._membership.agent_closed(self._now, number, "the end"))
        self._now += LIMITS.suspend_timeout_seconds
        self._apply(self._membership.tick(self._now))
        assert self._active == {}
        assert self._suspended == {}
        assert self._membership.executors == {}
        assert self._generations.generations == {}
        assert self._generations.current == {}
        assert self._retired == set(self._attached)


if __name__ == "__main__":
    import sys

    for argument in sys.argv[1:]:
        run_machine_history(argument)
