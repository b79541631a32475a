"""Kills at the moments that are easy to forget: start-up, first compile, restore, another recovery."""

import re
import sys
import time
from collections import Counter
from pathlib import Path

import e2e_harness as harness
import psutil
import pytest
from e2e_harness import TRAINER, TRAINING, TRAINING_SAFE_STEP, Cluster, Controller, Place, is_gone, losses, until

pytestmark = harness.MARKS

#: A program that takes the compiler some seconds; the text makes it one that no cache has.
COMPILE = """
import uuid
def slow(x):
    for k in range(120):
        x = jnp.sin(x @ x) * (k + 1) + jnp.cumsum(x, axis=k % 2)
    return x
square = jax.device_put(np.eye(24, dtype=np.float32) * {factor}, devices_of(0)[0])
lowered = jax.jit(slow).lower(square)
say("compiling")
compiled = lowered.compile()
result = float(compiled(square).sum())
"""


#: Less than the trainer's state, more than anything else that its recovery puts on devices.
STATE_BYTES = 100_000


def compilers(cluster: Cluster) -> dict[tuple[int, int], psutil.Process]:
    """The compiler process of every host: the child of its template that is not its executor."""
    found = {}
    for slot, host in cluster.hosts().items():
        for template in psutil.Process(host.pid).children():
            for child in template.children():
                if child.pid != host.executor_pid:
                    found[slot] = child
    return found


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time it has used."""
    times = process.cpu_times()
    return times.user + times.system


def test_a_worker_killed_during_a_compilation(cluster: Cluster, controller: Controller) -> None:
    until(lambda: len(compilers(cluster)) == 3)
    before = {slot: cpu_seconds(process) for slot, process in compilers(cluster).items()}
    since = cluster.now()
    controller.start(COMPILE.format(factor=time.time() % 1))
    assert controller.hear() == "compiling"

    def busy() -> tuple[int, int] | None:
        return next((s for s, p in compilers(cluster).items() if cpu_seconds(p) > before[s] + 0.1), None)

    slot = until(busy)
    # On slice 0 the program's argument would be lost too; there the compiler alone dies.
    compiler = compilers(cluster)[slot]
    if slot == (0, 0):
        compiler.kill()
    else:
        cluster.kill_worker(*slot)
    assert isinstance(controller.finish(), float)
    until(lambda: is_gone(compiler.pid))
    assert cluster.events(since, "compiler_lost"), cluster.events(since)
    until(lambda: len(compilers(cluster)) == 3)


@pytest.mark.maxtext
def test_a_training_killed_at_every_bad_moment(
    cluster: Cluster, tmp_path: Path, native_losses: dict[int, str]
) -> None:
    cluster.wait_whole()
    since = cluster.now()
    run = cluster.train(tmp_path / "checkpoints", *TRAINING)
    # The training's own first program is compiled, the step not yet; there is nothing to restore.
    until(lambda: cluster.events(since, "compiled", devices=6), run.describe)
    cluster.kill_worker(0)
    run.says(rf"^step {TRAINING_SAFE_STEP} loss", "stdout")
    cluster.wait_whole()
    restoring = cluster.now()
    cluster.kill_worker(2)
    # Far more than a probe of a slice: the state is being put on the devices again.
    until(lambda: any(e["bytes"] > STATE_BYTES for e in cluster.events(restoring, "arrays_made")), run.describe)
    again = cluster.now()
    cluster.kill_worker(1)
    # And while the replacement is on its way.
    cluster.wait_event(again, "host_lost", slice=1)
    cluster.kill_executor(0)
    assert run.wait() == 0, run.describe()
    assert losses(run.output) == native_losses
    lost = Counter(event["slice"] for event in cluster.events(since, "host_lost"))
    assert lost >= Counter({0: 2, 1: 1, 2: 1}), lost
    assert len(cluster.events(since, "error_raised")) >= 2
    # The record of it ends with a step that was done again, not with a loss that nobody noticed.
    assert "disturbed" not in cluster.events(since, "recovery_completed")[-1]
    assert "restored step" in run.output


@pytest.mark.maxtext
def test_a_worker_killed_while_the_cluster_comes_up(place: Place, tmp_path: Path) -> None:
    run = place.ridgeway(
        "run", "--topology", "2x1x1", *harness.ANY_PORTS, "--",
        sys.executable, str(TRAINER), "--checkpoints", str(tmp_path / "checkpoints"), "--steps", "3",
    )  # fmt: skip
    run.says("starting 2 workers")
    cluster = Cluster(place, place.record())
    until(lambda: cluster.host(0).pid, run.describe)
    cluster.kill_worker(0)
    cluster.close()
    run.says("worker of slice 0 host 0 killed by SIGKILL")
    assert run.wait() == 0, run.describe()
    assert list(losses(run.output)) == [0, 1, 2]
    place.assert_nothing_left()


@pytest.mark.maxtext
def test_restarts_used_up_are_a_clear_error_and_the_checkpoints_stay(place: Place, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    program = [sys.executable, str(TRAINER), "--checkpoints", str(checkpoints), *TRAINING]
    run = place.ridgeway(
        "run", "--topology", "2x1x1", *harness.ANY_PORTS, "--max-slice-restarts", "0", "--",
        *program, "--slice-timeout-seconds", "1",
    )  # fmt: skip
    run.says(rf"^step {TRAINING_SAFE_STEP} loss", "stdout")
    cluster = Cluster(place, place.record())
    cluster.kill_worker(1)
    cluster.close()
    assert run.wait() not in (0, 2), run.describe()
    errors = "\n".join(run.stderr)
    assert "slice 1 was given up: worker of slice 1 host 0 killed by SIGKILL after 0 restarts" in errors, errors
    assert re.search(r"^TimeoutError: Timed out waiting for 2 slices", errors, re.MULTILINE), errors
    place.assert_nothing_left()

    # What was committed is whole: the same program, without Ridgeway, goes on from there.
    again = place.start(program, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2")
    assert again.wait() == 0, again.describe()
    restored = int(re.search(r"restored step (\d+) on 2 devices", again.output)[1])  # type: ignore[index]
    assert list(losses(again.output)) == list(range(restored + 1, harness.TRAINING_STEPS))
    common = losses(run.output).keys() & losses(again.output).keys()
    before, after = ([float(losses(each.output)[step]) for step in sorted(common)] for each in (run, again))
    assert common and after == pytest.approx(before, rel=1e-5)
