"""The user's program: trains, sees errors, probes the slices and trains on, as pathwaysutils has it do.

It talks to the real dispatcher, knows what every value must be, and checks every error for its first cause.
"""

import asyncio
import copy
import functools
import itertools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from simulated_head import SimulatedCluster
from simulated_runtime import mix

from ridgeway.protocol.status import Code, Status
from ridgeway.proxy.arrays import Array
from ridgeway.proxy.dispatch import HostPart
from ridgeway.proxy.executables import CompiledProgram, Executable
from ridgeway.proxy.host_buffers import HostBufferStore
from ridgeway.proxy.suspension_gate import SuspensionGate

KIND_S64 = 5
THINKING_SECONDS = (0.0, 0.4)
"""What the program does beside its use of devices."""
POLL_SECONDS = 0.5
"""Pause after a probe that failed, in the place of pathwaysutils' ten seconds."""
FIRST_CAUSE = re.compile(
    r"was lost: .|has not joined the cluster yet|is down for good|generation \d+ ended at .+: .|"
    r"bytes that were announced did not come within|bytes could not be sent to"
)
"""What an error says of why, at its root."""


@functools.cache
def _compiled(
    name: str, devices: tuple[int, ...], arguments: int, results: int, donated: tuple[int, ...]
) -> Executable:
    metadata = {
        "name": name, "inputs": [[[], KIND_S64]] * arguments, "outputs": [[[], KIND_S64]] * results,
        "donated": list(donated), "output_shardings": None, "output_memory_kinds": [],
    }  # fmt: skip
    compiled = CompiledProgram(f"{name}-{donated}", metadata, bytes(donated), b"", 1, len(devices))
    return Executable(compiled, (devices,))


def executable(
    name: str, devices: Sequence[int], arguments: int, results: int = 1, donated: tuple[int, ...] = ()
) -> Executable:
    """A program, as a session gets it from the compiler."""
    return copy.copy(_compiled(name, tuple(devices), arguments, results, donated))


class Failed(Exception):
    """An operation ended in an error that a program may try again after."""

    def __init__(self, status: Status):
        super().__init__(str(status))
        self.status = status


class Value:
    """An array and what must be in it."""

    def __init__(self, array: Array, expected: int):
        self.array = array
        self.expected = expected


class Controller:
    """One session's program, on the devices of some slices."""

    def __init__(self, cluster: SimulatedCluster, name: str, slices: Sequence[int], donates: bool, depth: int):
        self.cluster = cluster
        self.world = cluster.world
        self.name = name
        self.slices = tuple(slices)
        self.depth = depth
        self.waiting: dict[int, tuple[float, str]] = {}
        """operations without an answer: when they were begun, and what they are"""
        self.errors: list[Status] = []
        self.rounds = 0
        """trainings that went through"""
        self.round_began = 0.0
        self.closed = False
        self.abandoned = False
        self.arrays: dict[Array, None] = {}
        self._operations = itertools.count(1)
        self._handles = itertools.count(1)
        self.buffers = HostBufferStore(1 << 20, 60.0)
        suspender = cluster.manager.suspender
        self.gate = SuspensionGate(suspender, 0, cluster.settings.pending_order_limit, cluster.emit)
        suspender.on_change.append(self.gate.reopen)
        self._held: set[int] = set()
        """operations that wait at the gate, or have not come there"""
        topology = cluster.manager.topology
        self._devices_of = {
            index: tuple(
                topology.first_device(slot) + k
                for slot in topology.slots_of_slice(index)
                for k in range(topology.devices_per_host)
            )
            for index in self.slices
        }
        self.devices = tuple(device for index in self.slices for device in self._devices_of[index])
        self._step = executable(f"step of {name}", self.devices, 2, 2, (0,) if donates else ())
        self._probes = {index: executable("probe", devices, 1) for index, devices in self._devices_of.items()}
        self._executables = [self._step, *self._probes.values()]
        for program in self._executables:
            cluster.programs.retain(program)

    # ---- operations

    def _request(self, devices: Sequence[int], function: Callable[..., None], *arguments: Any) -> None:
        """What a session does with a request that makes orders for ``devices``."""
        slot_of = self.cluster.manager.topology.slot_of_device

        def arrived() -> None:
            if not self.closed:
                self.gate.admit(lambda: {slot_of(d) for d in devices}, lambda: function(*arguments))

        self.cluster.process.run(arrived)

    def _begin(
        self, what: str, devices: Sequence[int], begin: Callable[[Callable[..., None]], None]
    ) -> Awaitable[bytes]:
        """Begin an operation now; awaiting the result gives its answer or raises `Failed`."""
        number = next(self._operations)
        answered: asyncio.Future[tuple[Status | None, bytes]] = self.world.loop.create_future()

        def done(error: Status | None, data: bytes = b"") -> None:
            if self.abandoned:
                return
            if self.waiting.pop(number, None) is None:
                self.world.violation(f"{self.name}: {what} was answered twice")
            if not answered.done():
                answered.set_result((error, data))

        self.waiting[number] = (self.world.now, what)
        self._held.add(number)  # at the gate, or on its way there

        def passed() -> None:
            self._held.discard(number)
            begin(done)

        self._request(devices, passed)

        async def answer() -> bytes:
            error, data = await answered
            if error is not None:
                self._check_error(what, error)
                raise Failed(error)
            return data

        return answer()

    def _check_error(self, what: str, error: Status) -> None:
        if self.closed:
            return  # nobody reads it any more
        self.errors.append(error)
        self.world.say(f"{self.name}: {what}: {error}")
        if error.code not in (Code.DATA_LOSS, Code.DEADLINE_EXCEEDED):
            self.world.violation(f"{self.name}: {what} ended in an error that nobody tries again after: {error}")
        if "the client went away" in error.message:
            self.world.violation(f"{self.name}: {what} was disturbed by another client's end: {error}")
        if FIRST_CAUSE.search(error.message) is None:
            self.world.violation(f"{self.name}: {what} ended in an error without its first cause: {error}")

    def _lost_before(self, value: Value) -> list[int]:
        groups = value.array.groups
        if groups is None:
            return []
        listed = groups if isinstance(groups, tuple) else (groups,)
        numbers = {executor.number for group in listed for executor in group.executors}
        return [number for number in sorted(numbers) if number in self.cluster.lost_at]

    def put(self, number: int, devices: tuple[int, ...], pieces: int = 1) -> Value:
        """Bring a number to all devices; its bytes may come after the request."""
        sharding = executable("put", devices, 1).outputs[0][2]
        array = self._keep(Array(KIND_S64, (), sharding))
        bounds = [round(i * len(devices) / pieces) for i in range(pieces + 1)]
        parts = [
            HostPart(range(first, last), (), None, next(self._handles))
            for first, last in itertools.pairwise(bounds)
            if last > first
        ]
        data = number.to_bytes(8, "little")
        late = [part.handle for part in parts if self.world.random.random() < 0.2]
        for part in parts:
            if part.handle not in late:
                self.buffers.put(part.handle, data)
        self._request(devices, self.cluster.dispatcher.put, array, parts, self.buffers)
        for handle in late:
            delay = self.world.random.uniform(0.0, 0.01)
            self.world.loop.call_later(delay, self.cluster.process.run, self.buffers.put, handle, data)
        return Value(array, number)

    def _keep(self, array: Array) -> Array:
        self.arrays[array] = None
        return array

    def drop(self, *values: Value) -> None:
        """Python forgets arrays."""
        if self.abandoned:
            return
        for value in values:
            self._request((), self._release, value.array)

    def _release(self, array: Array) -> None:
        if array in self.arrays:
            del self.arrays[array]
            array.release()

    def execute(self, program: Executable, arguments: list[Value], tell: bool = False) -> tuple[list[Value], Any]:
        """Start a program; its results, and the wait for its end if ``tell``."""
        results = [self._keep(Array(kind, shape, sharding)) for kind, shape, sharding in program.outputs]
        expected = mix(program.name, [argument.expected for argument in arguments])
        arrays = [argument.array for argument in arguments]
        execute = self.cluster.dispatcher.execute
        if not tell:
            self._request(program.devices, execute, program, arrays, results, (), None)
            return [Value(result, expected) for result in results], None
        wait = self._begin(
            f"executing {program.name}", program.devices, lambda done: execute(program, arrays, results, (), done)
        )
        return [Value(result, expected) for result in results], wait

    def copy(self, source: Value, devices: tuple[int, ...]) -> Value:
        """Copy shard by shard to other devices."""
        target = self._keep(Array(KIND_S64, (), executable("copy", devices, 1).outputs[0][2]))
        touched = (*source.array.devices, *devices)
        self._request(touched, self.cluster.dispatcher.copy, source.array, target, False)
        return Value(target, source.expected)

    async def ready(self, what: str, *values: Value) -> None:
        """Wait until arrays are computed."""
        lost = {number for value in values for number in self._lost_before(value)}
        arrays = [value.array for value in values]
        devices = [device for array in arrays for device in array.devices]
        await self._begin(f"{what} ready", devices, lambda done: self.cluster.dispatcher.ready(arrays, done))
        if lost:
            self.world.violation(
                f"{self.name}: {what} was ready although executors {sorted(lost)} with parts were lost"
            )

    async def fetch(self, what: str, value: Value) -> None:
        """Read an array and compare."""
        lost = self._lost_before(value)
        array = value.array
        data = await self._begin(what, array.devices, lambda done: self.cluster.dispatcher.fetch(array, None, done))
        if lost:
            self.world.violation(f"{self.name}: {what} was read although executors {lost} with parts of it were lost")
        if int.from_bytes(data, "little") != value.expected:
            self.world.violation(f"{self.name}: {what} is wrong")

    # ---- the program

    async def run(self, rounds: int) -> None:
        """Train until ``rounds`` trainings went through one after the other."""
        while self.rounds < rounds:
            try:
                await self._probe_all()
                self.round_began = self.world.now
                await self._train()
                self.rounds += 1
            except Failed:
                self.rounds = 0
                await asyncio.sleep(self.world.random.uniform(0.0, 0.05))
            finally:
                self.drop(*[Value(array, 0) for array in list(self.arrays)])

    async def _probe_all(self) -> None:
        while True:
            answers = await asyncio.gather(*(self._probe(index) for index in self.slices))
            if all(answers):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _probe(self, index: int) -> bool:
        value = self.put(self.world.random.getrandbits(32), self._devices_of[index])
        (result,), _ = self.execute(self._probes[index], [value])
        try:
            await self.ready(f"probe of slice {index}", result)
            return True
        except Failed:
            return False
        finally:
            self.drop(value, result)

    async def _train(self) -> None:
        random = self.world.random
        state = self.put(random.getrandbits(32), self.devices, random.randint(1, 2))
        for step in range(random.randint(2, 4)):
            waits: list[Any] = []
            for _ in range(self.depth):
                batch = self.put(random.getrandbits(32), self.devices)
                (following, loss), wait = self.execute(self._step, [state, batch], tell=random.random() < 0.3)
                if wait is not None:
                    waits.append(wait)
                self.drop(state, batch)
                state = following
                if random.random() < 0.5:
                    self.drop(loss)
            try:
                await self._use(step, state)
            finally:
                failures = [e for e in await asyncio.gather(*waits, return_exceptions=True) if e is not None]
            for failure in failures:
                if isinstance(failure, BaseException):
                    raise failure

    async def _use(self, step: int, state: Value) -> None:
        random = self.world.random
        await asyncio.sleep(random.uniform(*THINKING_SECONDS))
        what = random.random()
        if what < 0.4:
            await self.fetch(f"state at {step}", state)
        elif what < 0.6:
            await self.ready(f"state at {step}", state)
        elif what < 0.8:
            turn = random.randrange(len(self.devices))
            snapshot = self.copy(state, self.devices[turn:] + self.devices[:turn])
            if random.random() < 0.5:
                await self.ready(f"snapshot at {step}", snapshot)
            await self.fetch(f"snapshot at {step}", snapshot)
            self.drop(snapshot)
        else:
            await asyncio.gather(self.fetch(f"state at {step}", state), self.ready(f"state at {step}", state))

    def abandon(self) -> None:
        """The head is gone: what it had of this client, nobody has any more."""
        self.closed = self.abandoned = True
        self.arrays.clear()
        self.waiting.clear()
        self._executables = []

    def close(self) -> None:
        """The client goes away: everything it held is freed."""
        self.closed = True
        self.gate.close()
        self.cluster.manager.suspender.on_change.remove(self.gate.reopen)
        for number in self._held:
            del self.waiting[number]  # nobody will answer what was never asked
        self._held.clear()
        for array in list(self.arrays):
            self.cluster.process.run(self._release, array)
        for program in self._executables:
            self.cluster.programs.release(program)
        self._executables = []
        self.buffers.close()
