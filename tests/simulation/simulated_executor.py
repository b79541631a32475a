"""An executor process: obeys orders as `ridgeway.worker.executor` does, with numbers in the place of arrays."""

import asyncio
from typing import Any

from simulated_buffers import BufferHolder
from simulated_network import Machine
from simulated_runtime import Execution, GenerationFailure, Pending, Program, Runtime, Waiters, mix
from simulated_xla import BROKEN, XlaWorld

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.settings import Settings

ORDER_SECONDS = 0.0003
WORK_SECONDS = 0.003
SAVE_SECONDS = (0.01, 0.3)


class SimulatedExecutor(BufferHolder):
    """One executor; `cluster` says how to reach the head, other executors and services."""

    def __init__(self, machine: Machine, number: int, agent: int, per_host: int, settings: Settings, cluster: Any):
        super().__init__(machine, number, per_host, settings, cluster)
        self.agent = agent
        self.head: str | None = None
        """for which it was started"""
        self.per_host = per_host
        self.stuck = False
        """its order thread hangs; heartbeats go on"""
        self.programs: dict[str, Program] = {}
        self.first_device = 0
        self.services: dict[int, asyncio.Queue[int]] = {}
        self.cancelled: dict[int, Status] = {}
        self.entering: tuple[int, asyncio.Future[bool]] | None = None
        self.welcomed = False
        self.missed_generation = 0
        self.refused: int | None = None
        """an execution that this one refused and others perhaps have started"""
        self._orders: asyncio.Queue[tuple[list[Any], list[bytes]]] = asyncio.Queue()
        self._received = 0
        self._dispatched = 0
        self._completed_before = 0
        self._task = self.world.task(self._run_orders())
        cluster.executors[self.pid] = self

    def connect(self) -> None:
        """Say hello to the head."""
        self.connection = self.cluster.connect(self, {
            "role": "executor", "agent": self.agent, "executor": self.number, "pid": self.pid,
            "versions": self.cluster.versions, "transfer_host": "10.0.0.1", "transfer_port": self.pid,
            "head": self.head,
        }, self._message, lambda: self.end(3))  # fmt: skip

    def ended(self) -> None:
        self._task.cancel()
        self.cluster.executors.pop(self.pid, None)
        for xla in list(self.cluster.rendezvous.worlds.values()):
            if self in xla.attached.values():
                xla.member_died(self)

    # ---- messages

    def _message(self, message: list[Any], attached: list[bytes]) -> None:
        if not self.welcomed:
            if message[0] != "welcome":
                self.end(2)
                return
            self.welcomed = True
            self._send_heartbeats()
            return
        aside = getattr(self, f"_aside_{message[0]}", None)
        if aside is not None:
            aside(*message[1:], attached=attached)
        else:
            self._received += 1
            self._orders.put_nowait((message, attached))

    def _send_heartbeats(self) -> None:
        self.heartbeat()
        self._expire_promises()
        self.after(self.settings.heartbeat_interval_seconds, self._send_heartbeats)

    def heartbeat(self) -> None:
        outstanding = self._dispatched < self._received or len(self.waiters.tasks) > 0
        completed = self._completed_before + self.waiters.completed
        self.send(["heartbeat", self._dispatched, completed, outstanding, 0, 0, False])

    async def _run_orders(self) -> None:
        while True:
            message, attached = await self._orders.get()
            await self._pause(ORDER_SECONDS)
            while self.stuck:
                await asyncio.sleep(3600.0)
            work = getattr(self, f"_order_{message[0]}")(*message[1:], attached=attached)
            if work is not None:
                await work
            self._dispatched += 1

    def _execution_failed(self, execution: int, status: Status, runtime: Runtime) -> None:
        self.send(["execution_failed", execution, runtime.generation, *self._error_fields(status, runtime)])

    # ---- outside the sequence

    def _service(self, generation: int) -> "asyncio.Queue[int]":
        return self.services.setdefault(generation, asyncio.Queue())

    def _aside_service(self, generation: int, address: str, attached: list[bytes]) -> None:
        self._service(generation).put_nowait(int(address.rpartition(":")[2]))

    def _aside_abort(self, generation: int, code: int, message: str, attached: list[bytes]) -> None:
        cause = Status(Code(code), message)
        self.cancelled[generation] = cause
        self._service(generation).put_nowait(0)
        random = self.world.random
        if random.random() < self.cluster.crash_probability:
            self.machine.touched = "crashed at an abort"
            self.after(random.uniform(0.0, 0.05), self.end, -11)
        if self.entering is not None and self.entering[0] == generation:
            if random.random() < self.cluster.hole_probability:
                self.machine.touched = "hung in set-up"
            else:
                self.after(random.uniform(0.005, 0.03), _fail, self.entering[1])
        if self.runtime.generation == generation:
            self._abort_runtime(self.runtime, cause)

    def _abort_runtime(self, runtime: Runtime, cause: Status) -> None:
        if runtime.aborted is not None:
            return
        runtime.aborted = cause
        runtime.aborted_at = self.world.now
        runtime.poke()
        self.after(self.world.random.uniform(0.005, 0.03), self._break_collectives, runtime)

    def _break_collectives(self, runtime: Runtime) -> None:
        head = runtime.queue[0] if runtime.queue else None
        if head is not None and head.call is not None and not head.call.answered:
            if self.world.random.random() < self.cluster.hole_probability:
                self.machine.touched = "hung in a collective"
                head.call.answered = True
            else:
                head.call.answered = True
                self._finished(head, BROKEN)

    # ---- orders: generations

    def _order_reached(self, request: int, attached: list[bytes]) -> None:
        self.send(["reply", request])

    def _order_assign(self, slot: int, first_device: int, attached: list[bytes]) -> Any:
        self.first_device = first_device
        return self._leave()

    async def _leave(self) -> None:
        old, waiters = self.runtime, self.waiters
        patience = self.settings.drain_deadline_seconds / 3
        stuck = 0
        # Also executions whose results nobody keeps: leaving in the middle of one would fail it for the others.
        while old.queue:
            old.changed = self.world.loop.create_future()
            if old.aborted is not None:
                left = old.aborted_at + patience - self.world.now
                if left <= 1e-6:
                    stuck = 1
                    break
                self.world.loop.call_later(left, old.poke)
            await old.changed
            await self._pause(0.0)
        for group in self.store.values():
            for device, shard in group.items():
                if isinstance(shard, Execution) and shard.runtime is old:
                    group[device] = self._broken(old) if shard.value is None else self._value_of(shard)
        self._completed_before += waiters.completed
        if stuck:
            assert old.aborted is not None
            waiters.abandon(old.aborted)
        if old.xla is not None:
            old.xla.detach(self)
        self.runtime = Runtime(0, [self.first_device], self.per_host, 0, None)
        self.waiters = Waiters()
        self.refused = None

    def _order_leave_generation(self, request: int, generation: int, attached: list[bytes]) -> Any:
        async def work() -> None:
            if self.runtime.generation == generation:
                await self._leave()
            self.services.pop(generation, None)
            self.cancelled.pop(generation, None)
            self.send(["reply", request, self.world.random.random() < self.cluster.worn_probability])

        return work()

    async def _order_renew(self, request: int, attached: list[bytes]) -> None:
        if self.runtime.generation:
            self.world.violation(f"{self.name} is to be renewed in generation {self.runtime.generation}")
        await self._leave()
        await self._pause(self.world.random.uniform(0.02, 0.2))
        if self.world.random.random() < 0.2:
            self.send(["reply", request, False, "something is under way"])
        else:
            self.send(["reply", request, True, 1])

    async def _order_enter_generation(
        self, request: int, generation: int, rank: int, first_devices: list[int], attached: list[bytes]
    ) -> None:
        await self._leave()
        timeout = self.settings.generation_create_timeout_seconds
        xla: XlaWorld | None = None
        arrived: asyncio.Future[bool] = self.world.loop.create_future()
        self.entering = (generation, arrived)
        try:
            try:
                port = await asyncio.wait_for(self._service(generation).get(), timeout)
            except TimeoutError:
                raise statuses.deadline_exceeded("the head named no key-value service in time").error() from None
            await self._pause(0.0)
            cancelled = self.cancelled.get(generation)
            if cancelled is not None:
                raise cancelled.error()
            xla = self.cluster.rendezvous.worlds.get(port)
            if xla is None or xla.generation == -1:
                if self.world.random.random() < 0.1:
                    # It died between two steps of connecting, which jaxlib's client does not outlive.
                    self.machine.touched = "its service is dead"
                    self.after(0.1, self.end, -6)
                    await asyncio.sleep(timeout)
                raise Status(Code.ABORTED, "[Errno 111] Connection refused").error()
            meeting = xla.arrive(self, generation, rank, len(first_devices))
            meeting.add_done_callback(lambda _: arrived.done() or arrived.set_result(True))
            try:
                met = await asyncio.wait_for(arrived, 2 * timeout)
            except TimeoutError:
                raise Status(Code.ABORTED, "GetKeyValue() timed out").error() from None
            if not met:
                raise Status(Code.ABORTED, "CANCELLED: the distributed client was shut down").error()
            await self._pause(0.0)
        except statuses.StatusError as error:
            self.entering = None
            self.services.pop(generation, None)
            if xla is not None:
                xla.detach(self)
            self.missed_generation = generation
            status = self.cancelled.get(generation, error.status)
            self.send(["error", request, int(status.code), status.message, True, generation])
            return
        self.entering = None
        self.services.pop(generation, None)
        self.runtime = Runtime(generation, first_devices, self.per_host, rank, xla)
        self.waiters = Waiters()
        if (cancelled := self.cancelled.get(generation)) is not None:
            self._abort_runtime(self.runtime, cancelled)
        self.send(["reply", request])

    # ---- orders: preemption

    async def _order_suspend(
        self, request: int, scratch: str, path: str, slot: int, notice_seconds: float, attached: list[bytes]
    ) -> None:
        deadline = self.world.now + notice_seconds
        await self._leave()
        while self.waiters.tasks or any(p.claimed for p in self.promises.values()) or self.pushing or self._promised():
            if self.world.now > deadline:
                error = statuses.data_loss("the notice was over before everything had ended")
                self._reply_error(request, error, self.runtime)
                return
            await self._pause(0.0)
            await asyncio.sleep(0.005)
        state: dict[int, dict[int, int | Status]] = {}
        for number, group in self.store.items():
            state[number] = {}
            for device, shard in group.items():
                value = shard.value if isinstance(shard, Pending) else shard
                assert value is not None
                state[number][device] = self.describe(value, self.runtime) if isinstance(value, Status) else value
        await self._pause(0.0)
        await asyncio.sleep(self.world.random.uniform(*SAVE_SECONDS) * self.machine.slowness)
        await self._pause(0.0)
        self.cluster.scratch[path] = state
        self.send(["reply", request, path, len(state), {}])

    def _promised(self) -> bool:
        shards = (shard for group in self.store.values() for shard in group.values())
        return any(isinstance(shard, Pending) and shard.value is None for shard in shards)

    async def _order_restore(
        self, request: int, path: str, slot: int, mark: str, answered: int, attached: list[bytes]
    ) -> None:
        await asyncio.sleep(self.world.random.uniform(*SAVE_SECONDS) * self.machine.slowness)
        await self._pause(0.0)
        if self.store:
            self.world.violation(f"{self.name} holds groups {sorted(self.store)} and was told to restore others")
        for number, group in self.cluster.scratch[path].items():
            self.store[number] = dict(group)
        self.send(["reply", request])

    # ---- orders: programs

    def _order_load(self, program: str, name: str, *fields: Any, attached: list[bytes]) -> None:
        assignment = fields[1]
        devices = tuple(device for row in assignment for device in row)
        self.programs[program] = Program(name, devices, tuple(attached[0]))

    def _order_preload(self, programs: list[str], attached: list[bytes]) -> None:
        for program in programs:
            if program not in self.programs:
                self.world.violation(f"{self.name} was told to preload {program}, which it was never given")

    def _order_unload(self, programs: list[str], attached: list[bytes]) -> None:
        for program in programs:
            self.programs.pop(program, None)

    def _order_execute_and_tell(self, request: int, *fields: Any, attached: list[bytes]) -> Any:
        return self._order_execute(*fields, attached=attached, request=request)

    async def _order_execute(
        self, execution: int, program: str, arguments: list[Any], results: list[int], kept: list[int],
        attached: list[bytes], request: int | None = None,
    ) -> None:  # fmt: skip
        runtime = self.runtime
        source = self.programs[program]
        local = tuple(device for device in source.devices if device in runtime.local)
        if not local:
            self.world.violation(
                f"{self.name} was asked to run {source.name} on devices {source.devices}, none its own"
            )
        inputs: list[int | Pending] = []
        donated: list[tuple[int, int]] = []
        try:
            if runtime.aborted is not None and len(source.devices) > len(local):
                raise runtime.aborted.error()
            if not all(device in runtime.rank_of for device in source.devices):
                text = f"the generation of {source.name} does not stand"
                raise GenerationFailure(Code.ABORTED, text, self.missed_generation).error()
            if len(source.devices) > len(local):
                await self._wait_for_agreement(runtime)
            for index, argument in enumerate(arguments):
                group_of = dict.fromkeys(local, argument) if type(argument) is int else dict(argument)
                for device in local:
                    inputs.append(await self._shard(group_of[device], device))
                    if index in source.donated and index not in kept:
                        donated.append((group_of[device], device))
        except statuses.StatusError as error:
            status = self.describe(error.status, runtime)
            for result in results:
                self.store[result] = dict.fromkeys(local, status)
            if len(source.devices) > len(local) and runtime.generation > 0:
                self.refused = execution
            self._execution_failed(execution, status, runtime)
            if request is not None:
                self._reply_error(request, status, runtime)
            return
        for group, device in donated:
            self.store[group][device] = statuses.invalid_argument("the buffer was donated")
        work = Execution(runtime, execution, source, inputs)
        for result in results:
            self.store[result] = dict.fromkeys(local, work)

        def complete(_: Any, error: Status | None) -> None:
            if error is not None:
                self._execution_failed(execution, error, runtime)
                if request is not None:
                    self._reply_error(request, error, runtime)
            elif request is not None:
                self.send(["reply", request])

        waiters = self.waiters
        finish = waiters.register(complete)

        def done() -> None:
            waiters.completed += 1
            value = self._value_of(work)
            finish(None, value if isinstance(value, Status) else None)

        work.when_done(done)
        runtime.queue.append(work)
        if len(runtime.queue) == 1:
            self._start(work)

    async def _wait_for_agreement(self, runtime: Runtime) -> None:
        """Collectives pair by order alone: after a refusal nothing is started before all are known to have refused."""
        patience = self.settings.disagreement_seconds + self.settings.generation_create_timeout_seconds
        deadline = self.world.now + patience
        while self.refused is not None and runtime.aborted is None and self.world.now < deadline:
            await asyncio.sleep(0.005)
            await self._pause(0.0)
        if runtime.aborted is not None:
            raise runtime.aborted.error()
        if self.refused is not None:
            text = "it is not known whether all members refused an execution"
            raise GenerationFailure(Code.ABORTED, text, runtime.generation).error()

    def _aside_everybody_refused(self, execution: int, attached: list[bytes]) -> None:
        if self.refused == execution:
            self.refused = None

    def _start(self, work: Execution) -> None:
        """Run an execution once its inputs are there."""
        for value in work.inputs:
            if isinstance(value, Pending) and value.value is None:
                value.when_done(lambda: self._start(work))
                return
        values = [value.value if isinstance(value, Pending) else value for value in work.inputs]
        error = next((value for value in values if isinstance(value, Status)), None)
        runtime, program = work.runtime, work.program
        clique = tuple(sorted({runtime.rank_of[device] for device in program.devices}))
        if error is not None:
            self._finished(work, self.describe(error, runtime))
            return
        local = [device for device in program.devices if device in runtime.local]
        numbers = [value for value in values if isinstance(value, int)]
        if any(numbers[i] != numbers[i - i % len(local)] for i in range(len(numbers))):
            self.world.violation(f"the shards of an argument of {program.name} differ on {self.name}")
        result = mix(program.name, numbers[:: len(local)])
        if len(clique) == 1:
            self.after(WORK_SECONDS, self._finished, work, result)
        elif runtime.aborted is not None or runtime.xla is None:
            self._finished(work, BROKEN)
        else:
            work.call = runtime.xla.call(
                clique, runtime.rank, work.number, result, lambda value: self._finished(work, value)
            )

    def _finished(self, work: Execution, value: int | Status) -> None:
        if work.value is not None or not self.alive:
            return
        work.resolve(value)
        runtime = work.runtime
        runtime.queue.remove(work)
        runtime.poke()
        if runtime.queue:
            self._start(runtime.queue[0])


def _fail(arrived: "asyncio.Future[bool]") -> None:
    if not arrived.done():
        arrived.set_result(False)
