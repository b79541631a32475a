"""What a program sees of a lost worker: an exception that names it, and what it holds elsewhere untouched."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Controller, total, until, wait_gone

pytestmark = harness.MARKS

#: Steps for ever, each an execution with collectives over everything, and tells after the first.
STEP_FOR_EVER = """
values = sharded(devices_of(0, 1, 2))
said = False
while True:
    values = mix(values, 30)
    float(values[0, 0])
    if not said:
        say("stepping")
        said = True
"""


def test_a_killed_worker_is_an_exception(cluster: Cluster, controller: Controller) -> None:
    before = cluster.wait_whole()
    controller.run("""
everywhere = sharded(devices_of(0, 1, 2))
first = sharded(devices_of(0))
both = sharded(devices_of(0, 1))
lost_one = sharded(devices_of(2))
in_flight = mix(everywhere, 2000)
""")
    cluster.kill_worker(2)
    # The execution under way, what it would have made, and everything with a shard over there.
    for expression in ("in_flight", "mix(everywhere, 1)", "everywhere", "lost_one", "mix(lost_one, 1)"):
        for wait in ("np.asarray", "jax.block_until_ready"):
            text = controller.error_of(f"{wait}({expression})")
            assert text.startswith("DATA_LOSS: ") and "slice 2 host 0" in text, text
            assert re.search(r"connection to its (agent|executor) closed|killed by", text), text
    # Survivors keep what they hold.
    check = """
result = [
    bool((np.asarray(first) == plain(2)).all()),
    bool((np.asarray(both) == plain(4)).all()),
    float(mix(both, 3).sum()),
]
"""
    right = [True, True, total(4)]
    assert controller.run(check) == right
    cluster.wait_whole()
    assert controller.run(check) == right

    # What was lost stays lost; everything else works again, for the same program.
    for name in ("everywhere", "lost_one", "in_flight"):
        text = controller.error_of(f"np.asarray({name})")
        assert text.startswith("DATA_LOSS: ") and "slice 2 host 0" in text, text
    assert controller.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == total(6)
    assert controller.run("result = float(mix(sharded(devices_of(2)), 3).sum())") == total(2)
    assert controller.run("result = os.getpid()") == controller.pid

    after = cluster.hosts()
    assert after[2, 0].pid != before[2, 0].pid
    for slot in ((0, 0), (1, 0)):
        assert cluster.went_on(before[slot], after[slot]), (before[slot], after[slot])


def test_a_killed_executor_is_replaced_by_its_agent(cluster: Cluster, controller: Controller) -> None:
    before = cluster.wait_whole()
    controller.start(STEP_FOR_EVER)
    assert controller.hear() == "stepping"
    cluster.kill_executor(1)
    text = controller.error_of()
    assert text.startswith("DATA_LOSS: ") and "slice 1 host 0" in text, text
    after = cluster.wait_whole()
    assert after[1, 0].pid == before[1, 0].pid
    assert after[1, 0].incarnation == before[1, 0].incarnation
    assert after[1, 0].executor_pid != before[1, 0].executor_pid
    assert controller.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == total(6)
    assert cluster.went_on(before[0, 0], cluster.host(0)) and cluster.went_on(before[2, 0], cluster.host(2))


@pytest.fixture(scope="module")
def watchful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that calls silence a loss soon."""
    with harness.cluster_in(
        tmp_path_factory.mktemp("watchful"), "3x1x1",
        "--set", "heartbeat_timeout_seconds=4", "--set", "heartbeat_interval_seconds=0.2",
        "--set", "suspect_after_seconds=0.8", "--set", "progress_deadline_seconds=6",
    ) as cluster:  # fmt: skip
        yield cluster


def test_a_silent_worker_is_lost_after_the_heartbeat_timeout(watchful: Cluster, tmp_path: Path) -> None:
    before = watchful.wait_whole()
    since = watchful.now()
    family = harness.family_of(before[1, 0].pid)
    with watchful.controller() as controller:
        controller.start(STEP_FOR_EVER)
        assert controller.hear() == "stepping"
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        text = controller.error_of()
        assert text.startswith("DEADLINE_EXCEEDED: ") and "slice 1 host 0" in text, text
        assert "no heartbeat for" in text and "heartbeat_timeout_seconds" in text, text
        watchful.wait_event(since, "host_suspect", slice=1, host=0)
        watchful.wait_event(since, "host_lost", slice=1, host=0, code="DEADLINE_EXCEEDED")
        watchful.wait_whole()
        assert controller.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == total(3)
    # The supervisor has killed the silent one: a zombie would otherwise come back some day.
    wait_gone(*family)
    after = watchful.hosts()
    assert watchful.went_on(before[0, 0], after[0, 0]) and watchful.went_on(before[2, 0], after[2, 0])


def test_an_executor_that_makes_no_progress_is_lost(watchful: Cluster) -> None:
    before = watchful.wait_whole()
    with watchful.controller() as controller:
        controller.start(STEP_FOR_EVER)
        assert controller.hear() == "stepping"
        victim = watchful.kill_executor(2, number=signal.SIGSTOP)
        text = controller.error_of()
        assert text.startswith("DEADLINE_EXCEEDED: ") and "slice 2 host 0" in text, text
        assert "while its agent answered (progress_deadline_seconds)" in text, text
        wait_gone(victim.executor_pid)
        after = watchful.wait_whole()
        assert after[2, 0].pid == before[2, 0].pid
        assert after[2, 0].executor_pid != before[2, 0].executor_pid
        assert controller.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == total(3)


def test_a_worker_that_was_only_slow_is_suspect_and_not_lost(watchful: Cluster) -> None:
    before = watchful.wait_whole()
    since = watchful.now()
    family = harness.family_of(before[0, 0].pid)
    with watchful.controller() as controller:
        controller.run("values = sharded(devices_of(0, 1, 2)); result = float(mix(values, 3).sum())")
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        watchful.wait_event(since, "host_suspect", slice=0, host=0)
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        assert controller.run("result = float(mix(values, 3).sum())") == total(3)
    until(watchful.is_whole)
    assert watchful.events(since, "host_lost") == []
    assert {slot: (h.pid, h.executor_pid) for slot, h in watchful.hosts().items()} == {
        slot: (h.pid, h.executor_pid) for slot, h in before.items()
    }
