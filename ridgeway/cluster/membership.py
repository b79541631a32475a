"""Who is here: the pure state machine of hosts, executors and standbys.

Every method takes an event and the time, changes the state and returns the effects that a shell has to carry
out.  There is no clock, socket or thread in here, so whole histories can be simulated from a seed.

A host's life: ``absent -> joining -> ready -> (suspect -> ready)* -> lost``; `lost` is an event, after it the slot
is absent or joining again under a new incarnation.  A host that is preempted goes another way:
``ready -> draining -> suspended -> restoring -> ready``, see `suspension`.

Numbers for agents, executors and compilers come from one counter, so none is ever used twice and anything that names an
old one is stale.
"""

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
    ReleaseAgent,
    RestoreExecutor,
    ResumeExecutor,
    StartProcess,
    SuspendedExecutor,
    SuspendExecutor,
    Welcome,
)
from ridgeway.cluster.membership_records import Agent, Executor, HostState, Limits
from ridgeway.cluster.suspension import Phase, Suspension, Suspensions
from ridgeway.cluster.topology import Topology

EARLY_DEATHS_LIMIT = 3
"""Of processes of one agent that ended before they had joined, so many in a row are replaced at once."""


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
        self.suspensions = Suspensions(limits.suspend_timeout_seconds)
        self._next_number = 0
        self._slice_up = [False] * topology.slices

    def new_number(self) -> int:
        """A number that no process of this cluster ever had."""
        self._next_number += 1
        return self._next_number

    # ---- what is the case

    def host_state(self, slot: int) -> HostState:
        """The state of a slot."""
        phase = self.suspensions.phase(slot)
        if phase is not None:
            return _STATES[phase]
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
            lacking = (s for s, holder in enumerate(self.slots) if holder is None)
            missing = next((s for s in lacking if self.restarts[s] > 0 or s in self.suspensions), None)
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
        agent.early_deaths = 0
        executor.heard = executor.progressed = now
        if agent.slot is None:
            return [Emit("standby_ready", {"incarnation": agent.number, "launch_id": agent.launch_id})]
        return self._take_over(now, agent)

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
        return self._executor_ended(now, executor, Loss(False, description))

    def compiler_closed(self, number: int) -> list[Effect]:
        """A compiler's link ended; its agent starts another one."""
        for agent in self.agents.values():
            if agent.compiler == number:
                agent.compiler = None
                agent.compiler_connected = False
                return self._start_compiler(agent)
        return []

    def process_exited(self, now: float, agent_number: int, number: int) -> list[Effect]:
        """An agent says that a process which it was to start has ended. One that had connected is lost by its link; one
        that had not would be missed only after a long time, as when its template died before it had forked it."""
        agent = self.agents.get(agent_number)
        executor = self.executors.get(number)
        if agent is None or agent.early_deaths >= EARLY_DEATHS_LIMIT:
            return []  # what dies at once again and again is tried at the pace of its deadline
        if executor is not None and executor.agent == agent_number and not executor.connected:
            agent.early_deaths += 1
            return self._lose_executor(now, executor, Loss(False, "its executor ended before it had joined"))
        if agent.compiler == number and not agent.compiler_connected:
            agent.early_deaths += 1
            return self.compiler_closed(number)
        return []

    def recycle_executor(self, now: float, number: int, loss: Loss) -> list[Effect]:
        """An executor is of no more use (it does not drain, say): kill it and go on with another."""
        executor = self.executors.get(number)
        if executor is None:
            return []
        return [KillProcess(executor.agent, number, loss.description), *self._executor_ended(now, executor, loss)]

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
        self.suspensions.forgive(seconds)

    # ---- preemption

    def preempt(self, now: float, slot: int, notice_seconds: float, reason: str) -> list[Effect]:
        """The worker in a slot is going to be taken away in so many seconds. What its executor holds is saved and
        waits for a replacement; one that holds nothing just goes."""
        number = self.slots[slot]
        if number is None:
            return []
        phase = self.suspensions.phase(slot)
        if phase is Phase.SAVING:
            self.suspensions.hasten(now, slot, notice_seconds)
            return []
        agent = self.agents[number]
        about = {
            **self._names(slot), "incarnation": number, "launch_id": agent.launch_id,
            "notice_seconds": notice_seconds, "reason": reason,
        }  # fmt: skip
        effects: list[Effect] = [Emit("preemption_announced", about)]
        executor = self.active.get(slot)
        if executor is None:
            return effects + self._release(now, agent, f"preempted: {reason}")
        self.suspensions.announce(now, slot, executor, number, notice_seconds)
        return [*effects, SuspendExecutor(executor, slot, notice_seconds)]

    def state_saved(self, now: float, executor: int, size: int, about: dict) -> list[Effect]:
        """An executor has written what it holds (``size`` bytes): its worker can go. ``about``: more for the event."""
        suspension = self.suspensions.of_owner(executor)
        if suspension is None:
            return []
        slot = suspension.slot
        agent = self.agents[suspension.agent]
        self.suspensions.saved(now, suspension, size)
        del self.active[slot]
        del self.executors[executor]
        agent.executor = None
        self._slice_up[self.topology.slice_of_slot(slot)] = False
        event = {
            **self._names(slot), "incarnation": agent.number, "launch_id": agent.launch_id, "bytes": size,
            "seconds": round(now - suspension.announced, 4), **about,
        }  # fmt: skip
        return [
            SuspendedExecutor(executor, slot),
            Emit("host_suspended", event),
            *self._release(now, agent, "preempted; its state is saved"),
        ]

    def save_failed(self, now: float, executor: int, text: str) -> list[Effect]:
        """An executor could not write what it holds."""
        suspension = self.suspensions.of_owner(executor)
        if suspension is None:
            return []
        return self._lose_agent(now, suspension.agent, suspension.loss(f"its state could not be saved: {text}"))

    def state_restored(self, now: float, executor: int) -> list[Effect]:
        """A replacement's executor has read the state back."""
        suspension = self.suspensions.of_replacement(executor)
        if suspension is None:
            return []
        self.suspensions.end(suspension)
        slot = suspension.slot
        self.active[slot] = executor
        self.agents[self.executors[executor].agent].replacing = False
        event = {
            **self._names(slot), "incarnation": self.slots[slot], "bytes": suspension.bytes,
            "restore_seconds": round(now - suspension.restore_began, 4),
            "seconds": round(now - suspension.announced, 4),
        }  # fmt: skip
        return [
            ResumeExecutor(suspension.executor, executor, slot),
            Emit("host_resumed", event),
            *self._host_ready(now, slot),
        ]

    def restore_failed(self, now: float, executor: int, text: str) -> list[Effect]:
        """The saved state cannot be read: it is lost, and the replacement is a host like any other."""
        suspension = self.suspensions.of_replacement(executor)
        if suspension is None:
            return []
        return self._fail_suspension(now, suspension, suspension.loss(f"its state could not be restored: {text}"))

    def abandon_suspended(self, now: float, slice_index: int, reason: str) -> list[Effect]:
        """Nobody will come to take a suspended host's place."""
        effects: list[Effect] = []
        for slot in self.topology.slots_of_slice(slice_index):
            suspension = self.suspensions.get(slot)
            if suspension is not None and suspension.phase is Phase.SAVED and self.slots[slot] is None:
                effects += self._fail_suspension(now, suspension, suspension.loss(f"not replaced: {reason}"))
        return effects

    def _fail_suspension(self, now: float, suspension: Suspension, loss: Loss) -> list[Effect]:
        """A saved state is lost. Whoever was reading it is of no use any more: it may hold a part."""
        slot = suspension.slot
        reader = self.executors.get(suspension.replacement or 0)
        slice_index = self.topology.slice_of_slot(slot)
        hosts = self.topology.slots_of_slice(slice_index)
        was_down = any(host not in self.active and host not in self.suspensions for host in hosts)
        self.suspensions.end(suspension)
        effects: list[Effect] = [
            LoseExecutor(suspension.executor, slot, loss),
            self._lost_event(slot, suspension.agent, loss, executor_only=False),
        ]
        if not was_down:
            effects.append(Emit("slice_lost", {"slice": slice_index}))
        if reader is not None:
            effects += self.recycle_executor(now, reader.number, loss)
        return effects

    def _release(self, now: float, agent: Agent, reason: str) -> list[Effect]:
        """An agent leaves as announced. What its executor was reading, another one will read."""
        effects: list[Effect] = []
        if agent.executor is not None:
            effects += self._lose_executor(now, agent.executor, Loss(False, reason), host_too=True)
        del self.agents[agent.number]
        effects.append(ReleaseAgent(agent.number, reason))
        slot = agent.slot
        if slot is not None:
            self.slots[slot] = None
            effects += self._promote_standby(now, slot)
        return effects

    # ---- time

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: apply the deadlines."""
        effects: list[Effect] = []
        limits = self.limits
        for suspension, loss in self.suspensions.overdue(now):
            if suspension.phase is Phase.SAVING:
                effects += self._lose_agent(now, suspension.agent, loss)
            else:
                effects += self._fail_suspension(now, suspension, loss)
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

    def _take_over(self, now: float, agent: Agent) -> list[Effect]:
        """An agent's executor is there and gets the devices of its slot, with what was suspended there."""
        assert agent.slot is not None and agent.executor is not None
        slot, number = agent.slot, agent.executor.number
        suspension = self.suspensions.get(slot)
        if suspension is not None:
            assert suspension.phase is Phase.SAVED
            self.suspensions.restoring(now, suspension, number)
            return [RestoreExecutor(number, slot)]
        self.active[slot] = number
        agent.replacing = False
        return [ActivateExecutor(number, slot, number), *self._host_ready(now, slot)]

    def _host_ready(self, now: float, slot: int) -> list[Effect]:
        number = self.slots[slot]
        assert number is not None
        joined = self.agents[number].joined
        names = self._names(slot)
        effects: list[Effect] = [
            Emit("host_ready", {**names, "incarnation": number, "seconds": round(now - joined, 4)})
        ]
        slice_index = names["slice"]
        if self.slice_is_up(slice_index) and not self._slice_up[slice_index]:
            self._slice_up[slice_index] = True
            effects.append(Emit("slice_ready", {"slice": slice_index}))
        return effects

    def _executor_ended(self, now: float, executor: Executor, loss: Loss) -> list[Effect]:
        """An executor is gone, its agent is not: another one is started, unless that agent is leaving anyway."""
        suspension = self.suspensions.of_owner(executor.number)
        if suspension is not None:
            return self._lose_agent(now, suspension.agent, loss)
        return self._lose_executor(now, executor, loss)

    def _lose_executor(self, now: float, executor: Executor, loss: Loss, host_too: bool = False) -> list[Effect]:
        restored = self.suspensions.of_replacement(executor.number)
        if restored is not None:
            self.suspensions.replacement_lost(restored)
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
            effects.append(self._lost_event(slot, agent.number, loss, executor_only=not host_too))
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
        suspension = self.suspensions.get(slot)
        if suspension is not None and suspension.phase is Phase.SAVING:
            self.suspensions.end(suspension)
            if not loss.description.startswith("preempted"):
                loss = suspension.loss(f"lost before it was saved: {loss.description}")
        if agent.executor is not None:
            was_active = slot is not None and self.active.get(slot) == agent.executor.number
            effects += self._lose_executor(now, agent.executor, loss, host_too=True)
            if slot is not None and not was_active:
                effects.append(self._lost_event(slot, number, loss, executor_only=False, was_joining=True))
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
            effects += self._take_over(now, agent)
        return effects

    def _lost_event(self, slot: int, incarnation: int, loss: Loss, **more: bool) -> Emit:
        code = "DEADLINE_EXCEEDED" if loss.deadline else "DATA_LOSS"
        fields = {**self._names(slot), "incarnation": incarnation, "cause": loss.description, "code": code, **more}
        return Emit("host_lost", fields)

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
        self.suspensions.check_invariants(self.active)


_STATES = {
    Phase.SAVING: HostState.DRAINING, Phase.SAVED: HostState.SUSPENDED, Phase.RESTORING: HostState.RESTORING,
}  # fmt: skip
