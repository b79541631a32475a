"""The dispatcher: turns what sessions want into orders, one sequence for all executors.

Order is correctness: two programs in different order on two members of a generation give silently wrong numbers.
So everything is dispatched in one thread, an order goes to all of its executors before the next is made, and links
are first in, first out.  Nothing here waits: bytes that are still on their way are promised to executors by token.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.cluster.slice_hold import Hold
from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status
from ridgeway.proxy import resharding
from ridgeway.proxy.arrays import Array, BufferGroup, StringShard
from ridgeway.proxy.executables import Executable
from ridgeway.proxy.host_buffers import HostBufferStore
from ridgeway.proxy.movement import Movement, executor_with
from ridgeway.proxy.programs import Programs
from ridgeway.transport import frames

Done = Callable[[Status | None], None]
Fetched = Callable[[Status | None, bytes], None]


class HostPart:
    """One host buffer of an array: where in the array's device order it goes, and how it is laid out."""

    __slots__ = ("handle", "indices", "shape", "strides")

    def __init__(self, indices: Sequence[int], shape: tuple[int, ...], strides: tuple[int, ...] | None, handle: int):
        self.indices = indices
        self.shape = shape
        self.strides = strides
        self.handle = handle


class Dispatcher:
    """Used by every session of a head."""

    def __init__(self, manager: ResourceManager, programs: Programs):
        self.manager = manager
        self.programs = programs
        self._numbers = itertools.count(1)
        self._tokens = itertools.count(1)
        self._executions = itertools.count(1)

    def new_group(self, executors: tuple[ExecutorLink, ...]) -> BufferGroup:
        """A group for what an order is about to make on executors."""
        return BufferGroup(next(self._numbers), executors)

    def new_token(self) -> int:
        """The name of one promise."""
        return next(self._tokens)

    # ---- host to devices

    def put(self, array: Array, parts: list[HostPart], buffers: HostBufferStore) -> None:
        """Fill an array from host buffers, which may not be here yet."""
        executors = self.manager.executors_of(array.devices)
        if isinstance(executors, Status):
            hold = self.manager.hold_for(array.devices)
            if hold is None:
                self._discard(parts, buffers)
                array.fail(executors)
                return
            array.held = hold

            def go_on(error: Status | None) -> None:
                if error is not None:
                    self._discard(parts, buffers)
                    array.fail(error)
                else:
                    self.put(array, parts, buffers)

            hold.defer(go_on)
            return
        group = self.new_group(executors)
        together = len(parts) > 1 and not all(buffers.has(part.handle) for part in parts)
        here = [None if together else buffers.take(part.handle) for part in parts]
        tokens = [next(self._tokens) if data is None else None for data in here]
        receivers: dict[int, list[ExecutorLink]] = {}
        sizes = [dtypes.array_bytes(array.kind, part.shape) for part in parts]
        for executor in executors:
            orders, attached = [], []
            for position, part in enumerate(parts):
                mine = [d for i in part.indices if self.manager.executor_of_device(d := array.devices[i]) is executor]
                if not mine:
                    continue
                data = here[position]
                if data is None:
                    orders.append([mine, part.shape, part.strides, None, tokens[position]])
                    receivers.setdefault(position, []).append(executor)
                    executor.backlog.announce(sizes[position])
                else:
                    orders.append([mine, part.shape, part.strides, len(attached), None])
                    attached.append(data)
            executor.send(["put", group.number, array.kind, array.sharding.memory_kind, orders], attached)
        if together:
            _forward_together(parts, receivers, tokens, sizes, buffers)
        else:
            for position, links in receivers.items():
                forward = _forward_data(links, tokens[position], sizes[position])
                buffers.when_here(parts[position].handle, forward)
        array.bind(group)

    def _discard(self, parts: list[HostPart], buffers: HostBufferStore) -> None:
        for part in parts:
            buffers.discard(part.handle)

    # ---- programs

    def execute(
        self, executable: Executable, arguments: list[Array], results: list[Array], kept: Sequence[int],
        done: Done | None,
    ) -> None:  # fmt: skip
        """Start an execution; ``done`` is called when it is complete everywhere. Arguments in ``kept`` are not
        donated even if the program would."""
        refused = self.manager.crashes.refused
        problem = refused.get(executable.key) if refused else None
        hold = None
        for argument in arguments:
            hold = hold or argument.held
            problem = problem or argument.problem(self.manager)
        if problem is None:
            if executable.epoch != self.manager.epoch:
                executable.executors = self.manager.executors_of(executable.devices)
                executable.epoch = self.manager.epoch
            if isinstance(executable.executors, Status):
                problem = executable.executors
                hold = hold or self.manager.hold_for(executable.devices)
        if hold is not None and (problem is None or isinstance(executable.executors, Status)):
            for result in results:
                result.held = hold

            def go_on(error: Status | None) -> None:
                if error is None:
                    self.execute(executable, arguments, results, kept, done)
                else:
                    self._fail_execution(error, executable, arguments, results, kept, done)

            defer(hold, arguments, go_on)
            return
        references = None if problem is not None else self._references(executable, arguments)
        if isinstance(references, Status):
            problem, references = references, None
        if problem is not None or references is None:
            error = problem or statuses.internal("no arguments")
            self._fail_execution(error, executable, arguments, results, kept, done)
            return
        executors = executable.executors
        assert not isinstance(executors, Status)
        self.manager.span(executors)
        self.programs.ensure_loaded(executable, executors)
        if len(executors) > 1:
            self.programs.used_together(executable)
        execution = next(self._executions)
        executable.executions += 1
        groups = [self.new_group(executors) for _ in results]
        fields = [execution, executable.program, references, [g.number for g in groups], list(kept)]
        if done is None:
            frame = frames.pack(["execute", *fields])
            for executor in executors:
                executor.send_packed(frame)
        else:
            reply = _all_of(len(executors), done)
            for executor in executors:
                executor.request("execute_and_tell", fields, reply)
        self.manager.execution_started(execution, executors)
        for result, group in zip(results, groups, strict=True):
            result.bind(group)
        self._consume(executable, arguments, kept)

    def _fail_execution(
        self, error: Status, executable: Executable, arguments: list[Array], results: list[Array], kept: Sequence[int],
        done: Done | None,
    ) -> None:
        for result in results:
            result.fail(error)
        self._consume(executable, arguments, kept)
        if done is not None:
            done(error)

    def _consume(self, executable: Executable, arguments: list[Array], kept: Sequence[int]) -> None:
        for index in executable.donated:
            if index not in kept and index < len(arguments):
                arguments[index].delete()

    def _references(self, executable: Executable, arguments: list[Array]) -> list[Any] | Status:
        devices = executable.devices
        references: list[Any] = []
        for index, argument in enumerate(arguments):
            groups = argument.groups
            if type(groups) is BufferGroup and (argument.devices is devices or argument.devices == devices):
                references.append(groups.number)
                continue
            if groups is None:
                return statuses.invalid_argument(f"argument {index} of {executable.name} has no buffers")
            group_of = {d: argument.group_at(i).number for i, d in enumerate(argument.devices)}
            try:
                references.append([[d, group_of[d]] for d in devices])
            except KeyError:
                return statuses.invalid_argument(
                    f"argument {index} of {executable.name} lies on devices {list(argument.devices)}, "
                    f"the program runs on {list(devices)}"
                )
        return references

    # ---- devices to host

    def ready(self, arrays: Sequence[Array], done: Done) -> None:
        """``done(None)`` when every shard of every array is computed, or the first error."""
        for array in arrays:
            error = array.problem(self.manager)
            if error is not None:
                done(error)
                return
            if array.held is not None:
                defer(array.held, arrays, lambda error: done(error) if error is not None else self.ready(arrays, done))
                return
        wanted: dict[ExecutorLink, dict[int, None]] = {}
        strings: list[StringShard] = []
        for array in arrays:
            for group, executor in array.executors(self.manager):
                wanted.setdefault(executor, {})[group.number] = None
            strings += array.strings or ()
        if not wanted and not strings:
            done(None)
            return
        reply = _all_of(len(wanted) + len(strings), done)
        for executor, groups in wanted.items():
            executor.request("ready", [list(groups)], reply)
        for shard in strings:
            shard.when_here(lambda value: reply(value if isinstance(value, Status) else None, [], []))

    def fetch(self, array: Array, strides: tuple[int, ...] | None, done: Fetched) -> None:
        """The bytes of an array's first shard (of a single-device or fully replicated array: all of it)."""
        error = array.problem(self.manager)
        if error is not None:
            done(error, b"")
            return
        if array.held is not None:
            defer(
                array.held, [array],
                lambda error: done(error, b"") if error is not None else self.fetch(array, strides, done),
            )  # fmt: skip
            return
        if array.strings is not None:
            array.strings[0].when_here(
                lambda value: done(value, b"") if isinstance(value, Status) else done(None, value)
            )
            return
        device = array.devices[0]
        group = array.group_at(0)
        executor = executor_with(group, device, self.manager)
        executor.request(
            "fetch", [group.number, device, strides],
            lambda error, fields, buffers: done(error, b"" if error is not None else buffers[0]),
        )

    # ---- devices to devices

    def copy(self, source: Array, target: Array, reuse: bool) -> None:
        """Copy shard by shard to the target's devices and memory kind; the i-th shard goes to the i-th device.
        With ``reuse``, shards that are in place already are shared."""
        self._move(source, target, resharding.shard_by_shard(len(target.devices)), reuse)

    def reshard(self, source: Array, target: Array, reuse: bool) -> None:
        """Make the target's shards of parts of the source's, on any devices; bytes go from executor to executor."""
        try:
            plan = resharding.plan(source.shape, source.sharding, target.sharding)
        except statuses.StatusError as error:
            target.fail(error.status)
            return
        self._move(source, target, plan, reuse)

    def _move(self, source: Array, target: Array, plan: resharding.Plan, reuse: bool) -> None:
        if not self._can_make(source, target, lambda: self._move(source, target, plan, reuse)):
            return
        if source.strings is None:
            movement = Movement(self.manager, source, target, reuse, lambda: next(self._tokens))
            movement.send(plan, self.new_group)
        elif all(len(pieces) == 1 and pieces[0].taken is pieces[0].where is None for pieces in plan):
            target.strings = tuple(source.strings[pieces[0].candidates[0]] for pieces in plan)
        else:
            target.fail(statuses.unimplemented("An array of strings can only be resharded in whole shards."))

    def bitcast(self, source: Array, target: Array) -> None:
        """Read the source's shards, on the same devices, as shards of another dtype and shape."""
        if not self._can_make(source, target, lambda: self.bitcast(source, target)):
            return
        try:
            shapes = target.sharding.shard_shapes(target.shape)
        except statuses.StatusError as error:
            target.fail(error.status)
            return
        shards: dict[ExecutorLink, list[Any]] = {}
        for index, device in enumerate(target.devices):
            group = source.group_at(index)
            executor = executor_with(group, device, self.manager)
            shards.setdefault(executor, []).append([device, shapes[index], group.number])
        result = self.new_group(tuple(shards))
        for executor, mine in shards.items():
            executor.send(["bitcast", result.number, target.kind, target.sharding.memory_kind, mine])
        target.bind(result)

    def _can_make(self, source: Array, target: Array, again: Callable[[], None]) -> bool:
        """Whether orders to make an array can go out now; if not it fails, or they go out later by ``again``."""
        error = source.problem(self.manager)
        executors = self.manager.executors_of(target.devices)
        if error is None and isinstance(executors, Status):
            hold = source.held or self.manager.hold_for(target.devices)
            error = executors if hold is None else None
        else:
            hold = source.held
        if error is not None:
            target.fail(error)
            return False
        if hold is not None:
            target.held = hold
            defer(hold, [source], lambda error: target.fail(error) if error is not None else again())
            return False
        return True


def defer(hold: Hold, used: Sequence[Array], continuation: Done) -> None:
    """Hold work that uses arrays; dropping or deleting them meanwhile does not disturb it."""
    for array in used:
        array.pin()

    def go_on(error: Status | None) -> None:
        try:
            continuation(error)
        finally:
            for array in used:
                array.unpin()

    hold.defer(go_on)


def _forward_together(
    parts: list[HostPart], receivers: dict[int, list[ExecutorLink]], tokens: list[int | None], sizes: list[int],
    buffers: HostBufferStore,
) -> None:  # fmt: skip
    """Send the host buffers of one array when all of them are here, or none of them if one does not come: an array
    that only some of its executors have would be refused by the others only, which costs all their generation."""
    left = len(parts)

    def arrived(data: bytes | Status) -> None:
        nonlocal left
        if left <= 0:
            return
        if isinstance(data, Status):
            left = 0
            for position, links in receivers.items():
                _forward_data(links, tokens[position], sizes[position])(data)
            for part in parts:
                buffers.discard(part.handle)
            return
        left -= 1
        if left == 0:
            found = {part.handle: buffers.take(part.handle) for part in parts}
            for position, links in receivers.items():
                forward = _forward_data(links, tokens[position], sizes[position])
                forward(found[parts[position].handle] or b"")

    for part in parts:
        buffers.look_up(part.handle, arrived)


def _forward_data(links: list[ExecutorLink], token: int | None, size: int) -> Callable[[bytes | Status], None]:
    def arrived(data: bytes | Status) -> None:
        assert token is not None
        for link in links:
            link.backlog.announce(-size)
            if isinstance(data, Status):
                link.send_aside(["data_failed", token, int(data.code), data.message])
            else:
                link.send_promised(token, data)

    return arrived


def _all_of(count: int, done: Done) -> Callable[[Status | None, list[Any], list[bytes]], None]:
    """A reply callback that calls ``done`` after ``count`` replies, or at the first error."""
    left = count

    def reply(error: Status | None, fields: list[Any], buffers: list[bytes]) -> None:
        nonlocal left
        if left <= 0:
            return
        left = 0 if error is not None else left - 1
        if left == 0:
            done(error)

    return reply
