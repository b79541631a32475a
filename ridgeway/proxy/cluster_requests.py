"""Handlers of requests about the cluster itself: its devices and defaults."""

from collections.abc import Callable
from typing import Any

from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status
from ridgeway.proxy.services import Handler
from ridgeway.proxy.session import Session

PLATFORM = "cpu"
RUNTIME_TYPE = "pathways"
"""Exactly this: the client makes it ``proxy/pathways``, and Orbax and pathwaysutils look for that."""
MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")

Later = Callable[[Status | None], None]


def init(session: Session, request: Any, response: Any, later: Later) -> None:
    topology = session.services.manager.topology
    response.session_id = session.number
    response.platform_name = PLATFORM
    versions = session.services.versions
    one_slice = session.services.settings.slices_shown == "one"
    response.platform_version = f"ridgeway {versions['ridgeway']} jaxlib {versions['jaxlib']}"
    response.platform_id = int.from_bytes(PLATFORM.encode(), "little")
    response.process_index = 0
    response.runtime_type = RUNTIME_TYPE
    for device in range(topology.devices):
        slot = topology.slot_of_device(device)
        text = f"{PLATFORM}:{device} ({topology.describe_slot(slot)})"
        first_memory = device * len(MEMORY_KINDS)
        message = response.all_devices.add(
            id=device, local_device_id=device, local_hardware_id=device, platform_name=PLATFORM, device_kind=PLATFORM,
            default_memory_id=first_memory, debug_string=text, to_string=f"CpuDevice(id={device})",
        )  # fmt: skip
        message.attributes.version_number = 0
        attributes = message.attributes.attributes
        attributes["slice_index"].int64_value = 0 if one_slice else topology.slice_of_slot(slot)
        attributes["host_index"].int64_value = topology.host_of_slot(slot)
        # Equal for all: the data loader sits on the controller, and MaxText divides the batch by task.
        attributes["task_id"].int64_value = 0
        # By which jax finds the CPU device beside a device: here each is its own.
        attributes["colocation_id"].int64_value = device
        response.primary_device_ids.append(device)
        response.addressable_device_ids.append(device)
        for offset, kind in enumerate(MEMORY_KINDS):
            memory = response.memories.add(
                id=first_memory + offset, memory_space_kind=kind, kind_id=offset + 1,
                debug_string=f"{kind} of {text}", to_string=f"{kind.upper()}_{device}",
            )  # fmt: skip
            memory.device_ids.append(device)
            message.memory_ids.append(first_memory + offset)
    # jax.export lowers with Shardy only if the server says so.
    response.client_attributes.version_number = 0
    response.client_attributes.attributes["serialize_with_sdy"].bool_value = True
    # By which the plugin in the client's process says whose output it wants.
    response.client_attributes.attributes["ridgeway_session"].int64_value = session.number
    # By which it tells the user that colocated Python cannot work.
    for name in ("python", "jax"):
        response.client_attributes.attributes[f"ridgeway_{name}"].string_value = versions[name].encode()
    session.services.emit(
        "session_started", session=session.number, client=session.client,
        protocol=session.version.protocol, serdes=session.version.serdes,
    )  # fmt: skip


def get_default_device_assignment(session: Session, request: Any, response: Any, later: Later) -> None:
    count = request.num_replicas * request.num_partitions
    known = session.services.manager.topology.devices
    if count < 1 or count > known:
        raise statuses.invalid_argument(
            f"{request.num_replicas} replicas x {request.num_partitions} partitions need {count} devices; "
            f"this cluster has {known}"
        ).error()
    assignment = response.device_assignment
    assignment.replica_count = request.num_replicas
    assignment.computation_count = request.num_partitions
    for partition in range(request.num_partitions):
        computation = assignment.computation_devices.add()
        for replica in range(request.num_replicas):
            computation.replica_device_ids.append(replica * request.num_partitions + partition)


def get_default_layout(session: Session, request: Any, response: Any, later: Later) -> None:
    response.serialized_pjrt_layout = default_layout(request.dtype.kind, len(request.dims))


_PACKED_BITS = {
    dtypes.kind_of_mlir(text): bits for text, bits in (("i2", 2), ("ui2", 2), ("i4", 4), ("ui4", 4), ("f4E2M1FN", 4))
}


def default_layout(kind: int, rank: int) -> bytes:
    """XLA's CPU layout for an array: row-major, in the text form that `PjRtLayout` serializes to; types narrower
    than a byte are packed, which the text says with ``E(bits)``."""
    order = ",".join(str(dimension) for dimension in reversed(range(rank)))
    bits = _PACKED_BITS.get(kind)
    return (f"{{{order}:E({bits})}}" if bits else f"{{{order}}}").encode()


HANDLERS: dict[str, Handler] = {
    "init": init,
    "get_default_device_assignment": get_default_device_assignment,
    "get_default_layout": get_default_layout,
}
