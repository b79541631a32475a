"""Membership: events in, effects out; each test is named after what it protects."""

import pytest

from ridgeway.cluster.membership import (
    ActivateExecutor,
    AssignSlot,
    CloseAgent,
    Effect,
    Emit,
    HostState,
    KillProcess,
    Limits,
    LoseExecutor,
    Loss,
    Membership,
    Refuse,
    StartProcess,
    Welcome,
)
from ridgeway.cluster.topology import Topology
from ridgeway.launch import narration, supervision

LIMITS = Limits(
    heartbeat_timeout_seconds=10.0,
    suspect_after_seconds=3.0,
    executor_start_timeout_seconds=60.0,
    progress_deadline_seconds=300.0,
)


def of_kind[E: Effect](effects: list[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def events(effects: list[Effect], kind: str) -> list[dict]:
    return [effect.fields for effect in of_kind(effects, Emit) if effect.kind == kind]


class Cluster:
    """A membership, and short ways to the states that tests begin with."""

    def __init__(self, slices: int = 3, hosts_per_slice: int = 1, devices_per_host: int = 2):
        self.machine = Membership(Topology(slices, hosts_per_slice, devices_per_host), LIMITS)
        self.now = 0.0

    def agent(self, slot: int | None = None, standby: bool = False, launch_id: str = "") -> tuple[int, list[Effect]]:
        number = self.machine.new_number()
        effects = self.machine.agent_joined(self.now, number, slot, standby, launch_id)
        self.machine.check_invariants()
        return number, effects

    def executor(self, agent: int) -> tuple[int, list[Effect]]:
        """Connect the executor that an agent was last told to start."""
        record = self.machine.agents[agent].executor
        assert record is not None
        effects = self.machine.executor_joined(self.now, agent, record.number)
        self.machine.check_invariants()
        return record.number, effects

    def host(self, slot: int | None = None, standby: bool = False, launch_id: str = "") -> tuple[int, int]:
        """A joined agent with a connected executor: their numbers."""
        agent, _ = self.agent(slot, standby, launch_id)
        return agent, self.executor(agent)[0]

    def all_hosts(self) -> list[tuple[int, int]]:
        return [self.host(slot) for slot in range(self.machine.topology.slots)]

    def wait(self, seconds: float, agents: bool = True, executors: bool = True) -> list[Effect]:
        """Let time pass in steps of a heartbeat; those named say that they live."""
        effects: list[Effect] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            for number in list(self.machine.agents) if agents else []:
                self.machine.agent_heard(self.now, number)
            for number, record in list(self.machine.executors.items()) if executors else []:
                if record.connected:
                    self.machine.executor_heard(
                        self.now, number, record.dispatched, record.completed, record.outstanding, record.behind
                    )
            effects += self.machine.tick(self.now)
            self.machine.check_invariants()
        return effects


# ---- joining


def test_a_host_is_ready_when_its_executor_has_connected() -> None:
    cluster = Cluster()
    agent, effects = cluster.agent(1, launch_id="launch-4")
    assert effects[0] == Welcome(agent, 1)
    assert [(e.agent, e.role) for e in of_kind(effects, StartProcess)] == [(agent, "executor"), (agent, "compiler")]
    assert events(effects, "host_joining") == [{"slice": 1, "host": 0, "incarnation": agent, "launch_id": "launch-4"}]
    assert cluster.machine.host_state(1) is HostState.JOINING
    assert not of_kind(effects, ActivateExecutor)

    cluster.now = 2.5
    executor, effects = cluster.executor(agent)
    assert of_kind(effects, ActivateExecutor) == [ActivateExecutor(executor, 1, executor)]
    assert events(effects, "host_ready")[0]["seconds"] == 2.5
    assert cluster.machine.host_state(1) is HostState.READY
    assert cluster.machine.active == {1: executor}


def test_a_slice_is_up_only_when_all_its_hosts_are() -> None:
    cluster = Cluster(slices=2, hosts_per_slice=2)
    first, _ = cluster.agent(2)
    second, _ = cluster.agent(3)
    assert cluster.machine.slice_is_joining(1)
    assert not cluster.machine.slice_is_joining(0)
    _, effects = cluster.executor(first)
    assert not events(effects, "slice_ready")
    assert not cluster.machine.slice_is_up(1)
    _, effects = cluster.executor(second)
    assert events(effects, "slice_ready") == [{"slice": 1}]
    assert cluster.machine.slice_is_up(1)
    assert not cluster.machine.slice_is_joining(1)


def test_an_agent_that_names_no_slot_gets_the_first_free_one() -> None:
    cluster = Cluster()
    cluster.host(0)
    agent, effects = cluster.agent()
    assert effects[0] == Welcome(agent, 1)


def test_an_agent_is_refused_a_slot_that_is_taken() -> None:
    cluster = Cluster(slices=2, hosts_per_slice=2)
    holder, executor = cluster.host(3)
    number, effects = cluster.agent(3)
    (refusal,) = effects
    assert isinstance(refusal, Refuse)
    assert refusal.agent == number
    assert "slice 1 host 1 is taken" in refusal.message
    assert "--standby" in refusal.message
    assert cluster.machine.slots[3] == holder
    assert cluster.machine.active[3] == executor
    assert number not in cluster.machine.agents


def test_an_agent_is_refused_when_every_slot_is_taken() -> None:
    cluster = Cluster(slices=1, hosts_per_slice=2)
    cluster.all_hosts()
    _, effects = cluster.agent()
    (refusal,) = effects
    assert isinstance(refusal, Refuse)
    assert "all 2 host slots of this 1x2x2 cluster are taken" in refusal.message


def test_no_number_is_ever_used_twice() -> None:
    cluster = Cluster()
    seen: list[int] = []
    for slot in (0, 1, 2):
        agent, effects = cluster.agent(slot)
        seen += [agent, *(e.number for e in of_kind(effects, StartProcess))]
    for agent in list(cluster.machine.agents):
        effects = cluster.machine.agent_closed(1.0, agent, "gone")
        seen += [e.number for e in of_kind(effects, StartProcess)]
    for slot in (0, 1, 2):
        agent, effects = cluster.agent(slot)
        seen += [agent, *(e.number for e in of_kind(effects, StartProcess))]
    assert len(seen) == len(set(seen))


# ---- stale processes


def test_an_executor_of_an_agent_that_is_gone_is_refused() -> None:
    cluster = Cluster()
    agent, _ = cluster.agent(0)
    record = cluster.machine.agents[agent].executor
    assert record is not None
    cluster.machine.agent_closed(1.0, agent, "gone")
    (refusal,) = cluster.machine.executor_joined(2.0, agent, record.number)
    assert isinstance(refusal, Refuse)
    assert "stale" in refusal.message
    assert cluster.machine.active == {}


def test_an_executor_that_was_replaced_before_it_connected_is_refused() -> None:
    cluster = Cluster()
    agent, _ = cluster.agent(0)
    slow = cluster.machine.agents[agent].executor
    assert slow is not None
    cluster.machine.recycle_executor(1.0, slow.number, Loss(True, "did not start"))
    (refusal,) = cluster.machine.executor_joined(2.0, agent, slow.number)
    assert isinstance(refusal, Refuse)
    current, effects = cluster.executor(agent)
    assert current != slow.number
    assert cluster.machine.active == {0: current}
    assert of_kind(effects, ActivateExecutor)


def test_a_second_connection_of_one_executor_is_refused() -> None:
    cluster = Cluster()
    agent, executor = cluster.host(0)
    (refusal,) = cluster.machine.executor_joined(1.0, agent, executor)
    assert isinstance(refusal, Refuse)
    assert "already" in refusal.message
    assert cluster.machine.active == {0: executor}


def test_an_executor_of_another_agent_is_refused() -> None:
    cluster = Cluster()
    first, _ = cluster.agent(0)
    second, _ = cluster.agent(1)
    theirs = cluster.machine.agents[second].executor
    assert theirs is not None
    (refusal,) = cluster.machine.executor_joined(1.0, first, theirs.number)
    assert isinstance(refusal, Refuse)
    assert cluster.machine.active == {}


def test_what_a_lost_executor_says_changes_nothing() -> None:
    cluster = Cluster()
    _, executor = cluster.host(0)
    cluster.machine.executor_closed(1.0, executor, "gone")
    assert cluster.machine.executor_heard(2.0, executor, 5, 5, True) == []
    assert cluster.machine.executor_closed(2.0, executor, "gone") == []
    assert cluster.machine.recycle_executor(2.0, executor, Loss(False, "late")) == []
    assert executor not in cluster.machine.executors


def test_what_a_lost_agent_says_changes_nothing() -> None:
    cluster = Cluster()
    agent, _ = cluster.host(0)
    cluster.machine.agent_closed(1.0, agent, "gone")
    assert cluster.machine.agent_heard(2.0, agent) == []
    assert cluster.machine.agent_closed(2.0, agent, "gone") == []
    assert cluster.machine.agent_draining(agent) == []
    assert cluster.machine.agents == {}


def test_a_compiler_of_an_agent_that_is_gone_is_refused() -> None:
    cluster = Cluster()
    agent, effects = cluster.agent(0)
    compiler = next(e.number for e in of_kind(effects, StartProcess) if e.role == "compiler")
    assert cluster.machine.compiler_joined(agent, compiler) == []
    cluster.machine.agent_closed(1.0, agent, "gone")
    (refusal,) = cluster.machine.compiler_joined(agent, compiler)
    assert isinstance(refusal, Refuse)


# ---- losses


def test_an_executor_loss_restarts_an_executor_and_keeps_the_host() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    lost = cluster.machine.active[1]
    effects = cluster.machine.executor_closed(5.0, lost, "connection to its executor closed")
    assert of_kind(effects, LoseExecutor) == [LoseExecutor(lost, 1, Loss(False, "connection to its executor closed"))]
    (start,) = of_kind(effects, StartProcess)
    assert (start.agent, start.role) == (agents[1], "executor")
    assert start.number != lost
    (event,) = events(effects, "host_lost")
    assert event["executor_only"] is True
    assert event["code"] == "DATA_LOSS"
    assert events(effects, "slice_lost") == [{"slice": 1}]
    assert not of_kind(effects, CloseAgent)
    assert cluster.machine.slots[1] == agents[1]
    assert cluster.machine.host_state(1) is HostState.JOINING
    assert cluster.machine.slice_is_joining(1)

    executor, effects = cluster.executor(agents[1])
    assert executor == start.number
    assert events(effects, "slice_ready") == [{"slice": 1}]
    assert cluster.machine.host_state(1) is HostState.READY


def test_an_agent_loss_loses_the_host() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    executor = cluster.machine.active[2]
    effects = cluster.machine.agent_closed(5.0, agents[2], "connection to its agent closed")
    (loss,) = of_kind(effects, LoseExecutor)
    assert (loss.executor, loss.slot, loss.loss.deadline) == (executor, 2, False)
    assert of_kind(effects, CloseAgent) == [CloseAgent(agents[2], "connection to its agent closed")]
    assert not of_kind(effects, StartProcess)
    (event,) = events(effects, "host_lost")
    assert event["executor_only"] is False
    assert event["incarnation"] == agents[2]
    assert cluster.machine.slots[2] is None
    assert cluster.machine.host_state(2) is HostState.ABSENT
    assert not cluster.machine.slice_is_joining(2)


def test_a_host_lost_while_joining_is_told_with_its_cause() -> None:
    cluster = Cluster()
    agent, _ = cluster.agent(0)
    effects = cluster.machine.agent_closed(1.0, agent, "connection to its agent closed")
    assert not of_kind(effects, LoseExecutor)
    (event,) = events(effects, "host_lost")
    assert (event["was_joining"], event["code"], event["cause"]) == (
        True,
        "DATA_LOSS",
        "connection to its agent closed",
    )

    silent, _ = cluster.agent(0)
    effects = cluster.wait(11.0, agents=False)
    (event,) = events(effects, "host_lost")
    assert (event["incarnation"], event["was_joining"], event["code"]) == (silent, True, "DEADLINE_EXCEEDED")


def test_a_lost_slot_is_free_for_a_replacement_under_a_new_incarnation() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    cluster.machine.agent_closed(1.0, agents[0], "gone")
    agent, executor = cluster.host(0)
    assert agent > max(agents)
    assert cluster.machine.active[0] == executor
    assert cluster.machine.restarts == [1, 0, 0]


def test_a_death_is_counted_once_also_when_the_executor_is_seen_to_go_first() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    cluster.machine.executor_closed(1.0, cluster.machine.active[0], "connection to its executor closed")
    cluster.machine.agent_closed(1.1, agents[0], "connection to its agent closed")
    assert cluster.machine.restarts == [1, 0, 0]
    # Where an executor was ready in between, two things happened.
    cluster.host(0)
    cluster.machine.executor_closed(2.0, cluster.machine.active[1], "connection to its executor closed")
    cluster.executor(agents[1])
    cluster.machine.agent_closed(3.0, agents[1], "connection to its agent closed")
    assert cluster.machine.restarts == [1, 2, 0]


def test_a_slice_is_lost_once_when_several_of_its_hosts_are() -> None:
    cluster = Cluster(slices=1, hosts_per_slice=3)
    agents = [agent for agent, _ in cluster.all_hosts()]
    effects: list[Effect] = []
    for agent in agents:
        effects += cluster.machine.agent_closed(1.0, agent, "gone")
    assert len(events(effects, "host_lost")) == 3
    assert events(effects, "slice_lost") == [{"slice": 0}]


def test_what_ends_before_it_has_joined_is_replaced_at_once_but_not_for_ever() -> None:
    cluster = Cluster()
    agent, _ = cluster.agent(0)
    machine = cluster.machine

    def ends(role: str) -> list[StartProcess]:
        """The process of a role that the agent is to start ends; what is started instead."""
        record = machine.agents[agent]
        number = record.compiler if role == "compiler" else record.executor.number if record.executor else None
        assert number is not None
        found = machine.process_exited(cluster.now, agent, number)
        machine.check_invariants()
        return of_kind(found, StartProcess)

    # Their template died before it had forked them: no link that closes tells of it.
    for role in ("executor", "compiler"):
        (started,) = ends(role)
        assert started.role == role
    first = ends("executor")
    assert len(first) == 1 and ends("executor") == []
    # Then at the pace of the deadline, until one joins.
    assert len(of_kind(cluster.wait(LIMITS.executor_start_timeout_seconds + 1.0), StartProcess)) == 1
    number, _ = cluster.executor(agent)
    # One that had connected is lost by its link alone, and what is of another agent, or long gone, is not meant.
    assert machine.process_exited(cluster.now, agent, number) == []
    assert machine.process_exited(cluster.now, agent, 999) == []
    assert machine.process_exited(cluster.now, 999, number) == []


def test_a_compiler_loss_starts_another_compiler_and_loses_nothing() -> None:
    cluster = Cluster()
    agent, effects = cluster.agent(0)
    compiler = next(e.number for e in of_kind(effects, StartProcess) if e.role == "compiler")
    cluster.machine.compiler_joined(agent, compiler)
    (start,) = cluster.machine.compiler_closed(compiler)
    assert isinstance(start, StartProcess)
    assert (start.agent, start.role) == (agent, "compiler")
    assert start.number != compiler
    assert cluster.machine.compiler_closed(compiler) == []


# ---- silence


def test_silence_makes_a_host_suspect_before_it_is_lost() -> None:
    cluster = Cluster()
    cluster.all_hosts()
    effects = cluster.wait(3.0, agents=False)
    assert [event["host"] for event in events(effects, "host_suspect")] == [0, 0, 0]
    assert all(cluster.machine.host_state(slot) is HostState.SUSPECT for slot in range(3))
    assert not of_kind(effects, LoseExecutor)
    assert cluster.machine.slice_is_up(0)


def test_a_suspect_host_that_speaks_again_is_ready() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    cluster.wait(5.0, agents=False)
    cluster.machine.agent_heard(5.0, agents[0])
    assert cluster.machine.host_state(0) is HostState.READY
    effects = cluster.wait(20.0)
    assert not of_kind(effects, LoseExecutor)
    assert not events(effects, "host_suspect")


def test_suspicion_is_told_once_for_each_silence() -> None:
    cluster = Cluster(slices=1)
    agent, _ = cluster.host(0)
    assert len(events(cluster.wait(8.0, agents=False), "host_suspect")) == 1
    cluster.machine.agent_heard(cluster.now, agent)
    assert len(events(cluster.wait(8.0, agents=False), "host_suspect")) == 1


def test_a_silent_host_is_lost_with_deadline_exceeded() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    executor = cluster.machine.active[1]
    effects: list[Effect] = []
    while cluster.now < 12.0:
        for number in (agents[0], agents[2]):
            cluster.machine.agent_heard(cluster.now, number)
        effects += cluster.wait(0.5, agents=False)
    (loss,) = of_kind(effects, LoseExecutor)
    assert (loss.executor, loss.loss.deadline) == (executor, True)
    assert "no heartbeat for 10.0 s (heartbeat_timeout_seconds)" in loss.loss.description
    assert events(effects, "host_lost")[0]["code"] == "DEADLINE_EXCEEDED"
    assert of_kind(effects, CloseAgent)[0].agent == agents[1]


def test_an_executor_that_says_nothing_while_its_agent_answers_is_recycled() -> None:
    cluster = Cluster()
    agent, executor = cluster.host(0)
    effects = cluster.wait(299.0, executors=False)
    assert not of_kind(effects, KillProcess)
    effects = cluster.wait(2.0, executors=False)
    (kill,) = of_kind(effects, KillProcess)
    assert (kill.agent, kill.number) == (agent, executor)
    assert of_kind(effects, LoseExecutor)[0].loss.deadline
    assert cluster.machine.slots[0] == agent


def test_an_executor_that_completes_nothing_is_recycled_after_the_progress_deadline() -> None:
    cluster = Cluster()
    _, executor = cluster.host(0)
    cluster.machine.executor_heard(cluster.now, executor, 4, 3, True)
    effects = cluster.wait(299.0)
    assert not of_kind(effects, KillProcess)
    effects = cluster.wait(2.0)
    (loss,) = of_kind(effects, LoseExecutor)
    assert loss.executor == executor
    assert loss.loss.deadline
    assert "completed nothing" in loss.loss.description


def test_progress_and_idleness_put_the_progress_deadline_off() -> None:
    cluster = Cluster()
    _, executor = cluster.host(0)
    cluster.machine.executor_heard(cluster.now, executor, 4, 3, True)
    cluster.wait(200.0)
    cluster.machine.executor_heard(cluster.now, executor, 5, 3, True)
    cluster.wait(200.0)
    cluster.machine.executor_heard(cluster.now, executor, 5, 4, True)
    assert not of_kind(cluster.wait(200.0), KillProcess)
    cluster.machine.executor_heard(cluster.now, executor, 5, 5, False)
    assert not of_kind(cluster.wait(1000.0), KillProcess)


def test_who_waits_for_a_stuck_executor_is_not_recycled_with_it() -> None:
    cluster = Cluster()
    executors = [executor for _, executor in cluster.all_hosts()]
    for number in executors:
        cluster.machine.executor_heard(cluster.now, number, 4, 3, True)
    # They stop within the same moment; the others had got one order further.
    cluster.now = 0.5
    for number in executors[1:]:
        cluster.machine.executor_heard(cluster.now, number, 5, 3, True)
    effects = cluster.wait(301.0)
    assert [loss.executor for loss in of_kind(effects, LoseExecutor)] == [executors[0]]
    # Freed by that loss, they go on.
    for number in executors[1:]:
        cluster.machine.executor_heard(cluster.now, number, 6, 3, True)
    assert not of_kind(cluster.wait(200.0), LoseExecutor)


def test_who_waits_for_a_silent_executor_is_not_recycled_before_it() -> None:
    cluster = Cluster()
    executors = [executor for _, executor in cluster.all_hosts()]
    for number in executors:
        cluster.machine.executor_heard(cluster.now, number, 4, 3, True)
    cluster.now = 0.9
    cluster.machine.executor_heard(cluster.now, executors[2], 4, 3, True)
    effects: list[Effect] = []
    while cluster.now < 305.0:
        for number in executors[:2]:
            cluster.machine.executor_heard(cluster.now, number, 4, 3, True)
        effects += cluster.wait(1.0, executors=False)
    assert [loss.executor for loss in of_kind(effects, LoseExecutor)] == [executors[2]]


def test_an_executor_that_is_behind_is_recycled_before_those_that_have_dispatched_everything() -> None:
    cluster = Cluster()
    executors = [executor for _, executor in cluster.all_hosts()]
    for number in executors:
        cluster.machine.executor_heard(cluster.now, number, 4, 3, True)
    cluster.now = 0.5
    cluster.machine.executor_heard(cluster.now, executors[1], 5, 3, True, behind=True)
    effects = cluster.wait(301.0)
    assert [loss.executor for loss in of_kind(effects, LoseExecutor)] == [executors[1]]


def test_several_stuck_executors_are_recycled_one_after_the_other() -> None:
    cluster = Cluster()
    executors = [executor for _, executor in cluster.all_hosts()]
    for number in executors:
        cluster.machine.executor_heard(cluster.now, number, 4, 3, True)
    effects = cluster.wait(340.0)
    assert [loss.executor for loss in of_kind(effects, LoseExecutor)] == executors


def test_an_executor_that_does_not_start_in_time_is_replaced() -> None:
    cluster = Cluster()
    agent, _ = cluster.agent(0)
    late = cluster.machine.agents[agent].executor
    assert late is not None
    effects = cluster.wait(59.0)
    assert not of_kind(effects, KillProcess)
    effects = cluster.wait(2.0)
    assert of_kind(effects, KillProcess)[0].number == late.number
    (start,) = of_kind(effects, StartProcess)
    assert start.role == "executor"
    assert not of_kind(effects, LoseExecutor)
    assert cluster.machine.slots[0] == agent


def test_silence_while_the_head_itself_stood_still_is_forgiven() -> None:
    cluster = Cluster()
    cluster.all_hosts()
    starting, _ = cluster.agent(standby=True)
    for executor in list(cluster.machine.active.values()):
        cluster.machine.executor_heard(cluster.now, executor, 2, 1, True)
    cluster.now += 1000.0
    cluster.machine.forgive(1000.0)
    effects = cluster.machine.tick(cluster.now)
    assert effects == []
    # It is not forgiven twice.
    effects = cluster.wait(11.0, agents=False)
    assert len(of_kind(effects, CloseAgent)) == 4
    assert starting not in cluster.machine.agents


# ---- recycling


def test_recycling_kills_the_executor_and_starts_another() -> None:
    cluster = Cluster()
    agent, executor = cluster.host(0)
    effects = cluster.machine.recycle_executor(1.0, executor, Loss(False, "it did not drain"))
    assert of_kind(effects, KillProcess) == [KillProcess(agent, executor, "it did not drain")]
    assert of_kind(effects, LoseExecutor) == [LoseExecutor(executor, 0, Loss(False, "it did not drain"))]
    (start,) = of_kind(effects, StartProcess)
    assert start.agent == agent
    cluster.machine.check_invariants()


# ---- standbys


def test_a_standby_starts_its_executor_and_waits() -> None:
    cluster = Cluster()
    agent, effects = cluster.agent(standby=True)
    assert effects[0] == Welcome(agent, None)
    assert {e.role for e in of_kind(effects, StartProcess)} == {"executor", "compiler"}
    _, effects = cluster.executor(agent)
    assert not of_kind(effects, ActivateExecutor)
    assert [s.number for s in cluster.machine.standbys()] == [agent]
    assert cluster.machine.slots == [None, None, None]


def test_a_standby_takes_a_lost_hosts_place_at_once() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    standby, executor = cluster.host(standby=True, launch_id="launch-9")
    effects = cluster.machine.agent_closed(5.0, agents[1], "gone")
    assert of_kind(effects, AssignSlot) == [AssignSlot(standby, 1)]
    assert of_kind(effects, ActivateExecutor) == [ActivateExecutor(executor, 1, executor)]
    kinds = [effect.kind for effect in of_kind(effects, Emit)]
    assert kinds == ["host_lost", "slice_lost", "host_joining", "host_ready", "slice_ready"]
    assert events(effects, "host_joining")[0]["launch_id"] == "launch-9"
    # The loss is carried out before the place is given away.
    order = [type(e) for e in effects if isinstance(e, (LoseExecutor, ActivateExecutor))]
    assert order == [LoseExecutor, ActivateExecutor]
    assert cluster.machine.standbys() == []
    cluster.machine.check_invariants()


def test_a_standby_whose_executor_is_connected_is_preferred_to_an_older_one() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    cold, _ = cluster.agent(standby=True)
    warm, _ = cluster.host(standby=True)
    effects = cluster.machine.agent_closed(5.0, agents[0], "gone")
    assert of_kind(effects, AssignSlot) == [AssignSlot(warm, 0)]
    effects = cluster.machine.agent_closed(6.0, agents[1], "gone")
    assert of_kind(effects, AssignSlot) == [AssignSlot(cold, 1)]
    assert not of_kind(effects, ActivateExecutor)
    assert cluster.machine.host_state(1) is HostState.JOINING
    _, effects = cluster.executor(cold)
    assert of_kind(effects, ActivateExecutor)


def test_a_standby_that_comes_after_the_loss_takes_the_free_place() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    cluster.machine.agent_closed(5.0, agents[2], "gone")
    standby, effects = cluster.agent(standby=True)
    assert effects[0] == Welcome(standby, None)
    assert of_kind(effects, AssignSlot) == [AssignSlot(standby, 2)]
    assert events(effects, "host_joining")[0]["slice"] == 2


def test_a_standby_leaves_places_alone_that_never_had_a_host() -> None:
    cluster = Cluster()
    standby, effects = cluster.agent(standby=True)
    assert not of_kind(effects, AssignSlot)
    agent, effects = cluster.agent(0)
    assert effects[0] == Welcome(agent, 0)
    assert [s.number for s in cluster.machine.standbys()] == [standby]


def test_a_lost_standby_disturbs_no_slot() -> None:
    cluster = Cluster()
    cluster.all_hosts()
    standby, _ = cluster.host(standby=True, launch_id="launch-7")
    effects = cluster.machine.agent_closed(5.0, standby, "gone")
    assert not of_kind(effects, LoseExecutor)
    assert not events(effects, "host_lost")
    assert of_kind(effects, CloseAgent) == [CloseAgent(standby, "gone")]
    cluster.machine.check_invariants()


def test_a_standbys_executor_loss_restarts_it_without_a_loss_of_a_host() -> None:
    cluster = Cluster()
    standby, executor = cluster.host(standby=True)
    effects = cluster.machine.executor_closed(5.0, executor, "gone")
    assert not of_kind(effects, LoseExecutor)
    assert not events(effects, "host_lost")
    assert of_kind(effects, StartProcess)[0].agent == standby


def test_the_supervisor_hears_of_a_standby_that_is_ready_and_of_one_that_is_lost() -> None:
    cluster = Cluster()
    agent, _ = cluster.agent(standby=True, launch_id="launch-7")
    _, effects = cluster.executor(agent)
    (ready,) = events(effects, "standby_ready")
    assert narration.to_policy({"kind": "standby_ready", **ready}) == supervision.StandbyReady("launch-7")
    effects = cluster.wait(11.0, agents=False)
    (lost,) = events(effects, "standby_lost")
    assert narration.to_policy({"kind": "standby_lost", **lost}) == supervision.StandbyLost("launch-7")
    assert not events(effects, "host_lost")


def test_a_draining_host_is_shown_as_such_and_gives_its_place_to_no_standby() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    standby, _ = cluster.host(standby=True)
    cluster.machine.agent_draining(agents[0])
    assert cluster.machine.host_state(0) is HostState.DRAINING
    effects = cluster.machine.agent_closed(5.0, agents[0], "stopped")
    assert not of_kind(effects, AssignSlot)
    assert [s.number for s in cluster.machine.standbys()] == [standby]


def test_a_draining_standby_is_given_no_place() -> None:
    cluster = Cluster()
    agents = [agent for agent, _ in cluster.all_hosts()]
    standby, _ = cluster.host(standby=True)
    cluster.machine.agent_draining(standby)
    effects = cluster.machine.agent_closed(5.0, agents[0], "gone")
    assert not of_kind(effects, AssignSlot)


def test_a_silent_standby_that_is_promoted_in_the_tick_of_its_own_death_ends_lost_too() -> None:
    cluster = Cluster(slices=2)
    agents = [agent for agent, _ in cluster.all_hosts()]
    standby, _ = cluster.host(standby=True)
    effects = cluster.wait(11.0, agents=False)
    lost = [effect.agent for effect in of_kind(effects, CloseAgent)]
    assert sorted(lost) == sorted([*agents, standby])
    assert cluster.machine.slots == [None, None]
    assert cluster.machine.active == {}


# ---- the check itself


def test_the_invariants_notice_an_executor_without_a_host() -> None:
    cluster = Cluster()
    _, executor = cluster.host(0)
    cluster.machine.active[1] = executor
    with pytest.raises(AssertionError):
        cluster.machine.check_invariants()


def test_the_invariants_notice_one_agent_in_two_slots() -> None:
    cluster = Cluster()
    agent, _ = cluster.host(0)
    cluster.machine.slots[2] = agent
    with pytest.raises(AssertionError):
        cluster.machine.check_invariants()
