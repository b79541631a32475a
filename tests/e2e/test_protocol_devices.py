"""What a program sees of the devices, beside a local CPU or alone, and large buffers that go by file."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import e2e_harness as harness
import grpc
import pytest
from e2e_harness import Cluster, Controller
from port_client import PortClient

from ridgeway.protocol import messages
from ridgeway.protocol.status import RETRIED_CODES
from ridgeway.proxy.large_transfers import FOLDER_VARIABLE

pytestmark = harness.MARKS

THRESHOLD_VARIABLE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES"


def test_devices_are_described_as_jax_describes_them(controller: Controller) -> None:
    assert controller.run("""
devices = jax.devices()
result = [
    [d.id for d in devices] == list(range(6)) == [d.id for d in jax.local_devices()],
    [jax.device_count(), jax.local_device_count(), jax.process_count(), jax.process_index()],
    sorted({(d.platform, d.device_kind, d.process_index) for d in devices}),
    [d.slice_index for d in devices],
    jax.default_backend(), devices[0].client.runtime_type,
    sorted({m.kind for m in devices[5].addressable_memories()}), devices[5].default_memory().kind,
    [hasattr(d, "coords") for d in devices] == [False] * 6,  # as natively: a CPU has no place in a torus
    len({str(d) for d in devices}), len({repr(d) for d in devices}),
]
""") == [
        True, [6, 6, 1, 0], [["cpu", "cpu", 0]], [0, 0, 1, 1, 2, 2], "cpu", "proxy/pathways",
        ["device", "pinned_host", "unpinned_host"], "device", True, 6, 6,
    ]  # fmt: skip


def test_arrays_go_to_the_local_cpu_and_back_however_they_are_divided(cluster: Cluster, plugin: str) -> None:
    environment = {**cluster.environment(), "PYTHONPATH": plugin, "JAX_NUM_CPU_DEVICES": "6"}
    with contextlib.closing(Controller(cluster.place, environment)) as program:
        assert program.run("""
near, far = jax.devices("cpu"), jax.devices()
here, there = (NamedSharding(Mesh(np.array(devices), ("x",)), P("x")) for devices in (near, far))
values = np.arange(12.0, dtype=np.float32)
result = [near != far, len(near)]

def whole(key):
    return np.asarray(jax.random.key_data(key)).tolist()

keys = jax.random.split(jax.random.key(3), 6)
for source, target, device in ((here, there, far[4]), (there, here, near[4])):
    x = jax.device_put(values, source)
    y, untouched = jax.device_put((x, jax.device_put(values, target)), target)
    donated = jax.device_put(x, target, donate=True)
    key = jax.device_put(keys[2], source.mesh.devices[1])
    result.append([
        y.sharding == target, np.array_equal(np.asarray(y), values), np.array_equal(np.asarray(untouched), values),
        np.array_equal(np.asarray(donated), values), x.is_deleted(),
        whole(jax.device_put(key, device)) == whole(key), jax.device_put(key, device).devices() == {device},
        whole(jax.device_put(jax.device_put(keys, source), target)) == whole(keys),
    ])
""") == [True, 6, [True] * 8, [True] * 8]


def test_reversed_and_broadcast_host_arrays_are_taken_as_natively(cluster: Cluster, plugin: str) -> None:
    with contextlib.closing(Controller(cluster.place, {**cluster.environment(), "PYTHONPATH": plugin})) as program:
        assert program.run("""
plain = np.arange(24.0, dtype=np.float32).reshape(12, 2)
views = [
    plain[::-1], plain[:, ::-1], plain[::-2], np.broadcast_to(np.float32(3), (12, 2)),
    np.broadcast_to(plain[:, :1], (12, 2)), np.broadcast_to(plain[0], (12, 2)), plain[:0][::-1],
]
devices = jax.devices()
over_all = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
everywhere = NamedSharding(over_all.mesh, P())
same = jax.jit(lambda a: a + 0)
ways = [
    jnp.asarray, same, same, lambda v: jax.device_put(v, devices[4]), lambda v: jax.device_put(v, over_all),
    lambda v: jax.device_put(v, everywhere), lambda v: jax.make_array_from_callback(v.shape, over_all, lambda i: v[i]),
    jax.jit(lambda a: a + 0, in_shardings=over_all, out_shardings=over_all),
]
result = [
    [number, way] for number, view in enumerate(views) for way, taken in enumerate(ways)
    if not np.array_equal(np.asarray(taken(view)), view)
]
""") == []


def test_a_program_for_one_slice_runs_on_several_that_are_shown_as_one(tmp_path: Path) -> None:
    mesh = "jax.make_mesh((4,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))"
    (tmp_path / "one").mkdir()
    with harness.cluster_in(tmp_path / "one", "2x1x2", "--set", "slices_shown=one") as cluster:
        with contextlib.closing(cluster.controller()) as program:
            assert program.run(f"""
values = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding({mesh}, P("x")))
result = [[d.slice_index for d in jax.devices()], float(jax.jit(jnp.sum)(values))]
""") == [[0, 0, 0, 0], 28.0]
            cluster.kill_executor(1)
            assert "slice 1 host 0" in program.error_of("jax.block_until_ready(jax.jit(jnp.sum)(values))")
        cluster.wait_whole()


def test_jax_refuses_a_plain_mesh_of_several_slices(controller: Controller) -> None:
    with pytest.raises(harness.ProgramError, match="multi-slice"):
        controller.run("jax.make_mesh((6,), ('x',))")


def test_a_program_without_a_device_assignment_gets_the_first_devices(controller: Controller) -> None:
    assert controller.run("""
from jax._src import compiler, xla_bridge
from jaxlib import xla_client

def place(count):
    program = jax.jit(lambda x, y: x + y).lower(np.int32(1), np.int32(1)).compiler_ir()
    options = compiler.get_compile_options(num_replicas=count, num_partitions=1)
    devices = xla_client.DeviceList(tuple(jax.devices()[:count]))
    return xla_bridge.get_backend().compile_and_load(str(program), devices, options)

[total] = place(1).execute([jnp.array(1, dtype=np.int32), jnp.array(2, dtype=np.int32)])
result = [int(total), sorted(d.id for d in total.devices()), [d.id for d in place(3).local_devices()]]
""") == [3, [0], [0, 1, 2]]


def test_memory_stats_are_refused_as_a_mistake_is(controller: Controller) -> None:
    error = controller.error_of("jax.devices()[0].memory_stats()")
    assert "INVALID_ARGUMENT" in error  # by jaxlib's client, without asking
    assert not any(code.name in error for code in RETRIED_CODES)


@pytest.mark.parametrize("with_plugin", [False, True])
def test_the_local_cpu_can_stand_beside_the_cluster(cluster: Cluster, plugin: str, with_plugin: bool) -> None:
    environment = {**cluster.environment(), "JAX_PLATFORMS": "proxy,cpu"}
    if with_plugin:
        environment["PYTHONPATH"] = plugin
    with contextlib.closing(Controller(cluster.place, environment)) as program:
        assert program.run("""
local, far = jax.devices("cpu")[0], jax.devices()
here = jax.device_put(np.arange(12.0, dtype=np.float32), local)
there = jax.device_put(here, NamedSharding(Mesh(np.array(far), ("x",)), P("x")))
back = jax.device_put(there + 1, local)
result = [
    len(far), far[0].client.runtime_type, local.client.runtime_type, [d.id for d in there.devices()] != [],
    here.devices() == {local}, back.devices() == {local}, np.asarray(back).tolist(),
    float(jnp.sum(back)),
]
""") == [6, "proxy/pathways", "pjrt_ifrt", True, True, True, [n + 1.0 for n in range(12)], 78.0]


def test_programs_take_what_was_made_on_the_local_cpu_and_the_other_way(cluster: Cluster, plugin: str) -> None:
    environment = {**cluster.environment(), "JAX_PLATFORMS": "proxy,cpu", "PYTHONPATH": plugin}
    with contextlib.closing(Controller(cluster.place, environment)) as program:
        assert program.run("""
local, far = jax.devices("cpu")[0], jax.devices()
over_all = NamedSharding(Mesh(np.array(far), ("x",)), P("x"))
with jax.default_device(local):
    state, key = jnp.arange(6.0), jax.random.key(1)
    assert state.devices() == {local}
spread = jax.device_put(np.ones(6, np.float32), over_all)
twice = jax.jit(lambda v, w: v * 2 + w)
result = []
for _ in range(3):  # jax goes other ways from the second time on
    result.append([np.asarray(twice(state, 1.0)).tolist(), np.asarray(state + spread).tolist()])
assert twice(state, 1.0).devices() == {far[0]} and (state + spread).devices() == set(far)
made = jnp.arange(3.0)
with jax.default_device(local):
    for _ in range(3):
        back = jnp.sin(made) + made
    assert back.devices() == {local}
result += [np.allclose(back, np.sin(np.arange(3)) + np.arange(3)),
           jax.random.bits(jax.device_put(key, far[-1])).item() == jax.random.bits(key).item(),
           np.asarray(jax.jit(lambda a: jax.pure_callback(lambda b: np.asarray(made.sum() + b), a, a))(made[1])).item()]
""") == [*[[[1.0, 3.0, 5.0, 7.0, 9.0, 11.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]] * 3, True, True, 4.0]
    cluster.wait_sessions(0)


@pytest.fixture
def by_file(tmp_path: Path) -> Iterator[tuple[Cluster, Path]]:
    """A small cluster whose head takes large buffers from a folder."""
    folder = tmp_path / "large"
    folder.mkdir()
    (tmp_path / "place").mkdir()
    with harness.place_in(tmp_path / "place") as place:
        place.environment[FOLDER_VARIABLE] = str(folder)
        cluster = harness.bring_up(place, "1x1x2")
        yield cluster, folder
        harness.take_down(cluster)


def test_large_buffers_go_by_file(by_file: tuple[Cluster, Path], tmp_path: Path) -> None:
    cluster, folder = by_file
    environment = {**cluster.environment(), THRESHOLD_VARIABLE: "100000"}
    put = "jax.device_put(np.arange(100_000, dtype=np.float32), jax.devices()[1])"
    with contextlib.closing(Controller(cluster.place, environment)) as program:
        assert program.run(f"""
arrays = [{put} for _ in range(10)]
result = [float(a[-1]) for a in arrays] + [float(jax.device_put(np.float32(3)))]
""") == [99_999.0] * 10 + [3.0]
        assert list(folder.iterdir()) == []
        # Another client must not use the same names at the same time.
        with contextlib.closing(Controller(cluster.place, environment)) as second:
            error = second.error_of(f"np.asarray({put})")
            assert "FAILED_PRECONDITION" in error and FOLDER_VARIABLE in error, error
            assert second.run("result = float(jax.device_put(np.float32(5)))") == 5.0
        assert program.run(f"result = float({put}[-1])") == 99_999.0
    cluster.wait_sessions(0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with contextlib.closing(Controller(cluster.place, {**environment, FOLDER_VARIABLE: str(elsewhere)})) as lost:
        error = lost.error_of(f"np.asarray({put})")  # which shows that it is the folder by which the bytes come
        assert "INVALID_ARGUMENT" in error and "the same folder" in error, error
        assert lost.run("result = float(jax.device_put(np.float32(5)))") == 5.0
    cluster.wait_sessions(0)


def test_nothing_is_read_from_disk_unless_the_head_was_told_to(cluster: Cluster, tmp_path: Path) -> None:
    with contextlib.closing(PortClient(cluster.record.proxy_port)) as client:
        number = client.send("init_request", client.body("init_request"))
        session = harness.until(lambda: client.answers.get(number)).init_response.session_id
        request = messages.GrpcHostBufferReadFromDiskRequest()
        request.metadata.session_id, request.metadata.handle, request.metadata.buffer_size = session, 1, 4
        client.call_once("HostBufferReadFromDisk", request)
        with pytest.raises(grpc.RpcError, match=FOLDER_VARIABLE):
            client.look_up(session, 1)
        request.metadata.session_id = session + 1000
        with pytest.raises(grpc.RpcError, match="there is no session"):
            client.call_once("HostBufferReadFromDisk", request)
    cluster.wait_sessions(0)
