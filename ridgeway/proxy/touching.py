"""Which hosts a request makes orders for, looked up only while a host is suspended."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ridgeway.protocol import shardings
from ridgeway.protocol.status import StatusError

if TYPE_CHECKING:
    from ridgeway.proxy.session import Session

NO_ORDERS = frozenset({
    "init", "get_default_device_assignment", "get_default_layout", "compile", "make_error_arrays",
    "assemble_array_from_single_device_arrays", "disassemble_into_single_device_arrays", "fully_replicated_shard",
    "remap_arrays", "delete_array", "is_array_deleted", "destruct_array", "check_future",
    "loaded_executable_metadata", "loaded_executable_fetch_execute_result", "loaded_executable_cost_analysis",
    "loaded_executable_human_readable_program_text", "loaded_executable_delete", "loaded_executable_is_deleted",
    "loaded_executable_destruct", "loaded_host_callback_poll", "loaded_host_callback_return",
    "loaded_executable_mpmd_metadata", "loaded_executable_mpmd_cost_analysis",
})  # fmt: skip
"""Requests about what the head itself knows; what they free, executors are told in time."""


def slots_touched(session: "Session", name: str, request: Any) -> Iterable[int]:
    """The slots whose executors a request makes orders for; all of them for one of an unknown kind."""
    topology = session.services.manager.topology
    if name in NO_ORDERS:
        return ()
    look_up = _DEVICES.get(name)
    if look_up is None:
        return range(topology.slots)
    try:
        return {topology.slot_of_device(device) for device in look_up(session, request)}
    except (StatusError, KeyError):
        return ()  # a mistake, about which its handler will say more


def _of_arrays(session: "Session", handles: Iterable[int]) -> Iterable[int]:
    arrays = session.arrays
    return (device for handle in handles if handle in arrays for device in arrays[handle].devices)


def _put(session: "Session", request: Any) -> Iterable[int]:
    return shardings.parse(request.sharding).devices


def _put_shards(session: "Session", request: Any) -> Iterable[int]:
    return (device for spec in request.specs for device in shardings.parse(spec.array_spec.sharding).devices)


def _arrays(session: "Session", request: Any) -> Iterable[int]:
    return _of_arrays(session, request.array_handles)


def _copies(session: "Session", request: Any) -> Iterable[int]:
    return {*_of_arrays(session, request.array_handles), *request.device_ids}


def _reshards(session: "Session", request: Any) -> Iterable[int]:
    targets = {device for spec in request.array_specs for device in shardings.parse(spec.sharding).devices}
    return targets.union(_of_arrays(session, request.array_handles))


def _executes(session: "Session", request: Any) -> Iterable[int]:
    handle = request.loaded_executable_handle
    executable = session.executables.get(handle) or session.python.get(handle)
    if executable is None:
        # A request to the server itself, which may be about other devices than those of its arguments.
        return range(session.services.manager.topology.devices)
    return set(executable.devices).union(_of_arrays(session, request.args_handles))


_DEVICES: dict[str, Callable[["Session", Any], Iterable[int]]] = {
    "make_array_from_host_buffer": _put,
    "make_arrays_from_host_buffer_shards": _put_shards,
    "bitcast_arrays": _arrays,
    "copy_arrays": _copies,
    "reshard_arrays": _reshards,
    "copy_to_host_buffer": lambda session, request: _of_arrays(session, (request.array_handle,)),
    "check_value_ready": lambda session, request: _of_arrays(session, request.value_handles),
    "loaded_executable_execute": _executes,
}
