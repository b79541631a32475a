"""Arrays that change their devices, their parts, their memory and their owner, over four worker processes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import e2e_harness as harness
import psutil
import pytest
from e2e_harness import Cluster, Controller

pytestmark = harness.MARKS

SEEDS = 240
BATCH = 40
BATCH_SECONDS = 120.0
MEGABYTE = 1 << 20

#: Defines ``check(seed)``, which moves one array of random shape, dtype and sharding to another sharding.
PROPERTY = """
import random
import ml_dtypes
from jaxlib import _pathways

DTYPES = [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16, np.complex64, ml_dtypes.int4, np.uint16,
          ml_dtypes.float8_e4m3fn]
MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}

def random_sharding(rng, rank):
    devices = rng.sample(jax.devices(), rng.choice([1, 2, 4, 8]))  # any subset, in any order
    shape = rng.choice(MESHES[len(devices)])
    names = "abc"[: len(shape)]
    axes, spec = rng.sample(names, len(names)), []
    for _ in range(rank):
        count = rng.choice([0, 0, 1, 1, 2])
        taken, axes = tuple(axes[:count]), axes[count:]
        spec.append(taken or None)
    return NamedSharding(Mesh(np.array(devices).reshape(shape), tuple(names)), P(*spec),
                         memory_kind=rng.choice(["device", "device", "device", "pinned_host"]))

def cuts(sharding, rank):
    return [int(np.prod([sharding.mesh.shape[axis] for axis in entry or ()], dtype=int)) for entry in sharding.spec]

def same(left, right):
    return np.array_equal(np.asarray(left).astype(np.complex64), np.asarray(right).astype(np.complex64))

def check(seed):
    rng = random.Random(seed)
    rank = rng.randrange(4)
    source, target = random_sharding(rng, rank), random_sharding(rng, rank)
    shape = tuple(int(np.lcm(a, b)) * rng.choice([0, 1, 1, 2, 3] if rng.random() < 0.1 else [1, 1, 2, 3])
                  for a, b in zip(cuts(source, rank), cuts(target, rank)))
    dtype = rng.choice(DTYPES)
    values = np.random.default_rng(seed).integers(0, 2 if dtype is np.bool_ else 7, shape).astype(dtype)
    array = jax.device_put(values, source)
    # jax's own device_put cannot change devices and memory kind at once, natively neither.
    how = rng.choice(["reshard", "donate", "device_put"])
    if how == "device_put" and source.memory_kind == target.memory_kind:
        moved = jax.device_put(array, target)
    else:
        [moved] = _pathways._transfer_to_shardings([array], [target], how == "donate")
    assert moved.sharding == target and same(moved, values), (seed, how, shape, dtype, source, target)
    for shard in moved.addressable_shards:
        assert same(shard.data, values[shard.index]), (seed, how, shape, dtype, source, target, shard.device)
        assert shard.data.sharding.memory_kind == target.memory_kind, (seed, how, source, target)
    if how != "donate":
        assert same(array, values), (seed, "the source has changed")
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two slices of two hosts with two devices each."""
    with harness.cluster_in(tmp_path_factory.mktemp("wide"), "2x2x2") as made:
        yield made


@pytest.fixture
def program(wide: Cluster) -> Iterator[Controller]:
    """A program that is connected to that cluster."""
    with contextlib.closing(wide.controller()) as made:
        yield made
    wide.wait_sessions(0)


@pytest.mark.slow
@pytest.mark.timeout(SEEDS / BATCH * BATCH_SECONDS + 60)
def test_every_resharding_gives_what_numpy_gives(program: Controller) -> None:
    program.run(PROPERTY)
    for first in range(0, SEEDS, BATCH):
        program.run(f"for seed in range({first}, {first + BATCH}): check(seed)", BATCH_SECONDS)


def test_bytes_between_hosts_do_not_pass_through_the_head(wide: Cluster, program: Controller) -> None:
    head = psutil.Process(wide.status()["head"]["pid"])
    program.run("""
mesh = Mesh(np.array(jax.devices()), ("x",))
big = jax.jit(lambda: jnp.ones((512, 1 << 18), jnp.float32), out_shardings=NamedSharding(mesh, P("x")))()
jax.block_until_ready(big)
""")
    # From now on the kernel keeps a new record of the most memory that the process had at once.
    Path(f"/proc/{head.pid}/clear_refs").write_text("5")
    before = _peak_bytes(head.pid)
    program.run("""
from jaxlib import _pathways
turned = Mesh(np.array(jax.devices()[::-1]), ("x",))
[moved] = _pathways._transfer_to_shardings([big], [NamedSharding(turned, P(None, "x"))])
result = float(jax.jit(lambda a: a.sum())(jax.block_until_ready(moved)))
assert result == 512 * (1 << 18), result
""")
    assert _peak_bytes(head.pid) < before + 64 * MEGABYTE  # an eighth of what was moved


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def test_what_shares_shards_is_deleted_together(program: Controller) -> None:
    program.run("""
mesh = Mesh(np.array(jax.devices()), ("x",))
whole = jax.device_put(np.arange(16.0), NamedSharding(mesh, P("x")))
parts = [shard.data for shard in whole.addressable_shards]
again = jax.make_array_from_single_device_arrays((16,), whole.sharding, parts)
jax.jit(lambda a: a + 1, donate_argnums=0)(again)
""")
    for code in ("np.asarray(whole)", "np.asarray(parts[3])", "np.asarray(whole + 1)"):
        error = program.error_of(code)
        assert "INVALID_ARGUMENT" in error and "deleted or donated" in error, error


def test_a_moved_array_outlives_what_it_was_made_of(program: Controller) -> None:
    assert program.run("""
from jaxlib import _pathways
devices = jax.devices()
mesh, half = Mesh(np.array(devices), ("x",)), Mesh(np.array(devices[4:]), ("x",))
source = jax.device_put(np.arange(64.0), NamedSharding(mesh, P("x")))
[moved] = _pathways._transfer_to_shardings([source], [NamedSharding(half, P("x"))])
source.delete()
[back] = _pathways._transfer_to_shardings([moved], [NamedSharding(mesh, P())], True)
result = [float(back.sum()), moved.is_deleted()]
""") == [2016.0, True]


def test_an_error_goes_with_the_array_that_it_is_the_value_of(program: Controller) -> None:
    program.run("""
from jaxlib import _pathways
devices = jax.devices()
value = jax.device_put(np.arange(8.0), devices[0])
alias = jax.make_array_from_single_device_arrays((8,), value.sharding, [value])
value.delete()                                              # now the alias has an error for a value, which only
[moved] = _pathways._transfer_to_shardings([alias], [NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))])
more = jax.jit(lambda a: a + 1, donate_argnums=0)(moved)    # shows when something made of it is read
""")
    error = program.error_of("np.asarray(more)")
    assert "INVALID_ARGUMENT" in error and "deleted or donated" in error, error
    program.run("more.delete(); moved = more = None; result = float(jnp.ones(3).sum())")


@pytest.mark.maxtext
def test_pathwaysutils_reshards_through_the_server(program: Controller) -> None:
    pytest.importorskip("pathwaysutils")
    assert program.run("""
from pathwaysutils import reshard as by_ifrt
from pathwaysutils.experimental import reshard as by_request
whole = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y")), P("x", "y"))
half = NamedSharding(Mesh(np.array(jax.devices()[4:]), ("x",)), P(None, "x"))
values = np.arange(64.0).reshape(4, 16)
result = []
for reshard in (by_ifrt.reshard, by_request.reshard):
    tree = {"a": jax.device_put(values, whole), "b": jax.device_put(values * 2, whole)}
    moved = reshard(tree, half, donate=True)
    result.append([bool((np.asarray(moved["a"]) == values).all()), bool((np.asarray(moved["b"]) == values * 2).all()),
                   moved["a"].sharding == half])
""") == [[True, True, True]] * 2


def test_memory_kinds_of_arguments_and_results_are_real(program: Controller) -> None:
    assert program.run("""
mesh = Mesh(np.array(jax.devices()), ("x",))
device, host = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("x"), memory_kind="pinned_host")
values = jax.device_put(np.arange(16.0), device)
kept = jax.device_put(values, host)

def seen(array):
    kinds = {shard.data.sharding.memory_kind for shard in array.addressable_shards}
    return [array.sharding.memory_kind, sorted(kinds), float(array.sum())]

result = [
    seen(kept),
    seen(jax.device_put(kept, device)),
    seen(jax.jit(lambda a: a * 2, out_shardings=host)(values)),
    seen(jax.jit(lambda a: a * 2, in_shardings=host, out_shardings=host)(kept)),
    seen(jax.jit(lambda a: jax.device_put(a, device) * 2, in_shardings=host, out_shardings=device)(kept)),
    seen(jax.jit(lambda a: jax.device_put(a * 2, host))(values)),
    seen(jax.jit(lambda a: a + 1, donate_argnums=0, in_shardings=host, out_shardings=host)(kept)),
]
""") == [
        ["pinned_host", ["pinned_host"], 120.0], ["device", ["device"], 120.0], ["pinned_host", ["pinned_host"], 240.0],
        ["pinned_host", ["pinned_host"], 240.0], ["device", ["device"], 240.0], ["pinned_host", ["pinned_host"], 240.0],
        ["pinned_host", ["pinned_host"], 136.0],
    ]  # fmt: skip


@pytest.mark.parametrize("delay_seconds", [0.0, 0.1, 0.3])
def test_the_sender_dies_in_the_middle(wide: Cluster, program: Controller, delay_seconds: float) -> None:
    wide.wait_whole()
    program.run("""
from jaxlib import _pathways
here, there = (Mesh(np.array(devices_of(n)), ("x",)) for n in (0, 1))
big = jax.jit(lambda: jnp.ones((64, 1 << 20), jnp.float32), out_shardings=NamedSharding(here, P("x")))()
jax.block_until_ready(big)
""")
    program.start(f"""
import time
moved = [_pathways._transfer_to_shardings([big], [NamedSharding(there, P(None, "x"))])[0] for _ in range(3)]
say("on its way")
time.sleep({delay_seconds})
result = []
for array in moved:
    try:
        result.append(float(jax.block_until_ready(array).sum()))
    except jax.errors.JaxRuntimeError as error:
        result.append(str(error))
""")
    assert program.hear() == "on its way"
    wide.kill_executor(0, 1)
    for outcome in program.finish():
        assert outcome == 64 * (1 << 20) or ("DATA_LOSS" in outcome and "slice 0 host 1" in outcome), outcome
    wide.wait_whole()
    assert program.run("result = float(jax.device_put(np.ones(4, np.float32), devices_of(0)[3]).sum())") == 4.0
