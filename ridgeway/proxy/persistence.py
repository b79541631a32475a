"""Persistence requests: arrays between executors and storage, whose bytes never come here.

pathwaysutils' (and Orbax's) ``persistenceWriteRequest``, ``persistenceReadRequest`` and their bulk forms are plugin
programs, see `plugin_programs`.  A write is ordered at once, in sequence, to all executors that hold a part; what is
written is what the arrays are then, whatever the next program does to them.  What a read makes is held until all of it
is there, so a program that uses it waits, and fails if the read does, on all of its executors alike.
"""

import asyncio
import base64
import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ridgeway.cluster.executor_link import ExecutorLink, Reply
from ridgeway.cluster.slice_hold import Hold
from ridgeway.protocol import dtypes, messages, shardings
from ridgeway.protocol import status as statuses
from ridgeway.protocol.locations import check_name, parse_location
from ridgeway.protocol.shardings import Shape, Sharding
from ridgeway.protocol.status import Status
from ridgeway.proxy import persistence_plan
from ridgeway.proxy.arrays import Array, BufferGroup
from ridgeway.proxy.dispatch import Done, defer
from ridgeway.proxy.persistence_plan import Commit, Discard, Finish, Part, Stop, WriteCourse

if TYPE_CHECKING:
    from ridgeway.proxy.session import Session


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One array of a request, as the client describes it."""

    location: str
    name: str
    shape: Shape
    kind: int
    """a `DTypeProto.Kind`; of an array to write the array itself says it"""
    sharding: Sharding
    timeout_seconds: float
    """0: the request does not say"""


def parse_write(body: Any) -> Target:
    """An array of a write request.

    Raises:
      StatusError: INVALID_ARGUMENT.
      Exception: a member is missing or of another type.
    """
    return _parse(body, body["shape"], dtypes.KIND_UNSPECIFIED)


def parse_read(body: Any) -> Target:
    """An array of a read request.

    Raises:
      StatusError: INVALID_ARGUMENT; UNIMPLEMENTED, an unknown element type.
      Exception: a member is missing or of another type.
    """
    described = body["shape"]
    return _parse(body, described["dimensions"], dtypes.kind_by_name(described["xla_primitive_type_str"]))


def _parse(body: Any, dimensions: Any, kind: int) -> Target:
    devices = tuple(int(device) for device in body["devices"]["device_ids"])
    shape = tuple(int(size) for size in dimensions)
    if not devices or len(set(devices)) != len(devices) or any(size < 0 for size in shape):
        raise statuses.invalid_argument(f"an array of shape {list(shape)} on devices {list(devices)}").error()
    blob = shardings.hlo_sharding_proto(devices, base64.b64decode(body["b64_hlo_sharding_string"]))
    timeout = body.get("timeout") or {}
    return Target(
        location=str(parse_location(base64.b64decode(body["b64_location"]).decode())),
        name=check_name(base64.b64decode(body["b64_name"]).decode()),
        shape=shape,
        kind=kind,
        sharding=shardings.parse(messages.ShardingProto.FromString(blob)),
        timeout_seconds=float(timeout.get("seconds", 0)) + float(timeout.get("nanos", 0)) / 1e9,
    )


class WriteProgram:
    """Writes its arguments to storage; has no results."""

    name = "persistence_write"

    def __init__(self, targets: Sequence[Target]):
        self._targets = targets
        self.devices = _devices(targets)

    def execute(self, session: "Session", arguments: list[Array], done: Done) -> list[Array]:
        """See `plugin_programs.PluginProgram`."""
        if len(arguments) != len(self._targets):
            raise statuses.invalid_argument(f"writing {len(self._targets)} arrays, not {len(arguments)}").error()
        for argument, target in zip(arguments, self._targets, strict=True):
            if argument.error is None and (argument.shape, argument.devices) != (target.shape, target.sharding.devices):
                raise statuses.invalid_argument(
                    f"array {target.name!r} is {list(argument.shape)} on devices {list(argument.devices)}; "
                    f"the request says {list(target.shape)} on {list(target.sharding.devices)}"
                ).error()
            if argument.strings is not None:
                raise statuses.invalid_argument(f"array {target.name!r} is of strings, which stay on the head").error()
        saved = session.services.observer.saving(session, sum(_bytes(argument) for argument in arguments))
        _Write(session, self._targets, arguments, _and_tell(saved, done)).start()
        return []


class ReadProgram:
    """Makes arrays of what is in storage."""

    name = "persistence_read"

    def __init__(self, targets: Sequence[Target]):
        self._targets = targets
        self.devices = _devices(targets)

    def execute(self, session: "Session", arguments: list[Array], done: Done) -> list[Array]:
        """See `plugin_programs.PluginProgram`."""
        if arguments:
            raise statuses.invalid_argument(f"reading takes no arguments, not {len(arguments)}").error()
        known = session.services.manager.topology.devices
        for target in self._targets:
            if any(not 0 <= device < known for device in target.sharding.devices):
                devices = list(target.sharding.devices)
                raise statuses.invalid_argument(f"reading to devices {devices}; there are 0..{known - 1}").error()
        results = [Array(target.kind, target.shape, target.sharding) for target in self._targets]
        restored = session.services.observer.reading(session, sum(_bytes(result) for result in results))
        _Read(session, self._targets, results, _and_tell(restored, done)).start()
        return results


def _and_tell(ended: Callable[[bool], None], done: Done) -> Done:
    def tell(error: Status | None) -> None:
        ended(error is None)
        done(error)

    return tell


def _devices(targets: Sequence[Target]) -> tuple[int, ...]:
    return targets[0].sharding.devices if targets else ()


class _Transfer:
    """What a write and a read have in common: a name that executors know it by, a deadline, an end."""

    kind = ""

    def __init__(self, session: "Session", targets: Sequence[Target], arrays: Sequence[Array], done: Done):
        self._services = session.services
        self._session = session.number
        self._targets = targets
        self._arrays = arrays
        self._done = done
        self._id = uuid.uuid4().hex[:16]
        given = [target.timeout_seconds for target in targets if target.timeout_seconds > 0]
        self._timeout_seconds = max(given, default=self._services.settings.persistence_timeout_seconds)
        self._deadline = asyncio.get_running_loop().call_later(self._timeout_seconds, self._expired)
        self._started = time.monotonic()
        self._links: dict[int, ExecutorLink] = {}
        self._over = False

    def _executor_of(self, device: int) -> int:
        link = self._services.manager.executor_of_device(device)
        assert link is not None  # what is used has no lost shard
        self._links[link.number] = link
        return link.number

    def _expired(self) -> None:
        raise NotImplementedError

    @property
    def _remaining(self) -> float:
        return max(0.001, self._timeout_seconds - (time.monotonic() - self._started))

    def _too_late(self) -> Status:
        names = ", ".join(repr(target.name) for target in self._targets[:3])
        more = f" and {len(self._targets) - 3} more" if len(self._targets) > 3 else ""
        return statuses.deadline_exceeded(
            f"{self.kind} of {names}{more} in {self._targets[0].location} took longer than the "
            f"{self._timeout_seconds:g} s that the request gives it"
        )

    def _end(self, error: Status | None) -> None:
        if self._over:
            return
        self._over = True
        self._deadline.cancel()
        self._services.emit(
            f"persistence_{self.kind}", session=self._session, arrays=len(self._arrays), executors=len(self._links),
            bytes=sum(_bytes(array) for array in self._arrays), seconds=round(time.monotonic() - self._started, 4),
            code="OK" if error is None else error.code.name, message="" if error is None else error.message,
        )  # fmt: skip
        self._done(error)

    def _stop(self, links: Sequence[ExecutorLink], cause: Status) -> None:
        for link in links:
            link.send_aside(["persist_stop", self._id, int(cause.code), cause.message])

    def _described(self, index: int, chunk: Shape) -> list[Any]:
        target, array = self._targets[index], self._arrays[index]
        return [target.location, target.name, array.kind, array.shape, chunk]


def _bytes(array: Array) -> int:
    return dtypes.array_bytes(array.kind, array.shape)


class _Write(_Transfer):
    kind = "write"

    def start(self) -> None:
        """Send the orders, or have them sent when what is to be written is there."""
        if self._over:
            return
        error = next((e for array in self._arrays if (e := array.problem(self._services.manager)) is not None), None)
        if error is not None:
            self._end(error)
            return
        hold = next((array.held for array in self._arrays if array.held is not None), None)
        if hold is not None:
            defer(hold, self._arrays, lambda error: self.start() if error is None else self._end(error))
            return
        try:
            plan, chunks = self._plan()
        except statuses.StatusError as problem:
            self._end(problem.status)
            return
        if not plan:
            self._end(None)
            return
        self._described_arrays = [self._described(index, chunk) for index, chunk in enumerate(chunks)]
        self._course = WriteCourse(tuple(plan), lambda number: self._links[number].lost is None)
        for number, parts in plan.items():
            arrays: dict[int, list[Any]] = {}
            for part in parts:
                array, position = self._arrays[part.array], part.positions[0]
                order = [array.group_at(position).number, array.devices[position], part.start]
                arrays.setdefault(part.array, []).append(order)
            fields = [self._id, self._remaining, [[self._described_arrays[i], parts] for i, parts in arrays.items()]]
            self._links[number].request("persist_write", fields, self._written(number))

    def _plan(self) -> tuple[dict[int, list[Part]], list[Shape]]:
        limit = self._services.settings.persistence_chunk_bytes
        arrays: list[tuple[Shape, int, Sharding]] = []
        chunks: list[Shape] = []
        for array, target in zip(self._arrays, self._targets, strict=True):
            sharding = array.sharding if array.sharding.tiling is not None else target.sharding
            size = dtypes.dtype_of_kind(array.kind).itemsize
            arrays.append((array.shape, size, sharding))
            chunks.append(persistence_plan.chunk_shape(sharding.shard_shape(array.shape), size, limit))
        return persistence_plan.plan_write(arrays, self._executor_of), chunks

    def _written(self, number: int) -> Reply:
        return lambda error, fields, buffers: self._apply(self._course.written(number, error))

    def _committed(self, error: Status | None, fields: list[Any], buffers: list[bytes]) -> None:
        self._apply(self._course.committed(error))

    def _expired(self) -> None:
        if self._links:
            self._apply(self._course.expired(self._too_late()))
        else:
            self._end(self._too_late())

    def _apply(self, effects: Sequence[persistence_plan.Effect]) -> None:
        for effect in effects:
            match effect:
                case Commit(executor):
                    fields = [self._id, self._remaining, self._described_arrays]
                    self._links[executor].request("persist_commit", fields, self._committed)
                case Discard(executor):
                    fields = [self._id, self._described_arrays]
                    self._links[executor].request("persist_discard", fields, lambda *_: None)
                case Stop(executors, cause):
                    self._stop([self._links[number] for number in sorted(executors)], cause)
                case Finish(error):
                    self._end(error)


class _Read(_Transfer):
    kind = "read"

    def start(self) -> None:
        """Send the orders, or have them sent when the devices are there."""
        self._hold = Hold("a read from storage", self._services.settings.pending_order_limit)
        self._groups: list[BufferGroup] = []
        self._left = 0
        for array in self._arrays:
            array.held = self._hold
        self._order()

    def _order(self) -> None:
        manager = self._services.manager
        if self._over:
            return
        devices = tuple(dict.fromkeys(device for target in self._targets for device in target.sharding.devices))
        executors = manager.executors_of(devices)
        if isinstance(executors, Status):
            slice_hold = manager.hold_for(devices)
            if slice_hold is None:
                self._finish(executors)
            else:
                slice_hold.defer(lambda error: self._order() if error is None else self._finish(error))
            return
        try:
            shapes = [(target.shape, target.sharding) for target in self._targets]
            plan = persistence_plan.plan_read(shapes, self._executor_of)
        except statuses.StatusError as problem:
            self._finish(problem.status)
            return
        for target in self._targets:
            holders = dict.fromkeys(self._executor_of(device) for device in target.sharding.devices)
            self._groups.append(self._services.dispatcher.new_group(tuple(self._links[number] for number in holders)))
        self._left = len(plan)
        if not plan:
            self._finish(None)
        for number, parts in plan.items():
            arrays: dict[int, list[Any]] = {}
            for part in parts:
                devices_here = [self._arrays[part.array].devices[position] for position in part.positions]
                arrays.setdefault(part.array, []).append([devices_here, part.start, part.shape])
            orders = [
                [self._described(i, ()), self._groups[i].number, self._arrays[i].sharding.memory_kind, parts]
                for i, parts in arrays.items()
            ]
            self._links[number].request("persist_read", [self._id, self._remaining, orders], self._answered)

    def _answered(self, error: Status | None, fields: list[Any], buffers: list[bytes]) -> None:
        self._left -= 1
        if error is not None or self._left == 0:
            self._finish(error)

    def _expired(self) -> None:
        self._finish(self._too_late())

    def _finish(self, error: Status | None) -> None:
        """All of it is there, or nothing."""
        if self._over:
            return
        if error is None:
            for array, group in zip(self._arrays, self._groups, strict=True):
                array.bind(group)
        else:
            self._stop(list(self._links.values()), error)
            for array in self._arrays:
                array.fail(error)
            for group in self._groups:
                for executor in group.executors:
                    executor.free(group.number)
        self._end(error)
        # What waited for it may touch other hosts too.
        self._services.manager.suspender.when_free(lambda: self._hold.finish(error))
