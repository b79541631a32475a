"""The devices that colocated Python sees on a host: all of the cluster's, of which its own host's are addressable.

jax pickles meshes and shardings by device id, so user code here needs the cluster's devices, also those of other
hosts; and `jax.process_index` must tell it which host it is on.  No other process takes part: the client is told the
cluster's topology through a key-value service of its own, which lives only as long as it takes to make the client.

Semi-private names, each looked at by ``tests/worker/test_worker_python_devices.py``:

* ``_jax.get_distributed_runtime_service``, ``get_distributed_runtime_client``, the keys of topologies, and
  ``xla_client.make_cpu_client``: see above.
* ``xla_bridge.register_backend_factory``: makes that client jax's own.
* ``colocated_python.serialization``: XLA numbers a CPU device by process, ``2048 * process + k``, where the cluster
  counts through; so what jax (un)pickles by device id is translated here.
"""

import socket
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jaxlib import _jax, xla_client  # pyright: ignore[reportAttributeAccessIssue]  # jaxlib ships no types

from ridgeway.protocol import messages
from ridgeway.worker.device_runtime import Runtime

_PLATFORM = "cpu"
_LOOPBACK = "127.0.0.1"
_GLOBAL_TOPOLOGY_KEY = f"{_PLATFORM}:global_topology/{_PLATFORM}"
_LOCAL_TOPOLOGY_KEY = f"{_PLATFORM}:local_topology/{_PLATFORM}"
_DEVICES_OF_A_PROCESS = 2048
"""XLA numbers the CPU devices of process n from n times this."""
_FAR_HEARTBEAT_SECONDS = 100_000
_SERVICE_ATTEMPTS = 5
_CONNECT_SECONDS = 10
_TOPOLOGY_TIMEOUT_MINUTES = 1


def make_runtime(slot: int, slots: int, devices_per_host: int) -> Runtime:
    """A client with the devices of all ``slots`` hosts, those of host ``slot`` addressable, under the cluster's ids.

    Raises:
      RuntimeError: it could not be made.
    """
    client = _make_client(slot, slots, devices_per_host)
    numbers = {_local_id(d, devices_per_host): d for d in range(slots * devices_per_host)}
    return Runtime(0, client, {numbers[device.id]: device for device in client.devices()})


def make_default(runtime: Runtime) -> None:
    """Make a runtime's client the one that jax uses in this process, and its ids those that jax pickles."""
    client = runtime.client
    xla_bridge.register_backend_factory(_PLATFORM, lambda: client, priority=0, fail_quietly=False)
    _translate_ids({number: runtime.device(number) for number in runtime.numbers})


def _local_id(device: int, devices_per_host: int) -> int:
    """XLA's id of a cluster's device."""
    return device // devices_per_host * _DEVICES_OF_A_PROCESS + device % devices_per_host


def _describe_process(process: Any, slot: int, devices_per_host: int) -> None:
    """Fill a ``LocalTopologyProto``."""
    process.process_id = slot
    for k in range(devices_per_host):
        number = slot * devices_per_host + k
        local = _local_id(number, devices_per_host)
        process.devices.add(
            local_device_ordinal=k, global_device_id=local, device_kind=_PLATFORM, debug_string=f"{_PLATFORM}:{number}",
            # Orbax reads a device's id from the second part of this text.
            to_string=f"CpuDevice(id={local})[PjRtIFRTDeviceId={number}]",
        )  # fmt: skip


def _announce(distributed: Any, slot: int, slots: int, devices_per_host: int) -> None:
    """Say what the processes on all hosts would. The first one puts the topology together of what each has said of
    itself, the others read what the first has made of it."""
    if slot == 0:
        for other in range(1, slots):
            process: Any = messages.LocalTopologyProto()
            _describe_process(process, other, devices_per_host)
            distributed.key_value_set_bytes(f"{_LOCAL_TOPOLOGY_KEY}/{other}", process.SerializeToString())
    else:
        topology: Any = messages.GlobalTopologyProto()
        for other in range(slots):
            _describe_process(topology.processes.add(), other, devices_per_host)
        distributed.key_value_set_bytes(_GLOBAL_TOPOLOGY_KEY, topology.SerializeToString())


def _make_client(slot: int, slots: int, devices_per_host: int) -> Any:
    if slots == 1:
        return xla_client.make_cpu_client(asynchronous=True, num_devices=devices_per_host)
    service, address = _start_service()
    distributed = _jax.get_distributed_runtime_client(
        address, 0, init_timeout=_CONNECT_SECONDS, heartbeat_timeout=_FAR_HEARTBEAT_SECONDS,
        shutdown_on_destruction=False, use_compression=False,
    )  # fmt: skip
    try:
        distributed.connect()
        _announce(distributed, slot, slots, devices_per_host)
        return xla_client.make_cpu_client(
            asynchronous=True, distributed_client=distributed, node_id=slot, num_nodes=slots,
            num_devices=devices_per_host, get_local_topology_timeout_minutes=_TOPOLOGY_TIMEOUT_MINUTES,
            get_global_topology_timeout_minutes=_TOPOLOGY_TIMEOUT_MINUTES,
        )  # fmt: skip
    finally:
        distributed.shutdown()  # first: jaxlib ends a process whose service goes away under its client
        service.shutdown()


def _start_service() -> tuple[Any, str]:
    """jaxlib's key-value service, for this process alone, and its address."""
    for attempt in range(_SERVICE_ATTEMPTS):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((_LOOPBACK, 0))
            address = f"{_LOOPBACK}:{probe.getsockname()[1]}"
        try:
            service = _jax.get_distributed_runtime_service(
                address, 1, heartbeat_timeout=_FAR_HEARTBEAT_SECONDS, cluster_register_timeout=_CONNECT_SECONDS,
                shutdown_timeout=1, recoverable=True,
            )  # fmt: skip
        except Exception:  # somebody else took the port meanwhile
            if attempt == _SERVICE_ATTEMPTS - 1:
                raise
        else:
            return service, address
    raise AssertionError("the loop returns or raises")


def _translate_ids(devices: dict[int, Any]) -> None:
    """Have `colocated_python.serialization` name devices by the cluster's ids."""
    from jax.experimental.colocated_python import serialization

    number_of = {device: number for number, device in devices.items()}
    common: Callable[..., Any] = serialization._make_reduce_func_with_common_obj

    def reduce_mesh(mesh: jax.sharding.Mesh) -> Any:
        numbers = np.vectorize(number_of.__getitem__, otypes=[int])(mesh.devices)
        return serialization._unreduce_mesh, (numbers, mesh.axis_names, mesh.axis_types)

    def reduce_device_list(device_list: Any) -> Any:
        return serialization._unreduce_device_list, ([number_of[device] for device in device_list],)

    def reduce_single_device_sharding(sharding: jax.sharding.SingleDeviceSharding) -> Any:
        [device] = sharding.device_set
        return serialization._unreduce_single_device_sharding, (number_of[device], sharding.memory_kind)

    serialization._get_cpu_device_map = lambda: devices
    serialization._reduce_mesh = common(reduce_mesh)
    serialization._reduce_device_list = common(reduce_device_list)
    serialization._reduce_single_device_sharding = common(reduce_single_device_sharding)
