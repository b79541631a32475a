"""Host callbacks: programs on the workers call Python functions of the controller."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Controller

from ridgeway.protocol.status import RETRIED_CODES

pytestmark = harness.MARKS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two slices of one host with two devices."""
    folder = tmp_path_factory.mktemp("pair")
    with harness.cluster_in(folder, "2x1x2", "--max-slice-restarts", "unlimited") as made:
        yield made


@pytest.fixture
def program(pair: Cluster, plugin: str) -> Iterator[Controller]:
    """A program with the plugin, connected to that cluster."""
    pair.wait_whole()
    with contextlib.closing(Controller(pair.place, {**pair.environment(), "PYTHONPATH": plugin})) as made:
        made.run("from jax.experimental import io_callback")
        yield made
    pair.wait_sessions(0)


def test_callbacks_run_in_the_controller_with_the_values_of_the_workers(program: Controller) -> None:
    assert program.run("""
ran_in = []

def double(a):
    ran_in.append(os.getpid())
    return np.asarray(a) * 2

@jax.jit
def f(x):
    return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

values = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x")))
result = [np.asarray(f(values)).tolist(), np.asarray(f(jnp.int32(4))).item(), set(ran_in) == {os.getpid()}]
""") == [[1.0 + 2 * n for n in range(8)], 9, True]


def test_every_shard_calls_for_itself(program: Controller) -> None:
    assert program.run("""
seen = []
mesh = Mesh(np.array(jax.devices()), ("x",))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
def each(x):
    jax.debug.callback(lambda a: seen.append(np.asarray(a).tolist()), x)
    return jax.pure_callback(lambda a: np.asarray(a) * 3, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

tripled = np.asarray(each(jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))))
jax.effects_barrier()
result = [tripled.tolist(), sorted(seen)]
""") == [[3.0 * n for n in range(8)], [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]]


def test_ordered_callbacks_keep_their_order_over_executions_and_devices(program: Controller) -> None:
    assert program.run("""
order = []

@jax.jit
def two(x):
    io_callback(lambda a: order.append(int(a)), None, x, ordered=True)
    io_callback(lambda a: order.append(-int(a)), None, x, ordered=True)
    return x

for n in range(1, 5):
    two(jax.device_put(np.int32(n), jax.devices()[n % 3]))
jax.effects_barrier()
result = order
""") == [1, -1, 2, -2, 3, -3, 4, -4]


def test_a_callback_of_a_program_that_is_dropped_still_runs(program: Controller) -> None:
    assert program.run("""
import gc
late = []

def once():
    return jax.jit(lambda x: jax.debug.callback(lambda a: late.append(int(a)), x * 2))(jnp.int32(21))

once()
jax.clear_caches()
gc.collect()
jax.effects_barrier()
result = late
""") == [42]


def test_what_a_callback_raises_is_the_error_of_its_execution(program: Controller) -> None:
    error = program.error_of("""
def fails(a):
    raise LookupError("INTERNAL: there is no such thing, NOT_FOUND")

@jax.jit
def g(x):
    return jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

np.asarray(g(jnp.ones(3)))
""")
    assert "LookupError" in error and "fails" in error and "there is no such thing" in error, error
    assert not any(code.name in error for code in RETRIED_CODES), error
    assert program.run("result = float(jnp.ones(3).sum())") == 3.0


def test_a_callback_that_fails_for_one_executor_never_mixes_up_what_comes_next(program: Controller) -> None:
    """The other executor waits in the program's collective; with the next program's numbers it would go on wrongly."""
    assert program.run("""
mesh = Mesh(np.array(jax.devices()), ("x",))
split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

def fails_for_the_first(a):
    if np.asarray(a)[0] == 0:
        raise LookupError("no such thing")
    return np.asarray(a)

def summing(x):
    return jax.lax.psum(x, "x")

def called(x):
    return summing(jax.pure_callback(fails_for_the_first, jax.ShapeDtypeStruct(x.shape, x.dtype), x))

def shard(function):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False))

first, second = shard(called), shard(summing)
np.asarray(second(jax.device_put(np.ones(4, np.float32), split)))
result = []
for turn in range(3):
    bad = first(jax.device_put(np.arange(4, dtype=np.float32), split))
    good = [second(jax.device_put(np.full(4, 100 * (n + 1), np.float32), split)) for n in range(3)]
    for n, value in enumerate(good):
        try:
            result.append(np.asarray(value).tolist() == [400.0 * (n + 1)])
        except jax.errors.JaxRuntimeError as error:
            result.append("DATA_LOSS" in str(error) or "no such thing" in str(error))
    try:
        np.asarray(bad)
        result.append("it did not fail")
    except jax.errors.JaxRuntimeError:
        result.append(True)
result.append(np.asarray(second(jax.device_put(np.ones(4, np.float32), split))).tolist())
""") == [True] * 12 + [[4.0]]


#: A callback that says when it has begun and ends when it is told to.
BLOCKS = """
import threading
entered, go_on = threading.Event(), threading.Event()

def blocks(a):
    entered.set()
    go_on.wait(60)
    return np.asarray(a)
"""


def test_a_slice_dies_while_a_callback_blocks(pair: Cluster, program: Controller) -> None:
    program.run(BLOCKS + """
@jax.jit
def h(x):
    return jax.pure_callback(blocks, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

waiting = h(jax.device_put(np.float32(1), devices_of(1)[0]))
assert entered.wait(60)
elsewhere = jax.device_put(np.float32(2), devices_of(0)[0])
""")
    pair.kill_executor(1)
    error = program.error_of("np.asarray(waiting)")
    assert "DATA_LOSS" in error and "slice 1" in error, error
    assert program.run("go_on.set(); result = float(elsewhere + 1)") == 3.0


def test_a_controller_that_is_killed_in_a_callback_leaves_the_cluster_whole(pair: Cluster, plugin: str) -> None:
    hosts = pair.wait_whole()
    environment = {**pair.environment(), "PYTHONPATH": plugin}
    with contextlib.closing(Controller(pair.place, environment)) as made:
        made.start("""
import time

def never_ends(a):
    say("in it")
    time.sleep(3600)

np.asarray(jax.jit(lambda x: jax.pure_callback(never_ends, jax.ShapeDtypeStruct((), x.dtype), x))(jnp.float32(1)))
""")
        assert made.hear() == "in it"
        made.process.kill()
        pair.wait_sessions(0)
    with contextlib.closing(Controller(pair.place, environment)) as following:
        assert following.run("result = float(jax.device_put(np.float32(1), jax.devices()[0]) + 1)") == 2.0
    assert {slot: host.executor_pid for slot, host in pair.hosts().items()} == {
        slot: host.executor_pid for slot, host in hosts.items()
    }


def test_a_slice_dies_while_a_callback_of_a_program_over_both_blocks(pair: Cluster, program: Controller) -> None:
    program.run(BLOCKS + """
@jax.jit
def over_both(x):
    y = jax.pure_callback(blocks, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return y.sum() + x.sum()

mesh = Mesh(np.array(jax.devices()), ("x",))
waiting = over_both(jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P("x"))))
assert entered.wait(60)
""")
    pair.kill_executor(1)
    error = program.error_of("float(waiting)")
    assert "DATA_LOSS" in error and "slice 1" in error, error
    assert program.run("go_on.set(); result = float(jax.device_put(np.float32(2), devices_of(0)[0]) + 1)") == 3.0
    pair.wait_whole()
    again = "result = float(over_both(jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P('x')))))"
    assert program.run(again) == 8.0


def test_ordered_effects_go_on_after_one_that_raised_and_after_a_lost_slice(
    pair: Cluster, program: Controller
) -> None:
    program.run("""
order = []

def note(a):
    if int(a) == 2:
        raise ValueError("the second")
    order.append(int(a))

@jax.jit
def ordered(x):
    io_callback(note, None, x, ordered=True)
    return x

ordered(jax.device_put(np.int32(1), devices_of(0)[0]))
jax.effects_barrier()
""")
    error = program.error_of("""
np.asarray(ordered(jax.device_put(np.int32(2), devices_of(0)[0])))
jax.effects_barrier()
""")
    assert "the second" in error and not any(code.name in error for code in RETRIED_CODES), error
    program.run("jax.clear_caches(); jax._src.dispatch.runtime_tokens.clear()")  # as a program begins again
    assert program.run("""
ordered(jax.device_put(np.int32(3), devices_of(1)[0]))
jax.effects_barrier()
result = order
""") == [1, 3]
    pair.kill_executor(1)
    pair.wait_whole()
    # The token of the last one lay on the slice that is lost: whether the next one is an error or not, nothing hangs,
    # and what runs afterwards runs in order.
    assert program.run("""
try:
    np.asarray(ordered(jax.device_put(np.int32(4), devices_of(0)[0])))
    jax.effects_barrier()
except jax.errors.JaxRuntimeError as error:
    say(str(error))
    jax._src.dispatch.runtime_tokens.clear()
ordered(jax.device_put(np.int32(5), devices_of(0)[0]))
jax.effects_barrier()
result = order
""") in ([1, 3, 4, 5], [1, 3, 5])


def test_everything_else_works_without_the_plugin(
    pair: Cluster, python_without_plugin: tuple[str, str], tmp_path: Path
) -> None:
    python, packages = python_without_plugin
    environment = {**pair.environment(), "PYTHONPATH": packages}
    with contextlib.closing(Controller(pair.place, environment, python=python)) as stock:
        assert stock.run("""
import importlib.util
mesh = Mesh(np.array(jax.devices()), ("x",))
values = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
moved = jax.device_put(values, NamedSharding(mesh, P()))
step = jax.jit(lambda v: v * 2 + v.sum(), donate_argnums=0)
stepped = step(values)
result = [importlib.util.find_spec("ridgeway") is None, np.asarray(stepped).tolist(), values.is_deleted(),
          float(moved.sum()), float(jax.random.normal(jax.random.key(0), (4,)).shape[0])]
""") == [True, [28.0 + 2 * n for n in range(8)], True, 28.0, 4.0]
        error = stock.error_of("""
np.asarray(jax.jit(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x))(jnp.float32(1)))
""")
        assert "UNIMPLEMENTED" in error and not any(code.name in error for code in RETRIED_CODES), error
        stock.run(f"""
with jax.profiler.trace({str(tmp_path)!r}):
    result = float(values.sum()) if not values.is_deleted() else float(stepped.sum())
""")
        assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1
    pair.wait_sessions(0)


#: A function whose partitioning is the controller's: it multiplies by what its closure says.
PARTITIONED = """
from jax.experimental.custom_partitioning import custom_partitioning

partitioned = []

def make(factor, fails=False):
    @custom_partitioning
    def f(x):
        return jnp.sin(x) * factor

    def partition(mesh, argument_shapes, result_shape):
        if fails:
            raise ValueError("a mistake in partition")
        partitioned.append([os.getpid(), factor])
        return mesh, lambda x: jnp.sin(x) * factor, result_shape.sharding, (argument_shapes[0].sharding,)

    f.def_partition(partition=partition, sharding_rule="i j -> i j")
    return f

grid = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b")), P("a", "b"))
over_all = lambda f: jax.jit(f, in_shardings=grid, out_shardings=grid)
values = np.arange(16.0, dtype=np.float32).reshape(4, 4)
"""


def test_python_that_the_compiler_calls_runs_in_the_controller(program: Controller) -> None:
    program.run(PARTITIONED)
    assert program.run("""
seen = []

def f(x):
    y = make(3.0)(x)
    jax.debug.inspect_array_sharding(y, callback=seen.append)
    return y

found = over_all(f)(values)
result = [
    np.allclose(np.asarray(found), 3 * np.sin(values), atol=1e-5), found.sharding == grid,
    [one.is_equivalent_to(grid, 2) for one in seen], partitioned == [[os.getpid(), 3.0]],
]
""") == [True, True, [True], True]
    # A program with the same bytes means something else where another function has that name, so none is kept.
    assert program.run("""
partitioned.clear()
once = np.asarray(over_all(make(3.0))(values))
jax.clear_caches()
again = np.asarray(over_all(make(5.0))(values))
result = [bool(np.allclose(again, 5 / 3 * once, atol=1e-4)), [factor for _, factor in partitioned]]
""") == [True, [3.0, 5.0]]


def test_an_error_in_such_python_is_the_programs_and_names_its_line(program: Controller) -> None:
    program.run(PARTITIONED)
    error = program.error_of("over_all(make(1.0, fails=True))(values)")
    assert "ValueError: a mistake in partition" in error and "compiler.py" not in error
    assert not any(code.name in error for code in RETRIED_CODES)
    assert program.run("result = float(over_all(make(2.0))(np.zeros((4, 4), np.float32)).sum())") == 0.0


def test_a_client_without_the_plugin_is_told_what_such_python_needs(
    pair: Cluster, python_without_plugin: tuple[str, str]
) -> None:
    python, path = python_without_plugin
    environment = {**pair.environment(), "PYTHONPATH": path}
    with contextlib.closing(Controller(pair.place, environment, python=python)) as stock:
        stock.run(PARTITIONED)
        error = stock.error_of("over_all(make(1.0))(values)")
    assert "needs Ridgeway installed" in error and not any(code.name in error for code in RETRIED_CODES)
    pair.wait_sessions(0)
