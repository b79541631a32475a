"""Replica-resize: training goes on with the slices that are left, and takes others in when they are there."""

import re
from pathlib import Path

import e2e_harness as harness
import pytest
from cluster_by_hand import ClusterByHand
from e2e_harness import Place, Running, losses

pytestmark = [*harness.MARKS, pytest.mark.maxtext]

STEPS = 4000
"""More than are ever done: the test ends the run by what it has seen, not by its length."""
MINIMUM = ("--minimum-slices", "2", "--poll-seconds", "2", "--checkpoint-period", "10")


def restored(run: Running) -> list[tuple[int, int]]:
    """(step, devices) of each restore so far."""
    return [(int(step), int(count)) for step, count in re.findall(r"^restored step (\d+) on (\d+) d", run.output, re.M)]


def next_attempt(run: Running, earlier: int) -> tuple[int, int]:
    """Step and devices of the next restore."""
    harness.until(lambda: len(restored(run)) > earlier, run.describe)
    return restored(run)[earlier]


def steps_on(run: Running, attempt: int, count: int) -> int:
    """Wait for so many steps of an attempt (0: the first); returns the last one's number."""

    def tail() -> list[int]:
        parts = re.split(r"^restored step .*$", run.output, flags=re.M)
        return [int(step) for step, _ in harness.LOSSES.findall(parts[attempt])] if len(parts) > attempt else []

    harness.until(lambda: len(tail()) >= count, run.describe)
    return tail()[-1]


def test_a_lost_slice_is_done_without_until_it_is_back(place: Place, tmp_path: Path) -> None:
    by_hand = ClusterByHand(place, 3)
    cluster = by_hand.cluster
    before = cluster.wait_whole()
    with cluster.controller() as holder:
        # What survivors hold for another program has nothing to do with the training.
        holder.run("""
kept = [sharded(devices_of(index)) for index in (0, 1)]
pinned = [jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) for x in kept]
jax.block_until_ready((kept, pinned))
""")
        run = cluster.train(tmp_path / "checkpoints", "--steps", str(STEPS), *MINIMUM)
        steps_on(run, 0, 12)
        by_hand.lose(2)
        since = cluster.now()
        step, devices = next_attempt(run, 0)
        assert step % 10 == 0 and devices == 4
        seen = steps_on(run, 1, 3)
        # Nobody said that the slice comes back, so nobody waited for it.
        assert [e for e in cluster.events(since, "probe_held") if e["reason"] != "notice"] == []
        by_hand.start_worker(2)
        cluster.wait_event(since, "slice_ready", slice=2)
        step, devices = next_attempt(run, 1)
        assert devices == 6
        assert step % 10 == 0 and step >= seen - seen % 10
        steps_on(run, 2, 3)
        after = cluster.hosts()
        for slot in ((0, 0), (1, 0)):
            assert cluster.went_on(before[slot], after[slot])
            assert after[slot].restarts == 0
        assert cluster.events(since, "executor_recycled") == []
        assert holder.run("result = [float(x.sum()) for x in (*kept, *pinned)]") == [harness.total(2)] * 4
    # No step was left out.
    done = list(losses(run.output))
    assert done == list(range(len(done)))
    run.process.kill()
    run.wait()
    by_hand.end()


def test_other_orders_of_losses(place: Place, tmp_path: Path) -> None:
    steps = 260
    by_hand = ClusterByHand(place, 3)
    cluster = by_hand.cluster
    before = cluster.wait_whole()
    run = cluster.train(tmp_path / "checkpoints", "--steps", str(steps), *MINIMUM)
    steps_on(run, 0, 12)

    # Two slices, one after the other: with one slice, fewer than the minimum, nothing is trained.
    by_hand.lose(2)
    assert next_attempt(run, 0)[1] == 4
    steps_on(run, 1, 3)
    since = cluster.now()
    by_hand.lose(1)
    cluster.wait_event(since, "error_raised")
    done = len(losses(run.output))

    # One comes back and dies at once.
    since = cluster.now()
    flapping = by_hand.start_worker(1)
    cluster.wait_event(since, "host_joining", slice=1)
    flapping.process.kill()
    cluster.wait_event(since, "host_lost", slice=1)
    assert len(restored(run)) == 1 and len(losses(run.output)) - done <= 1

    # It comes back for good; the other one never does, and training ends normally on two.
    del by_hand.workers[1]
    by_hand.start_worker(1)
    assert next_attempt(run, 1)[1] == 4
    assert run.wait() == 0, run.describe()
    assert list(losses(run.output)) == list(range(steps))
    assert {devices for _, devices in restored(run)} == {4}
    assert re.search(r"^end pid", run.output, re.M)
    assert cluster.went_on(before[0, 0], cluster.host(0))
    assert cluster.host(2).state == "absent"
    by_hand.end()
