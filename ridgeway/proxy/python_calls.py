"""Colocated Python: functions of the controller that run in a Python process on the host of their arguments.

jax compiles one as a `CustomCallProgram`: a pickle with the specs of its arguments and results.  Nothing of it is
read here but the specs.  A call goes to the Python process of each host that has devices of the program; the hosts'
executors send the arguments' shards there and are sent the results' (see `worker.python_host`).  Results are *held*
until all processes have answered: what uses them is ordered after that, so no executor ever waits for user code.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.python_processes import PythonProcess
from ridgeway.cluster.slice_hold import Hold
from ridgeway.protocol import dtypes, messages, shardings
from ridgeway.protocol import status as statuses
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.proxy.arrays import Array, BufferGroup, StringShard
from ridgeway.proxy.dispatch import defer
from ridgeway.proxy.movement import executor_with

if TYPE_CHECKING:
    from ridgeway.proxy.services import Services

PYTHON_PROGRAM = "xla::ifrt::CustomCallProgram"
_TYPE_PREFIX = "jax_colocated_python"
_OF_A_FIRST_CALL = ("_output_specs_and_push_result", "_pop_result")
"""What jax appends to a function's name for the two programs that its first call makes."""

Spec = tuple[int, tuple[int, ...], Sharding]
"""Dtype kind, shape, sharding."""
Done = Callable[[Status | None], None]


@dataclasses.dataclass(slots=True)
class PythonProgram:
    """One colocated Python function, for given specs and devices."""

    number: str
    name: str
    devices: tuple[int, ...]
    inputs: list[Spec]
    outputs: list[Spec]
    pickled: bytes


_numbers = itertools.count(1)


def parse(data: bytes, known_devices: int) -> PythonProgram:
    """The program in a serialized `CustomCallProgramProto`.

    Raises:
      StatusError: INVALID_ARGUMENT, it makes no sense; UNIMPLEMENTED, it is not colocated Python.
    """
    proto = messages.CustomCallProgramProto.FromString(data)
    if not proto.type.startswith(_TYPE_PREFIX):
        raise statuses.unimplemented(f"custom call programs of type {proto.type!r} are not supported").error()
    devices = tuple(proto.devices.device_ids)
    if not devices or any(not 0 <= device < known_devices for device in devices):
        raise statuses.invalid_argument(
            f"colocated Python {proto.name!r} on devices {list(devices)}; this cluster has 0..{known_devices - 1}"
        ).error()
    name = proto.name
    for suffix in _OF_A_FIRST_CALL:
        name = name.removesuffix(suffix)
    inputs, outputs = [_spec(spec) for spec in proto.input_specs], [_spec(spec) for spec in proto.output_specs]
    for kind, shape, sharding in inputs + outputs:
        if not set(sharding.devices) <= set(devices):
            raise statuses.invalid_argument(
                f"colocated Python {name!r} runs on devices {list(devices)}, but an argument or result "
                f"{dtypes.kind_name(kind)}{list(shape)} lies on {list(sharding.devices)}"
            ).error()
    return PythonProgram(str(next(_numbers)), name, devices, inputs, outputs, proto.serialized_program_text)


def _spec(proto: Any) -> Spec:
    return proto.dtype.kind, tuple(proto.shape.dims), shardings.parse(proto.sharding)


class _Call:
    """One call of a program."""

    def __init__(self, number: int, program: PythonProgram, results: list[Array], hold: Hold, done: Done | None):
        self.number = number
        self.program = program
        self.results = results
        self.hold = hold
        self.done = done
        self.executors: dict[int, ExecutorLink] = {}
        """by slot"""
        self.pending: dict[int, PythonProcess] = {}
        """by slot: who has not answered"""
        self.targets: dict[int, list[list[Any]]] = {}
        """by slot, for each result: [[devices], token]"""
        self.deadline = 0.0
        self.failed = False


class SessionPython:
    """A session's programs, processes and calls."""

    def __init__(self, services: "Services", session: int):
        self._services = services
        self._manager = services.manager
        self._session = session
        self._programs: dict[int, PythonProgram] = {}
        self._processes: dict[int, PythonProcess] = {}
        """by slot"""
        self._lost_objects: dict[int, dict[int, str]] = {}
        """by slot: objects that lived in a process that is gone, and what became of it"""
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)

    # ---- programs

    def add(self, handle: int, program: PythonProgram) -> None:
        """Keep a program under a handle."""
        self._programs[handle] = program

    def get(self, handle: int) -> PythonProgram | None:
        """The program with a handle, if it is one of these."""
        return self._programs.get(handle)

    def drop(self, handle: int) -> None:
        """The client has no use for a program any more; objects that only it knew end with it."""
        program = self._programs.pop(handle, None)
        if program is not None:
            for process in self._processes.values():
                if program.number in process.loaded:
                    process.loaded.discard(program.number)
                    process.send(["unload", [program.number]])

    # ---- calls

    def call(
        self, program: PythonProgram, arguments: list[Array], results: list[Array], stream: int, done: Done | None
    ) -> None:
        """Start a call; calls of one stream run in order. ``done`` is called when it has ended everywhere."""
        error = next((e for a in arguments if (e := a.problem(self._manager)) is not None), None)
        executors = self._manager.executors_of(program.devices)
        if error is None and isinstance(executors, Status):
            hold = self._manager.hold_for(program.devices)
            if hold is not None:
                for result in results:
                    result.held = hold
                defer(hold, arguments, lambda error: (
                    self.call(program, arguments, results, stream, done) if error is None
                    else _fail(results, error, done)
                ))  # fmt: skip
                return
            error = executors
        if error is not None or isinstance(executors, Status):
            _fail(results, error or statuses.internal("no executors"), done)
            return
        limit = self._services.settings.pending_order_limit
        if len(self._calls) >= limit:
            text = f"more than {limit} calls of colocated Python have not ended (pending_order_limit)"
            _fail(results, statuses.resource_exhausted(text), done)
            return
        hold = Hold(f"colocated Python {program.name!r}", limit)
        call = _Call(next(self._numbers), program, results, hold, done)
        call.deadline = self._manager.clock() + self._services.settings.python_call_timeout_seconds
        self._calls[call.number] = call
        for result in results:
            if result.kind == dtypes.KIND_STRING:
                result.strings = tuple(StringShard() for _ in result.devices)
            else:
                result.held = hold
        for executor in executors:
            self._send_call(call, executor, arguments, stream)

    def _send_call(self, call: _Call, executor: ExecutorLink, arguments: list[Array], stream: int) -> None:
        slot, program = executor.slot, call.program
        process = self._process(executor)
        call.executors[slot] = executor
        call.pending[slot] = process
        if program.number not in process.loaded:
            process.loaded.add(program.number)
            process.send(["load", program.number, program.name], [program.pickled])
        inputs: list[list[Any]] = []
        for argument in arguments:
            parts = [[devices, self._services.dispatcher.new_token()] for devices in self._parts(argument, slot)]
            shapes = argument.sharding.shard_shapes(argument.shape) if argument.kind == dtypes.KIND_STRING else None
            inputs.append([
                [devices, token, None if shapes is None else shapes[argument.devices.index(devices[0])]]
                for devices, token in parts
            ])  # fmt: skip
            self._feed(argument, parts, process)
        call.targets[slot] = [
            [] if result.kind == dtypes.KIND_STRING
            else [[devices, self._services.dispatcher.new_token()] for devices in self._parts(result, slot)]
            for result in call.results
        ]  # fmt: skip
        address = [executor.transfer_host, executor.transfer_port]
        process.send(
            ["call", call.number, program.number, stream, inputs, call.targets[slot], executor.number, address]
        )

    def _parts(self, array: Array, slot: int) -> list[list[int]]:
        """An array's devices on a host, those with the same part of it together."""
        here = [(i, d) for i, d in enumerate(array.devices) if self._manager.topology.slot_of_device(d) == slot]
        sharding = array.sharding
        if sharding.tiling is None or sharding.tiling.partial:
            return [[device] for _, device in here]
        domains = sharding.index_domains(array.shape)
        together: dict[Any, list[int]] = {}
        for index, device in here:
            together.setdefault(tuple((p.start, p.stop) for p in domains[index]), []).append(device)
        return list(together.values())

    def _feed(self, argument: Array, parts: list[list[Any]], process: PythonProcess) -> None:
        """Have an argument's shards sent to a process, as soon as both are there."""
        if not parts:
            return
        argument.pin()

        def joined() -> None:
            self._send_shards(argument, parts, process)
            argument.unpin()

        if argument.held is not None:
            argument.unpin()
            defer(argument.held, [argument], lambda error: (
                self._feed(argument, parts, process) if error is None else _fail_tokens(process, parts, error)
            ))  # fmt: skip
        else:
            process.when_joined(joined)

    def _send_shards(self, argument: Array, parts: list[list[Any]], process: PythonProcess) -> None:
        if process.lost is not None:
            return
        error = argument.problem(self._manager)
        if error is not None:
            _fail_tokens(process, parts, error)
            return
        for devices, token in parts:
            position = argument.devices.index(devices[0])
            if argument.strings is not None:
                argument.strings[position].when_here(_forward(process, token))
            elif argument.groups is None:
                _fail_tokens(process, [[devices, token]], statuses.invalid_argument("an argument has no buffers"))
            else:
                group = argument.group_at(position)
                executor_with(group, devices[0], self._manager).send(
                    ["send", group.number, devices[0], [[token, process.host, process.port, -process.number, None]]]
                )

    # ---- processes

    def _process(self, executor: ExecutorLink) -> PythonProcess:
        process = self._processes.get(executor.slot)
        if process is not None and process.agent.number != executor.agent:
            self._manager.pythons.retire(process, "another host has taken the place of its host")
            process = None
        if process is None:
            agent = self._manager.agents[executor.agent]
            lost = self._lost_objects.setdefault(executor.slot, {})
            process = self._manager.pythons.start(
                self._session, executor.slot, self._manager.topology.slots, executor.place, agent, lost,
                self._on_message, self._on_lost,
            )  # fmt: skip
            self._processes[executor.slot] = process
        return process

    def _on_lost(self, process: PythonProcess, status: Status) -> None:
        if self._processes.get(process.slot) is process:
            del self._processes[process.slot]
        lost = self._lost_objects.setdefault(process.slot, {})
        lost.update(dict.fromkeys(process.objects, status.message))
        for call in [call for call in self._calls.values() if call.pending.get(process.slot) is process]:
            text = f"{status.message}, with the colocated Python {call.program.name!r} in it"
            self._ended(call, process.slot, Status(status.code, text))

    def _on_message(self, process: PythonProcess, message: list[Any], buffers: list[bytes]) -> None:
        match message:
            case ["objects", str(number), str(name), list(objects)]:
                process.objects.update(objects)
                for program in self._programs.values():
                    if program.number == number:
                        program.name = name  # of the class and the method, which jax does not say
            case ["output", str(stream), str(line)]:
                self._services.callbacks.output(self._session, process.place, stream, line)
            case ["done", int(number), list(strings)]:
                call = self._calls.get(number)
                if call is not None:
                    for index, device, position in strings:
                        result = call.results[index]
                        _set_strings(result, device, buffers[position])
                    self._ended(call, process.slot, None)
            case ["failed", int(number), int(code), str(text), int(generation)]:
                call = self._calls.get(number)
                if call is not None:
                    status = Status(Code(code), text)
                    settled: Callable[[Status], None] = lambda status: self._ended(call, process.slot, status)  # noqa: E731
                    self._manager.settle(process.place, status, generation > 0, generation, settled)
            case _:
                raise ValueError(f"a message {message[0]!r} of a Python process")

    def is_busy(self, slot: int) -> bool:
        """Whether a call has not ended on a host: its executor has to be there for what the call returns."""
        return any(slot in call.executors for call in self._calls.values())

    # ---- ends of calls

    def _ended(self, call: _Call, slot: int, error: Status | None) -> None:
        """A call has ended on one host. The first error is the call's; what hosts have sent is let go."""
        if call.pending.pop(slot, None) is None:
            return
        if error is not None:
            self._discard(call, slot)
            self._fail(call, error)
        if not call.pending:
            del self._calls[call.number]
            self._bind(call)

    def _fail(self, call: _Call, error: Status) -> None:
        if not call.failed:
            call.failed = True
            _fail(call.results, error, call.done)
            self._manager.suspender.when_free(lambda: call.hold.finish(None))

    def _bind(self, call: _Call) -> None:
        """All hosts have answered."""
        lost = next((e.lost for e in call.executors.values() if e.lost is not None), None)
        if lost is not None:
            self._fail(call, lost)
        if call.failed:
            for slot in list(call.targets):
                self._discard(call, slot)
            return
        executors = tuple(call.executors.values())
        for index, result in enumerate(call.results):
            if result.kind != dtypes.KIND_STRING:
                group = self._services.dispatcher.new_group(executors)
                for slot, executor in call.executors.items():
                    executor.send(_take(group, result, call.targets[slot][index]))
                result.bind(group)
        self._manager.suspender.when_free(lambda: call.hold.finish(None))
        if call.done is not None:
            call.done(None)

    def _discard(self, call: _Call, slot: int) -> None:
        """Have an executor take and drop what a host has perhaps sent it."""
        executor = call.executors[slot]
        for result, targets in zip(call.results, call.targets.pop(slot), strict=True):
            if targets and executor.lost is None:
                group = self._services.dispatcher.new_group((executor,))
                executor.send(_take(group, result, targets))
                executor.free(group.number)

    # ---- life

    def tick(self) -> None:
        """Apply the calls' deadline."""
        now = self._manager.clock()
        for call in [call for call in self._calls.values() if now >= call.deadline]:
            seconds = self._services.settings.python_call_timeout_seconds
            for process in list(call.pending.values()):
                self._manager.pythons.overdue(
                    process,
                    f"the colocated Python {call.program.name!r} did not end within {seconds:g} s "
                    "(python_call_timeout_seconds)",
                )

    def close(self) -> None:
        """The session is over."""
        for process in self._processes.values():
            self._manager.pythons.end(process)
        self._processes.clear()
        self._programs.clear()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.done = None
            for slot in list(call.targets):
                self._discard(call, slot)
            self._fail(call, statuses.failed_precondition("the session is over"))


def _take(group: BufferGroup, result: Array, targets: list[list[Any]]) -> list[Any]:
    """The order that makes a result of what a Python process has sent to the executor."""
    assemblies = [[devices, result.kind, None, [[None, None, None, None, token, None]]] for devices, token in targets]
    return ["copy", group.number, result.sharding.memory_kind, [], assemblies]


def _fail(results: Sequence[Array], error: Status, done: Done | None) -> None:
    for result in results:
        strings = result.strings or ()
        result.fail(error)
        for shard in strings:
            shard.set(error)
    if done is not None:
        done(error)


def _set_strings(result: Array, device: int, data: bytes) -> None:
    if result.strings is not None:
        result.strings[result.devices.index(device)].set(data)


def _fail_tokens(process: PythonProcess, parts: list[list[Any]], error: Status) -> None:
    for _, token in parts:
        process.send(["data_failed", token, int(error.code), error.message])


def _forward(process: PythonProcess, token: int) -> Callable[[bytes | Status], None]:
    def arrived(data: bytes | Status) -> None:
        if isinstance(data, Status):
            process.send(["data_failed", token, int(data.code), data.message])
        else:
            process.send(["data", token], [data])

    return arrived


def check_arguments(program: PythonProgram, arguments: list[Array]) -> None:
    """Whether arguments are what the specs say.

    Raises:
      StatusError: INVALID_ARGUMENT, they are not.
    """
    if len(arguments) != len(program.inputs):
        raise _mistake(program, f"takes {len(program.inputs)} arrays, not {len(arguments)}")
    for index, (argument, (kind, shape, sharding)) in enumerate(zip(arguments, program.inputs, strict=True)):
        if argument.error is not None:
            continue
        if (argument.kind, argument.shape, argument.devices) != (kind, shape, sharding.devices):
            raise _mistake(
                program,
                f"takes {dtypes.kind_name(kind)}{list(shape)} on devices {list(sharding.devices)} as array {index}, "
                f"not {dtypes.kind_name(argument.kind)}{list(argument.shape)} on {list(argument.devices)}",
            )


def _mistake(program: PythonProgram, text: str) -> StatusError:
    return statuses.invalid_argument(f"colocated Python {program.name!r} {text}").error()
