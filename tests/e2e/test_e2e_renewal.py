"""A survivor that is worn by aborted generations is replaced by a fresh process, and nobody notices."""

from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import total, until

pytestmark = harness.MARKS


@pytest.mark.timeout(240)
def test_a_worn_survivor_is_renewed_with_all_it_holds(tmp_path: Path) -> None:
    options = ("--max-slice-restarts", "unlimited", "--set", "executor_aborts_limit=1")
    with harness.cluster_in(tmp_path, "2x1x2", *options) as cluster, cluster.controller() as controller:
        before = cluster.wait_whole()
        controller.run("""
kept = sharded(devices_of(0))
pinned = jax.device_put(kept, kept.sharding.with_memory_kind("pinned_host"))
result = float(mix(sharded(devices_of(0, 1)), 3).sum())
""")
        everywhere = "result = float(mix(sharded(devices_of(0, 1)), 3).sum())"
        held = "result = [float(np.asarray(pinned).sum()), float(mix(kept, 3).sum())]"
        pids = {before[0, 0].executor_pid}
        for _ in range(3):
            since = cluster.now()
            cluster.kill_executor(1)
            renewed = cluster.wait_event(since, "executor_renewed", slice=0)
            assert renewed["pid"] not in pids
            pids.add(renewed["pid"])
            cluster.wait_whole()
            assert controller.run(held) == [total(2), total(2)]
            assert controller.run(everywhere) == total(4)
            # Only the one that was killed was lost.
            assert {event["slice"] for event in cluster.events(since, "host_lost")} == {1}
        until(lambda: cluster.host(0).executor_pid == renewed["pid"], cluster.describe)
        assert cluster.host(0).incarnation == before[0, 0].incarnation
        for pid in pids - {renewed["pid"]}:
            harness.wait_gone(pid)
        # The fresh process is the executor also for those who kill it.
        since = cluster.now()
        cluster.kill_executor(0)
        lost = cluster.wait_event(since, "host_lost", slice=0)
        assert lost["executor_only"]
        assert controller.error_of("mix(kept, 3).sum().block_until_ready()").startswith("DATA_LOSS: ")
        cluster.wait_whole()
        assert controller.run(everywhere) == total(4)
