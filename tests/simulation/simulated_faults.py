"""What is done to a cluster, and when it ends."""

import asyncio
from collections.abc import Callable

from simulated_head import SimulatedCluster
from simulated_worker import SimulatedAgent, SimulatedCompiler

from ridgeway.worker.agent_events import PreemptionAnnounced

FAULTS_SECONDS = 2.5
"""Faults begin within so many seconds..."""
FAULT_LENGTH_SECONDS = 2.5
"""... and last at most so many."""


class Faults:
    """Chooses faults by chance and carries them out on whatever is running then."""

    def __init__(
        self, cluster: SimulatedCluster, replace_client: Callable[[], None], replace_all_clients: Callable[[], None]
    ):
        self._cluster = cluster
        self._replace_all_clients = replace_all_clients
        self._world = cluster.world
        self._over_at = 0.0
        self.preemptions: dict[str, Callable[[float], None]] = {
            "preempt worker": self._preempt_worker,
            "preempt slice": self._preempt_slice,
            "preempt all": self._preempt_all,
        }
        """Faults that nobody may notice but by a pause."""
        self._kinds: dict[str, Callable[[float], None]] = {
            "kill executor": self._kill_executor,
            "kill agent": self._kill_agent,
            "kill worker": self._kill_worker,
            "kill all": self._kill_all,
            "stop executor": self._stop_executor,
            "stop agent": self._stop_agent,
            "stop worker": self._stop_worker,
            "break connection": self._break_connection,
            "cut off from head": self._cut_off,
            "cut between workers": self._cut_between,
            "hang": self._hang,
            "slow machine": self._slow,
            "kill compiler": self._kill_compiler,
            "kill rendezvous": self._kill_rendezvous,
            "no services": self._no_services,
            "stop head": self._stop_head,
            "client goes away": lambda seconds: replace_client(),
            **self.preemptions,
            "preempt too late": self._preempt_too_late,
        }
        self._choices = list(self._kinds)
        if cluster.can_lose_its_head:
            self._kinds["kill head"] = self._kill_head
            self._choices += ["kill head"] * 3

    async def run(self, count: int, only_preemptions: bool = False) -> None:
        """Do ``count`` faults; returns when none has an effect any more that would not pass by itself."""
        random = self._world.random
        # Several within a moment are as likely as one after the other.
        moments = [random.uniform(0.0, FAULTS_SECONDS) for _ in range(random.randint(1, count))] if count else []
        times = sorted(random.choice(moments) + random.uniform(0.0, 0.1) for _ in range(count))
        for time in times:
            await asyncio.sleep(max(0.0, time - self._world.now))
            kinds = self.preemptions if only_preemptions else self._kinds
            kind = random.choice(list(self.preemptions) if only_preemptions else self._choices)
            self._world.say(f"FAULT {kind}")
            kinds[kind](random.uniform(0.05, FAULT_LENGTH_SECONDS))
        await asyncio.sleep(max(0.0, self._over_at - self._world.now))

    def _agent(self) -> SimulatedAgent | None:
        agents = list(self._cluster.agents.values())
        agent = self._world.random.choice(agents) if agents else None
        if agent is not None:
            self._world.say(f"      on {agent.name}, {agent.core.place}")
        return agent

    def _touch(self, agent: SimulatedAgent, what: str) -> None:
        agent.machine.touched = what

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        self._over_at = max(self._over_at, self._world.now + seconds)
        self._world.loop.call_later(seconds, function)

    # ---- preemptions

    def _preempt_worker(self, seconds: float) -> None:
        agent = self._agent()
        # One that has no place, or does not know of it yet, just ends.
        if agent is not None and agent.core.agent is not None and agent.core.slice is not None:
            agent.run(agent.handle, PreemptionAnnounced("SIGTERM"))

    def _preempt_slice(self, seconds: float) -> None:
        index = self._world.random.randrange(self._cluster.manager.topology.slices)
        self._preempt(list(self._cluster.manager.topology.slots_of_slice(index)), seconds)

    def _preempt_all(self, seconds: float) -> None:
        self._preempt(list(range(self._cluster.manager.topology.slots)), seconds)

    def _preempt(self, slots: list[int], seconds: float) -> None:
        notice = self._cluster.settings.preemption_notice_seconds
        for slot in slots:
            delay = self._world.random.choice((0.0, 0.0, seconds))
            self._later(
                delay, lambda slot=slot: self._cluster.process.run(self._cluster.manager.preempt, slot, notice, "asked")
            )

    def _preempt_too_late(self, seconds: float) -> None:
        agent = self._agent()
        slot = None if agent is None or agent.core.slice is None else (agent.core.slice, agent.core.host or 0)
        if agent is not None and slot is not None:
            self._touch(agent, "it was preempted at short notice")
            preempt = self._cluster.manager.preempt
            where = self._cluster.manager.topology.slot_of(*slot)
            self._cluster.process.run(preempt, where, seconds / 20, "asked")

    # ---- deaths

    def _kill_executor(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "its executor was killed")
            for executor in agent.executors():
                executor.kill()

    def _kill_agent(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "its agent was killed")
            agent.kill()

    def _kill_worker(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "it was killed")
            agent.kill_all()

    def _kill_all(self, seconds: float) -> None:
        for agent in list(self._cluster.agents.values()):
            self._touch(agent, "everything was killed")
            self._later(self._world.random.uniform(0.0, 0.2), agent.kill_all)

    def _kill_compiler(self, seconds: float) -> None:
        agent = self._agent()
        for child in list(agent.children.values()) if agent is not None else []:
            if isinstance(child, SimulatedCompiler):
                child.kill()

    def _kill_rendezvous(self, seconds: float) -> None:
        self._cluster.rendezvous.crash()

    # ---- silence

    def _stop_executor(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "its executor was stopped")
            for executor in agent.executors():
                executor.stop()
                if self._world.random.random() < 0.5:
                    self._later(seconds, executor.resume)
                else:
                    self._stays_stopped(agent, seconds)

    def _stop_agent(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "its agent was stopped")
            agent.stop()
            if self._world.random.random() < 0.5:
                self._later(seconds, agent.resume)
            else:
                self._stays_stopped(agent, seconds)

    def _stop_worker(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "it was stopped")
            comes_back = self._world.random.random() < 0.5
            for process in agent.everything():
                process.stop()
                if comes_back:
                    self._later(seconds, process.resume)
            if not comes_back:
                self._stays_stopped(agent, seconds)

    def _stays_stopped(self, agent: SimulatedAgent, seconds: float) -> None:
        """A supervisor replaces a silent worker; a scheduler's own probes end one that never answers."""
        if self._cluster.can_lose_its_head:
            self._later(seconds, agent.kill_all)

    def _hang(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "its executor hangs")
            for executor in agent.executors():
                executor.stuck = True

    def _slow(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "it was slow")
            machine = agent.machine
            machine.slowness = self._world.random.choice((5.0, 20.0))

            def recover() -> None:
                machine.slowness = 1.0

            self._later(seconds, recover)

    def _kill_head(self, seconds: float) -> None:
        if not self._cluster.process.alive:
            return
        self._cluster.crash_head()

        def restart() -> None:
            self._world.say("another head")
            self._cluster.start_head()
            # Their programs are started again too: a client does not outlive its server.
            self._replace_all_clients()

        self._later(seconds, restart)

    def _stop_head(self, seconds: float) -> None:
        # Often for longer than it may be silent: its machine answers, so nobody turns away from it.
        process = self._cluster.process
        process.stop()
        self._later(2 * seconds, process.resume)

    # ---- the network

    def _break_connection(self, seconds: float) -> None:
        agent = self._agent()
        if agent is not None:
            self._touch(agent, "a connection of it broke")
            process = self._world.random.choice(agent.everything())
            for connection in list(process.connections):
                connection.reset()

    def _cut_off(self, seconds: float) -> None:
        agent = self._agent()
        # Before a slot was ever ready, a supervisor takes two refusals for a mistake that it must tell: the place of
        # one that was killed while it was cut off is refused until the head has noticed.
        if agent is not None and agent.machine.was_ready:
            self._touch(agent, "it was cut off from the head")
            machine = agent.machine
            for direction in self._world.random.choice((("to_head",), ("from_head",), ("to_head", "from_head"))):
                machine.blocked[direction] = True
            self._later(seconds, machine.heal)

    def _cut_between(self, seconds: float) -> None:
        agents = list(self._cluster.agents.values())
        if len(agents) < 2:
            return
        pair = self._world.random.sample(agents, 2)
        for agent in pair:
            self._world.say(f"      on {agent.name}, {agent.core.place}")
            self._touch(agent, "it was cut off from another worker")
        names = frozenset(agent.machine.name for agent in pair)
        self._world.unreachable.add(names)
        self._later(seconds, lambda: self._world.unreachable.discard(names))

    def _no_services(self, seconds: float) -> None:
        self._cluster.rendezvous.outage_until = self._world.now + seconds
        self._later(seconds, lambda: None)
