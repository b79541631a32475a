"""Colocated Python: functions and objects of the controller on the workers' hosts, in a process of their own."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator

import e2e_harness as harness
import psutil
import pytest
from e2e_harness import Cluster, Controller

from ridgeway.protocol.status import RETRIED_CODES

pytestmark = harness.MARKS

SET_UP = """
import time
from jax.experimental import colocated_python as cp
devices = cp.colocated_cpu_devices(jax.devices())
mesh = Mesh(np.array(devices), ("x",))
rows = NamedSharding(mesh, P("x"))

def on(device, value):
    return jax.device_put(np.asarray(value), devices[device])

@cp.colocated_python
def where(x):
    return jax.device_put(np.asarray([os.getpid(), jax.process_index(), jax.process_count()], np.int32), x.sharding)

@cp.colocated_python_class
class Counter:
    def __init__(self, start):
        self.count = start

    def add(self, x):
        self.count += int(x.addressable_shards[0].data)
        return jax.device_put(np.int32(self.count), x.sharding)

    def end(self, x):
        os.kill(os.getpid(), 9)
"""


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
        made.run(SET_UP)
        yield made
    pair.wait_sessions(0)


def python_processes(cluster: Cluster) -> list[psutil.Process]:
    """The Python processes that the cluster's agents have now, as the log of each says."""
    found = [event["pid"] for event in cluster.events(kind="python_started")]
    return [psutil.Process(pid) for pid in found if not harness.is_gone(pid)]


def test_a_function_runs_on_the_host_of_its_argument(pair: Cluster, program: Controller) -> None:
    """In one process for each host, that is neither the controller nor the executor, and knows which host it is."""
    [first, again, other] = program.run("result = [np.asarray(where(on(d, 1))).tolist() for d in (0, 1, 2)]")
    executors = {host.executor_pid for host in pair.hosts().values()}
    assert first == again
    assert first[1:] == [0, 2] and other[1:] == [1, 2]
    assert first[0] != other[0]
    assert {first[0], other[0]}.isdisjoint({*executors, program.pid})
    assert sorted(process.pid for process in python_processes(pair)) == sorted([first[0], other[0]])
    shown = [(p["slice"], p["host"], p["pid"], p["state"]) for p in pair.status()["pythons"]]
    assert shown == [(0, 0, first[0], "ready"), (1, 0, other[0], "ready")]
    code, output, _ = pair.place.call("status")
    assert code == 0 and f"colocated Python: slice 0 host 0 pid {first[0]}, slice 1" in output


def test_all_hosts_of_an_array_run_the_function_on_their_own_shards(program: Controller) -> None:
    assert program.run("""
@cp.colocated_python
def scale(x, factor):
    by = float(factor.addressable_shards[0].data)
    parts = [shard.data * by + jax.process_index() for shard in x.addressable_shards]
    return {"out": jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts), "same": factor}

x = jax.device_put(np.arange(8, dtype=np.float32), rows)
factor = jax.device_put(np.float32(10), NamedSharding(mesh, P()))
made = [scale(x, factor) for _ in range(3)][-1]
total = jax.jit(jnp.sum)(made["out"])
result = [np.asarray(made["out"]).tolist(), float(total), float(made["same"])]
""") == [[0, 10, 20, 30, 41, 51, 61, 71], 284, 10]


def test_results_are_used_before_they_are_there(program: Controller) -> None:
    """Dispatch does not wait for user code; deleting what was used meanwhile does no harm, and neither does a call
    whose result nobody wants. Calls of one thread keep their order, also where one waits for another's result."""
    assert program.run("""
seen = cp.colocated_python_class(type("Seen", (), {
    "__init__": lambda self: setattr(self, "order", []),
    "note": lambda self, x: (time.sleep(0.3 if not self.order else 0), self.order.append(int(x)), x)[-1],
    "all": lambda self, x: jax.device_put(np.asarray(self.order, np.int32), x.sharding),
}))()
note = seen.note.specialize(out_specs_fn=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))
jax.block_until_ready(note(on(0, 0)))
one = note(on(0, 1))
two = note(jax.jit(lambda a: a + 1)(one))
del one
note(on(0, 3))
four = jax.jit(lambda a, b: a * b)(two, on(0, 2))
result = [int(four), np.asarray(seen.all(on(0, 0))).tolist()]
""") == [4, [0, 1, 2, 3]]


def test_objects_keep_state_and_are_freed(pair: Cluster, program: Controller) -> None:
    assert program.run("""
one, two = Counter(10), Counter(100)
result = [int(one.add(on(0, 1))), int(one.add(on(0, 2))), int(two.add(on(0, 1))), int(one.add(on(2, 5)))]
""") == [11, 13, 101, 15]
    assert program.run("""
@cp.colocated_python
def living(x):
    import gc
    gc.collect()
    return jax.device_put(np.int32(sum(type(o).__name__ == "Counter" for o in gc.get_objects())), x.sharding)

before = int(living(on(0, 0)))
del one
result = [before, int(living(on(0, 0)))]
""") == [2, 1]


def test_wide_types_strings_keys_and_no_arguments(program: Controller) -> None:
    assert program.run("""
@cp.colocated_python
def twice(x):
    parts = [jax.device_put(np.asarray(s.data) * 2, s.device) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

@cp.colocated_python
def shout(x):
    upper = np.vectorize(str.upper, otypes=[np.dtypes.StringDType()])
    parts = [jax.device_put(upper(np.asarray(s.data)), s.device) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

@cp.colocated_python
def split(key):
    return jax.random.split(key)

@cp.colocated_python
def nothing():
    return jax.device_put(np.float32(7), there)

there = jax.sharding.SingleDeviceSharding(devices[2])
words = jax.device_put(np.array(["ab", "c", "", "xyz"], np.dtypes.StringDType()), rows)
half = jax.device_put(np.ones(4, jnp.bfloat16), rows)
key = jax.device_put(jax.random.key(7), devices[3])
keys = jax.random.key_data(split(key)).tolist() == jax.random.key_data(jax.random.split(jax.random.key(7))).tolist()
result = [
    np.asarray(twice(half)).tolist(), str(twice(half).dtype), np.asarray(shout(words)).tolist(), keys,
    float(nothing.specialize(devices=devices[2:3])()),
]
""") == [[2.0] * 4, "bfloat16", ["AB", "C", "", "XYZ"], True, 7.0]


def test_what_it_prints_reaches_the_controller(program: Controller) -> None:
    program.run("""
@cp.colocated_python
def talk(x):
    import sys
    print("half a", end=" ")
    print("line")
    print("to stderr, without an end", file=sys.stderr, end="")
    return x

jax.block_until_ready(talk(on(2, 1)))
""")
    harness.until(lambda: "slice 1 host 0: half a line\n" in program.describe(), program.describe)
    harness.until(lambda: "slice 1 host 0: to stderr, without an end\n" in program.describe(), program.describe)


def test_what_it_raises_reaches_the_controller(program: Controller) -> None:
    """With type, text and the user's part of the traceback, and never so that an elastic manager takes it for a lost
    slice; what comes after goes on."""
    text = program.error_of("""
def inner():
    raise KeyError("NOT_FOUND in the table")

@cp.colocated_python
def look(x):
    inner()

print(look(on(1, 1)))
""")
    assert text.startswith("UNKNOWN: colocated Python 'look' on slice 0 host 0 raised KeyError: 'not found in the tabl")
    assert "in inner" in text and "python_host" not in text and "lowered_fun" not in text
    assert not any(code.name in text for code in RETRIED_CODES)
    assert program.run("result = int(where(on(1, 1))[1])") == 0


def test_wrong_results_are_refused(program: Controller) -> None:
    text = program.error_of("""
@cp.colocated_python
def wrong(x):
    return jax.device_put(np.zeros(3, np.float32), x.sharding)

wrong = wrong.specialize(out_specs_fn=lambda x: jax.ShapeDtypeStruct((2,), np.float32, sharding=x.sharding))
np.asarray(wrong(on(0, 1)))
""")
    assert text.startswith("INVALID_ARGUMENT: colocated Python 'wrong' on slice 0 host 0: result 0 is float32[3]; its")


def test_code_that_crashes_takes_only_its_process_along(pair: Cluster, program: Controller) -> None:
    """The host's devices keep what they hold; objects are lost, say so, also methods never called before, and only
    those; functions run in a new process."""
    before = [host.executor_pid for host in pair.hosts().values()]
    program.run("""
kept = sharded(jax.devices())
here, there = Counter(1), Counter(1)
result = [int(here.add(on(0, 1))), int(there.add(on(2, 1)))]
""")
    text = program.error_of("np.asarray(Counter(0).end(on(0, 1)))")
    assert text.startswith("DATA_LOSS: the Python process of slice 0 host 0 was lost: killed by SIGKILL")
    assert "'Counter.end'" in text
    text = program.error_of("int(here.add(on(0, 1)))")
    assert text.startswith("DATA_LOSS: the object of the colocated Python method 'Counter.add' is gone")
    assert "slice 0 host 0" in text and "make a new one" in text
    assert program.error_of("np.asarray(here.end(on(0, 1)))").startswith("DATA_LOSS: the object of")
    numbers = "result = [int(there.add(on(2, 1))), int(where(on(0, 1))[1]), int(Counter(5).add(on(0, 1)))]"
    assert program.run(numbers) == [3, 0, 6]
    assert program.run("result = float(jnp.sum(kept))") == harness.total(4)
    assert [host.executor_pid for host in pair.hosts().values()] == before


def test_objects_outlive_an_executor(pair: Cluster, program: Controller) -> None:
    program.run("counter = Counter(1); result = int(counter.add(on(0, 1)))")
    before = pair.kill_executor(0)
    harness.until(lambda: pair.host(0).executor_pid != before.executor_pid)
    pair.wait_whole()
    assert program.run("result = [int(counter.add(on(d, 1))) for d in (0, 1)]") == [3, 4]


def test_a_lost_host_is_named(pair: Cluster, program: Controller) -> None:
    """Also what its user code has started is gone, though nobody of its own was left to end it."""
    child = program.run("""
counter = Counter(1)

@cp.colocated_python
def start(x):
    import subprocess
    return jax.device_put(np.int32(subprocess.Popen(["sleep", "600"]).pid), x.sharding)

@cp.colocated_python
def wait(x):
    print("waiting")
    time.sleep(600)

counter.add(on(2, 1))
result = int(start(on(2, 1)))
""")
    assert not harness.is_gone(child)
    program.start("say(1); np.asarray(wait(on(2, 1)))")
    program.hear()
    harness.until(lambda: "slice 1 host 0: waiting" in program.describe(), program.describe)
    pair.kill_worker(1)
    text = program.error_of()
    assert text.startswith("DATA_LOSS: ") and "slice 1 host 0" in text, text
    harness.until(lambda: harness.is_gone(child))
    pair.wait_whole()
    text = program.error_of("int(counter.add(on(2, 1)))")
    assert text.startswith("DATA_LOSS: the object of") and "slice 1 host 0" in text
    assert program.run("result = [int(Counter(2).add(on(2, 1))), int(where(on(2, 1))[1])]") == [3, 1]


def test_the_end_of_the_session_ends_its_processes_and_theirs(pair: Cluster, plugin: str) -> None:
    pair.wait_whole()
    with contextlib.closing(Controller(pair.place, {**pair.environment(), "PYTHONPATH": plugin})) as program:
        program.run(SET_UP)
        pids = program.run("""
@cp.colocated_python
def start(x):
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    return jax.device_put(np.asarray([os.getpid(), child.pid], np.int32), x.sharding)

result = np.asarray(start(on(0, 1))).tolist()
""")
        assert not any(harness.is_gone(pid) for pid in pids)
        os.kill(program.pid, signal.SIGKILL)
        program.process.wait()
    harness.until(lambda: all(harness.is_gone(pid) for pid in pids))
    pair.wait_sessions(0)


def test_the_example_goes_on_after_a_loss(pair: Cluster, plugin: str) -> None:
    """Each host has its own reader; the losses are those of an undisturbed run, also after a worker was killed."""
    pair.wait_whole()
    example = harness.ROOT / "examples" / "colocated_python.py"
    environment = {**pair.environment(), "PYTHONPATH": plugin}
    program = pair.place.start([sys.executable, str(example), "--steps", "12", "--pause-seconds", "0.3"], **environment)
    program.says(r"^step 3 loss ", "stdout")
    pair.kill_worker(1)
    assert program.wait() == 0, program.describe()
    assert re.search("^lost, going on from step .*DATA_LOSS.*slice 1 host 0", program.output, re.MULTILINE)
    for host in (0, 1):
        said = rf"^slice {host} host 0: reader in process \d+, host {host} of 2$"
        assert re.search(said, program.output, re.MULTILINE), program.output
    mean_row = sum(range(16)) / 16 * 8
    expected = {step: f"{mean_row * 0.99**step * (step + 1):.4f}" for step in range(12)}
    found = harness.losses(program.output)
    assert {step: float(loss) for step, loss in found.items()} == pytest.approx(
        {step: float(loss) for step, loss in expected.items()}, rel=1e-3
    )
    pair.wait_sessions(0)
    pair.wait_whole()
