"""Who is here: the pure state machine of hosts, executors and standbys.

Every method takes an event and the time, changes the state and returns the effects that a shell has to carry
out.  There is no clock, socket or thread in here, so whole histories can be simulated from a seed.

A host's life: ``absent -> joining -> ready -> (suspect -> ready)* -> lost``; `lost` is an event, after it the slot
is absent or joining again under a new incarnation.  Numbers for agents, executors and compilers come from one
counter, so none is ever used twice and anything that names an old one is stale.
"""

import dataclasses
import enum

from ridgeway.cluster.membership_effects import (
    ActivateExecutor,
    AssignSlot,
    CloseAgent,
    CloseExecutor,
    Effect,
    Emit,
    KillProcess,
    LoseExecutor,
    Loss,
    Refuse,
    StartProcess,
    Welcome,
)
from ridgeway.cluster.topology import Topology


class HostState(enum.Enum):
    """State of a host slot as shown to people."""

    ABSENT = "absent"
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"


@dataclasses.dataclass(slots=True)
class Executor:
    """One executor process as membership sees it."""

    number: int
    agent: int
    started: float
    connected: bool = False
    heard: float = 0.0
    dispatched: int = 0
    completed: int = 0
    outstanding: bool = False
    behind: bool = False
    progressed: float = 0.0


@dataclasses.dataclass(slots=True)
class Agent:
    """One agent as membership sees it."""

    number: int
    slot: int | None
    joined: float
    heard: float
    launch_id: str
    suspect: bool = False
    draining: bool = False
    executor: Executor | None = None
    replacing: bool = False
    """Its active executor was lost, which was counted, and the next one is not ready yet."""
    compiler: int | None = None
    compiler_connected: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The deadlines that membership applies, in seconds."""

    heartbeat_timeout_seconds: float
    suspect_after_seconds: float
    executor_start_timeout_seconds: float
    progress_deadline_seconds: float


class Membership:
    """All agents, and which executor owns which slot."""

    def __init__(self, topology: Topology, limits: Limits):
        self.topology = topology
        self.limits = limits
        self.agents: dict[int, Agent] = {}
        self.slots: list[int | None] = [None] * topology.slots
        self.active: dict[int, int] = {}
        """slot -> executor that owns its devices"""
        self.executors: dict[int, Executor] = {}
        self.restarts: list[int] = [0] * topology.slots
        self._next_number = 0
        self._slice_up = [False] * topology.slices

    def new_number(self) -> int:
        """A number that no process of this cluster ever had."""
        self._next_number += 1
        return self._next_number

    # ---- what is the case

    def host_state(self, slot: int) -> HostState:
        """The state of a slot."""
        number = self.slots[slot]
        if number is None:
            return HostState.ABSENT
        agent = self.agents[number]
        if agent.draining:
            return HostState.DRAINING
        if slot not in self.active:
            return HostState.JOINING
        return HostState.SUSPECT if agent.suspect else HostState.READY

    def slice_is_up(self, slice_index: int) -> bool:
        """Whether every host of a slice is ready."""
        return all(slot in self.active for slot in self.topology.slots_of_slice(slice_index))

    def slice_is_joining(self, slice_index: int) -> bool:
        """Whether a slice is not up but each of its missing hosts has an agent already."""
        return not self.slice_is_up(slice_index) and all(
            self.slots[slot] is not None for slot in self.topology.slots_of_slice(slice_index)
        )

    def standbys(self) -> list[Agent]:
        """Agents without a slot, those with a connected executor first, the oldest first."""
        waiting = [agent for agent in self.agents.values() if agent.slot is None and not agent.draining]
        return sorted(waiting, key=lambda a: (not (a.executor and a.executor.connected), a.number))

    # ---- events

    def agent_joined(
        self, now: float, number: int, slot: int | None, standby: bool, launch_id: str = ""
    ) -> list[Effect]:
        """An authenticated agent of the right version wants slot ``slot``, or to stand by."""
        if slot is None and not standby:
            slot = next((s for s, holder in enumerate(self.slots) if holder is None), None)
            if slot is None:
                return [
                    Refuse(
                        number,
                        f"all {self.topology.slots} host slots of this {self.topology} cluster are taken; "
                        "start it with --standby to have it wait for one",
                    )
                ]
        if slot is not None:
            holder = self.slots[slot]
            if holder is not None:
                return [
                    Refuse(
                        number,
                        f"{self.topology.describe_slot(slot)} is taken (incarnation {holder}); "
                        "stop that worker first, choose another slot or --standby",
                        taken=True,
                    )
                ]
        agent = Agent(number, slot, now, now, launch_id)
        self.agents[number] = agent
        effects: list[Effect] = [Welcome(number, slot)]
        if slot is None:
            missing = next((s for s, holder in enumerate(self.slots) if holder is None and self.restarts[s] > 0), None)
            if missing is not None:
                slot = missing
                effects.append(AssignSlot(number, slot))
        if slot is not None:
            effects += self._take_slot(agent, slot)
        effects += self._start_executor(now, agent)
        effects += self._start_compiler(agent)
        return effects

    def executor_joined(self, now: float, agent_number: int, number: int) -> list[Effect]:
        """An executor that an agent was told to start has connected."""
        agent = self.agents.get(agent_number)
        if agent is None or agent.executor is None or agent.executor.number != number:
            return [Refuse(number, "this executor is stale: its agent is gone or has started another one")]
        executor = agent.executor
        if executor.connected:
            return [Refuse(number, "this executor is connected already; one process has one connection")]
        executor.connected = True
        executor.heard = executor.progressed = now
        if agent.slot is None:
            return [Emit("standby_ready", {"incarnation": agent.number, "launch_id": agent.launch_id})]
        return self._activate(now, agent)

    def compiler_joined(self, agent_number: int, number: int) -> list[Effect]:
        """A compiler that an agent was told to start has connected."""
        agent = self.agents.get(agent_number)
        if agent is None or agent.compiler != number:
            return [Refuse(number, "this compiler is stale: its agent is gone or has started another one")]
        agent.compiler_connected = True
        return []

    def agent_heard(self, now: float, number: int) -> list[Effect]:
        """Anything arrived from an agent."""
        agent = self.agents.get(number)
        if agent is None:
            return []
        agent.heard = now
        agent.suspect = False
        return []

    def executor_heard(
        self, now: float, number: int, dispatched: int, completed: int, outstanding: bool, behind: bool = False
    ) -> list[Effect]:
        """A heartbeat of an executor: orders dispatched and executions completed so far, whether it has accepted
        work that is not done, and whether it was sent orders that it has not even dispatched."""
        executor = self.executors.get(number)
        if executor is None:
            return []
        executor.heard = now
        if (dispatched, completed) != (executor.dispatched, executor.completed) or not outstanding:
            executor.progressed = now
        executor.dispatched, executor.completed = dispatched, completed
        executor.outstanding, executor.behind = outstanding, behind
        return []

    def agent_closed(self, now: float, number: int, description: str) -> list[Effect]:
        """An agent's link ended: its host is lost now."""
        return self._lose_agent(now, number, Loss(False, description))

    def executor_closed(self, now: float, number: int, description: str) -> list[Effect]:
        """An executor's link ended; its agent, if it lives, starts another one."""
        executor = self.executors.get(number)
        if executor is None:
            return []
        return self._lose_executor(now, executor, Loss(False, description))

    def compiler_closed(self, number: int) -> list[Effect]:
        """A compiler's link ended; its agent starts another one."""
        for agent in self.agents.values():
            if agent.compiler == number:
                agent.compiler = None
                agent.compiler_connected = False
                return self._start_compiler(agent)
        return []

    def recycle_executor(self, now: float, number: int, loss: Loss) -> list[Effect]:
        """An executor is of no more use (it does not drain, say): kill it and go on with another."""
        executor = self.executors.get(number)
        if executor is None:
            return []
        return [KillProcess(executor.agent, number, loss.description), *self._lose_executor(now, executor, loss)]

    def agent_draining(self, number: int) -> list[Effect]:
        """An agent was asked to stop."""
        if number in self.agents:
            self.agents[number].draining = True
        return []

    def forgive(self, seconds: float) -> None:
        """The head itself stood still for so long: that silence is nobody's fault."""
        for agent in self.agents.values():
            agent.heard += seconds
        for executor in self.executors.values():
            executor.heard += seconds
            executor.progressed += seconds
            executor.started += seconds

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: apply the deadlines."""
        effects: list[Effect] = []
        limits = self.limits
        for agent in list(self.agents.values()):
            if agent.number not in self.agents:
                continue
            silent = now - agent.heard
            if silent >= limits.heartbeat_timeout_seconds:
                effects += self._lose_agent(
                    now, agent.number, Loss(True, f"no heartbeat for {silent:.1f} s (heartbeat_timeout_seconds)")
                )
                continue
            if silent >= limits.suspect_after_seconds and not agent.suspect:
                agent.suspect = True
                if agent.slot is not None:
                    effects.append(
                        Emit(
                            "host_suspect",
                            {
                                **self._names(agent.slot),
                                "incarnation": agent.number,
                                "silent_seconds": round(silent, 2),
                            },
                        )
                    )
            executor = agent.executor
            if executor is None:
                continue
            if not executor.connected and now - executor.started >= limits.executor_start_timeout_seconds:
                effects += self.recycle_executor(
                    now,
                    executor.number,
                    Loss(True, "its executor did not start in time (executor_start_timeout_seconds)"),
                )
        return effects + self._recycle_stuck_executor(now)

    def _recycle_stuck_executor(self, now: float) -> list[Effect]:
        """Apply the progress deadline.  Whoever waits for a stuck executor, in a collective, is late as well; so only
        one goes at a time, the most suspicious, and the others get time to show that its loss has freed them."""
        deadline = self.limits.progress_deadline_seconds
        connected = [executor for executor in self.executors.values() if executor.connected]
        working = [executor for executor in connected if executor.outstanding]
        silent = max((now - executor.heard for executor in connected), default=0.0)
        waiting = max((now - executor.progressed for executor in working), default=0.0)
        if max(silent, waiting) < deadline:
            return []
        if silent >= deadline / 2:
            stuck = min(connected, key=lambda executor: executor.heard)
            what = f"said nothing for {silent:.1f} s"
        else:
            # Who waits for others has dispatched what it was sent.
            stuck = min(working, key=lambda executor: (not executor.behind, executor.progressed))
            waiting = now - stuck.progressed
            what = f"completed nothing for {waiting:.1f} s"
        for executor in working:
            executor.progressed = max(executor.progressed, now - deadline + self.limits.heartbeat_timeout_seconds)
        description = f"its executor {what} while its agent answered (progress_deadline_seconds)"
        return self.recycle_executor(now, stuck.number, Loss(True, description))

    # ---- transitions

    def _names(self, slot: int) -> dict:
        return {"slice": self.topology.slice_of_slot(slot), "host": self.topology.host_of_slot(slot)}

    def _take_slot(self, agent: Agent, slot: int) -> list[Effect]:
        agent.slot = slot
        self.slots[slot] = agent.number
        return [Emit("host_joining", {**self._names(slot), "incarnation": agent.number, "launch_id": agent.launch_id})]

    def _start_executor(self, now: float, agent: Agent) -> list[Effect]:
        executor = Executor(self.new_number(), agent.number, now)
        agent.executor = executor
        self.executors[executor.number] = executor
        return [StartProcess(agent.number, "executor", executor.number)]

    def _start_compiler(self, agent: Agent) -> list[Effect]:
        agent.compiler = self.new_number()
        return [StartProcess(agent.number, "compiler", agent.compiler)]

    def _activate(self, now: float, agent: Agent) -> list[Effect]:
        assert agent.slot is not None and agent.executor is not None
        slot = agent.slot
        self.active[slot] = agent.executor.number
        agent.replacing = False
        names = self._names(slot)
        effects: list[Effect] = [
            ActivateExecutor(agent.executor.number, slot, agent.executor.number),
            Emit("host_ready", {**names, "incarnation": agent.number, "seconds": round(now - agent.joined, 4)}),
        ]
        slice_index = names["slice"]
        if self.slice_is_up(slice_index) and not self._slice_up[slice_index]:
            self._slice_up[slice_index] = True
            effects.append(Emit("slice_ready", {"slice": slice_index}))
        return effects

    def _lose_executor(self, now: float, executor: Executor, loss: Loss, host_too: bool = False) -> list[Effect]:
        del self.executors[executor.number]
        agent = self.agents[executor.agent]
        agent.executor = None
        effects: list[Effect] = []
        slot = agent.slot
        if slot is not None and self.active.get(slot) == executor.number:
            del self.active[slot]
            self.restarts[slot] += 1
            agent.replacing = True
            names = self._names(slot)
            effects.append(LoseExecutor(executor.number, slot, loss))
            effects.append(
                Emit(
                    "host_lost",
                    {
                        **names,
                        "incarnation": agent.number,
                        "cause": loss.description,
                        "executor_only": not host_too,
                        "code": _code_name(loss),
                    },
                )
            )
            if self._slice_up[names["slice"]]:
                self._slice_up[names["slice"]] = False
                effects.append(Emit("slice_lost", {"slice": names["slice"]}))
        elif executor.connected:
            effects.append(CloseExecutor(executor.number, loss))
        if not host_too:
            effects += self._start_executor(now, agent)
        return effects

    def _lose_agent(self, now: float, number: int, loss: Loss) -> list[Effect]:
        agent = self.agents.get(number)
        if agent is None:
            return []
        effects: list[Effect] = []
        slot = agent.slot
        if agent.executor is not None:
            was_active = slot is not None and self.active.get(slot) == agent.executor.number
            effects += self._lose_executor(now, agent.executor, loss, host_too=True)
            if slot is not None and not was_active:
                effects.append(
                    Emit(
                        "host_lost",
                        {
                            **self._names(slot),
                            "incarnation": number,
                            "cause": loss.description,
                            "executor_only": False,
                            "code": _code_name(loss),
                            "was_joining": True,
                        },
                    )
                )
                if not agent.replacing:  # else one death, whose executor was only seen to go first
                    self.restarts[slot] += 1
        if slot is None:
            effects.append(
                Emit("standby_lost", {"incarnation": number, "launch_id": agent.launch_id, "cause": loss.description})
            )
        del self.agents[number]
        effects.append(CloseAgent(number, loss.description))
        if slot is not None:
            self.slots[slot] = None
            if not agent.draining:
                effects += self._promote_standby(now, slot)
        return effects

    def _promote_standby(self, now: float, slot: int) -> list[Effect]:
        waiting = self.standbys()
        if not waiting:
            return []
        agent = waiting[0]
        effects = [AssignSlot(agent.number, slot), *self._take_slot(agent, slot)]
        agent.joined = now
        if agent.executor is not None and agent.executor.connected:
            effects += self._activate(now, agent)
        return effects

    def check_invariants(self) -> None:
        """Used by simulations.

        Raises:
          AssertionError: two hosts in one slot, an active executor that is not its agent's, and the like.
        """
        holders = [number for number in self.slots if number is not None]
        assert len(holders) == len(set(holders)), "one agent in two slots"
        for slot, number in enumerate(self.slots):
            if number is not None:
                assert self.agents[number].slot == slot, "slot table and agent disagree"
        for agent in self.agents.values():
            assert agent.slot is None or self.slots[agent.slot] == agent.number, "agent thinks it has a slot"
        for slot, number in self.active.items():
            holder = self.slots[slot]
            assert holder is not None, "an executor owns the devices of an absent host"
            executor = self.agents[holder].executor
            assert executor is not None and executor.number == number and executor.connected
        known = {a.executor.number for a in self.agents.values() if a.executor is not None}
        assert known == set(self.executors), "executor table and agents disagree"


def _code_name(loss: Loss) -> str:
    return "DEADLINE_EXCEEDED" if loss.deadline else "DATA_LOSS"
