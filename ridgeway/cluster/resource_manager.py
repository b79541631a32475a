"""The resource manager: the shell that carries out what `membership` and `generations` decide.

Lives in the head's event loop; every method returns at once.  The proxy asks it which executors have a set of
devices, has it form generations, and is told about losses.
"""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from ridgeway.cluster import generations as generation_machine
from ridgeway.cluster import membership as membership_machine
from ridgeway.cluster.agent_link import AgentLink
from ridgeway.cluster.compilers import CompilerPool
from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.explanations import Explanations
from ridgeway.cluster.program_crashes import ProgramCrashes, program_of
from ridgeway.cluster.python_processes import PythonProcesses
from ridgeway.cluster.rendezvous import Rendezvous
from ridgeway.cluster.renewals import Renewals
from ridgeway.cluster.slice_hold import Ended, SliceHold, SliceHolds
from ridgeway.cluster.suspender import Suspender
from ridgeway.cluster.topology import Topology
from ridgeway.processes import describe_exit
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status
from ridgeway.settings import Settings

CAUSES_KEPT = 1000
CAUSE_CHARACTERS = 300
EXECUTIONS_KEPT = 20_000
TICK_SECONDS = 0.05
_PART_OF_STOPPING = frozenset({"host_lost", "slice_lost", "standby_lost", "host_joining"})

Emit = Callable[..., Any]


@dataclasses.dataclass(eq=False, slots=True)
class _Disagreement:
    """An execution that some of its members could not start or finish, and others perhaps have started."""

    deadline: float
    generation: int
    place: str
    status: Status
    failed: set[int] = dataclasses.field(default_factory=set)
    collective: bool = False
    """It broke while it ran: it was started by all, so refusing the next one in common would prove nothing."""


@dataclasses.dataclass(eq=False, slots=True)
class _Settling:
    """A collective's error that waits for its cause."""

    deadline: float
    generation: int
    place: str
    status: Status
    deliver: Callable[[Status], None]


class ResourceManager:
    """Executors by slot, generations among them, and what is held for slices on their way back."""

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        emit: Emit,
        rendezvous: Rendezvous,
        service_host: str,
        clock: Callable[[], float] = time.monotonic,
        scratch_folder: str = "",
    ):
        self.topology = topology
        self.settings = settings
        self.emit = emit
        self.clock = clock
        """Seconds; every deadline of the cluster is measured by it."""
        self.membership = membership_machine.Membership(
            topology,
            membership_machine.Limits(
                settings.heartbeat_timeout_seconds, settings.suspect_after_seconds,
                settings.executor_start_timeout_seconds, settings.progress_deadline_seconds,
                settings.suspend_timeout_seconds,
            ),
        )  # fmt: skip
        self.generations = generation_machine.Generations()
        self.compilers = CompilerPool(settings, emit)
        self.pythons = PythonProcesses(settings, emit, clock)
        self.suspender = Suspender(self, scratch_folder)
        self.renewals = Renewals(clock, emit, self._is_engaged, self.slot_names)
        self.compilers.is_awaited = lambda: bool(self.suspender.slots)
        self.crashes = ProgramCrashes(
            settings.program_crash_limit, settings.program_crash_window_seconds, settings.membership_settle_seconds
        )
        self.explanations = Explanations(settings.loss_explanation_seconds)
        self.agents: dict[int, AgentLink] = {}
        self.executors: dict[int, ExecutorLink] = {}
        self.slots: list[ExecutorLink | None] = [None] * topology.slots
        self.stopping = False
        """The head is going: losses are its own doing and no events."""
        self.epoch = 0
        """Changes whenever a slot's executor does."""
        self.on_loss: list[Callable[[ExecutorLink], None]] = []
        self.on_activation: list[Callable[[ExecutorLink], None]] = []
        """Called with each executor that takes a slot."""
        self.on_profile_data: Callable[[ExecutorLink, int, int, str, bytes], None] = lambda *_: None
        """Called with executor, profile, start, problem and trace when an executor has recorded one."""
        self.on_host_callback: Callable[[ExecutorLink, int, int, list[list[int]], bytes], None] = lambda *_: None
        """Called with executor, callback, token, and the operands' shapes and bytes when a program calls back."""
        self.on_generation: list[Callable[[list[ExecutorLink]], None]] = []
        """Called when executors have been ordered into a generation, with its members."""
        self._last_loss: list[Status | None] = [None] * topology.slots
        self._spans: dict[tuple[int, ...], tuple[ExecutorLink, ...] | Status] = {}
        self._spans_epoch = -1
        self.holds = SliceHolds(settings)
        self._ticked = clock()
        self._rendezvous = rendezvous
        self._service_host = service_host
        self._services: dict[int, int] = {}
        self._waiting_for_service: list[int] = []
        self._generation_started: dict[int, float] = {}
        self._causes: OrderedDict[int, Status] = OrderedDict()
        self._settling: list[_Settling] = []
        self._execution_members: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._disagreements: dict[int, _Disagreement] = {}

    # ---- questions of the proxy

    def executors_of(self, devices: tuple[int, ...]) -> tuple[ExecutorLink, ...] | Status:
        """The executors that have ``devices``, in slot order, or why one of them is down."""
        if self._spans_epoch != self.epoch:
            self._spans.clear()
            self._spans_epoch = self.epoch
        found = self._spans.get(devices)
        if found is None:
            slots = sorted({self.topology.slot_of_device(d) for d in devices})
            links = [self.slots[slot] for slot in slots]
            if None in links:
                found = self.loss_of_slot(slots[links.index(None)])
            else:
                found = tuple(link for link in links if link is not None)
            self._spans[devices] = found
        return found

    def loss_of_slot(self, slot: int) -> Status:
        """Why a slot without an executor has none."""
        last = self._last_loss[slot]
        slice_index = self.topology.slice_of_slot(slot)
        reason = self.holds.given_up.get(slice_index)
        if reason is not None:
            detail = f": {last.message}" if last is not None else ""
            return statuses.data_loss(f"slice {slice_index} is down for good ({reason}){detail}")
        if last is None:
            return statuses.data_loss(f"{self.topology.describe_slot(slot)} has not joined the cluster yet")
        return last

    def executor_of_device(self, device: int) -> ExecutorLink | None:
        """The executor that has a device now."""
        return self.slots[self.topology.slot_of_device(device)]

    def hold_for(self, devices: Iterable[int]) -> SliceHold | None:
        """Where work on ``devices`` should wait: they lie in one slice, which is down but on its way back, or waited
        for. See `slice_hold`."""
        slices = {self.topology.slice_of_device(d) for d in devices}
        if len(slices) != 1:
            self.holds.spanned()
            return None
        slice_index = slices.pop()
        if self.membership.slice_is_up(slice_index):
            return None
        hold, opened = self.holds.find(self.clock(), slice_index, self.membership.slice_is_joining)
        if hold is not None and opened:
            self.emit("probe_held", slice=slice_index, reason=hold.reason.value)
        return hold

    def _finish(self, ended: list[Ended]) -> None:
        for entry in ended:
            slice_index = entry.hold.slice_index
            held = round(self.clock() - entry.hold.opened, 4)
            self.emit("probe_answered", slice=slice_index, held_seconds=held, ok=entry.up)
            missing = next((s for s in self.topology.slots_of_slice(slice_index) if self.slots[s] is None), None)
            error = None if missing is None else self.loss_of_slot(missing)
            self.suspender.when_free(lambda hold=entry.hold, error=error: hold.finish(error))

    def slice_is_up(self, slice_index: int) -> bool:
        """Whether every host of a slice is ready."""
        return self.membership.slice_is_up(slice_index)

    # ---- generations

    def span(self, executors: tuple[ExecutorLink, ...]) -> None:
        """Make sure that orders sent to these executors from now on run in a common generation."""
        if len(executors) > 1:
            if self.holds.watching and len({self.topology.slice_of_slot(e.slot) for e in executors}) > 1:
                self.holds.spanned()
            current = self.generations.current
            first = current.get(executors[0].number)
            if first is not None and all(current.get(e.number) == first for e in executors):
                return
            self._apply_generation(self.generations.need([e.number for e in executors]))

    def execution_started(self, execution: int, executors: tuple[ExecutorLink, ...]) -> None:
        """Remember who runs an execution, to notice when they disagree."""
        if len(executors) > 1:
            self._execution_members[execution] = tuple(e.number for e in executors)
            if len(self._execution_members) > EXECUTIONS_KEPT:
                self._execution_members.popitem(last=False)

    def cause_of(self, generation: int) -> Status | None:
        """Why a generation ended, if that is known."""
        return self._causes.get(generation)

    def execution_failed(self, executor: ExecutorLink, execution: int, status: Status, generation: int) -> None:
        """A member could not start or finish an execution in the generation that it is in."""
        members = self._execution_members.get(execution)
        if members is None or generation in self._causes or generation == 0:
            return
        entry = self._disagreements.get(execution)
        if entry is None:
            deadline = self.clock() + self.settings.disagreement_seconds
            entry = self._disagreements[execution] = _Disagreement(deadline, generation, executor.place, status)
        entry.failed.add(executor.number)
        if status.code is statuses.Code.ABORTED:
            entry.collective = True
        if entry.failed >= set(members) and not entry.collective:
            del self._disagreements[execution]
            for number in members:
                link = self.executors.get(number)
                if link is not None:
                    link.send_aside(["everybody_refused", execution])

    def _is_engaged(self, link: ExecutorLink) -> bool:
        """Whether an executor is in a generation, or is being suspended: then it stays the process that it is."""
        return link.number in self.generations.current or link.slot in self.suspender.slots

    def stuck(self, executor: ExecutorLink, status: Status, generation: int) -> None:
        """A member's program failed on one of its devices, and the others wait for that one: only an abort ends it."""
        if generation > 0 and generation not in self._causes:
            self._abort_for(generation, executor.place, status)

    def settle(
        self, place: str, status: Status, collective: bool, generation: int, deliver: Callable[[Status], None]
    ) -> None:
        """Deliver the error of an executor at ``place``, or the loss behind it: a collective's own error waits until
        it is known why its generation ended."""
        if not collective:
            deliver(status)
            return
        cause = self._causes.get(generation)
        if cause is not None:
            deliver(cause)
            return
        deadline = self.clock() + self.settings.membership_settle_seconds
        self._settling.append(_Settling(deadline, generation, place, status, deliver))

    def _abort_for(self, generation: int, executor_place: str, status: Status) -> None:
        code = statuses.Code.DATA_LOSS if status.code is statuses.Code.ABORTED else status.code
        status = Status(code, f"generation {generation} ended at {executor_place}: {status.message}")
        self._causes.setdefault(generation, status)
        self._apply_generation(self.generations.failed(self.clock(), generation, status.message))

    def _apply_generation(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case generation_machine.Enter(generation, members):
                    self._enter(generation, members)
                case generation_machine.Abort(generation, members, leaving, cause):
                    self._abort(generation, members, leaving, cause)
                case generation_machine.Leave(generation, members):
                    self._leave(generation, members)
                case generation_machine.Ready(generation, members):
                    started = self._generation_started.pop(generation, self.clock())
                    self.emit(
                        "generation_ready",
                        generation=generation,
                        members=self._places(members),
                        seconds=round(self.clock() - started, 4),
                    )
                case generation_machine.Recycle(number, generation):
                    link = self.executors.get(number)
                    if link is not None:
                        self.emit(
                            "executor_recycled",
                            **self.slot_names(link.slot),
                            reason=f"did not leave generation {generation} in time",
                        )
                        description = f"it did not leave the aborted generation {generation} (drain_deadline_seconds)"
                        cause = self._causes.get(generation)
                        if cause is not None:
                            # Whoever reads of this loss wants to know of the one behind it.
                            description += f"; that had ended because {cause.message[:CAUSE_CHARACTERS]}"
                        loss = membership_machine.Loss(False, description)
                        self.apply(self.membership.recycle_executor(self.clock(), number, loss))
                case generation_machine.Retire(generation):
                    self._generation_started.pop(generation, None)
                    port = self._services.pop(generation, None)
                    if port is not None:
                        self._rendezvous.close_service(port)

    def _enter(self, generation: int, members: tuple[int, ...]) -> None:
        links = [self.executors[number] for number in members]
        self._generation_started[generation] = self.clock()
        self.emit("generation_started", generation=generation, members=self._places(members))
        first_devices = [self.topology.first_device(link.slot) for link in links]
        for rank, link in enumerate(links):

            def entered(
                error: Status | None, fields: list[Any], buffers: list[bytes], link: ExecutorLink = link
            ) -> None:
                if error is None:
                    self._apply_generation(self.generations.entered(link.number, generation))
                elif link.lost is None:
                    self._abort_for(generation, link.place, error)

            link.request("enter_generation", [generation, rank, first_devices], entered)
        self._waiting_for_service.append(generation)
        self._hand_out_services()
        for callback in self.on_generation:
            callback(links)

    def _hand_out_services(self) -> None:
        while self._waiting_for_service:
            generation = self._waiting_for_service[0]
            record = self.generations.generations.get(generation)
            if record is None or record.aborted:
                self._waiting_for_service.pop(0)
                continue
            port = self._rendezvous.take_nowait()
            if port is None:
                return  # the next tick asks again; members give up after generation_create_timeout_seconds
            self._waiting_for_service.pop(0)
            self._services[generation] = port
            for number in record.members:
                link = self.executors.get(number)
                if link is not None:
                    link.send_aside(["service", generation, f"{self._service_host}:{port}"])

    def _abort(self, generation: int, members: tuple[int, ...], leaving: tuple[int, ...], cause: str) -> None:
        started = self.clock()
        status = self._causes.setdefault(generation, statuses.data_loss(cause))
        while len(self._causes) > CAUSES_KEPT:
            self._causes.popitem(last=False)
        self._generation_started.pop(generation, None)
        for number in members:
            link = self.executors.get(number)
            if link is not None:
                link.send_aside(["abort", generation, int(status.code), status.message])
        self.emit("generation_aborted", generation=generation, cause=status.message)
        self._order_to_leave(generation, leaving, "survivors_aborted", started)
        settled = [entry for entry in self._settling if entry.generation == generation]
        self._settling = [entry for entry in self._settling if entry.generation != generation]
        for entry in settled:
            entry.deliver(status)

    def _leave(self, generation: int, members: tuple[int, ...]) -> None:
        self.emit("generation_dissolved", generation=generation, members=self._places(members))
        self._order_to_leave(generation, members, "generation_left", self.clock())

    def _order_to_leave(self, generation: int, members: tuple[int, ...], when_all: str, started: float) -> None:
        waiting = set(members)
        for number in members:
            link = self.executors.get(number)
            if link is None:
                continue

            def left(error: Status | None, fields: list[Any], buffers: list[bytes], number: int = number) -> None:
                waiting.discard(number)
                if error is None:
                    self._apply_generation(self.generations.left(number, generation))
                    if (leaver := self.executors.get(number)) is not None:
                        self.renewals.consider(leaver, bool(fields and fields[0]))
                if not waiting:
                    self.emit(when_all, generation=generation, seconds=round(self.clock() - started, 4))

            link.request("leave_generation", [generation], left)

    def dissolve(self, number: int) -> None:
        """Have the members of an executor's generation leave it, each after what it was ordered before."""
        self._apply_generation(self.generations.dissolve(number))

    # ---- effects of membership

    def apply(self, effects: list[membership_machine.Effect]) -> None:
        """Carry out what membership decided."""
        suspended = len(self.suspender.slots)
        self._apply(effects)
        if len(self.suspender.slots) < suspended:
            self.suspender.changed()

    def _apply(self, effects: list[membership_machine.Effect]) -> None:
        for effect in effects:
            match effect:
                case membership_machine.Emit(kind, _) if self.stopping and kind in _PART_OF_STOPPING:
                    pass
                case membership_machine.Emit(kind, fields):
                    self.emit(kind, **fields)
                    if kind == "slice_ready":
                        self._slice_ready(fields["slice"])
                case membership_machine.StartProcess(agent, role, number):
                    if agent in self.agents:
                        self.agents[agent].send([f"start_{role}", number])
                case membership_machine.KillProcess(agent, number, reason):
                    if agent in self.agents:
                        self.agents[agent].send(["kill_executor", number, reason])
                case membership_machine.AssignSlot(agent, slot):
                    names = self.slot_names(slot)
                    self.agents[agent].slot = slot
                    self.agents[agent].send(["assign", names["slice"], names["host"]])
                case membership_machine.ActivateExecutor(number, slot, _):
                    self._activate(number, slot)
                case membership_machine.LoseExecutor(number, slot, loss):
                    self._lose(number, slot, loss)
                case membership_machine.CloseExecutor(number, loss):
                    executor_link = self.executors.pop(number, None)
                    if executor_link is not None:
                        executor_link.lose(loss.deadline, loss.description)
                case membership_machine.SuspendExecutor(number, slot, notice_seconds):
                    self.suspender.suspend(number, slot, notice_seconds)
                case membership_machine.SuspendedExecutor(number, _):
                    self.suspender.detach(number)
                case membership_machine.RestoreExecutor(number, slot):
                    self.suspender.restore(number, slot)
                case membership_machine.ResumeExecutor(_, number, slot):
                    self.suspender.resume(number, slot)
                case membership_machine.ReleaseAgent(number, reason):
                    self.suspender.release(self.agents.pop(number), reason)
                    self.compilers.remove_agent(number, blamed=False)
                    self.pythons.agent_lost(number, reason)
                case membership_machine.CloseAgent(number, reason):
                    agent_link = self.agents.pop(number, None)
                    if agent_link is not None:
                        agent_link.close()
                    self.explanations.agent_gone(number)
                    self.compilers.remove_agent(number)
                    self.pythons.agent_lost(number, reason)
                case membership_machine.Welcome() | membership_machine.Refuse():
                    raise AssertionError("answered where the connection is accepted")

    def _activate(self, number: int, slot: int) -> None:
        link = self.executors[number]
        link.slot = slot
        link.place = self.topology.describe_slot(slot)
        link.send(["assign", slot, self.topology.first_device(slot)])
        self.generations.add(number)
        self.slots[slot] = link
        self.epoch += 1
        for callback in self.on_activation:
            callback(link)

    def _lose(self, number: int, slot: int, loss: membership_machine.Loss) -> None:
        suspended = self.suspender.take_lost(slot)
        link = self.executors.pop(number, None) or suspended
        assert link is not None
        self.slots[slot] = None
        self.epoch += 1
        status = statuses.Status(
            statuses.Code.DEADLINE_EXCEEDED if loss.deadline else statuses.Code.DATA_LOSS,
            f"{link.place} (executor {number}) was lost: {loss.description}",
        )
        self._last_loss[slot] = status
        self.holds.lost(self.clock(), self.topology.slice_of_slot(slot))
        self.renewals.forget(number)
        self.crashes.lost(self.clock(), number)
        if not loss.deadline and link.agent in self.agents:
            self.explanations.wait(self.clock(), number, link.agent)
        for generation in self.generations.generations.values():
            if number in generation.members and not generation.aborted and number in generation.remaining:
                self._causes.setdefault(generation.number, status)
        # The survivors' collectives first: nobody must wait while the rest is done.
        self._apply_generation(self.generations.lost(self.clock(), number, status.message))
        for other in self.executors.values():
            other.send_aside(["peer_lost", number, int(status.code), status.message])
        self.pythons.peer_lost(number, status)
        link.lose(loss.deadline, loss.description)
        for callback in self.on_loss:
            callback(link)

    def _slice_ready(self, slice_index: int) -> None:
        self._finish(self.holds.up(self.clock(), slice_index))

    # ---- what the launcher says

    def expect(self, slice_index: int) -> None:
        """A replacement for a host of this slice is being started."""
        self.holds.expect(self.clock(), slice_index)

    def give_up(self, slice_index: int, reason: str) -> None:
        """No replacement will come."""
        ended = self.holds.give_up(slice_index, reason)
        self._spans_epoch = -1
        self._finish(ended)
        self.apply(self.membership.abandon_suspended(self.clock(), slice_index, reason))

    def preempt(self, slot: int, notice_seconds: float, reason: str) -> None:
        """The worker in a slot will be taken away in so many seconds: save what it holds, and let it go."""
        self.apply(self.membership.preempt(self.clock(), slot, notice_seconds, reason))

    def explain_loss(self, slot: int, description: str, executor: int | None = None) -> None:
        """Add what the launcher or the agent knows of a loss to what users read; news of an ``executor`` that is not
        the one lost last there comes too late."""
        last = self._last_loss[slot]
        if last is None or (executor is not None and f"(executor {executor})" not in last.message):
            return
        if description not in last.message:
            self._last_loss[slot] = Status(last.code, f"{last.message} ({description})")
            self._spans_epoch = -1

    def executor_exited(self, slot: int, executor: int, code: int, running: list[tuple[str, str]]) -> None:
        """How a lost executor's process ended, and the programs (with names) that it was running."""
        text = f"executor {describe_exit(code)}"
        if running:
            names = list(dict.fromkeys(name for _, name in running))
            text += f" while it ran {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if names[3:] else "")
        programs = [(program_of(program), name) for program, name in running]
        self.crashes.exited(executor, code, programs)
        self.explain_loss(slot, text, executor)
        self.explanations.explain(executor, text)

    # ---- time

    def forgive(self, seconds: float) -> None:
        """The head itself stood still for so long: what it did not hear was perhaps said, so every deadline that
        runs for others is put off."""
        self.membership.forgive(seconds)
        self.generations.forgive(seconds)
        self.pythons.forgive(seconds)
        for settling in self._settling:
            settling.deadline += seconds
        for entry in self._disagreements.values():
            entry.deadline += seconds

    def tick(self) -> None:
        """Apply every deadline; called every `TICK_SECONDS`. Much later than that means that this process was stopped
        or starved, which is forgiven."""
        now = self.clock()
        lag, self._ticked = now - self._ticked, now
        if lag > max(2 * TICK_SECONDS, self.settings.drain_deadline_seconds / 4):
            self.forgive(lag)
        self.apply(self.membership.tick(now))
        progressed = {number: link.progressed for number, link in self.executors.items()}
        self._apply_generation(self.generations.tick(now, self.settings.drain_deadline_seconds, progressed))
        self._hand_out_services()
        self.pythons.tick(now)
        self.suspender.tick(now)
        self.explanations.tick(now)
        for name, count in self.crashes.tick(now):
            self.emit("program_refused", program=name, crashes=count)
        for link in self.executors.values():
            link.flush_frees()
        self._finish(self.holds.due(now, self.membership.slice_is_joining))
        for execution, entry in list(self._disagreements.items()):
            if entry.generation in self._causes:
                del self._disagreements[execution]
            elif now >= entry.deadline:
                del self._disagreements[execution]
                self._abort_for(entry.generation, entry.place, entry.status)
        for settling in [s for s in self._settling if now >= s.deadline]:
            if settling in self._settling:
                self._abort_for(settling.generation, settling.place, settling.status)
        # Those of a generation that is no more; what ended it is forgotten.
        stale = [settling for settling in self._settling if now >= settling.deadline]
        self._settling = [settling for settling in self._settling if settling not in stale]
        for settling in stale:
            settling.deliver(self._causes.get(settling.generation, statuses.data_loss(settling.status.message)))

    # ---- names

    def slot_names(self, slot: int) -> dict[str, int]:
        """A slot's slice and host, as fields of an event."""
        return {"slice": self.topology.slice_of_slot(slot), "host": self.topology.host_of_slot(slot)}

    def _places(self, members: Iterable[int]) -> list[list[int]]:
        return [
            list(self.slot_names(link.slot).values()) for n in members if (link := self.executors.get(n)) is not None
        ]
