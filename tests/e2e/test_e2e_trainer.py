"""The plain trainer of the examples: the same losses as natively, also when a worker dies under it."""

import re
import sys
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import TRAINER, TRAINING, TRAINING_PERIOD, TRAINING_SAFE_STEP, Cluster, Running, losses

pytestmark = [*harness.MARKS, pytest.mark.maxtext]


def assert_one_process(run: Running) -> None:
    """The program that ended is the one that began, and its own variables were never lost."""
    start, end = re.findall(r"^(?:start|end) pid (\d+)", run.output, re.MULTILINE)
    assert start == end == str(run.pid)
    kept = int(re.search(r"(\d+) step times kept", run.output)[1])  # type: ignore[index]
    assert kept == len(harness.LOSSES.findall(run.output))


def test_losses_through_the_proxy_equal_native_ones(
    cluster: Cluster, tmp_path: Path, native_losses: dict[int, str]
) -> None:
    run = cluster.train(tmp_path / "checkpoints", *TRAINING)
    assert run.wait() == 0, run.describe()
    assert losses(run.output) == native_losses
    assert_one_process(run)


def test_losses_after_a_kill_equal_those_of_an_undisturbed_run(
    cluster: Cluster, tmp_path: Path, native_losses: dict[int, str]
) -> None:
    before = cluster.wait_whole()
    since = cluster.now()
    run = cluster.train(tmp_path / "checkpoints", *TRAINING)
    run.says(rf"^step {TRAINING_SAFE_STEP} loss", "stdout")
    cluster.kill_worker(2)
    assert run.wait() == 0, run.describe()
    restored = int(re.search(r"restored step (\d+) on 6 devices", run.output)[1])  # type: ignore[index]
    assert restored % TRAINING_PERIOD == 0
    assert run.output.count(f"\nstep {restored + 1} loss") == 2, "these steps were not repeated"
    assert losses(run.output) == native_losses
    assert_one_process(run)

    # The client was told once, with the first cause, and nobody but the victim was started again.
    [error] = cluster.events(since, "error_raised")
    assert error["code"] == "DATA_LOSS" and "slice 2 host 0" in error["message"]
    [lost] = cluster.events(since, "slice_lost")
    assert lost["slice"] == 2
    after = cluster.wait_whole()
    assert after[2, 0].incarnation != before[2, 0].incarnation
    for slot in ((0, 0), (1, 0)):
        assert (after[slot].pid, after[slot].restarts) == (before[slot].pid, before[slot].restarts)


def test_a_standby_takes_over_under_the_trainer(tmp_path: Path, native_losses: dict[int, str]) -> None:
    with harness.place_in(tmp_path) as place:
        run = place.ridgeway(
            "run", "--topology", "3x1x2", *harness.ANY_PORTS, "--standby", "1", "--",
            sys.executable, str(TRAINER), "--checkpoints", str(tmp_path / "checkpoints"), *TRAINING,
        )  # fmt: skip
        cluster = Cluster(place, place.record())
        run.says("a standby is ready")
        [standby] = cluster.status()["standbys"]
        run.says(rf"^step {TRAINING_SAFE_STEP} loss", "stdout")
        victim = cluster.kill_worker(1)
        run.says("restored step", "stdout")
        host = cluster.host(1)
        assert host.pid == standby["pid"] != victim.pid
        place.note_ports()
        cluster.close()
        assert run.wait() == 0, run.describe()
        assert losses(run.output) == native_losses
        place.assert_nothing_left()
