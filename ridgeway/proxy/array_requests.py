"""Handlers of requests about arrays. Each: (session, request, response, later) -> None or LATER."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ridgeway.protocol import dtypes, messages, shardings
from ridgeway.protocol import status as statuses
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import Status, status_from_proto
from ridgeway.proxy.arrays import Array
from ridgeway.proxy.dispatch import HostPart, defer
from ridgeway.proxy.services import Handler
from ridgeway.proxy.session import LATER, Session

DONATE_INPUT = 3
"""`ARRAY_COPY_SEMANTICS_DONATE_INPUT`"""

Later = Callable[[Status | None], None]


def _strides(message: Any) -> tuple[int, ...] | None:
    return tuple(message.byte_strides.strides) if message.HasField("byte_strides") else None


def _bytes_of(kind: int, shape: tuple[int, ...]) -> int:
    return 0 if kind == dtypes.KIND_STRING else math.prod(shape) * dtypes.dtype_of_kind(kind).itemsize


def _check_devices(session: Session, sharding: Sharding) -> None:
    count = session.services.manager.topology.devices
    for device in sharding.devices:
        if not 0 <= device < count:
            raise statuses.invalid_argument(f"there is no device {device}; this cluster has 0..{count - 1}").error()


def _make_strings(session: Session, array: Array, handle: int) -> None:
    data = session.buffers.take(handle)
    if data is not None:
        array.strings = data
        return

    def arrived(value: bytes | Status) -> None:
        if isinstance(value, Status):
            array.fail(value)
        else:
            array.strings = value

    session.buffers.when_here(handle, arrived)


def make_array_from_host_buffer(session: Session, request: Any, response: Any, later: Later) -> None:
    sharding = shardings.parse(request.sharding)
    _check_devices(session, sharding)
    kind, shape = request.dtype.kind, tuple(request.shape.dims)
    array = Array(kind, shape, sharding)
    response.array_handle = session.bind_array(request.array_handle, array)
    if kind == dtypes.KIND_STRING:
        _make_strings(session, array, request.host_buffer_handle)
        return
    part = HostPart(range(len(sharding.devices)), shape, _strides(request), request.host_buffer_handle)
    session.services.observer.arrays_made(session, 1, _bytes_of(kind, shape))
    session.services.dispatcher.put(array, [part], session.buffers)


def make_arrays_from_host_buffer_shards(session: Session, request: Any, response: Any, later: Later) -> None:
    for index, spec in enumerate(request.specs):
        sharding = shardings.parse(spec.array_spec.sharding)
        _check_devices(session, sharding)
        kind, shape = spec.array_spec.dtype.kind, tuple(spec.array_spec.shape.dims)
        array = Array(kind, shape, sharding)
        handle = request.array_handles[index] if request.array_handles else 0
        response.array_handles.append(session.bind_array(handle, array))
        parts = [
            HostPart(list(where.indices), tuple(buffer.shape.dims), _strides(buffer), buffer.host_buffer_handle)
            for where, buffer in zip(spec.addressable_shard_indices, spec.host_buffers, strict=True)
        ]
        covered = {i for part in parts for i in part.indices}
        if covered != set(range(len(sharding.devices))):
            array.fail(statuses.invalid_argument(
                f"host buffers for shards {sorted(covered)} of an array with {len(sharding.devices)} shards"))
            continue
        if kind == dtypes.KIND_STRING:
            _make_strings(session, array, parts[0].handle)
            continue
        session.services.observer.arrays_made(session, 1, _bytes_of(kind, shape))
        session.services.dispatcher.put(array, parts, session.buffers)


def make_error_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    error = status_from_proto(request.error)
    for index, spec in enumerate(request.array_specs):
        array = Array(spec.dtype.kind, tuple(spec.shape.dims), shardings.parse(spec.sharding))
        array.fail(error)
        handle = request.array_handles[index] if request.array_handles else 0
        response.array_handles.append(session.bind_array(handle, array))


def assemble_array_from_single_device_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    sources = [session.array(handle) for handle in request.single_device_array_handles]
    sharding = shardings.parse(request.sharding)
    kind = request.dtype.kind if request.HasField("dtype") else sources[0].kind
    array = Array(kind, tuple(request.shape.dims), sharding)
    response.array_handle = session.bind_array(request.result_handle, array)
    _relabel(session, [(source, index) for source in sources for index in range(len(source.devices))], array)
    if request.copy_semantics == DONATE_INPUT:
        for source in sources:
            source.delete()


def _relabel(session: Session, shards: list[tuple[Array, int]], target: Array) -> None:
    """Make ``target`` of shards that are on the right devices already, in its device order."""
    manager = session.services.manager
    error = next((e for source, _ in shards if (e := source.problem(manager)) is not None), None)
    if error is not None:
        target.fail(error)
        return
    hold = next((source.held for source, _ in shards if source.held is not None), None)
    if hold is not None:
        target.held = hold
        sources = [source for source, _ in shards]
        defer(hold, sources, lambda error: target.fail(error) if error is not None else _relabel(session, shards, target))
        return
    by_device = {source.devices[index]: source.group_at(index) for source, index in shards if source.strings is None}
    if shards and shards[0][0].strings is not None:
        target.strings = shards[0][0].strings
        return
    try:
        groups = tuple(by_device[device] for device in target.devices)
    except KeyError as missing:
        target.fail(statuses.invalid_argument(
            f"no shard on device {missing} was given for an array on devices {list(target.devices)}"))
        return
    target.bind(groups[0] if all(group is groups[0] for group in groups) else groups)


def disassemble_into_single_device_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    source = session.array(request.array_handle)
    shapes = _shard_shapes(source)
    for index, device in enumerate(source.devices):
        part = Array(source.kind, shapes[index], _single_device(device, source.sharding.memory_kind))
        handle = request.result_handles[index] if request.result_handles else 0
        response.array_handles.append(session.bind_array(handle, part))
        _relabel(session, [(source, index)], part)
    if request.copy_semantics == DONATE_INPUT:
        source.delete()


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
    if request.copy_semantics == DONATE_INPUT:
        source.delete()


def copy_arrays(session: Session, request: Any, response: Any, later: Later) -> None:
    memory_kind = request.memory_kind if request.HasField("memory_kind") and request.memory_kind else None
    for index, handle in enumerate(request.array_handles):
        result_handle = request.result_handles[index] if request.result_handles else 0
        source = session.array(handle)
        devices = tuple(request.device_ids) or source.devices
        target = Array(source.kind, source.shape, _moved(source.sharding, devices, memory_kind))
        response.array_handles.append(session.bind_array(result_handle, target))
        if len(devices) != len(source.devices):
            target.fail(statuses.invalid_argument(
                f"copying an array with {len(source.devices)} shards to {len(devices)} devices"))
            continue
        _check_devices(session, target.sharding)
        session.services.dispatcher.copy(source, target)
        if request.copy_semantics == DONATE_INPUT:
            source.delete()


def _moved(sharding: Sharding, devices: tuple[int, ...], memory_kind: str | None) -> Sharding:
    kind = memory_kind if memory_kind is not None else sharding.memory_kind
    if len(devices) == 1:
        return _single_device(devices[0], kind)
    marker = f"moved to {devices} {kind}".encode()  # so that it equals no sharding with other devices
    return dataclasses.replace(
        sharding, devices=devices, memory_kind=kind, data=sharding.data + marker, _shapes={}, _domains={}
    )


def copy_to_host_buffer(session: Session, request: Any, response: Any, later: Later) -> Any:
    array = session.array(request.array_handle)
    handle = request.host_buffer_handle

    def fetched(error: Status | None, data: bytes) -> None:
        if error is None and not session.ended:
            try:
                session.buffers.put(handle, data)
            except statuses.StatusError as full:
                error = full.status
        if error is not None:
            session.buffers.fail(handle, error)
        later(error)

    session.services.dispatcher.fetch(array, _strides(request), fetched)
    return LATER


def check_value_ready(session: Session, request: Any, response: Any, later: Later) -> Any:
    session.services.dispatcher.ready([session.array(handle) for handle in request.value_handles], later)
    return LATER


def delete_array(session: Session, request: Any, response: Any, later: Later) -> None:
    for handle in request.array_handle:
        session.array(handle).delete()
    response.deletion_future_handle, _ = session.new_future(statuses.OK)


def is_array_deleted(session: Session, request: Any, response: Any, later: Later) -> None:
    response.deleted = session.array(request.array_handle).deleted


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
        "copy_arrays", "copy_to_host_buffer", "check_value_ready", "delete_array", "is_array_deleted", "destruct_array",
    )
}  # fmt: skip
