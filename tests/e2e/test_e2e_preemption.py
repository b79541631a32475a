"""A worker that is told to leave: the program sees a pause, or, when there is not time enough, an ordinary loss."""

import signal
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Controller, until

pytestmark = harness.MARKS

#: Values of every kind that an executor can hold, on slices 1 and 2, and what they are.
HOLD_EVERYTHING = """
import ml_dtypes
first, *others = devices_of(1)
both = devices_of(1, 2)
over = NamedSharding(Mesh(np.array(both), ("x",)), P("x"))
everywhere = NamedSharding(Mesh(np.array(both), ("x",)), P())
in_host_memory = jax.sharding.SingleDeviceSharding(first, memory_kind="pinned_host")
numbers, halves = np.arange(8), np.arange(5, dtype=np.float32) / 2
held = {
    name: (array, np.asarray(expected))
    for name, array, expected in [
        (str(dtype), jax.device_put(numbers.astype(dtype), over), numbers.astype(dtype))
        for dtype in (np.int8, np.uint16, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex64)
    ] + [
        ("int4", jax.device_put((numbers - 4).astype(ml_dtypes.int4), over), (numbers - 4).astype(ml_dtypes.int4)),
        ("bool", jax.device_put(numbers % 3 == 0, everywhere), numbers % 3 == 0),
        ("scalar", jax.device_put(np.float32(2.5), first), np.float32(2.5)),
        ("empty", jax.device_put(np.zeros((0, 3), np.int32), first), np.zeros((0, 3), np.int32)),
        ("host", jax.device_put(halves, in_host_memory), halves),
        ("computed", mix(sharded(both), 40), None),
    ]
}
held["computed"] = (held["computed"][0], np.array(held["computed"][0]))
held["shard"] = (held["computed"][0].addressable_shards[0].data, held["computed"][1][:4])
words = jax.device_put(np.array(["a", "bc"], dtype=np.dtypes.StringDType()), first)
donated = jax.device_put(halves, first)
jax.jit(lambda v: v + 1, donate_argnums=0)(donated)
"""
CHECK_EVERYTHING = """
wrong = {
    name: str(np.asarray(array))
    for name, (array, expected) in held.items()
    if np.asarray(array).dtype != expected.dtype or np.asarray(array).tobytes() != expected.tobytes()
}
result = [
    wrong, held["host"][0].sharding.memory_kind, np.asarray(words).tolist(), donated.is_deleted(),
    bool((np.asarray(mix(held["computed"][0], 2)).shape == (16, 256))),
]
"""
#: A training of 60 steps, ending with the bytes of all its losses and of its state.
TRAIN = """
mesh = Mesh(np.array(jax.devices()), ("x",))
weights = jax.device_put(np.linspace(-1, 1, 6 * 32, dtype=np.float32).reshape(6, 32), NamedSharding(mesh, P("x")))

@jax.jit
def step(weights, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ w.T) - 0.5) ** 2))(weights)
    return weights - 0.1 * gradient, loss

trained = []
for number in range(60):
    batch = np.random.default_rng(number).standard_normal((12, 32), dtype=np.float32)
    weights, loss = step(weights, jax.device_put(batch, NamedSharding(mesh, P())))
    trained.append(np.asarray(loss).tobytes().hex())
    if number in (10, 30):
        say(number)
result = trained + [np.asarray(weights).tobytes().hex()]
"""


def assert_lost_as_preempted(controller: Controller, name: str, *words: str) -> None:
    text = controller.error_of(f"np.asarray({name})")
    assert text.startswith("DATA_LOSS: ") and "slice 1 host 0" in text and "preempted with" in text, text
    assert all(word in text for word in words), text


def test_training_goes_on_as_if_nothing_had_happened(cluster: Cluster, controller: Controller) -> None:
    before = cluster.wait_whole()
    undisturbed = controller.run(TRAIN)
    since = cluster.now()
    controller.start(TRAIN)
    assert controller.hear() == 10
    cluster.kill_worker(1, number=signal.SIGTERM)
    assert controller.hear() == 30
    # Once more, by the command, and two slices at once.
    for index in (0, 2):
        code, _, errors = cluster.place.call("preempt", f"slice={index}", "--notice-seconds", "60")
        assert code == 0, errors
        assert "is suspended" in errors
    assert controller.finish() == undisturbed
    after = cluster.wait_whole()
    assert all(after[slot].pid != before[slot].pid for slot in after)
    # The last two were away at the same time.
    first, *others = [event["slice"] for event in cluster.events(since, "host_resumed")]
    assert first == 1 and sorted(others) == [0, 2]
    for kind in ("host_lost", "generation_aborted", "error_raised"):
        assert cluster.events(since, kind) == []
    assert cluster.events(since, "session_released")
    # Nothing is kept that is of no more use.
    assert list((Path(cluster.record.logs_folder) / "scratch").iterdir()) == []


@pytest.mark.maxtext
def test_a_checkpoint_that_is_being_written(
    cluster: Cluster, tmp_path: Path, native_losses: dict[int, str]
) -> None:
    cluster.wait_whole()
    since = cluster.now()
    run = cluster.train(tmp_path / "checkpoints", *harness.TRAINING)
    run.says(rf"^step {harness.TRAINING_PERIOD} loss", "stdout")
    cluster.kill_worker(0, number=signal.SIGTERM)
    assert run.wait() == 0, run.describe()
    assert harness.losses(run.output) == native_losses
    assert "restored step" not in run.output
    [resumed] = cluster.events(since, "host_resumed")
    assert resumed["slice"] == 0 and not cluster.events(since, "error_raised")
    cluster.wait_sessions(0)
    # And what was written is whole.
    again = cluster.train(tmp_path / "checkpoints", *harness.TRAINING)
    again.says("restored step 60 on 6 devices", "stdout")
    assert again.wait() == 0, again.describe()


def test_everything_held_is_as_before(cluster: Cluster, controller: Controller) -> None:
    cluster.wait_whole()
    controller.run(HOLD_EVERYTHING)
    right = [{}, "pinned_host", ["a", "bc"], True, True]
    assert controller.run(CHECK_EVERYTHING) == right
    since = cluster.now()
    # In the middle of an execution, of puts and of copies between hosts.
    controller.start("""
flying = mix(sharded(both), 2000)
moved = jax.device_put(held["computed"][0], NamedSharding(Mesh(np.array(devices_of(0, 1)), ("x",)), P("x")))
snapshot = jax.device_put(flying, NamedSharding(Mesh(np.array(both), ("x",)), P("x"), memory_kind="pinned_host"))
say("flying")
for turn in range(40):
    there = jax.device_put(np.full((64, 64), turn, np.float32), first)
    back = jax.device_put(there, devices_of(2)[0])
    assert float(back.sum()) == turn * 64 * 64, turn
result = [
    np.asarray(snapshot).tobytes() == np.asarray(flying).tobytes(),
    np.asarray(moved).tobytes() == held["computed"][1].tobytes(),
]
""")
    assert controller.hear() == "flying"
    cluster.request("preempt", slice=1)
    assert controller.finish() == [True, True]
    cluster.wait_event(since, "host_resumed", slice=1)
    assert controller.run(CHECK_EVERYTHING) == right
    assert cluster.events(since, "host_lost") == []


def test_a_notice_that_is_too_short_is_an_ordinary_loss(cluster: Cluster, controller: Controller) -> None:
    before = cluster.wait_whole()
    controller.run("""
there = sharded(devices_of(1))
kept = sharded(devices_of(0))
busy = mix(sharded(devices_of(1)), 20000)
""")
    since = cluster.now()
    cluster.request("preempt", slice=1, notice_seconds=0.05)
    assert_lost_as_preempted(controller, "there", "0.05 s notice")
    assert_lost_as_preempted(controller, "busy")
    cluster.wait_whole()
    assert_lost_as_preempted(controller, "there")
    assert controller.run("result = bool((np.asarray(kept) == plain(2)).all())")
    assert controller.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == harness.total(6)
    assert cluster.events(since, "host_suspended") == []
    assert cluster.host(0).pid == before[0, 0].pid


def test_a_notice_during_a_compilation(cluster: Cluster, controller: Controller) -> None:
    cluster.wait_whole()
    since = cluster.now()
    controller.start("""
def slow(v):
    for turn in range(200):
        v = jnp.sin(v) @ jnp.cos(v.T) * (turn + 1)
    return v
there = sharded(devices_of(0, 1, 2))
square = jax.device_put(np.eye(8, dtype=np.float32), devices_of(1)[0])
traced = jax.jit(slow).lower(square)
say("compiling")
compiled = traced.compile()
result = [bool(np.isfinite(np.asarray(compiled(square))).all()), bool((np.asarray(there) == plain(6)).all())]
""")
    assert controller.hear() == "compiling"
    for index in range(3):
        cluster.request("preempt", slice=index)
    assert controller.finish() == [True, True]
    for index in range(3):
        cluster.wait_event(since, "host_resumed", slice=index)
    assert not cluster.events(since, "compiler_lost", blamed=True)
    assert not cluster.events(since, "host_lost")


def test_another_slice_dies_meanwhile(cluster: Cluster, controller: Controller) -> None:
    cluster.wait_whole()
    controller.run("""
there = sharded(devices_of(1))
both = mix(sharded(devices_of(1, 2)), 3)
jax.block_until_ready(both)
flying = mix(both, 4000)
""")
    since = cluster.now()
    cluster.request("preempt", slice=1)
    cluster.kill_worker(2)
    for name in ("both", "flying"):
        text = controller.error_of(f"np.asarray({name})")
        assert text.startswith("DATA_LOSS: ") and "slice 2 host 0" in text, text
    assert controller.run("result = bool((np.asarray(there) == plain(2)).all())")
    cluster.wait_whole()
    assert controller.run("result = float(mix(there, 3).sum())") == harness.total(2)
    assert controller.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == harness.total(6)
    assert [e["slice"] for e in cluster.events(since, "host_resumed")] == [1]


def test_a_replacement_that_is_told_to_leave_too(cluster: Cluster, controller: Controller) -> None:
    cluster.wait_whole()
    controller.run("there = sharded(devices_of(1)); jax.block_until_ready(there)")
    since = cluster.now()
    cluster.request("preempt", slice=1)
    # While it is away nobody can be told.
    cluster.wait_event(since, "host_joining", slice=1)
    cluster.request("preempt", slice=1)
    assert controller.run("result = bool((np.asarray(there) == plain(2)).all())")
    cluster.wait_event(since, "host_resumed", slice=1)
    cluster.wait_whole()
    assert len(cluster.events(since, "preemption_announced", slice=1)) == 2
    assert cluster.events(since, "host_lost") == []


def test_standbys_take_over_both_hosts_of_a_slice_at_once(tmp_path: Path) -> None:
    with (
        harness.cluster_in(tmp_path, "1x2x1", "--standby", "2") as cluster,
        cluster.controller() as controller,
    ):
        cluster.wait_whole()
        controller.run("there = mix(sharded(devices_of(0)), 5); before = np.asarray(there).tobytes()")
        until(lambda: [s["state"] for s in cluster.status()["standbys"]] == ["ready", "ready"], cluster.describe)
        standbys = {standby["pid"] for standby in cluster.status()["standbys"]}
        since = cluster.now()
        cluster.request("preempt", slice=0)
        assert controller.run("result = np.asarray(there).tobytes() == before")
        assert controller.run("result = float(mix(there, 3).sum())") == harness.total(2)
        assert {host.pid for host in cluster.wait_whole().values()} == standbys
        assert cluster.events(since, "host_lost") == []


def test_a_replacement_that_comes_too_late(tmp_path: Path) -> None:
    with (
        harness.cluster_in(
            tmp_path, "2x1x1", "--replacement-delay-seconds", "6", "--max-slice-restarts", "0",
            "--set", "suspend_timeout_seconds=1",
        ) as cluster,
        cluster.controller() as controller,
    ):  # fmt: skip
        cluster.wait_whole()
        controller.run("there = sharded(devices_of(1))")
        since = cluster.now()
        cluster.kill_worker(1, number=signal.SIGTERM)
        cluster.wait_event(since, "host_suspended")
        folder = Path(cluster.record.logs_folder) / "scratch"
        assert folder.stat().st_mode & 0o777 == 0o700
        [state] = folder.iterdir()
        assert state.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in state.iterdir()} == {0o600}
        assert_lost_as_preempted(controller, "there", "suspend_timeout_seconds")
        until(lambda: not state.exists(), lambda: list(folder.iterdir()))
        # It is replaced all the same: preemptions are not paid from the budget for crashes, which is 0.
        cluster.wait_whole()
        assert controller.run("result = float(mix(sharded(devices_of(0, 1)), 3).sum())") == harness.total(2)
    assert not folder.exists()
