"""The plain trainer of the examples: the same losses as natively, also when a worker dies under it."""

import re
import socket
import sys
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import TRAINER, Cluster, Place, Running, losses

pytestmark = [*harness.MARKS, pytest.mark.maxtext]

STEPS = 100
PERIOD = 10
ARGUMENTS = ("--steps", str(STEPS), "--checkpoint-period", str(PERIOD))
#: By then a step has been committed, and many are still to come.
SAFE_STEP = 2 * PERIOD + 2


def train_natively(place: Place, checkpoints: Path, processes: int, devices_each: int) -> list[Running]:
    """The trainer as multi-controller jax: gloo collectives between processes, no Ridgeway."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    return [
        place.start(
            [sys.executable, str(TRAINER), "--checkpoints", str(checkpoints), *ARGUMENTS],
            JAX_PLATFORMS="cpu",
            JAX_NUM_CPU_DEVICES=str(devices_each),
            JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
            JAX_COORDINATOR_ADDRESS=coordinator,
            JAX_NUM_PROCESSES=str(processes),
            JAX_PROCESS_ID=str(index),
        )
        for index in range(processes)
    ]


@pytest.fixture(scope="module")
def native_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Losses by step of the same program on three native processes with two devices each."""
    with harness.place_in(tmp_path_factory.mktemp("native")) as place:
        runs = train_natively(place, place.folder / "checkpoints", 3, 2)
        for run in runs:
            assert run.wait() == 0, run.describe()
        found = [losses(run.output) for run in runs]
    assert list(found[0]) == list(range(STEPS))
    assert found[0] == found[1] == found[2]
    return found[0]


def assert_one_process(run: Running) -> None:
    """The program that ended is the one that began, and its own variables were never lost."""
    start, end = re.findall(r"^(?:start|end) pid (\d+)", run.output, re.MULTILINE)
    assert start == end == str(run.pid)
    kept = int(re.search(r"(\d+) step times kept", run.output)[1])  # type: ignore[index]
    assert kept == len(harness.LOSSES.findall(run.output))


def test_losses_through_the_proxy_equal_native_ones(
    cluster: Cluster, tmp_path: Path, native_losses: dict[int, str]
) -> None:
    run = cluster.train(tmp_path / "checkpoints", *ARGUMENTS)
    assert run.wait() == 0, run.describe()
    assert losses(run.output) == native_losses
    assert_one_process(run)


def test_losses_after_a_kill_equal_those_of_an_undisturbed_run(
    cluster: Cluster, tmp_path: Path, native_losses: dict[int, str]
) -> None:
    before = cluster.wait_whole()
    since = cluster.now()
    run = cluster.train(tmp_path / "checkpoints", *ARGUMENTS)
    run.says(rf"^step {SAFE_STEP} loss", "stdout")
    cluster.kill_worker(2)
    assert run.wait() == 0, run.describe()
    restored = int(re.search(r"restored step (\d+) on 6 devices", run.output)[1])  # type: ignore[index]
    assert restored % PERIOD == 0 and restored >= PERIOD
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
            sys.executable, str(TRAINER), "--checkpoints", str(tmp_path / "checkpoints"), *ARGUMENTS,
        )  # fmt: skip
        cluster = Cluster(place, place.record())
        run.says("a standby is ready")
        [standby] = cluster.status()["standbys"]
        run.says(rf"^step {SAFE_STEP} loss", "stdout")
        victim = cluster.kill_worker(1)
        run.says("restored step", "stdout")
        host = cluster.host(1)
        assert host.pid == standby["pid"] != victim.pid
        place.note_ports()
        cluster.close()
        assert run.wait() == 0, run.describe()
        assert losses(run.output) == native_losses
        place.assert_nothing_left()
