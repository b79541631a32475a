"""Handlers of requests about arrays. Each: (session, request, response, later) -> None or LATER."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from ridgeway.protocol import dtypes, messages, shardings
from ridgeway.protocol import status as statuses
from ridgeway.protocol.shardings import Sharding, Tiling
from ridgeway.protocol.status import Status, status_from_proto
from ridgeway.proxy.arrays import Array, StringShard
from ridgeway.proxy.dispatch import HostPart, defer
from ridgeway.proxy.executables import DEFAULT_MEMORY_KIND
from ridgeway.proxy.movement import memory_kind_of
from ridgeway.proxy.services import Handler
from ridgeway.proxy.session import LATER, Session

ALWAYS_COPY = 1
"""`ARRAY_COPY_SEMANTICS_ALWAYS_COPY`"""
DONATE_INPUT = 3
"""`ARRAY_COPY_SEMANTICS_DONATE_INPUT`"""

Later = Callable[[Status | None], None]


def _strides(message: Any) -> tuple[int, ...] | None:
    return tuple(message.byte_strides.strides) if message.HasField("byte_strides") else None


def _bytes_of(kind: int, shape: tuple[int, ...]) -> int:
    return 0 if kind == dtypes.KIND_STRING else math.prod(shape) * dtypes.dtype_of_kind(kind).itemsize


def _sharding(session: Session, proto: Any) -> Sharding:
    sharding = shardings.parse(proto)
    _check_devices(session, sharding)
    return sharding


def _check_devices(session: Session, sharding: Sharding) -> None:
    count = session.services.manager.topology.devices
    for device in sharding.devices:
        if not 0 <= device < count:
            raise statuses.invalid_argument(f"there is no device {device}; this cluster has 0..{count - 1}").error()
    if not sharding.devices or len(set(sharding.devices)) != len(sharding.devices):
        raise statuses.invalid_argument(f"a sharding over the devices {list(sharding.devices)}").error()


def _shape(proto: Any) -> tuple[int, ...]:
    shape = tuple(proto.dims)
    if any(dimension < 0 for dimension in shape):
        raise statuses.invalid_argument(f"an array of shape {list(shape)}").error()
    return shape


def _same_count(what: str, one: Any, other: Any) -> None:
    if len(one) != len(other):
        raise statuses.invalid_argument(f"{what}: {len(one)} and {len(other)}").error()


def _result_handles(request: Any, field: str, count: int) -> list[int]:
    """The client's handles for results, or zeros: it takes the server's."""
    handles = list(getattr(request, field))
    if handles:
        _same_count("handles and results", handles, range(count))
    return handles or [0] * count


def _make_strings(session: Session, array: Array, parts: list[HostPart]) -> None:
    """Strings have no place on a device: they stay here, shard by shard, as they arrived."""
    shards = [StringShard() for _ in array.devices]
    array.strings = tuple(shards)
    for part in parts:
        mine = [shards[index] for index in part.indices]

        def arrived(value: bytes | Status, mine: list[StringShard] = mine) -> None:
            for shard in mine:
                shard.set(value)

        data = session.buffers.take(part.handle)
        if data is not None:
            arrived(data)
        else:
            session.buffers.when_here(part.handle, arrived)


def make_array_from_host_buffer(session: Session, request: Any, response: Any, later: Later) -> None:
    kind = request.dtype.kind
    try:
        sharding = _sharding(session, request.sharding)
        shape = _shape(request.shape)
        size = _bytes_of(kind, shape)
    except statuses.StatusError:
        session.buffers.discard(request.host_buffer_handle)
        raise
    array = Array(kind, shape, sharding)
    response.array_handle = session.bind_array(request.array_handle, array)
    part = HostPart(range(len(sharding.devices)), shape, _strides(request), request.host_buffer_handle)
    _fill(session, array, [part], size)


def _fill(session: Session, array: Array, parts: list[HostPart], size: int) -> None:
    if array.kind == dtypes.KIND_STRING:
        _make_strings(session, array, parts)
        return
    session.services.observer.arrays_made(session, 1, size)
    session.services.dispatcher.put(array, parts, session.buffers)


def make_arrays_from_host_buffer_shards(session: Session, request: Any, response: Any, later: Later) -> None:
    handles = _result_handles(request, "array_handles", len(request.specs))
    for handle, spec in zip(handles, request.specs, strict=True):
        array, parts = _sharded_array(session, spec)
        response.array_handles.append(session.bind_array(handle, array))
        if array.error is None:
            _fill(session, array, parts, _bytes_of(array.kind, array.shape))
        else:
            for buffer in spec.host_buffers:
                session.buffers.discard(buffer.host_buffer_handle)


def _sharded_array(session: Session, spec: Any) -> tuple[Array, list[HostPart]]:
    """An array with the host buffers of its shards; it has failed if they do not fit."""
    try:
        sharding = _sharding(session, spec.array_spec.sharding)
        array = Array(spec.array_spec.dtype.kind, _shape(spec.array_spec.shape), sharding)
        _bytes_of(array.kind, array.shape)
        _same_count("sets of shards and host buffers", spec.addressable_shard_indices, spec.host_buffers)
        parts = [
            HostPart(list(where.indices), _shape(buffer.shape), _strides(buffer), buffer.host_buffer_handle)
            for where, buffer in zip(spec.addressable_shard_indices, spec.host_buffers, strict=True)
        ]
    except statuses.StatusError as error:
        return _failed(error.status), []
    covered = sorted(index for part in parts for index in part.indices)
    if covered != list(range(len(sharding.devices))):
        array.fail(statuses.invalid_argument(
            f"host buffers for shards {covered} of an array with {len(sharding.devices)} shards"))
    return array, parts


def _failed(error: Status) -> Array:
    """An array that is nothing but an error."""
    array = Array(dtypes.KIND_UNSPECIFIED, (), _single_device(0, None))
    array.fail(error)
    return array


def make_error_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    error = status_from_proto(request.error)
    handles = _result_handles(request, "array_handles", len(request.array_specs))
    for handle, spec in zip(handles, request.array_specs, strict=True):
        array = Array(spec.dtype.kind, _shape(spec.shape), _sharding(session, spec.sharding))
        array.fail(error)
        response.array_handles.append(session.bind_array(handle, array))


def assemble_array_from_single_device_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    sources = [session.array(handle) for handle in request.single_device_array_handles]
    sharding = _sharding(session, request.sharding)
    if not sources:
        raise statuses.invalid_argument("an array of no shards").error()
    kind = request.dtype.kind if request.HasField("dtype") else sources[0].kind
    array = Array(kind, _shape(request.shape), sharding)
    response.array_handle = session.bind_array(request.result_handle, array)
    by_device = {d: (source, index) for source in sources for index, d in enumerate(source.devices)}
    missing = [device for device in sharding.devices if device not in by_device]
    if missing or len(by_device) != len(sharding.devices):
        array.fail(statuses.invalid_argument(
            f"shards on devices {sorted(by_device)} were given for an array on devices {list(sharding.devices)}"))
    else:
        _relabel(session, [by_device[device] for device in sharding.devices], array)
    _give_away(request, sources)


def _give_away(request: Any, sources: list[Array]) -> None:
    if request.copy_semantics == DONATE_INPUT:
        for source in sources:
            source.give_away()


def _relabel(session: Session, shards: list[tuple[Array, int]], target: Array) -> None:
    """Make ``target`` of shards that are on the right devices already, given in its device order."""
    manager = session.services.manager
    error = next((e for source, _ in shards if (e := source.problem(manager)) is not None), None)
    if error is None:
        misfits = (_misfit(source, index, target, position) for position, (source, index) in enumerate(shards))
        error = next(filter(None, misfits), None)
    if error is not None:
        target.fail(error)
        return
    hold = next((source.held for source, _ in shards if source.held is not None), None)
    if hold is not None:
        target.held = hold

        def go_on(error: Status | None) -> None:
            if error is not None:
                target.fail(error)
            else:
                _relabel(session, shards, target)

        defer(hold, [source for source, _ in shards], go_on)
        return
    strings = [source.strings[index] for source, index in shards if source.strings is not None]
    if strings:
        target.strings = tuple(strings)
        return
    groups = tuple(source.group_at(index) for source, index in shards)
    target.bind(groups[0] if all(group is groups[0] for group in groups) else groups)


def _misfit(source: Array, index: int, target: Array, position: int) -> Status | None:
    """Why the shard of ``source`` cannot be the target's shard at ``position``."""
    if source.devices[index] != target.devices[position]:
        return statuses.invalid_argument(
            f"a shard on device {source.devices[index]} was given as one on device {target.devices[position]}"
        )
    if source.kind != target.kind:
        return statuses.invalid_argument(
            f"a shard of {dtypes.kind_name(source.kind)} was given for an array of {dtypes.kind_name(target.kind)}"
        )
    return None


def disassemble_into_single_device_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    source = session.array(request.array_handle)
    shapes = _shard_shapes(source)
    if source.error is not None and request.result_handles:
        # What has failed at once has perhaps no shards that anybody knows.
        for handle in request.result_handles:
            response.array_handles.append(session.bind_array(handle, _failed(source.error)))
        return
    handles = _result_handles(request, "result_handles", len(source.devices))
    for index, (handle, device) in enumerate(zip(handles, source.devices, strict=True)):
        part = Array(source.kind, shapes[index], _single_device(device, source.sharding.memory_kind))
        response.array_handles.append(session.bind_array(handle, part))
        _relabel(session, [(source, index)], part)
    _give_away(request, [source])


def _shard_shapes(array: Array) -> tuple[tuple[int, ...], ...]:
    try:
        return array.sharding.shard_shapes(array.shape)
    except statuses.StatusError:
        return (array.shape,) * len(array.devices)  # opaque: only the devices' programs know


def _single_device(device: int, memory_kind: str | None) -> Sharding:
    return _parse_serialized(shardings.single_device_sharding_proto(device, memory_kind))


def _parse_serialized(data: bytes) -> Sharding:
    return shardings.parse(messages.ShardingProto.FromString(data))


def fully_replicated_shard(session: Session, request: Any, response: Any, later: Later) -> None:
    source = session.array(request.array_handle)
    shard = Array(source.kind, source.shape, _single_device(source.devices[0], source.sharding.memory_kind))
    response.array_handle = session.bind_array(request.result_handle, shard)
    _relabel(session, [(source, 0)], shard)
    _give_away(request, [source])


def copy_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    memory_kind = request.memory_kind if request.HasField("memory_kind") and request.memory_kind else None
    sources = [session.array(handle) for handle in request.array_handles]
    handles = _result_handles(request, "result_handles", len(sources))
    for handle, source in zip(handles, sources, strict=True):
        devices = tuple(request.device_ids) or source.devices
        target = Array(source.kind, source.shape, _moved(source.sharding, devices, memory_kind))
        _check_devices(session, target.sharding)
        response.array_handles.append(session.bind_array(handle, target))
        if source.error is None and len(devices) != len(source.devices):
            target.fail(statuses.invalid_argument(
                f"copying an array with {len(source.devices)} shards to {len(devices)} devices"))
            continue
        _observe_copy(session, source, target)
        session.services.dispatcher.copy(source, target, request.copy_semantics != ALWAYS_COPY)
    _give_away(request, sources)


def _observe_copy(session: Session, source: Array, target: Array) -> None:
    """Copies from devices to host memory and back are how snapshots are taken and restored."""
    to_devices, from_devices = (memory_kind_of(array) == DEFAULT_MEMORY_KIND for array in (target, source))
    if to_devices != from_devices:
        size = dtypes.array_bytes(source.kind, source.shape)
        if to_devices:
            session.services.observer.restored(session, size)
        else:
            session.services.observer.saving(session, size)(source.error is None)


def reshard_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    sources = [session.array(handle) for handle in request.array_handles]
    _same_count("arrays and results", sources, request.array_specs)
    for source, target in zip(sources, _results(session, request, request.array_specs, response), strict=True):
        if source.error is None and (source.kind != target.kind or source.shape != target.shape):
            target.fail(statuses.invalid_argument(f"resharding {_describe(source)} to {_describe(target)}"))
            continue
        session.services.dispatcher.reshard(source, target, request.copy_semantics != ALWAYS_COPY)
    _give_away(request, sources)


def bitcast_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    sources = [session.array(handle) for handle in request.array_handles]
    _same_count("arrays and results", sources, request.array_specs)
    for source, target in zip(sources, _results(session, request, request.array_specs, response), strict=True):
        if source.error is not None:
            target.fail(source.error)
        elif source.devices != target.devices or dtypes.KIND_STRING in (source.kind, target.kind):
            target.fail(statuses.invalid_argument(f"bitcasting {_describe(source)} to {_describe(target)}"))
        elif (source.kind, source.shape, memory_kind_of(source)) == (target.kind, target.shape, memory_kind_of(target)):
            _relabel(session, [(source, index) for index in range(len(source.devices))], target)
        else:
            session.services.dispatcher.bitcast(source, target)
    _give_away(request, sources)


def remap_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    plan = request.plan
    sources = [session.array(handle) for handle in request.array_handles]
    targets = _results(session, request, plan.output_specs, response)
    shards: list[list[tuple[Array, int] | None]] = [[None] * len(target.devices) for target in targets]
    for taken, place in _remapped(plan, sources, targets):
        shards[place[0]][place[1]] = (sources[taken[0]], taken[1])
    for target, row in zip(targets, shards, strict=True):
        given = [shard for shard in row if shard is not None]
        if len(given) != len(row):
            missing = [d for d, shard in zip(target.devices, row, strict=True) if shard is None]
            target.fail(statuses.invalid_argument(f"a remap plan names no shards for devices {missing}"))
        else:
            _declare_tiling(given, target)
            _relabel(session, given, target)
    _give_away(request, sources)


type _Place = tuple[int, int]
"""An array and a position in its device order."""


def _remapped(plan: Any, sources: list[Array], targets: list[Array]) -> Iterator[tuple[_Place, _Place]]:
    """Which source shard becomes which target shard. Plans say it by positions, since version 6 by devices."""
    for mapping in plan.mappings:
        columns = (
            mapping.from_start, mapping.from_end, mapping.from_step, mapping.to_start, mapping.to_end, mapping.to_step,
        )  # fmt: skip
        for column in columns:
            _same_count("numbers of intervals in a remap plan", column, columns[0])
        intervals = zip(*columns, strict=True)
        for from_start, from_end, from_step, to_start, to_end, to_step in intervals:
            try:
                taken, places = range(from_start, from_end, from_step), range(to_start, to_end, to_step)
                source, target = sources[mapping.in_array], targets[mapping.out_array]
                for index, place in zip(taken, places, strict=True):
                    if not (0 <= index < len(source.devices) and 0 <= place < len(target.devices)):
                        raise IndexError
                    yield (mapping.in_array, index), (mapping.out_array, place)
            except (IndexError, ValueError):
                raise statuses.invalid_argument(
                    f"a remap plan maps shards {from_start}:{from_end}:{from_step} of array {mapping.in_array} to "
                    f"{to_start}:{to_end}:{to_step} of result {mapping.out_array}"
                ).error() from None
    for output in plan.input_devices_for_output:
        for given in output.input_devices:
            try:
                source, target = sources[given.in_array], targets[output.out_array]
                for device in given.device_list.device_ids:
                    taken, place = source.devices.index(device), target.devices.index(device)
                    yield (given.in_array, taken), (output.out_array, place)
            except (IndexError, ValueError):
                raise statuses.invalid_argument(
                    f"a remap plan maps devices {list(given.device_list.device_ids)} of array {given.in_array} to "
                    f"result {output.out_array}"
                ).error() from None


def _declare_tiling(shards: list[tuple[Array, int]], target: Array) -> None:
    """Say what each shard of the target holds, if its sharding does not: when all are of one array of the same
    shape, each device holds what it held."""
    source = shards[0][0]
    tiling = source.sharding.tiling
    if target.sharding.tiling is not None or tiling is None or source.shape != target.shape:
        return
    if all(other is source for other, _ in shards):
        order = tuple(tiling.tile_of_device[index] for _, index in shards) if tiling.tiles else ()
        target.sharding = shardings.declare_tiling(target.sharding, Tiling(tiling.tiles, order, tiling.partial))


def _results(session: Session, request: Any, specs: Any, response: Any) -> list[Array]:
    """Arrays for `ArraySpecProto`s, bound to the request's result handles."""
    handles = _result_handles(request, "result_handles", len(specs))
    results = [Array(spec.dtype.kind, _shape(spec.shape), _sharding(session, spec.sharding)) for spec in specs]
    for handle, array in zip(handles, results, strict=True):
        response.array_handles.append(session.bind_array(handle, array))
    return results


def _describe(array: Array) -> str:
    return f"{dtypes.kind_name(array.kind)}{list(array.shape)} on devices {list(array.devices)}"


def _moved(sharding: Sharding, devices: tuple[int, ...], memory_kind: str | None) -> Sharding:
    kind = memory_kind if memory_kind is not None else sharding.memory_kind
    if len(devices) == 1:
        return _single_device(devices[0], kind)
    return shardings.move(sharding, devices, kind)


def copy_to_host_buffer(session: Session, request: Any, response: Any, later: Later) -> Any:
    array = session.array(request.array_handle)
    handle = request.host_buffer_handle

    def fetched(error: Status | None, data: bytes) -> None:
        session.fetching_bytes -= size
        if error is None:
            if not session.ended:
                session.buffers.put_result(handle, data)
            answer(None)
            return

        def failed(explained: Status) -> None:
            session.buffers.fail(handle, explained)
            answer(explained)

        session.services.manager.explanations.when_explained(error, failed)

    size = dtypes.array_bytes(array.kind, array.shape)
    session.fetching_bytes += size
    answer = session.services.observer.fetching(session, size, later)
    session.services.dispatcher.fetch(array, _strides(request), fetched)
    return LATER


def check_value_ready(session: Session, request: Any, response: Any, later: Later) -> Any:
    arrays = [session.array(handle) for handle in request.value_handles]
    session.services.dispatcher.ready(arrays, session.services.observer.waiting(session, later))
    return LATER


def delete_array(session: Session, request: Any, response: Any, later: Later) -> None:
    for handle in request.array_handle:
        session.array(handle).delete()
    response.deletion_future_handle, _ = session.new_future(statuses.OK)


def is_array_deleted(session: Session, request: Any, response: Any, later: Later) -> None:
    response.deleted = session.array(request.array_handle).is_deleted


def destruct_array(session: Session, request: Any, response: Any, later: Later) -> None:
    for handle in request.array_handle:
        array = session.arrays.pop(handle, None)
        if array is not None:
            array.release()


HANDLERS: dict[str, Handler] = {
    name: globals()[name]
    for name in (
        "make_array_from_host_buffer", "make_arrays_from_host_buffer_shards", "make_error_arrays",
        "assemble_array_from_single_device_arrays", "disassemble_into_single_device_arrays", "fully_replicated_shard",
        "copy_arrays", "reshard_arrays", "bitcast_arrays", "remap_arrays", "copy_to_host_buffer", "check_value_ready",
        "delete_array", "is_array_deleted", "destruct_array",
    )
}  # fmt: skip
