"""Several programs at one cluster: they come, go and crash without disturbing each other or leaving anything."""

import contextlib
import os
import signal

import e2e_harness as harness
from e2e_harness import Cluster, Controller, total, until

pytestmark = harness.MARKS

MEGABYTES_EACH = 64


def executor_bytes(cluster: Cluster) -> list[int]:
    """Resident memory of each executor as the head knows it."""
    return [host["memory_bytes"] for piece in cluster.status()["slices"] for host in piece["hosts"]]


def test_a_killed_controller_leaves_nothing_behind(cluster: Cluster) -> None:
    pids = {slot: (host.pid, host.executor_pid) for slot, host in cluster.wait_whole().items()}
    since = cluster.now()
    controller = cluster.controller()
    with contextlib.closing(controller):
        controller.run("values = sharded(devices_of(0, 1, 2)); result = float(mix(values, 3)[0, 0])")
        until(lambda: min(executor_bytes(cluster)) > 0)
        before = executor_bytes(cluster)
        controller.run(f"""
ballast = [
    jax.block_until_ready(jax.device_put(np.ones(({MEGABYTES_EACH} << 20) // 4, np.float32), device))
    for device in jax.devices()
]
""")
        half = MEGABYTES_EACH << 20
        until(
            lambda: all(now > then + half for now, then in zip(executor_bytes(cluster), before, strict=True)),
            lambda: (before, executor_bytes(cluster)),
        )
        [session] = cluster.status()["sessions"]
        assert session["arrays"] >= 6 and session["executables"] >= 1
        controller.start("say('now'); result = float(mix(values, 300)[0, 0])")
        assert controller.hear() == "now"
        os.kill(controller.pid, signal.SIGKILL)
        cluster.wait_sessions(0)
        ended = cluster.wait_event(since, "session_ended")
        assert ended["arrays"] >= 6
        until(
            lambda: all(now < then + half for now, then in zip(executor_bytes(cluster), before, strict=True)),
            lambda: (before, executor_bytes(cluster)),
        )
    # No worker noticed, and the next program finds the cluster as it was.
    assert cluster.events(since, "host_lost") == []
    with cluster.controller() as following:
        assert following.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == total(6)
    assert {slot: (host.pid, host.executor_pid) for slot, host in cluster.hosts().items()} == pids


def test_the_crash_of_one_program_does_not_disturb_another(cluster: Cluster, controller: Controller) -> None:
    since = cluster.now()
    other = cluster.controller()
    with contextlib.closing(other):
        cluster.wait_sessions(2)
        # Handles count from 1 in both: a mix-up would show at once.
        controller.run("mine = sharded(devices_of(0, 1, 2))")
        other.run("mine = sharded(devices_of(0, 1, 2)) * 2")
        controller.start("""
import time
values, turns, crashed = mine, 0, False
while turns < 5 or not os.path.exists("crashed"):
    values = mix(values, 20)
    assert np.isclose(float(values.sum()), plain(6).sum(), rtol=1e-4), float(values.sum())
    turns += 1
    if turns == 3:
        say("stepping")
for _ in range(5):
    values = mix(values, 20)
result = [float(values.sum()), float(mine.sum())]
""")
        assert controller.hear() == "stepping"
        assert other.run("result = float(mine.sum())") == total(6, 2.0)
        other.start("say('now'); result = float(mix(mine, 300).sum())")
        assert other.hear() == "now"
        os.kill(other.pid, signal.SIGKILL)
        cluster.wait_sessions(1)
        (cluster.place.folder / "crashed").touch()
        assert controller.finish() == [total(6), total(6)]
    assert len(cluster.events(since, "session_ended")) == 1
    assert cluster.events(since, "host_lost") == []
    assert cluster.events(since, "generation_aborted") == []


def test_a_loss_is_told_to_every_program_that_had_a_part_in_it(cluster: Cluster, controller: Controller) -> None:
    with cluster.controller() as other:
        controller.run("mine = sharded(devices_of(0, 1, 2))")
        other.run("mine = sharded(devices_of(0, 1)); result = float(mix(mine, 3).sum())")
        cluster.kill_worker(2)
        text = controller.error_of("result = float(mine.sum())")
        assert text.startswith("DATA_LOSS: ") and "slice 2 host 0" in text
        # The other one holds nothing there. Work that ran in the common generation may have been broken off.
        assert other.run("result = float(mine.sum())") == total(4)
        cluster.wait_whole()
        for program in (controller, other):
            assert program.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == total(6)
