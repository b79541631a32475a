"""The device runtime: XLA clients, buffers and executables, and every semi-private jaxlib call that a worker needs.

Of `ridgeway.worker`, only this module, `compilation` and, for colocated Python, `python_devices` import jaxlib or
``jax._src``.  ``tests/worker/test_device_runtime.py`` fails loudly when one of these calls changes.  Why each is used:

* ``xla_client.make_cpu_client``: a client with our own collectives and process numbers; `jax` keeps only one.
* ``_jax.get_distributed_runtime_client``, ``_jax.make_gloo_tcp_collectives``: the same, for one generation.
* ``_jax.batched_device_put``, ``_jax.batched_copy_array_to_devices_with_sharding``, ``array.ArrayImpl``,
  ``array._array_global_result_handler`` (which knows that jaxlib's takes ``_skip_checks`` up to 0.11.1 and not later):
  buffers on a client that is not jax's default backend; no tracing, no cache.
* ``GSPMDSharding``: a sharding without a mesh; `Mesh` objects are interned and would leak sockets and threads of
  every past generation (measured: 29 sockets, 18 threads each).
* ``_lapack.initialize``: programs that call LAPACK.
* ``stablehlo.deserialize_portable_artifact``, ``mlir.make_ir_context``: reading a client's program.
* ``_profiler.ProfilerSession``: `jax.profiler` writes what it records to files of this host only.
"""

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import array as jax_array
from jax._src import core
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax, _profiler, xla_client  # pyright: ignore[reportAttributeAccessIssue]  # jaxlib ships no types
from jaxlib.cpu import _lapack  # pyright: ignore[reportMissingImports]

from ridgeway.protocol.status import Status
from ridgeway.worker.program_source import ProgramSource

jax.config.update("jax_enable_x64", True)

_FAR_HEARTBEAT_SECONDS = 100_000
_LAPACK_TARGET = b"lapack_"
"""Begins the name of each custom call to LAPACK. Its functions are taken from scipy, whose import costs 0.4 s, by
``_lapack.initialize``; natively jax calls that when it lowers such a program. A program that calls them before that
crashes."""
_ABORT_REPEAT_SECONDS = 0.02
_TOPOLOGY_TIMEOUT_MINUTES = 1

Array = Any


class LoadedProgram:
    """An executable on one runtime, ready to run."""

    def __init__(self, runtime: "Runtime", source: ProgramSource, executable: Any):
        self.source = source
        self.executable = executable
        flat = source.devices
        device_list = _jax.DeviceList(tuple(runtime.device(d) for d in flat))
        self.local = tuple(d for d in flat if d in runtime.local)
        """This executor's devices among the program's, in the program's order."""
        first = runtime.device(self.local[0])
        single = len(flat) == 1
        parameters = executable.get_parameter_shardings()
        results = executable.get_output_shardings()
        replicated = xla_client.HloSharding.replicate()

        def place(op_sharding: Any, memory_kind: str | None) -> Any:
            if single:
                return SingleDeviceSharding(first, memory_kind=memory_kind)
            return GSPMDSharding(
                device_list, replicated if op_sharding is None else op_sharding, memory_kind=memory_kind
            )

        self._inputs = [core.ShapedArray(shape, dtype) for shape, dtype in source.inputs]
        self._place_input = functools.cache(lambda i, kind: place(None if parameters is None else parameters[i], kind))
        self._handlers = [
            jax_array._array_global_result_handler(
                core.ShapedArray(shape, dtype),
                place(None if results is None else results[i], source.output_memory_kinds[i]),
                True,
            )
            for i, (shape, dtype) in enumerate(source.outputs)
        ]
        self._single = single

    def assemble(self, index: int, shards: list[Array]) -> Array:
        """Argument ``index`` from this executor's shards, one per device of `local`."""
        if self._single:
            return shards[0]
        aval, sharding = self._inputs[index], self._place_input(index, memory_kind_of(shards[0]))
        return jax_array.ArrayImpl(aval, sharding, shards, committed=True, _skip_checks=True)

    def execute(self, arguments: Sequence[Array]) -> tuple[Any, list[Array]]:
        """Start one execution. Returns a token that is ready when it is done, and the results (asynchronous)."""
        results = self.executable.execute_sharded(arguments, with_tokens=True)
        token = results.consume_token()
        return token, results.consume_with_handlers(self._handlers)


class Runtime:
    """One XLA client: alone on this executor's devices, or a member of a generation."""

    def __init__(self, generation: int, client: Any, devices: dict[int, Any], distributed: Any = None):
        self.generation = generation
        self._client = client
        self._devices = devices
        self._distributed = distributed
        self.local = frozenset(number for number, d in devices.items() if d.process_index == client.process_index())
        self.aborted: Status | None = None
        """The first cause, once the generation is aborted."""
        self.aborted_at = 0.0
        self.programs: dict[str, LoadedProgram] = {}
        self.left_behind: list[Array] = []
        """arrays that were never computed; dropping them could block"""
        self._lock = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}
        self._sockets_before: set[str] = set()
        self._service_port = 0
        self._abort_ended = threading.Event()
        self._sweeping = threading.Lock()
        self._closed = False

    @property
    def client(self) -> Any:
        """jaxlib's client."""
        return self._client

    @property
    def numbers(self) -> tuple[int, ...]:
        """The cluster-wide ids of all devices that the client knows."""
        return tuple(self._devices)

    def device(self, number: int) -> Any:
        """The client's device for a cluster-wide device id."""
        return self._devices[number]

    def has_devices(self, numbers: Sequence[int]) -> bool:
        """Whether a program on these devices can run here."""
        return all(number in self._devices for number in numbers)

    def put(self, data: np.ndarray, device: int, memory_kind: str | None = None) -> Array:
        """Copy host data to one device (or its host memory, by kind)."""
        where = self._devices[device]
        return _jax.batched_device_put(
            core.ShapedArray(data.shape, data.dtype),
            SingleDeviceSharding(where, memory_kind=memory_kind),
            [data],
            [where],
            True,
            False,
            xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL,
            True,
        )

    def copy(self, shard: Array, device: int, memory_kind: str | None = None) -> Array:
        """Start a copy of one device's shard to a device of this executor, also the same one."""
        where = self._devices[device]
        return _jax.batched_copy_array_to_devices_with_sharding(
            [shard],
            [_jax.DeviceList((where,))],
            [SingleDeviceSharding(where, memory_kind=memory_kind)],
            [_jax.ArrayCopySemantics.ALWAYS_COPY],
        )[0]

    def load(self, source: ProgramSource, callbacks: Sequence[Callable[..., Any]] = ()) -> LoadedProgram:
        """The program's executable on this runtime, loaded at first use; from any thread. ``callbacks``: its host
        callbacks, which XLA calls with numpy arrays (None for a token) and which return a tuple of them."""
        loaded = self.programs.get(source.program)
        if loaded is not None:
            return loaded
        with self._lock:
            lock = self._loading.setdefault(source.program, threading.Lock())
        with lock:
            loaded = self.programs.get(source.program)
            if loaded is not None:
                return loaded
            options = xla_client.CompileOptions.ParseFromString(source.options)
            options.device_assignment = xla_client.DeviceAssignment.create(
                np.array([[self._devices[d].id for d in row] for row in source.assignment], dtype=np.int32)
            )
            device_list = _jax.DeviceList(tuple(self._devices[d] for d in source.devices))
            if _LAPACK_TARGET in source.serialized:
                _lapack.initialize()
            executable = self._client.deserialize_executable(
                source.serialized, device_list, options, list(callbacks)
            )
            loaded = self.programs[source.program] = LoadedProgram(self, source, executable)
        return loaded

    def abort(self, cause: Status, while_aborting: Callable[[], None]) -> None:
        """End all collectives of this generation, now and until `close`: shut the distributed client down, which
        cancels rendezvous, and both directions of every socket that was made since the generation was entered.
        Runs its own thread, which calls ``while_aborting`` about every 0.1 s."""
        if self.aborted is not None or self._distributed is None:
            return
        self.aborted_at = time.monotonic()
        self.aborted = cause

        def work() -> None:
            self._shut_sockets()
            self._shutdown_distributed()
            last = 0.0
            while not self._abort_ended.wait(_ABORT_REPEAT_SECONDS):
                self._shut_sockets()
                if time.monotonic() - last > 0.1:
                    last = time.monotonic()
                    while_aborting()

        self._shut_sockets()
        threading.Thread(target=work, name="abort", daemon=True).start()

    def close(self) -> None:
        """Leave: drop programs, stop aborting, detach from the key-value service."""
        self.programs.clear()
        with self._sweeping:  # from here on no abort touches a socket: those to come are the next generation's
            self._abort_ended.set()
        self._shutdown_distributed()

    def _shutdown_distributed(self) -> None:
        if self._distributed is not None and not self._closed:
            self._closed = True
            try:
                self._distributed.shutdown()
            except Exception as error:  # what it says does not matter any more
                print(f"leaving generation {self.generation}: {str(error)[:200]}", flush=True)

    def _shut_sockets(self) -> None:
        with self._sweeping:
            if not self._abort_ended.is_set():
                self._sweep_sockets()

    def _sweep_sockets(self) -> None:
        for link, descriptor in open_sockets().items():
            if link in self._sockets_before or link in _OWN_SOCKETS:
                continue
            try:
                connection = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            try:
                if socket_link(connection) != link:
                    continue  # closed meanwhile, and its number given to another one
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                is_tcp = internet and connection.type == socket.SOCK_STREAM
                # A listener has no peer and must stay: gloo ends the process without it. So must the connection
                # to the key-value service: jaxlib's client ends the process when it breaks.
                if is_tcp and connection.getpeername()[1] != self._service_port:
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            finally:
                connection.close()

    def memory_stats(self) -> dict[int, dict[str, Any]]:
        """What the client says of its local devices' memory, by device id; often empty on CPU."""
        return {number: dict(self._devices[number].memory_stats() or {}) for number in self.local}


_OWN_SOCKETS: set[str] = set()


def spare_socket_from_abort(connection: socket.socket) -> None:
    """A socket of ours that is made while a generation stands; an abort must leave it alone."""
    _OWN_SOCKETS.add(socket_link(connection))


def forget_socket(connection: socket.socket) -> None:
    """The socket is about to be closed."""
    _OWN_SOCKETS.discard(socket_link(connection))


def socket_link(connection: socket.socket) -> str:
    """``socket:[inode]``, what the kernel calls a socket whatever its descriptors."""
    return f"socket:[{os.fstat(connection.fileno()).st_ino}]"


def open_sockets() -> dict[str, int]:
    """``socket:[inode]`` -> descriptor, for this process."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:["):
            found[link] = int(name)
    return found


def runtime_alone(first_device: int, devices_per_host: int) -> Runtime:
    """A client of this executor's own devices; collectives among them stay in the process."""
    client = xla_client.make_cpu_client(asynchronous=True, num_devices=devices_per_host)
    ordered = sorted(client.local_devices(), key=lambda d: d.id)
    return Runtime(0, client, {first_device + k: device for k, device in enumerate(ordered)})


class EnteringGeneration:
    """A generation that is being entered: `run` blocks, `abort` (from another thread) makes it fail soon."""

    def __init__(
        self, generation: int, rank: int, first_devices: Sequence[int], devices_per_host: int, timeout_seconds: float
    ):
        self.generation = generation
        self._rank = rank
        self._first_devices = first_devices
        self._devices_per_host = devices_per_host
        self._timeout_seconds = timeout_seconds
        self._distributed: Any = None
        self._lock = threading.Lock()
        self.aborted: Status | None = None

    def abort(self, cause: Status) -> None:
        """Cancel what `run` waits for."""
        with self._lock:
            self.aborted = cause
            distributed = self._distributed
        if distributed is not None:
            try:
                distributed.shutdown()
            except Exception as error:
                print(f"cancelling generation {self.generation}: {str(error)[:200]}", flush=True)

    def run(self, service_address: str, own_address: str) -> Runtime:
        """Connect to the key-value service, make collectives and client.

        Raises:
          Exception: whatever jaxlib raises when a peer is missing or `abort` was called.
        """
        before = set(open_sockets())
        host, _, port = service_address.rpartition(":")
        # jaxlib's client ends the process when it cannot register with the service.
        socket.create_connection((host, int(port)), self._timeout_seconds).close()
        distributed = _jax.get_distributed_runtime_client(
            service_address,
            0,
            init_timeout=max(1, int(self._timeout_seconds)),
            heartbeat_timeout=_FAR_HEARTBEAT_SECONDS,
            shutdown_on_destruction=False,
            use_compression=False,
        )
        distributed.connect()
        with self._lock:
            self._distributed = distributed
            if self.aborted is not None:
                distributed.shutdown()
                raise RuntimeError(f"aborted: {self.aborted.message}")
        collectives = _jax.make_gloo_tcp_collectives(distributed, hostname=own_address)
        client = xla_client.make_cpu_client(
            asynchronous=True,
            distributed_client=distributed,
            node_id=self._rank,
            num_nodes=len(self._first_devices),
            collectives=collectives,
            num_devices=self._devices_per_host,
            get_local_topology_timeout_minutes=_TOPOLOGY_TIMEOUT_MINUTES,
            get_global_topology_timeout_minutes=_TOPOLOGY_TIMEOUT_MINUTES,
        )
        ordered = sorted(client.devices(), key=lambda d: d.id)
        numbers = [first + k for first in self._first_devices for k in range(self._devices_per_host)]
        runtime = Runtime(self.generation, client, dict(zip(numbers, ordered, strict=True)), distributed)
        runtime._sockets_before = before
        runtime._service_port = int(port)
        return runtime


def start_profile(host_tracer_level: int, python_tracer_level: int) -> Any:
    """Record what this process does; levels as in `jax.profiler.ProfileOptions`. Its ``stop()`` gives a serialized
    ``tensorflow.profiler.XSpace`` whose times count from the start.

    Raises:
      Exception: it is being recorded already.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = host_tracer_level
    options.python_tracer_level = python_tracer_level
    return _profiler.ProfilerSession(options)


def shards_of(array: Array) -> list[Array]:
    """The single-device arrays of a (possibly global) array, in the order of its program's local devices."""
    return array._arrays


def to_host(shard: Array) -> np.ndarray:
    """The bytes of a single-device array, once it is computed.

    Not by ``np.asarray`` alone: of an array that has failed, jaxlib 0.12.0.1 leaks a reference to its client in there,
    and with it the client's ten threads and gloo's listening socket.

    Raises:
      Exception: what its computation failed with.
    """
    shard.block_until_ready()
    return np.asarray(shard)


def is_deleted(array: Array) -> bool:
    """Whether its buffer was donated or deleted."""
    return array.is_deleted()


def memory_kind_of(shard: Array) -> str | None:
    """The memory kind a single-device array lies in."""
    return shard.sharding.memory_kind
