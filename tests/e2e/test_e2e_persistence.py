"""Arrays between workers and storage, by pathwaysutils' requests and Orbax's handler for them, as published."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Controller, until

from ridgeway.protocol.status import RETRIED_CODES

ts = pytest.importorskip("tensorstore")

pytestmark = harness.MARKS

PREPARE = """
import datetime, json
import orbax.checkpoint as ocp
from pathwaysutils.persistence import helper

SECONDS = 60

def mesh_of(*slices):
    return Mesh(np.array(devices_of(*slices)).reshape(len(slices), -1), ("data", "fsdp"))

def write(folder, names, arrays, seconds=SECONDS):
    return helper.write_arrays(str(folder), names, arrays, datetime.timedelta(seconds=seconds))

def read(folder, names, likes, mesh, specs, seconds=SECONDS):
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return helper.read_arrays(
        str(folder), names, [x.dtype for x in likes], [x.shape for x in likes], shardings, mesh.devices,
        datetime.timedelta(seconds=seconds),
    )

SPECS = {"w": P("fsdp"), "all": P(("data", "fsdp")), "bias": P(), "zeros": P(None, "fsdp"), "step": P()}

def plain_state(seed):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((96, 32)).astype(np.float32), "all": rng.standard_normal((24, 8)).astype(np.float32),
        "bias": rng.standard_normal(32).astype(jnp.bfloat16), "zeros": np.zeros((4, 12), np.float32),
        "step": np.int32(seed),
    }

def state_on(mesh, seed):
    return {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in plain_state(seed).items()}

def same(found, seed):
    expected = plain_state(seed)
    return all(
        found[k].dtype == v.dtype and np.array_equal(np.asarray(found[k]), v) for k, v in expected.items()
    ) and set(found) == set(expected)

@jax.jit
def one_more(state):
    return jax.tree.map(lambda x: x + 1, state)

one_more_in_place = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)

def manager(folder):
    options = ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=True)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    return ocp.CheckpointManager(str(folder), options=options, item_handlers=handler)

def restore(checkpoints, step, mesh):
    like = plain_state(0)
    args = {
        k: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, SPECS[k]), global_shape=v.shape, dtype=v.dtype)
        for k, v in like.items()
    }
    item = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in like.items()}
    return checkpoints.restore(step, args=ocp.args.PyTreeRestore(item=item, restore_args=args))
"""


@pytest.fixture
def program(cluster: Cluster) -> Iterator[Controller]:
    """A program with pathwaysutils initialized for persistence."""
    environment = cluster.environment() | {"ENABLE_PATHWAYS_PERSISTENCE": "1"}
    with Controller(cluster.place, environment) as made:
        made.run(PREPARE)
        yield made


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


RESTORE_ALONE = """
import sys, jax, numpy as np
import orbax.checkpoint as ocp
checkpoints = ocp.CheckpointManager(sys.argv[1], item_handlers=ocp.PyTreeCheckpointHandler())
where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
names = ("w", "all", "bias", "zeros", "step")
args = {name: ocp.ArrayRestoreArgs(sharding=where) for name in names}
found = checkpoints.restore(checkpoints.latest_step(), args=ocp.args.PyTreeRestore(restore_args=args))
print(sorted((name, str(x.dtype), x.shape, float(x.astype("float32").sum())) for name, x in found.items()))
"""
RESTORED = (
    "sorted((name, str(x.dtype), x.shape, float(jnp.asarray(x).astype('float32').sum()))"
    " for name, x in plain_state(7).items())"
)


def test_orbax_saves_and_restores_on_other_topologies(cluster: Cluster, program: Controller, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    program.run(f"""
checkpoints = manager({str(folder)!r})
state = state_on(mesh_of(0, 1, 2), 7)
checkpoints.save(1, args=ocp.args.PyTreeSave(state))
state = one_more_in_place(state)  # donates what is being saved
checkpoints.wait_until_finished()
""")
    assert not [path for path in folder.rglob("*partial*")]
    assert entries(folder / "1" / "default" / "w") == {".zarray", "zarr.json", "0.0", "1.0"}  # not once per replica
    found = program.run("""
result = []
for mesh in (mesh_of(0, 1, 2), mesh_of(1), mesh_of(2, 0), Mesh(np.array(devices_of(0, 1, 2))[None], ("data", "fsdp"))):
    restored = restore(checkpoints, 1, mesh)
    result.append(same(restored, 7))
    more = one_more(restored)
    result.append(bool(np.array_equal(np.asarray(more["w"]), plain_state(7)["w"] + 1)))
checkpoints.close()
""")
    assert found == [True] * 8

    alone = ts.open({"driver": "zarr", "kvstore": f"file://{folder}/1/default/bias/"}).result().read().result()
    assert (alone.dtype.name, alone.shape) == ("bfloat16", (32,))
    script = tmp_path / "alone.py"
    script.write_text(RESTORE_ALONE)
    native = cluster.place.start([harness.sys.executable, str(script), str(folder)], JAX_PLATFORMS="cpu")
    expected = program.run(f"result = str({RESTORED})")
    assert native.wait() == 0, native.describe()
    assert native.stdout[-1] == expected


def test_a_worker_lost_in_the_middle_of_a_save(cluster: Cluster, program: Controller, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    program.run(f"""
checkpoints = manager({str(folder)!r})
state = state_on(mesh_of(0, 1, 2), 1)
checkpoints.save(1, args=ocp.args.PyTreeSave(state))
checkpoints.wait_until_finished()
bare = write({str(tmp_path / "bare")!r}, ["w", "all"], [state["w"], state["all"]])
bare.result()
""")
    victim = cluster.kill_executor(2, number=signal.SIGSTOP)  # it can write nothing any more
    program.run(f"""
checkpoints.save(2, args=ocp.args.PyTreeSave(state_on(mesh_of(0, 1, 2), 2)))
bare = write({str(tmp_path / "bare")!r}, ["all"], [state["all"]])
""")
    until(lambda: [path for path in tmp_path.glob("bare/all.partial-*/*")])
    os.kill(victim.executor_pid, signal.SIGKILL)
    for wait in ("checkpoints.wait_until_finished()", "bare.result()"):
        text = program.error_of(wait)
        assert text.startswith("DATA_LOSS: ") and "slice 2 host 0" in text, text
    # The earlier ones are whole, and nothing says that there is another.
    assert program.run("""
result = [
    manager(checkpoints.directory).all_steps(), same(restore(manager(checkpoints.directory), 1, mesh_of(0, 1)), 1)
]
""") == [[1], True]
    until(lambda: entries(tmp_path / "bare") == {"w", "all"}, lambda: entries(tmp_path / "bare"))
    cluster.wait_whole()
    assert program.run(f"""
(found,), end = read({str(tmp_path / "bare")!r}, ["all"], [plain_state(1)["all"]], mesh_of(2), [P()])
checkpoints = manager({str(folder)!r})
restored = restore(checkpoints, 1, mesh_of(0, 1, 2))
checkpoints.save(2, args=ocp.args.PyTreeSave(state_on(mesh_of(0, 1, 2), 2)))
checkpoints.wait_until_finished()
again = restore(checkpoints, 2, mesh_of(0, 1, 2))
result = [bool((np.asarray(found) == plain_state(1)["all"]).all()), same(restored, 1), same(again, 2)]
checkpoints.close()
""") == [True, True, True]


def test_a_worker_lost_in_the_middle_of_a_read(cluster: Cluster, program: Controller, tmp_path: Path) -> None:
    program.run(f"""
state = state_on(mesh_of(0, 1, 2), 3)
write({str(tmp_path)!r}, ["all"], [state["all"]]).result()
""")
    victim = cluster.kill_executor(1, number=signal.SIGSTOP)
    program.run(f"""
(found,), end = read({str(tmp_path)!r}, ["all"], [state["all"]], mesh_of(0, 1, 2), [SPECS["all"]])
used = one_more(found)
""")
    os.kill(victim.executor_pid, signal.SIGKILL)
    for expression in ("end.result()", "np.asarray(found)", "np.asarray(used)"):
        text = program.error_of(expression)
        assert text.startswith("DATA_LOSS: ") and "slice 1 host 0" in text, text
    cluster.wait_whole()
    assert program.run(f"""
(found,), end = read({str(tmp_path)!r}, ["all"], [plain_state(3)["all"]], mesh_of(0, 1, 2), [SPECS["all"]])
used = one_more(found)
result = bool((np.asarray(used) == plain_state(3)["all"] + 1).all())
""")


def test_what_storage_refuses_is_no_lost_slice(cluster: Cluster, program: Controller, tmp_path: Path) -> None:
    before = cluster.hosts()
    program.run(f"""
from pathwaysutils.elastic import elastic
HERE = {str(tmp_path)!r}
state = state_on(mesh_of(0, 1, 2), 4)
like = {{"w": state["w"]}}
write(HERE, ["w", "damaged", "holey"], [state["w"]] * 3).result()

def read_one(name, like=state["w"], folder=HERE):
    (found,), end = read(folder, [name], [like], mesh_of(0, 1, 2), [P("fsdp")])
    return found, end

def refusals(make):
    texts = []
    for use in (lambda found, end: end.result(), lambda found, end: np.asarray(one_more(found))):
        try:
            use(*make())
        except jax.errors.JaxRuntimeError as error:
            texts.append(str(error))
            assert not elastic.is_error_due_to_slice_down(error), error
    return texts
""")
    data = bytearray((tmp_path / "damaged" / "1.0").read_bytes())
    data[1000] ^= 1
    (tmp_path / "damaged" / "1.0").write_bytes(data)
    (tmp_path / "holey" / "0.0").unlink()
    for code, make, says in (
        ("FAILED_PRECONDITION", "read_one('nothing')", "written completely"),
        ("FAILED_PRECONDITION", "read_one('damaged')", "damaged/1.0"),
        ("FAILED_PRECONDITION", "read_one('holey')", "is missing"),
        ("INVALID_ARGUMENT", "read_one('w', np.zeros((6, 6), np.float32))", "[96, 32], but [6, 6]"),
        ("INVALID_ARGUMENT", "read_one('w', folder='here')", "cannot be kept at 'here'"),
    ):
        texts = program.run(f"result = refusals(lambda: {make})")
        assert texts and all(text.startswith(f"{code}: ") and says in text for text in texts), texts
    # Nobody, not even root, makes folders there.
    text = program.error_of("write('/sys/kernel/ridgeway', ['w'], [state['w']]).result()")
    assert text.startswith("PERMISSION_DENIED: Array 'w' in /sys/kernel/ridgeway could not be written"), text
    assert program.run("""
found, end = read_one("w")
result = [end.result(), bool((np.asarray(found) == plain_state(4)["w"]).all())]
""") == [None, True]
    assert {s: h.executor_pid for s, h in cluster.hosts().items()} == {s: h.executor_pid for s, h in before.items()}


def test_a_full_disk(cluster: Cluster, program: Controller, tmp_path: Path) -> None:
    program.run(f"""
HERE = {str(tmp_path)!r}
large = jax.device_put(np.ones((600, 1000), np.float32), NamedSharding(mesh_of(0, 1, 2), SPECS["all"]))
write(HERE, ["large"], [large]).result()
large = one_more(large)
""")
    harness.psutil.Process(cluster.host(1).executor_pid).rlimit(harness.psutil.RLIMIT_FSIZE, (100_000, 10_000_000))
    text = program.error_of("write(HERE, ['large', 'other'], [large, large]).result()")
    assert text.startswith("RESOURCE_EXHAUSTED: Array ") and "File too large" in text, text
    assert not any(code.name in text for code in RETRIED_CODES), text
    until(lambda: entries(tmp_path) == {"large"}, lambda: entries(tmp_path))
    harness.psutil.Process(cluster.host(1).executor_pid).rlimit(harness.psutil.RLIMIT_FSIZE, (10_000_000, 10_000_000))
    check = """
(found,), end = read(HERE, ["large"], [large], mesh_of(0, 1, 2), [P()])
result = float(np.asarray(found).min()), float(np.asarray(found).max())
"""
    assert program.run(check) == [1.0, 1.0]
    program.run("write(HERE, ['large'], [large]).result()")
    assert program.run(check) == [2.0, 2.0]


def test_a_request_has_as_long_as_it_says(cluster: Cluster, program: Controller, tmp_path: Path) -> None:
    program.run(f"""
HERE = {str(tmp_path)!r}
state = state_on(mesh_of(0, 1, 2), 5)
write(HERE, ["all"], [state["all"]]).result()
alone = jax.device_put(np.ones(8), NamedSharding(mesh_of(0), P("fsdp")))
""")
    victim = cluster.kill_executor(2, number=signal.SIGSTOP)
    try:
        program.run("""
wrote = write(HERE, ["all"], [state["all"]], seconds=1.5)
_, read_end = read(HERE, ["all"], [state["all"]], mesh_of(0, 1, 2), [SPECS["all"]], seconds=1.5)
assert float(one_more(alone).sum()) == 16  # who does not wait for storage goes on
""")
        for wait in ("wrote.result()", "read_end.result()"):
            text = program.error_of(wait)
            assert text.startswith("DEADLINE_EXCEEDED: ") and "1.5 s" in text and f"'all' in {tmp_path}" in text, text
    finally:
        os.kill(victim.executor_pid, signal.SIGCONT)
    until(lambda: entries(tmp_path) == {"all"}, lambda: entries(tmp_path))
    assert program.run("""
write(HERE, ["again"], [state["all"]]).result()
(found,), end = read(HERE, ["again"], [state["all"]], mesh_of(0, 1), [P()])
result = bool((np.asarray(found) == plain_state(5)["all"]).all())
""")


def test_a_notice_during_a_write_and_a_read(cluster: Cluster, program: Controller, tmp_path: Path) -> None:
    cluster.wait_whole()
    since = cluster.now()
    program.run(f"""
HERE, SPEC = {str(tmp_path)!r}, P(("data", "fsdp"))
values = np.arange(6_000_000, dtype=np.float32).reshape(24, -1)
large = jax.device_put(values, NamedSharding(mesh_of(0, 1, 2), SPEC))
wrote = write(HERE, ["large"], [large])
""")
    cluster.request("preempt", slice=1)
    program.run("""
wrote.result()
(found,), end = read(HERE, ["large"], [large], mesh_of(0, 1, 2), [SPEC])
""")
    cluster.request("preempt", slice=2)
    assert program.run("result = [end.result(), bool((np.asarray(found) == values).all())]") == [None, True]
    for index in (1, 2):
        cluster.wait_event(since, "host_resumed", slice=index)
    assert entries(tmp_path) == {"large"}
    assert cluster.events(since, "host_lost") == []


def test_an_array_that_was_lost_is_not_written(cluster: Cluster, program: Controller, tmp_path: Path) -> None:
    program.run("state = state_on(mesh_of(0, 1, 2), 6)")
    cluster.kill_executor(0)
    text = program.error_of(f"write({str(tmp_path / 'new')!r}, ['all'], [state['all']]).result()")
    assert text.startswith("DATA_LOSS: ") and "slice 0 host 0" in text, text
    # Others may have begun, if the order was faster than the news.
    until(lambda: not (tmp_path / "new").exists() or entries(tmp_path / "new") == set())


EXAMPLE = harness.ROOT / "examples" / "persistent_checkpoints.py"


def test_the_example_goes_on_natively_from_what_workers_wrote(cluster: Cluster, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [harness.sys.executable, str(EXAMPLE), "--checkpoints", str(kept), "--checkpoint-period", "4"]
    first = cluster.start(*command, "--steps", "9")
    assert first.wait() == 0, first.describe()
    assert first.stdout[-1] == "checkpoints: [4, 8]"
    losses = harness.losses(first.output)
    assert list(losses) == list(range(1, 10))
    native = cluster.place.start([*command, "--steps", "3"], JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4")
    assert native.wait() == 0, native.describe()
    assert native.stdout[0] == "restored step 8 on 4 devices"
    assert float(harness.losses(native.output)[9]) == pytest.approx(float(losses[9]), rel=1e-5)
