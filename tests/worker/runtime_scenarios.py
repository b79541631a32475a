"""What `test_device_runtime` does in processes of its own, with real XLA clients for the CPU.

Every function takes ``link``, by which it may talk to the test, as its last argument; what it returns goes to the test.
"""

import gc
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax._src.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client
from jaxlib.mlir.dialects import stablehlo

from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.worker import buffers, compilation, device_runtime
from ridgeway.worker.buffers import BufferStore, HostShard, PromisedShard, result_group, shard_group
from ridgeway.worker.device_runtime import EnteringGeneration, Runtime
from ridgeway.worker.executor import Executor
from ridgeway.worker.failures import GenerationFailure
from ridgeway.worker.program_source import ProgramSource
from ridgeway.worker.promises import Promise, PromiseTable

HOST = "127.0.0.1"
ENTER_SECONDS = 30.0
PATIENCE_SECONDS = 60.0
CAUSE = statuses.data_loss("slice 1 host 0 (executor 7) was lost: it was killed")

Compiled = tuple[dict[str, Any], bytes, bytes, int]
"""Metadata, serialized executable, options, number of devices."""


# ---- programs


def _artifact(lowered: Any) -> bytes:
    """A program as a client sends it."""
    module = lowered.compiler_ir("stablehlo")
    return stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version(), allow_other_dialects=True)


def _options(devices: int) -> bytes:
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, devices
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, devices
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    return options.SerializeAsString()


def _compile(lowered: Any, devices: int) -> Compiled:
    options = _options(devices)
    metadata, serialized = compilation.compile_program(_artifact(lowered), options, 1, devices)
    return metadata, serialized, options, devices


def compile_all(link: Any) -> dict[str, Compiled]:
    """The programs of all scenarios, compiled as a compiler process does it."""
    jax.config.update("jax_num_cpu_devices", 6)

    def affine(x: Any, y: Any) -> Any:
        return x @ y + 1.0, jnp.sum(x)

    shape = jax.ShapeDtypeStruct
    programs = {
        "affine": _compile(jax.jit(affine).lower(shape((2, 3), np.float32), shape((3, 2), np.float32)), 1),
        "donating": _compile(jax.jit(lambda x: x * 3, donate_argnums=0).lower(shape((4,), np.float32)), 1),
        "solving": _compile(jax.jit(jnp.linalg.inv).lower(shape((3, 3), np.float32)), 1),
    }
    for devices in (2, 4, 6):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
        split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
        double = jax.jit(lambda x: (x * 2, jnp.sum(x)), in_shardings=split, out_shardings=(split, whole))
        lowered = double.lower(shape((devices * 2,), np.float32))
        programs[f"summing {devices}"] = _compile(lowered, devices)
    return programs


def _source(name: str, compiled: Compiled, devices: tuple[int, ...]) -> ProgramSource:
    metadata, serialized, options, _ = compiled

    def arrays(pairs: list[Any]) -> tuple[Any, ...]:
        return tuple((tuple(shape), dtypes.dtype_of_kind(kind)) for shape, kind in pairs)

    kinds = tuple(None for _ in metadata["outputs"])
    return ProgramSource(
        f"{name}@{devices}", metadata["name"], options, (devices,), arrays(metadata["inputs"]),
        arrays(metadata["outputs"]), kinds, serialized,
    )  # fmt: skip


def describe_programs(programs: dict[str, Compiled], link: Any) -> dict[str, Any]:
    """Everything that metadata says of two of them, and the text of one."""
    metadata, serialized, options, devices = programs["summing 2"]
    return {
        "single": programs["affine"][0], "donated": programs["donating"][0]["donated"], "pair": metadata,
        "text": compilation.program_text(serialized, options, 1, devices),
    }  # fmt: skip


def compile_nonsense(link: Any) -> list[tuple[int, str]]:
    """What the compiler says of programs that are none."""
    found = []
    for artifact in (b"", b"not a program", b"ML\xefR\x01nonsense"):
        try:
            compilation.compile_program(artifact, _options(1), 1, 1)
        except StatusError as error:
            found.append((int(error.status.code), error.status.message))
    return found


def signature_of_untyped(link: Any) -> int:
    """A module without a function ``main``."""
    with mlir.make_ir_context() as context, mlir.ir.Location.unknown(context):
        module = mlir.ir.Module.parse("module @m { func.func @f() { return } }")
        version = stablehlo.get_current_version()
        artifact = stablehlo.serialize_portable_artifact(module, version, allow_other_dialects=True)
    try:
        compilation.compile_program(artifact, _options(1), 1, 1)
    except StatusError as error:
        return int(error.status.code)
    return 0


# ---- buffers


def put_and_copy(link: Any) -> list[str]:
    """Buffers of many types on two devices, in every memory, moved about."""
    runtime = device_runtime.runtime_alone(10, 2)
    assert runtime.local == {10, 11}
    assert runtime.has_devices((11, 10))
    assert not runtime.has_devices((11, 12))
    samples = [
        np.arange(6, dtype=np.float32).reshape(2, 3), np.float64(2.5).reshape(()), np.zeros((0, 3), np.int32),
        np.array([True, False]), np.array([1 + 2j], np.complex64), np.array([1, -2], np.int8),
        np.array([1.5, -0.25], ml_dtypes.bfloat16), np.array([1, -2, 3], ml_dtypes.int4), np.array([2**63], np.uint64),
        np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
    ]  # fmt: skip
    seen: list[str] = []
    for data in samples:
        for kind in (None, "device", "pinned_host", "unpinned_host"):
            shard = runtime.put(data, 11, kind)
            assert device_runtime.memory_kind_of(shard) == (kind or "device")
            other = runtime.copy(shard, 10, kind)
            same = runtime.copy(shard, 11, "device")
            shard.delete()
            assert device_runtime.is_deleted(shard)
            for moved in (other, same):
                assert not device_runtime.is_deleted(moved)
                back = np.asarray(moved)
                assert back.dtype == data.dtype
                assert back.shape == data.shape
                assert back.tobytes() == np.ascontiguousarray(data).tobytes()
        seen.append(str(data.dtype))
    return seen


def put_copies(link: Any) -> list[float]:
    """What is put belongs to the runtime: the caller may reuse its memory."""
    runtime = device_runtime.runtime_alone(0, 1)
    data = np.zeros(1 << 18, np.float32)
    shards = []
    for number in range(8):
        data[:] = number
        shards.append(runtime.put(data, 0))
    data[:] = -1
    return [float(np.asarray(shard).max()) for shard in shards]


def memory_stats(link: Any) -> list[int]:
    """Devices that the client says something of."""
    runtime = device_runtime.runtime_alone(4, 2)
    stats = runtime.memory_stats()
    assert all(isinstance(value, dict) for value in stats.values())
    return sorted(stats)


# ---- programs


def execute_on_one_device(programs: dict[str, Compiled], link: Any) -> None:
    """A program on each device of a runtime, also of another one than it was compiled for."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = np.ones((3, 2), np.float32)
    for first in (0, 6):
        runtime = device_runtime.runtime_alone(first, 2)
        for device in sorted(runtime.local):
            loaded = runtime.load(_source("affine", programs["affine"], (device,)))
            assert runtime.load(loaded.source) is loaded
            assert loaded.local == (device,)
            arguments = [loaded.assemble(i, [runtime.put(data, device)]) for i, data in enumerate((x, y))]
            token, (product, total) = loaded.execute(arguments)
            token.block_until_ready()
            np.testing.assert_array_equal(np.asarray(product), x @ y + 1)
            assert np.asarray(total) == x.sum()
            assert device_runtime.memory_kind_of(device_runtime.shards_of(product)[0]) == "device"


def execute_lapack(programs: dict[str, Compiled], link: Any) -> None:
    """A program that calls LAPACK, in a process that never lowered one."""
    runtime = device_runtime.runtime_alone(0, 1)
    loaded = runtime.load(_source("solving", programs["solving"], (0,)))
    matrix = np.array([[2, 0, 0], [0, 4, 0], [0, 0, 8]], np.float32)
    token, (inverse,) = loaded.execute([loaded.assemble(0, [runtime.put(matrix, 0)])])
    token.block_until_ready()
    np.testing.assert_allclose(np.asarray(inverse), np.linalg.inv(matrix))


def execute_on_two_devices(programs: dict[str, Compiled], link: Any) -> None:
    """A collective between two devices of one process."""
    runtime = device_runtime.runtime_alone(0, 2)
    for devices in ((0, 1), (1, 0)):
        loaded = runtime.load(_source("summing 2", programs["summing 2"], devices))
        assert loaded.local == devices
        parts = [np.array([1, 2], np.float32), np.array([3, 4], np.float32)]
        shards = [runtime.put(part, device) for part, device in zip(parts, devices, strict=True)]
        token, (doubled, total) = loaded.execute([loaded.assemble(0, shards)])
        token.block_until_ready()
        assert [np.asarray(shard).tolist() for shard in device_runtime.shards_of(doubled)] == [[2, 4], [6, 8]]
        assert [float(np.asarray(shard)) for shard in device_runtime.shards_of(total)] == [10, 10]


def donate(programs: dict[str, Compiled], link: Any) -> None:
    """A donated argument is gone; using it again is an error, of the argument."""
    runtime = device_runtime.runtime_alone(0, 1)
    loaded = runtime.load(_source("donating", programs["donating"], (0,)))
    argument = runtime.put(np.arange(4, dtype=np.float32), 0)
    token, (tripled,) = loaded.execute([loaded.assemble(0, [argument])])
    token.block_until_ready()
    assert device_runtime.is_deleted(argument)
    assert np.asarray(tripled).tolist() == [0, 3, 6, 9]
    try:
        loaded.execute([argument])
    except Exception as error:
        status = statuses.classify_runtime_error(str(error))
        assert status.code is Code.INVALID_ARGUMENT, status
    else:
        raise AssertionError("a donated buffer was used again")
    # What is to be kept is copied first.
    kept = runtime.put(np.arange(4, dtype=np.float32), 0)
    loaded.execute([runtime.copy(kept, 0)])
    assert not device_runtime.is_deleted(kept)
    assert np.asarray(kept).tolist() == [0, 1, 2, 3]


# ---- stores


def _describe(error: BaseException) -> Status:
    return error.status if isinstance(error, StatusError) else statuses.internal(str(error))


def drain_and_go_on(programs: dict[str, Compiled], link: Any) -> None:
    """Everything that lies on one runtime goes on living on the next."""
    store = BufferStore(1.0)
    promises = PromiseTable()
    old = device_runtime.runtime_alone(0, 2)
    halves = {0: HostShard(np.array([1, 2], np.float32), None), 1: HostShard(np.array([3, 4], np.float32), None)}
    store.set(1, shard_group(dict(halves)))
    source = _source("summing 2", programs["summing 2"], (0, 1))
    loaded = old.load(source)
    _, outputs = loaded.execute([store.argument(1, 0, loaded, old)])
    store.set(2, result_group(outputs[0], loaded.local, old, False))
    store.set(3, result_group(outputs[1], loaded.local, old, False))
    store.set(4, shard_group({0: old.put(np.array([7.0], np.float32), 0, "pinned_host")}, old))
    store.set(5, shard_group({0: old.put(np.arange(4, dtype=np.float32), 0)}, old))
    donating = old.load(_source("donating", programs["donating"], (0,)))
    donating.execute([store.argument(5, 0, donating, old)])
    store.poison(6, (0, 1), CAUSE)
    # Host memory is nobody's but the store's: a program gets a copy.
    kept = HostShard(np.arange(1000, dtype=np.float32), "pinned_host")
    store.set(7, shard_group({0: kept, 1: kept}, memory_kind="pinned_host"))
    assert device_runtime.memory_kind_of(store.shard(7, 0, old)) == "pinned_host"
    assert store.peek(7, 0) is store.peek(7, 1) is kept
    assert store.host_memory_bytes() == 4000
    assert store.drain(old, _describe, lambda spans: False) == (0, 0)
    old.close()

    new = device_runtime.runtime_alone(0, 2)
    loaded = new.load(source)
    # A result is an argument again; so is what was put before.
    token, (doubled, total) = loaded.execute([store.argument(2, 0, loaded, new)])
    token.block_until_ready()
    assert [np.asarray(shard).tolist() for shard in device_runtime.shards_of(doubled)] == [[4, 8], [12, 16]]
    assert [float(np.asarray(shard)) for shard in device_runtime.shards_of(total)] == [20, 20]
    assert float(np.asarray(store.shard(3, 1, new))) == 10
    assert store.peek(7, 1) is kept
    store.free([7])
    assert store.host_memory_bytes() == 0
    assert np.asarray(store.shard(1, 0, new)).tolist() == [1, 2]
    pinned = store.shard(4, 0, new)
    assert device_runtime.memory_kind_of(pinned) == "pinned_host"
    assert np.asarray(pinned).tolist() == [7]
    for number, code in ((5, Code.INVALID_ARGUMENT), (6, CAUSE.code)):
        try:
            store.shard(number, 0, new)
        except StatusError as error:
            assert error.status.code is code, error
        else:
            raise AssertionError(f"group {number} could be read")
    store.free([1, 2, 3, 4, 5, 6])
    assert store.size == 0
    assert promises.claim(1, None) is not None


def poisoned_arguments(programs: dict[str, Compiled], link: Any) -> None:
    """A program with a poisoned argument is refused with the argument's own error, and nothing else is disturbed."""
    runtime = device_runtime.runtime_alone(0, 2)
    store = BufferStore(0.05)
    promises = PromiseTable()
    loaded = runtime.load(_source("summing 2", programs["summing 2"], (0, 1)))
    store.poison(1, (0, 1), CAUSE)
    half = HostShard(np.array([1, 2], np.float32), None)
    store.set(2, shard_group({0: half, 1: CAUSE}))
    for number in (1, 2):
        for _ in range(2):
            try:
                store.argument(number, 0, loaded, runtime)
            except StatusError as error:
                assert error.status == CAUSE
            else:
                raise AssertionError("a poisoned argument was taken")
    assert np.asarray(store.shard(2, 0, runtime)).tolist() == [1, 2]
    try:
        store.group(99)
    except StatusError as error:
        assert error.status.code is Code.INTERNAL
    else:
        raise AssertionError("a group that is not there was found")
    assert promises.claim(5, 7).resolved is False


# ---- generations


class _Member:
    """A runtime in a generation, and what it computes."""

    def __init__(
        self, programs: dict[str, Compiled], generation: int, rank: int, first_devices: list[int], per_host: int
    ):
        self.entering = EnteringGeneration(generation, rank, first_devices, per_host, ENTER_SECONDS)
        self.devices = tuple(first + k for first in first_devices for k in range(per_host))
        self.mine = tuple(first_devices[rank] + k for k in range(per_host))
        self.program = programs[f"summing {len(self.devices)}"]
        self.runtime: Runtime | None = None

    def enter(self, service: str) -> Runtime:
        self.runtime = self.entering.run(service, HOST)
        assert self.runtime.local == set(self.mine)
        assert self.runtime.has_devices(self.devices)
        return self.runtime

    def start(self) -> tuple[Any, list[Any]]:
        """Start the sum of all devices' numbers; each has its own device id twice."""
        runtime = self.runtime
        assert runtime is not None
        loaded = runtime.load(_source("summing", self.program, self.devices))
        assert loaded.local == self.mine
        shards = [runtime.put(np.array([device, device], np.float32), device) for device in self.mine]
        return loaded.execute([loaded.assemble(0, shards)])

    def check(self) -> None:
        """The sum is right."""
        token, (doubled, total) = self.start()
        token.block_until_ready()
        parts = [np.asarray(shard).tolist() for shard in device_runtime.shards_of(doubled)]
        assert parts == [[2 * device, 2 * device] for device in self.mine]
        assert {float(np.asarray(s)) for s in device_runtime.shards_of(total)} == {2.0 * sum(self.devices)}


def live_through_generations(
    programs: dict[str, Compiled], rank: int, first_devices: list[int], per_host: int, link: Any
) -> int:
    """Enter each generation whose service comes over the link, compute there, and leave; how many sockets more are
    open after the last than after the first."""
    first: int | None = None
    generation = 0
    while (service := link.recv()) is not None:
        generation += 1
        member = _Member(programs, generation, rank, first_devices, per_host)
        runtime = member.enter(service)
        member.check()
        member.check()
        link.send(("value", "computed"))
        assert link.recv() == "leave"
        runtime.close()
        del member, runtime
        gc.collect()
        link.send(("value", "left"))
        if first is None:
            first = len(device_runtime.open_sockets())
    assert first is not None
    # XLA's threads close theirs in their own time.
    deadline = time.monotonic() + PATIENCE_SECONDS / 4
    while (more := len(device_runtime.open_sockets()) - first) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return max(more, 0)


def survive(programs: dict[str, Compiled], rank: int, link: Any) -> dict[str, Any]:
    """Be one of three; the last is killed, or stopped, while the others wait for it in a collective."""
    first = _Member(programs, 1, rank, [0, 2, 4], 2)
    device = first.mine[0]
    runtime = first.enter(link.recv())
    first.check()  # the communicators are made
    link.send(("value", "ready"))
    assert link.recv() == "go"
    if rank == 2:
        # Never takes part in the next one.
        link.send(("value", "waiting"))
        threading.Event().wait()
    store = BufferStore(1.0)
    store.set(1, shard_group({device: runtime.put(np.array([rank], np.float32), device)}, runtime))
    # XLA runs small programs in the thread that starts them.
    execution = _Beside(first.start)
    link.send(("value", "started"))
    assert link.recv() == "abort"
    was_blocked = not execution.over or (execution.result is not None and not execution.result[1][0].is_ready())
    spared = _spared_pair()
    ticked = threading.Event()
    runtime.abort(CAUSE, ticked.set)
    assert runtime.aborted == CAUSE
    execution.join()
    texts = [str(execution.error)] if execution.error is not None else []
    if execution.result is not None:
        token, (doubled, total) = execution.result
        store.set(2, result_group(doubled, first.mine, runtime, True))
        waiting = _Beside(token.block_until_ready)
        waiting.join()
        texts.append(str(waiting.error))
        del token, doubled, total, waiting
    given_up = time.monotonic() + PATIENCE_SECONDS
    lost, stuck = store.drain(runtime, lambda error: CAUSE, lambda spans: time.monotonic() > given_up)
    assert ticked.wait(PATIENCE_SECONDS)
    spared()
    runtime.close()
    kept = isinstance(_shards(store, 1)[device], HostShard)
    poisoned = [shard == CAUSE for shard in _shards(store, 2).values()] if store.size == 2 else []
    client = runtime._client
    del runtime, first, execution
    gc.collect()
    # By nothing that the collector can see: who reads what has failed must not leak the client, which has threads.
    leaked = sys.getrefcount(client) - len(gc.get_referrers(client)) - 2
    del client
    gc.collect()
    link.send(("value", "left"))
    # The survivors go on, with what they have kept.
    second = _Member(programs, 2, rank, [0, 2], 2)
    again = second.enter(link.recv())
    second.check()
    held = float(np.asarray(store.shard(1, device, again))[0])
    again.close()
    return {
        "was blocked": was_blocked, "texts": texts,
        "collective": all(statuses.is_collective_failure(text) for text in texts), "lost": lost,
        "stuck": stuck, "kept": kept, "held": held, "poisoned": poisoned, "leaked": leaked,
    }  # fmt: skip


def _shards(store: BufferStore, number: int) -> dict[int, Any]:
    shards = store.group(number).shards
    assert shards is not None
    return shards


class _Beside:
    """Something that may block, in a thread of its own."""

    def __init__(self, function: Callable[[], Any]):
        self.result: Any = None
        self.error: Exception | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert self.over, "it never came back"


def _spared_pair() -> Callable[[], None]:
    """A connection of our own that is made while a generation stands; the result checks that it still carries."""
    with socket.create_server((HOST, 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for end in (one, other):
        device_runtime.spare_socket_from_abort(end)

    def check() -> None:
        one.sendall(b"still here")
        other.settimeout(PATIENCE_SECONDS)
        assert other.recv(100) == b"still here"
        for end in (one, other):
            device_runtime.forget_socket(end)
            end.close()

    return check


def _error_of(function: Callable[[], Any]) -> str:
    beside = _Beside(function)
    beside.join()
    return "" if beside.error is None else f"{type(beside.error).__name__}: {beside.error}"


def enter_in_vain(programs: dict[str, Compiled], link: Any) -> str:
    """Enter a generation whose other member never comes; the abort ends that."""
    member = _Member(programs, 1, 0, [0, 1], 1)
    service = link.recv()
    threading.Timer(0.5, member.entering.abort, (CAUSE,)).start()
    return _error_of(lambda: member.enter(service))


def enter_after_the_abort(programs: dict[str, Compiled], link: Any) -> str:
    """The abort comes before the entering has begun."""
    member = _Member(programs, 1, 0, [0, 1], 1)
    member.entering.abort(CAUSE)
    service = link.recv()
    return _error_of(lambda: member.enter(service))


def enter_at_a_dead_address(link: Any) -> str:
    """Nobody serves there."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    entering = EnteringGeneration(1, 0, [0, 1], 1, 1.0)
    return _error_of(lambda: entering.run(f"{HOST}:{port}", HOST))


# ---- promises and errors


def promises_in_any_order(link: Any) -> None:
    """Orders that name bytes, the bytes, and the news that none will come: each may be first."""
    table = PromiseTable()
    lost = statuses.data_loss("slice 2 host 0 was lost")

    def outcome(promise: Promise) -> Any:
        seen: list[Any] = []
        promise.when_resolved(seen.append)
        assert len(seen) == promise.resolved
        return seen[0] if seen else None

    # Bytes after the order that names them, and before it.
    late = table.claim(1, 7)
    assert outcome(late) is None
    table.resolve(1, b"late")
    assert outcome(late) == b"late"
    table.resolve(2, b"early")
    assert outcome(table.claim(2, 7)) == b"early"
    # The sender's loss: after the order, before it, and after its bytes.
    waiting, other = table.claim(3, 7), table.claim(4, 8)
    table.resolve(5, b"arrived in time")
    table.peer_lost(7, lost)
    assert outcome(waiting) == lost
    assert outcome(other) is None
    assert outcome(table.claim(6, 7)) == lost
    assert outcome(table.claim(5, 7)) == b"arrived in time"
    # What comes too late changes nothing, and is not kept for ever.
    table.resolve(3, b"too late")
    assert outcome(waiting) == lost
    # Nobody is told of bytes that the network swallows.
    from_head = table.claim(9, None)
    table.expire(PATIENCE_SECONDS)
    assert outcome(other) is None
    table.expire(0.0)
    for promise in (other, from_head):
        status = outcome(promise)
        assert isinstance(status, Status)
        assert status.code is Code.DEADLINE_EXCEEDED
        assert "transfer_timeout_seconds" in status.message
    try:
        other.wait(0.0)
    except StatusError as error:
        assert error.status.code is Code.DEADLINE_EXCEEDED
    else:
        raise AssertionError("an error was taken for bytes")


def waiting_for_bytes_ends_with_the_generation(link: Any) -> None:
    """An execution that is lost anyway does not wait for the bytes of an argument, and does not spoil them."""
    runtime = device_runtime.runtime_alone(0, 1)
    store = BufferStore(PATIENCE_SECONDS)
    promise = Promise()
    store.set(1, shard_group({0: PromisedShard(promise, lambda data: data, None)}))
    asked: list[int] = []

    def ended() -> Status | None:
        asked.append(1)
        return CAUSE if len(asked) > 2 else None

    started = time.monotonic()
    try:
        store.shard(1, 0, runtime, ended)
    except StatusError as error:
        assert error.status == CAUSE
    else:
        raise AssertionError("bytes that had not come were used")
    assert time.monotonic() - started < PATIENCE_SECONDS / 2
    promise.resolve(np.array([3.0], np.float32))
    assert np.asarray(store.shard(1, 0, runtime)).tolist() == [3.0]


def draining_much_is_progress(link: Any) -> None:
    """Bringing a shard of several parts to host memory is told part by part, and keeps every byte."""
    runtime = device_runtime.runtime_alone(0, 1)
    store = BufferStore(1.0)
    count = buffers.COPIED_AT_ONCE_BYTES // 4 * 3 + 5
    value = np.arange(count, dtype=np.float32)
    store.set(1, shard_group({0: runtime.put(value, 0)}, runtime))
    for number in range(2, 8):
        store.set(number, shard_group({0: runtime.put(np.full(1 << 22, number, np.float32), 0)}, runtime))
    told: list[int] = []
    assert store.drain(runtime, _describe, lambda spans: False, lambda: told.append(1)) == (0, 0)
    assert len(told) >= 5
    kept = store.peek(1, 0)
    assert isinstance(kept, HostShard) and np.array_equal(kept.data, value)


def errors_are_described(link: Any) -> None:
    """What is said of an error: the first cause, and the generation of those that have none of their own yet."""
    runtime = device_runtime.runtime_alone(0, 1)
    broken = RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    wrong = RuntimeError("INVALID_ARGUMENT: shapes differ")

    def describe(error: BaseException) -> Status:
        return Executor.describe(None, error, runtime)  # type: ignore[arg-type]

    # Alone, nobody knows a better cause than the error itself.
    assert describe(broken).code is Code.DATA_LOSS
    runtime.generation = 4
    failure = describe(broken)
    assert isinstance(failure, GenerationFailure)
    assert (failure.code, failure.generation) == (Code.ABORTED, 4)
    assert describe(wrong).code is Code.INVALID_ARGUMENT
    assert describe(CAUSE.error()) == CAUSE
    # Once the generation has ended, its cause is the cause of whatever broke in it...
    other = statuses.data_loss("slice 3 host 0 was lost")
    runtime.aborted = other
    assert describe(broken) == other
    assert describe(failure.error()) == other
    # ... but not of a value that was an error before, nor of one from an earlier generation.
    assert describe(CAUSE.error()) == CAUSE
    earlier = GenerationFailure(Code.ABORTED, "collective failed", 3)
    assert describe(earlier.error()) == earlier
