"""Unmodified MaxText: the same losses with a kill as without, and a kill in the middle of a checkpoint."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import e2e_harness as harness
import psutil
import pytest
from cluster_by_hand import ClusterByHand
from e2e_harness import ROOT, Cluster, Place, Running

from ridgeway.demo import dataset
from ridgeway.demo import job as jobs

pytestmark = [*harness.MARKS, pytest.mark.maxtext, pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "maxtext_job.sh"
STEPS = 26
PERIOD = 10
MAXTEXT = "maxtext.trainers.pre_train.train"
#: MaxText's imports, compilation and steps, on a machine that is busy with other things.
TRAINING_SECONDS = 200.0
#: A save takes a few tenths of a second; some kills may come when the bytes are on the controller already.
SAVES_TRIED = 3


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled programs, for all tests here."""
    yield tmp_path_factory.mktemp("cache")


def start_example(place: Place, cache: Path, name: str) -> tuple[Running, Path]:
    """The example, as a user starts it; returns it and its output folder."""
    programs = place.folder / "bin"
    programs.mkdir(exist_ok=True)
    # What an installation puts on PATH.
    for command, module in (("ridgeway", ["-m", "ridgeway.cli.main"]), ("python", [])):
        program = programs / command
        program.write_text(f'#!/bin/sh\nexec {" ".join([sys.executable, *module])} "$@"\n')
        program.chmod(0o755)
    output = place.folder / name
    run = place.start(
        [str(EXAMPLE)],
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
        XDG_CACHE_HOME=str(cache),
        OUTPUT=str(output),
        STEPS=str(STEPS),
        CHECKPOINT_PERIOD=str(PERIOD),
        RUN_OPTIONS=" ".join([*harness.ANY_PORTS, "--standby", "1", "--cluster", name]),
    )
    return run, output


class Steps:
    """The steps in the log of a run, which is read as it grows."""

    def __init__(self, run: Running):
        self._run = run
        self._lines = 0
        self._steps: list[int] = []

    def __call__(self) -> list[int]:
        """All of them so far."""
        new = self._run.stderr[self._lines :]
        self._lines += len(new)
        self._steps += [record.step for record in jobs.parse_steps("\n".join(new))]
        return self._steps

    def until(self, condition: Callable[[list[int]], Any], what: str) -> Any:
        """Wait for something about the steps, while the run lives; returns the condition's value."""

        def there() -> Any:
            assert self._run.process.poll() is None, f"ended before {what}:\n{self._run.describe()}"
            return condition(self())

        return harness.until(there, lambda: f"{what}: never came true\n{self._run.describe()}", TRAINING_SECONDS)


def controllers(place: Place) -> list[psutil.Process]:
    """The processes of MaxText itself (not of `ridgeway run`, whose command line has it too)."""
    return [p for p in place.processes() if p.cmdline()[1:3] == ["-m", MAXTEXT]]


def went_back(steps: list[int]) -> bool:
    """Whether the step counter fell."""
    return any(after <= before for before, after in itertools.pairwise(steps))


@pytest.mark.timeout(600)
def test_losses_with_a_kill_equal_those_without(place: Place, cache: Path) -> None:
    """The example of the README, once undisturbed and once with a kill: all losses equal to the last digit."""
    undisturbed, quiet = start_example(place, cache, "quiet")
    assert undisturbed.wait(TRAINING_SECONDS) == 0, undisturbed.describe()
    assert not went_back(Steps(undisturbed)())

    run, killed = start_example(place, cache, "killed")
    checkpoints = killed / "training" / "checkpoints"
    steps = Steps(run)
    # Some steps after a checkpoint, and not right before the next one.
    steps.until(lambda s: len(jobs.committed_steps(checkpoints)) >= 2 and s[-1] % PERIOD in (3, 4, 5), "the kill")
    (controller,) = controllers(place)
    cluster = Cluster(place, place.record("killed"))
    sessions = [session["session"] for session in cluster.status()["sessions"]]
    before = cluster.hosts()
    # Another head, other processes, the same job: nothing is compiled.
    assert cluster.events(0, "compiled", cache="miss") == []
    assert cluster.events(0, "compiled", cache="hit")
    cluster.kill_worker(2)
    steps.until(went_back, "the recovery")
    after = cluster.hosts()
    assert [session["session"] for session in cluster.status()["sessions"]] == sessions
    assert len(sessions) == 1
    cluster.close()
    assert controllers(place) == [controller]
    assert after[2, 0].pid != before[2, 0].pid
    for survivor in ((0, 0), (1, 0)):
        assert (after[survivor].pid, after[survivor].incarnation) == (
            before[survivor].pid,
            before[survivor].incarnation,
        )
    assert run.wait(TRAINING_SECONDS) == 0, run.describe()

    expected = {r.step: r.loss for r in jobs.parse_metrics((quiet / "training" / "metrics.jsonl").read_text())}
    assert list(expected) == list(range(STEPS))
    records = jobs.parse_metrics((killed / "training" / "metrics.jsonl").read_text())
    (rewind,) = jobs.find_rewinds(records)
    assert rewind.next_step - 1 in jobs.committed_steps(checkpoints)
    assert rewind.next_step > PERIOD
    assert rewind.repeated_steps > 0
    assert [record.step for record in records[rewind.index :]] == list(range(rewind.next_step, STEPS))
    # Every one, those done twice included, both times.
    assert [(r.step, r.loss) for r in records if r.loss != expected[r.step]] == []
    place.assert_nothing_left()


class Attempts:
    """The steps in the log of a run, split where another number of slices begins."""

    def __init__(self, run: Running):
        self._run = run
        self._lines = 0
        self._found: list[tuple[int, list[int]]] = []

    def __call__(self) -> list[tuple[int, list[int]]]:
        """(slices, steps) so far."""
        new = self._run.stderr[self._lines :]
        self._lines += len(new)
        for record in jobs.parse_steps("\n".join(new)):
            slices = record.live_slices or 0
            if not self._found or self._found[-1][0] != slices:
                self._found.append((slices, []))
            self._found[-1][1].append(record.step)
        return self._found

    def until(self, count: int, steps: int) -> None:
        """Wait until so many numbers of slices have been seen, with so many steps on the last one."""

        def there() -> bool:
            assert self._run.process.poll() is None, self._run.describe()
            found = self()
            return len(found) == count and len(found[-1][1]) >= steps

        harness.until(there, lambda: f"{self()}\n{self._run.describe()}", TRAINING_SECONDS)


@pytest.mark.timeout(600)
def test_resize_to_two_slices_and_back(place: Place, cache: Path) -> None:
    """Replica-resize: on with two slices from the last checkpoint, up again at one when the third is back."""
    data = dataset.build(place.folder / "data")
    options = jobs.Options(
        data.directory, place.folder / "out", steps=100_000, checkpoint_period=PERIOD, run_name="resize",
        elastic_min_slice_count=2,
    )  # fmt: skip
    job = jobs.build(options)
    job.metrics_file.parent.mkdir(parents=True)
    place.environment["XDG_CACHE_HOME"] = str(cache)
    by_hand = ClusterByHand(place, 3)
    cluster = by_hand.cluster
    before = cluster.wait_whole()
    run = place.start(job.command, **(job.environment | cluster.environment()))
    attempts = Attempts(run)
    attempts.until(1, PERIOD + 4)
    by_hand.lose(2)
    attempts.until(2, 3)
    # It joins while they train.
    by_hand.start_worker(2)
    attempts.until(3, 3)
    (first, second, third) = attempts()
    assert [slices for slices, _ in (first, second, third)] == [3, 2, 3]
    marked = jobs.committed_steps(job.checkpoint_directory)
    assert second[1][0] - 1 in marked and second[1][0] <= first[1][-1] + 1
    assert third[1][0] - 1 in marked and third[1][0] <= second[1][-1] + 2
    after = cluster.hosts()
    for slot in ((0, 0), (1, 0)):
        assert cluster.went_on(before[slot], after[slot])
        assert after[slot].restarts == 0
    run.process.kill()
    run.wait()
    by_hand.end()


def unmarked(checkpoints: Path) -> list[int]:
    """Steps with a folder that has no commit marker: those being saved, or whose save was cut off."""
    if not checkpoints.is_dir():
        return []
    names = {path.name.partition(".")[0] for path in checkpoints.iterdir()}
    return sorted({int(name) for name in names if name.isdigit()} - set(jobs.committed_steps(checkpoints)))


@pytest.mark.timeout(500)
def test_kill_while_a_checkpoint_is_written(place: Place, cache: Path) -> None:
    """The unmarked step is discarded, the last marked one restored, training goes on, and saves happen again."""
    period, count = 4, 30
    data = dataset.build(place.folder / "data")
    options = jobs.Options(data.directory, place.folder / "out", steps=count, checkpoint_period=period, run_name="save")
    job = jobs.build(options)
    checkpoints = job.checkpoint_directory
    job.metrics_file.parent.mkdir(parents=True)
    place.environment["XDG_CACHE_HOME"] = str(cache)
    cluster = harness.bring_up(place, "3x1x2", "--standby", "1")
    run = place.start(job.command, **(job.environment | cluster.environment()))
    steps = Steps(run)
    tried: list[str] = []
    steps.until(lambda s: s, "the first step")
    sessions = [session["session"] for session in cluster.status()["sessions"]]
    assert len(sessions) == 1
    while True:
        steps.until(lambda s: len(jobs.committed_steps(checkpoints)) >= 2 + len(tried), "two checkpoints")
        cluster.wait_whole()
        (cut,) = steps.until(lambda s: unmarked(checkpoints), "a save under way")
        # A save reads the replica of slice 0.
        cluster.kill_worker(0)
        marked = jobs.committed_steps(checkpoints)
        seen = len(steps())
        steps.until(lambda s, seen=seen: went_back(s[seen - 1 :]), "the recovery")
        again = next(a for b, a in itertools.pairwise(steps()[seen - 1 :]) if a <= b)
        if cut not in marked and again == marked[-1] + 1 and again <= cut:
            break
        tried.append(f"save of step {cut}: marked {marked}, training went on with step {again}")
        assert len(tried) < SAVES_TRIED, f"no save was cut off: {tried}"
    # One process, one session of the head, from before the first kill to after the last recovery.
    assert [session["session"] for session in cluster.status()["sessions"]] == sessions
    assert [controller.pid for controller in controllers(place)] == [run.pid]
    assert run.wait(TRAINING_SECONDS) == 0, run.describe()
    committed = jobs.committed_steps(checkpoints)
    # The step whose save was cut off was saved when training came there again, and so was every later one.
    assert committed == [*range(0, count, period), count - 1]
    assert unmarked(checkpoints) == []
    records = jobs.parse_metrics(job.metrics_file.read_text("utf-8"))
    losses: dict[int, set[float]] = {}
    for record in records:
        losses.setdefault(record.step, set()).add(record.loss)
    assert {step: found for step, found in losses.items() if len(found) > 1} == {}
    assert sorted(losses) == list(range(count))
    harness.take_down(cluster)
