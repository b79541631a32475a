"""State in the workers' host memory: it survives what happens to devices and generations, and brings training back."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import ROOT, Cluster, Controller, Running, losses, until

pytestmark = [*harness.MARKS, pytest.mark.maxtext]

SNAPSHOT_TRAINER = ROOT / "examples" / "snapshot_trainer.py"
MIB = 1 << 20


def in_host_memory(cluster: Cluster) -> list[int]:
    """Bytes of arrays in host memory, as `ridgeway status` shows them for each slice."""
    return [host["host_array_bytes"] for piece in cluster.status()["slices"] for host in piece["hosts"]]


def wait_for_bytes(cluster: Cluster, *expected: int) -> None:
    """Wait until the slices hold so many bytes (they tell once a second)."""
    until(lambda: in_host_memory(cluster) == list(expected), lambda: (in_host_memory(cluster), expected))


def test_pinned_host_is_memory_of_the_workers(cluster: Cluster, controller: Controller) -> None:
    controller.run("""
rows = np.arange(2 * MIB, dtype=np.float32).reshape(2, -1)
mesh_of = lambda index: Mesh(np.array(devices_of(index)), ("x",))
on = lambda index, kind: NamedSharding(mesh_of(index), P("x"), memory_kind=kind)
devices = [jax.device_put(rows, on(index, "device")) for index in (0, 1, 2)]
pinned = [jax.device_put(x, on(index, "pinned_host")) for index, x in enumerate(devices)]
put = jax.device_put(rows, on(0, "pinned_host"))
jax.block_until_ready((pinned, put))
result = [x.sharding.memory_kind for x in (*pinned, put)]
""".replace("MIB", str(MIB)))
    wait_for_bytes(cluster, 16 * MIB, 8 * MIB, 8 * MIB)

    # Generations come and go, with and without a loss; the source is deleted; a slice is lost and comes back.
    controller.run("""
[x.delete() for x in devices]
result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())
""")
    before = cluster.hosts()
    since = cluster.now()
    cluster.kill_executor(2)
    cluster.wait_event(since, "host_lost", slice=2)
    cluster.wait_whole()
    assert controller.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == harness.total(6)
    assert "slice 2" in controller.error_of("jax.block_until_ready(pinned[2])")
    wait_for_bytes(cluster, 16 * MIB, 8 * MIB, 0)
    same = "result = [bool((np.asarray(x) == rows).all()) for x in (pinned[0], pinned[1], put)]"
    assert controller.run(same) == [True] * 3
    # Back on devices, and as the argument of a program.
    assert controller.run("""
back = jax.device_put(pinned[1], on(1, "device"))
element = jax.jit(lambda x: x[1, 7])
result = [back.sharding.memory_kind, bool((np.asarray(back) == rows).all()), float(element(back)), float(element(put))]
""") == ["device", True, MIB + 7, MIB + 7]
    after = cluster.hosts()
    assert [after[s, 0].executor_pid == before[s, 0].executor_pid for s in (0, 1, 2)] == [True, True, False]

    # Dropped, or deleted: the memory is free.
    controller.run("del pinned[1:]; pinned[0].delete()")
    wait_for_bytes(cluster, 8 * MIB, 0, 0)
    controller.run("del put")
    wait_for_bytes(cluster, 0, 0, 0)


SNAPSHOTS = """
import sys; sys.path.insert(0, "EXAMPLES")
from snapshot_trainer import Snapshots
snapshots = Snapshots()

def mesh_over(*slices):
    return Mesh(np.array([devices_of(index) for index in slices]), ("data", "model"))

def state_on(mesh, factor=1.0):
    return {"a": jax.device_put(factor * plain(2), NamedSharding(mesh, P("model"))),
            "b": jax.device_put(np.float32(factor), NamedSharding(mesh, P()))}

def abstract_on(mesh):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_on(mesh))

def latest():
    return sorted({s.latest.step for s in snapshots._snapshotters if s.latest})

def is_state(state, factor):
    return bool((np.asarray(state["a"]) == factor * plain(2)).all()) and float(state["b"]) == factor
""".replace("EXAMPLES", str(SNAPSHOT_TRAINER.parent))


def test_a_kill_during_a_snapshot_falls_back_to_the_one_before(cluster: Cluster, controller: Controller) -> None:
    controller.run(SNAPSHOTS)
    assert controller.run("""
snapshots.save(1, state_on(mesh_over(0, 1, 2)))
snapshots.join()
result = latest()
""") == [1]
    # What is to be saved next is still being computed when the slice dies.
    since = cluster.now()
    controller.run("""
slow = jax.jit(lambda s, x: jax.tree.map(lambda v: v + x.sum() * 0, s), donate_argnums=0)
snapshots.save(2, slow(state_on(mesh_over(0, 1, 2), 2.0), mix(sharded(devices_of(0, 1, 2)), 100_000)))
result = latest()
""")
    cluster.kill_worker(0)
    cluster.wait_event(since, "host_lost", slice=0)
    assert controller.run("""
snapshots.join()
step, state = snapshots.load(abstract_on(mesh_over(1, 2)))
result = [latest(), step, is_state(state, 1.0)]
""") == [[1], 1, True]
    cluster.wait_whole()


def test_a_kill_during_a_restore_leaves_the_snapshot(cluster: Cluster, controller: Controller) -> None:
    controller.run(SNAPSHOTS)
    controller.run("""
import threading, time
snapshots.save(7, state_on(mesh_over(0, 1), 7.0)); snapshots.join()
abstract = abstract_on(mesh_over(1, 2))
""")
    since = cluster.now()
    cluster.kill_worker(0)
    cluster.wait_event(since, "host_lost", slice=0)
    # Restoring onto slice 2, which does not answer any more and then is killed.
    stopped = cluster.kill_executor(2, number=signal.SIGSTOP)
    controller.start("""
replicas = [jax.tree.leaves(s._latest_snapshot[0]) for s in snapshots._snapshotters]
failures = []
def load():
    try:
        snapshots.load(abstract)
    except Exception as error:
        failures.append(error)
thread = threading.Thread(target=load)
thread.start()
while not any(x.is_deleted() for leaves in replicas for x in leaves):
    time.sleep(0.01)
say("used up")
thread.join()
raise failures[0]
""")
    assert controller.hear() == "used up"
    since = cluster.now()
    os.kill(stopped.executor_pid, signal.SIGKILL)
    cluster.wait_event(since, "host_lost", slice=2)
    text = controller.error_of()
    assert "slice 2 host 0" in text, text
    cluster.wait_whole()
    assert controller.run("""
step, state = snapshots.load(abstract)
result = [step, is_state(state, 7.0)]
""") == [7, True]


def restores(run: Running) -> list[tuple[int, int]]:
    """(last step done before, step restored) of each recovery."""
    found: list[tuple[int, int]] = []
    last = -1
    for line in run.output.splitlines():
        if (match := re.match(r"step (\d+) loss", line)) is not None:
            last = int(match[1])
        elif (match := re.match(r"restored step (\d+) on 6 devices", line)) is not None:
            found.append((last, int(match[1])))
    return found


def test_training_goes_on_from_a_survivors_snapshot(
    cluster: Cluster, tmp_path: Path, native_losses: dict[int, str]
) -> None:
    log = tmp_path / "log.jsonl"
    steps = ("--steps", str(harness.TRAINING_STEPS), "--log", str(log))
    run = cluster.start(sys.executable, str(SNAPSHOT_TRAINER), *steps)
    for count, (step, victim) in enumerate(((10, 1), (30, 0)), 1):
        run.says(rf"^step {step} loss", "stdout")
        cluster.kill_worker(victim)
        until(lambda count=count: len(restores(run)) == count, run.describe)
        cluster.wait_whole()
    assert run.wait() == 0, run.describe()
    # At most one step was done again, although nothing was ever written to storage.
    assert all(done - restored <= 1 for done, restored in restores(run)), run.describe()
    assert losses(run.output) == native_losses
    assert list(tmp_path.iterdir()) == [log]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["restored"] for r in records if r.get("event") == "attempt"] == [False, True, True]
    assert records[-1] == {"time": records[-1]["time"], "event": "end", "pid": run.pid}


def test_the_simple_workload_of_pathwaysutils_runs_as_it_is(cluster: Cluster) -> None:
    run = cluster.start(
        sys.executable, "-m", "pathwaysutils.extras.simple_model.simple_model",
        "--total_steps=2", "--snapshot_interval=1", "--devices_per_slice=2",
    )  # fmt: skip
    assert run.wait() == 0, run.describe()
    said = "\n".join(run.stderr)
    for step in (1, 2):
        assert f"Saved in-memory snapshot at step {step}." in said, run.describe()
    assert "Failed to snapshot" not in said and "Skipping snapshot" not in said, run.describe()
    assert "Training complete. Executed 2 steps." in said


def test_the_workload_class_of_pathwaysutils_recovers_from_its_snapshots(cluster: Cluster) -> None:
    run = cluster.start(sys.executable, str(Path(__file__).with_name("workload_program.py")))
    run.says("^step 3$", "stdout")
    cluster.kill_worker(0)
    assert run.wait() == 0, run.describe()
    (restored,) = re.findall(r"^restored step (\d+)$", run.output, re.MULTILINE)
    done = [int(step) for step in re.findall(r"^step (\d+)$", run.output, re.MULTILINE)]
    assert done == list(range(1, 13)) or done == [*range(1, int(restored) + 2), *range(int(restored) + 1, 13)]
    found = json.loads(run.stdout[-1])
    assert found["losses"] == found["undisturbed"]
