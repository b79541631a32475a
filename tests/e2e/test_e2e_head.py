"""Head and workers started by hand, as a scheduler would: when the head dies, nobody trains on as a zombie."""

import contextlib
import os
import signal
from collections.abc import Sequence

import e2e_harness as harness
from cluster_by_hand import SECRET, free_port
from e2e_harness import Cluster, Place, Running, is_gone, total, until, wait_gone

pytestmark = harness.MARKS

TRY = "result = float(mix(sharded(devices_of(0, 1)), 3).sum())"


def start_head(place: Place, port: int, *settings: str) -> tuple[Running, Cluster]:
    """`ridgeway head` for two slices of one host with two devices."""
    head = place.ridgeway(
        "head", "--topology", "2x1x2", "--cluster-port", str(port), "--proxy-port", "0",
        *(f"--set={setting}" for setting in settings), RIDGEWAY_CLUSTER_SECRET=SECRET,
    )  # fmt: skip
    head.says("waiting for 2 workers")
    return head, Cluster(place, place.record())


def start_worker(place: Place, port: int, slice_index: int) -> Running:
    """`ridgeway worker` for one of the slices."""
    return place.ridgeway(
        "worker", "--head", f"127.0.0.1:{port}", "--slice", str(slice_index), "--host", "0",
        RIDGEWAY_CLUSTER_SECRET=SECRET,
    )  # fmt: skip


def kill_head(head: Running, cluster: Cluster, place: Place) -> list[int]:
    """SIGKILL the head's process; returns the executors, which all must end at once."""
    executors = [host.executor_pid for host in cluster.hosts().values()]
    pid = cluster.status()["head"]["pid"]
    place.note_ports()
    cluster.close()
    os.kill(pid, signal.SIGKILL)
    assert head.wait() == 1, head.describe()
    assert any("the head killed by SIGKILL" in line for line in head.stderr)
    wait_gone(*executors)
    return executors


def assert_no_children(workers: Sequence[Running]) -> None:
    """Agents with nothing but their template."""
    for worker in workers:
        until(lambda pid=worker.pid: len(harness.family_of(pid)) == 2, lambda pid=worker.pid: harness.family_of(pid))


def test_workers_end_with_their_head(place: Place) -> None:
    port = free_port()
    head, cluster = start_head(place, port)
    # A program may come before the workers do: it is told so, and no more.
    with contextlib.closing(cluster.controller()) as controller:
        text = controller.error_of("jax.block_until_ready(sharded(devices_of(0, 1)))")
        assert text.startswith("DATA_LOSS: ") and "slice 0 host 0 has not joined the cluster yet" in text, text
        workers = [start_worker(place, port, slice_index) for slice_index in (0, 1)]
        cluster.wait_whole()
        assert controller.run(TRY) == total(4)
        controller.start("""
values = sharded(devices_of(0, 1))
say("stepping")
while True:
    values = mix(values, 30)
    float(values[0, 0])
""")
        assert controller.hear() == "stepping"
        kill_head(head, cluster, place)
        for worker in workers:
            assert worker.wait() == 3, worker.describe()
            assert "the link to the head closed" in worker.stderr[-1], worker.describe()
            assert "orphan_policy = exit" in worker.stderr[-1]
        # What jax does when its server is gone is its own affair; nothing of ours may be left.
        until(lambda: [p.pid for p in place.processes()] in ([controller.pid], []))
        controller.process.kill()
        controller.process.wait()
    place.assert_nothing_left()


def test_workers_wait_for_a_new_head_and_a_zombie_does_not_disturb(place: Place) -> None:
    port = free_port()
    settings = (
        "orphan_policy=wait", "heartbeat_timeout_seconds=3", "heartbeat_interval_seconds=0.3",
        "suspect_after_seconds=1",
    )  # fmt: skip
    head, cluster = start_head(place, port, *settings)
    workers = [start_worker(place, port, slice_index) for slice_index in (0, 1)]
    before = cluster.wait_whole()
    since = cluster.now()
    with contextlib.closing(cluster.controller()) as controller:
        assert controller.run(TRY) == total(4)

        # A worker falls silent, somebody starts another one for its place, then the first one wakes up.
        zombie = workers[1]
        family = harness.family_of(zombie.pid)
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        cluster.wait_event(since, "host_lost", slice=1, code="DEADLINE_EXCEEDED")
        text = controller.error_of(TRY)
        assert text.startswith("DEADLINE_EXCEEDED: ") and "slice 1 host 0" in text, text
        workers[1] = start_worker(place, port, 1)
        cluster.wait_whole()
        assert controller.run(TRY) == total(4)
        replaced = cluster.hosts()
        awake = cluster.now()
        for pid in reversed(family):
            os.kill(pid, signal.SIGCONT)
        assert zombie.wait() == 5, zombie.describe()
        assert "slice 1 host 0 is taken" in zombie.stderr[-1], zombie.describe()
        wait_gone(*family)
        assert controller.run(TRY) == total(4)
        assert cluster.events(awake, "host_lost") == [] == cluster.events(awake, "generation_aborted")
        assert cluster.hosts() == replaced
        assert replaced[0, 0].executor_pid == before[0, 0].executor_pid

        # The head's process is stopped for longer than it may be silent, but its host answers: nothing is lost.
        kept = "kept = sharded(devices_of(0, 1)); result = float(kept.sum())"
        assert controller.run(kept) == total(4)
        stopped = cluster.status()["head"]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            for worker in workers:
                worker.says("but its host answers")
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert controller.run("result = float(mix(kept, 3).sum())") == total(4)
        assert cluster.hosts() == replaced
        assert cluster.events(awake, "host_lost") == []

    # The head dies: whatever the executors were at is nobody's any more, so they end; the agents wait.
    cluster.wait_sessions(0)
    kill_head(head, cluster, place)
    for worker in workers:
        worker.says("waiting 60 s for a head to come back")
    assert_no_children(workers)
    head, cluster = start_head(place, port, *settings)
    after = cluster.wait_whole()
    assert [host.pid for host in after.values()] == [worker.pid for worker in workers]
    assert not any(is_gone(worker.pid) for worker in workers)
    with cluster.controller() as controller:
        assert controller.run(TRY) == total(4)

    place.note_ports()
    cluster.close()
    head.process.send_signal(signal.SIGTERM)
    assert head.wait() == 0, head.describe()
    for worker in workers:
        assert worker.wait() == 0, worker.describe()
    place.assert_nothing_left()
