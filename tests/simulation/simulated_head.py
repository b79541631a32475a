"""The head: the real resource manager, connections, dispatcher and supervision policy, on simulated links.

With the supervision policy it stands for `ridgeway run`, whose workers end with their head.  Without, workers are
restarted by a scheduler that knows nothing of them, as a JobSet does, and wait for another head when theirs has died.
Everything that decides is the real thing; here are only its surroundings and the rules that it must never break.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from simulated_executor import SimulatedExecutor
from simulated_network import Connection, HeadLink, Machine, Process, World
from simulated_worker import SimulatedAgent
from simulated_xla import SimulatedRendezvous

from ridgeway.cluster.connections import Connections
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.cluster.topology import Topology
from ridgeway.launch import narration, supervision
from ridgeway.protocol.status import Code
from ridgeway.proxy.compile_cache import CompileCache
from ridgeway.proxy.dispatch import Dispatcher
from ridgeway.proxy.programs import Programs
from ridgeway.settings import Settings
from ridgeway.transport.frames import FrameError
from ridgeway.transport.stream_link import LinkClosed

TICK_SECONDS = 0.1
CONTROL_SECONDS = (0.0005, 0.005)
SPAWN_SECONDS = (0.02, 0.1)
RESTART_SECONDS = (0.1, 0.6)
"""After which a scheduler restarts a worker."""
VERSIONS = {"ridgeway": "1", "jax": "1", "jaxlib": "1", "python": "3"}


class CheckedManager(ResourceManager):
    """The resource manager, with its invariants checked after every change."""

    world: World
    dead = False
    """its head has crashed: what is still cleared away is nobody's"""
    _depth = 0

    def apply(self, effects: list[Any]) -> None:
        self._checked(super().apply, effects)

    def _apply_generation(self, effects: list[Any]) -> None:
        self._checked(super()._apply_generation, effects)

    def _checked(self, function: Callable[[list[Any]], None], effects: list[Any]) -> None:
        self._depth += 1
        try:
            function(effects)
        finally:
            self._depth -= 1
        if effects and self._depth == 0 and not self.dead:
            self.check()

    def check(self) -> None:
        """Raise if the parts disagree."""
        membership = self.membership
        membership.check_invariants()
        owners = {slot: link.number for slot, link in enumerate(self.slots) if link is not None}
        for slot in list(owners):
            if slot not in membership.active and slot in membership.suspensions:
                del owners[slot]
        if set(self.suspender.slots) != set(membership.suspensions.slots):
            self.world.violation(f"{list(self.suspender.slots)} are suspended, or {membership.suspensions.slots}")
        self.generations.check_invariants(owners.values())
        if owners != membership.active:
            self.world.violation(f"slots are owned by {owners}, membership says {membership.active}")
        for link in self.slots:
            if link is not None and link.lost is not None:
                self.world.violation(f"{link.place} is owned by executor {link.number}, which is lost")
        ghosts = set(self.executors) - set(membership.executors)
        if ghosts:
            self.world.violation(f"links to executors {sorted(ghosts)} are kept although they are lost")


class SimulatedCluster:
    """Head, supervisor and workers."""

    versions = VERSIONS

    def __init__(
        self, world: World, topology: Topology, settings: Settings, options: supervision.Options | None, standbys: int
    ):
        self.world = world
        self.settings = settings
        self._topology = topology
        self.executors: dict[int, SimulatedExecutor] = {}
        self.scratch: dict[str, dict[int, Any]] = {}
        """what preempted executors saved, by path"""
        self.agents: dict[str, SimulatedAgent] = {}
        self.hole_probability = 0.0
        self.worn_probability = 0.0
        self.crash_probability = 0.0
        self.quiet_since: float | None = None
        """when faults stopped"""
        self.counts: dict[str, int] = {}
        """events by kind"""
        self.lost_at: dict[int, float] = {}
        self.aborted: set[int] = set()
        """generations whose end was told to anybody"""
        self._orders: dict[int, _OrderStream] = {}
        self._head_links: dict[HeadLink, asyncio.Task[None] | None] = {}
        """its ends of connections; None: not accepted yet"""
        self._head_number = 0
        self.start_head()
        self._policy = None if options is None else supervision.Supervision(options)
        self._policy_timer: Any = None
        self._jobs = 0
        if self._policy is not None:
            self._carry_out(self._policy.begin(world.now))
        else:
            for slot in range(topology.slots):
                self._schedule((topology.slice_of_slot(slot), topology.host_of_slot(slot)))
            for _ in range(standbys):
                self._schedule(None)

    # ---- the head

    def start_head(self) -> None:
        """A head, which knows of nothing yet."""
        world, settings = self.world, self.settings
        self._head_number += 1
        number = self._head_number
        self.process = Process(Machine(world, "head"), "head")
        self.lost_at.clear()
        self.aborted.clear()
        self._orders.clear()
        self.rendezvous = SimulatedRendezvous(world, settings.spare_rendezvous_services, self._is_lost)

        def emit(kind: str, **fields: Any) -> None:
            if number == self._head_number and self.process.alive:
                self.emit(kind, **fields)

        self.manager = CheckedManager(
            self._topology, settings, emit, self.rendezvous, "10.0.0.1", clock=lambda: world.now,
            scratch_folder="/scratch",
        )  # type: ignore[arg-type]
        self.manager.world = world
        self.manager.on_loss.append(lambda link: self.lost_at.setdefault(link.number, world.now))
        self.programs = Programs(self.manager, CompileCache(None, 0), "simulated", emit)
        self.manager.on_generation.append(self.programs.preload)
        self.dispatcher = Dispatcher(self.manager, self.programs)

        async def no_control(link: Any) -> None:
            raise LinkClosed

        self._connections = Connections(self.manager, "", "simulated", VERSIONS, no_control)
        self.process.after(TICK_SECONDS, self._tick)

    @property
    def can_lose_its_head(self) -> bool:
        """Whether workers outlive a head."""
        return self._policy is None

    def crash_head(self) -> None:
        """SIGKILL: all that it knew is gone, the kernel closes its connections, its services die with it."""
        self.manager.dead = True
        self.process.kill()
        self.rendezvous.crash()
        for agent in self.agents.values():
            agent.machine.touched = "its head died"
        for link, task in list(self._head_links.items()):
            if task is not None:
                task.cancel()
            link.close()
        self._head_links.clear()

    def _tick(self) -> None:
        self.manager.tick()
        self.manager.check()
        self.process.after(TICK_SECONDS, self._tick)

    def emit(self, kind: str, **fields: Any) -> None:
        """The event log: the supervisor follows it."""
        world = self.world
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind in _TOLD:
            world.say(f"{kind} {fields}")
        if kind == "host_lost":
            self._check_loss(fields)
        elif kind == "host_ready":
            self._note_ready(fields["incarnation"])
        event = narration.to_policy({"kind": kind, **fields}) if self._policy is not None else None
        if event is not None:
            world.loop.call_later(world.random.uniform(*CONTROL_SECONDS), self._policy_event, event)

    def _note_ready(self, incarnation: int) -> None:
        worker = self.agents.get(self.manager.agents[incarnation].launch_id)
        if worker is not None:
            worker.machine.was_ready = True

    def _check_loss(self, fields: dict[str, Any]) -> None:
        """A host is lost only after something was done to it."""
        agent = self.manager.agents.get(fields["incarnation"])
        worker = None if agent is None else self.agents.get(agent.launch_id)
        if worker is not None and worker.machine.touched is None:
            self.world.violation(
                f"nothing was done to slice {fields['slice']} host {fields['host']}: {fields['cause']}"
            )

    def _is_lost(self, executor: SimulatedExecutor) -> bool:
        return executor.number not in self.manager.membership.executors

    def reachable(self, machine: Machine) -> bool:
        """Whether a new connection to the head can be made."""
        return self.process.alive and not any(machine.blocked.values())

    def connect(
        self, process: Process, hello: dict[str, Any], on_message: Callable[..., None], on_closed: Callable[[], None]
    ) -> Connection:
        """A process connects and says hello; the real `Connections` serve it."""
        head = self.process
        connection = Connection(process, head, on_message, on_closed)
        if head.alive:
            self._head_links[connection.head] = None
        serve = {
            "agent": self._connections._serve_agent,
            "executor": self._connections._serve_executor,
            "compiler": self._connections._serve_compiler,
        }[hello["role"]]
        if hello["role"] == "executor":
            stream = self._orders[hello["executor"]] = _OrderStream(self, hello["executor"])
            connection.head.watch = stream.sent

        async def serving(link: HeadLink) -> None:
            try:
                await serve(link, hello)  # type: ignore[arg-type]
            except (LinkClosed, FrameError, ConnectionError):
                pass
            finally:
                self._head_links.pop(link, None)
                link.close()

        def begin() -> None:
            self._head_links[connection.head] = self.world.task(serving(connection.head))

        def accept() -> None:
            if head.alive:
                head.run(begin)
            else:
                connection.head.close()  # it died before it had accepted

        self.world.loop.call_later(self.world.random.uniform(0.001, 0.01) * process.machine.slowness, accept)
        return connection

    def members_of(self, generation: int) -> set[int]:
        """Executors that were ordered into a generation."""
        record = self.manager.generations.generations.get(generation)
        return set() if record is None else set(record.members)

    def executors_of_devices(self, devices: Sequence[int]) -> set[int | None]:
        """Numbers of the executors that own devices now."""
        links = (self.manager.executor_of_device(device) for device in devices)
        return {None if link is None else link.number for link in links}

    # ---- a scheduler

    def _schedule(self, slot: tuple[int, int] | None) -> None:
        """Start a worker for a slot, or a standby, and again whenever it ends."""
        self._jobs += 1
        self.world.loop.call_later(self.world.random.uniform(*SPAWN_SECONDS), self._launch, f"job-{self._jobs}", slot)

    # ---- the supervisor

    def _policy_event(self, event: supervision.Event) -> None:
        assert self._policy is not None
        self._carry_out(self._policy.handle(event, self.world.now))

    def _policy_tick(self) -> None:
        assert self._policy is not None
        self._policy_timer = None
        self._carry_out(self._policy.tick(self.world.now))

    def _tell_head(self, function: Callable[..., None], *arguments: Any) -> None:
        self.world.loop.call_later(self.world.random.uniform(*CONTROL_SECONDS), self.process.run, function, *arguments)

    def _carry_out(self, effects: list[supervision.Effect]) -> None:
        assert self._policy is not None
        world = self.world
        for effect in effects:
            match effect:
                case supervision.StartWorker(launch_id, slot, expect):
                    if expect and slot is not None:
                        self._tell_head(self.manager.expect, slot[0])
                    world.loop.call_later(world.random.uniform(*SPAWN_SECONDS), self._launch, launch_id, slot)
                case supervision.KillWorker(launch_id):
                    if launch_id in self.agents:
                        self.agents[launch_id].machine.touched = "killed by the supervisor"
                        self.agents[launch_id].kill_all()
                case supervision.ReportExit(slice_index, host_index, _, description):
                    slot_number = self.manager.topology.slot_of(slice_index, host_index)
                    self._tell_head(self.manager.explain_loss, slot_number, f"its worker was {description}")
                case supervision.CannotStart() | supervision.GiveUp():
                    world.violation(f"the supervisor gave up: {effect}")
        if self._policy_timer is not None:
            self._policy_timer.cancel()
            self._policy_timer = None
        wakeup = self._policy.next_wakeup()
        if wakeup != float("inf"):
            self._policy_timer = world.loop.call_at(max(wakeup, world.now), self._policy_tick)

    def _launch(self, launch_id: str, slot: tuple[int, int] | None) -> None:
        machine = Machine(self.world, launch_id)

        def exited(code: int) -> None:
            # A Job controller clears away what is left of it.
            agent.kill_all()
            self.agents.pop(launch_id, None)
            if self._policy is None:
                self.world.loop.call_later(self.world.random.uniform(*RESTART_SECONDS), self._schedule, slot)
            else:
                self.world.loop.call_later(0.001, self._policy_event, supervision.WorkerExited(launch_id, code))

        agent = self.agents[launch_id] = SimulatedAgent(machine, launch_id, slot, self.settings, self, exited)


_TOLD = {
    "host_joining", "host_ready", "host_lost", "host_suspect", "slice_ready", "slice_lost", "generation_started",
    "generation_ready", "generation_aborted", "executor_recycled", "probe_held", "probe_answered", "connection_refused",
    "standby_ready", "standby_lost", "compiler_lost", "preemption_announced", "host_suspended", "host_resumed",
    "generation_dissolved", "session_held", "session_released",
}  # fmt: skip


class _OrderStream:
    """What one executor is told, and the rules for it."""

    def __init__(self, cluster: SimulatedCluster, executor: int):
        self._cluster = cluster
        self._executor = executor
        self._generation: int | None = None
        self._programs: dict[str, tuple[int, ...]] = {}

    def sent(self, message: Sequence[Any]) -> None:
        cluster, world = self._cluster, self._cluster.world
        match message[0]:
            case "abort":
                cluster.aborted.add(message[1])
                if Code(message[2]) is Code.ABORTED:
                    world.violation(f"generation {message[1]} was ended without a first cause: {message[3]}")
            case "enter_generation":
                self._generation = message[2]
                if self._generation in cluster.aborted:
                    world.violation(
                        f"executor {self._executor} was ordered into the ended generation {self._generation}"
                    )
            case "leave_generation":
                if self._generation == message[2]:
                    self._generation = None
            case "load":
                self._programs[message[1]] = tuple(device for row in message[4] for device in row)
            case "unload":
                for program in message[1]:
                    self._programs.pop(program, None)
            case "execute" | "execute_and_tell":
                program = message[2] if message[0] == "execute" else message[3]
                if program not in self._programs:
                    world.violation(f"executor {self._executor} was asked to run {program}, which it was never given")
                owners = cluster.executors_of_devices(self._programs[program])
                if self._executor not in owners:
                    world.violation(f"executor {self._executor} was asked to run {program} on devices of {owners}")
                if len(owners) > 1:
                    if self._generation is None or self._generation in cluster.aborted:
                        world.violation(
                            f"executor {self._executor} was asked to run {program} in generation {self._generation}, "
                            "which has ended"
                        )
                    elif not owners <= cluster.members_of(self._generation):
                        world.violation(f"{program} was sent to {owners}, not all in generation {self._generation}")
