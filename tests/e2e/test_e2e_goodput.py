"""Goodput of a trainer that loses a slice, in `status`, `timeline` and metrics; and nothing is compiled twice."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Place, until

pytestmark = [*harness.MARKS, pytest.mark.slow, pytest.mark.maxtext]

TOPOLOGY = "2x1x2"
STEPS = 60


def scrape(cluster: Cluster) -> dict[str, float]:
    """Metrics as Prometheus gets them: name with labels to value."""
    address = cluster.status()["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def train(cluster: Cluster, checkpoints: Path) -> harness.Running:
    """The plain trainer."""
    return cluster.train(checkpoints, "--steps", str(STEPS), "--checkpoint-period", "20")


def goodput_of(cluster: Cluster) -> list[dict[str, Any]]:
    """What `ridgeway timeline --json` says of the sessions."""
    code, output, errors = cluster.place.call("timeline", "--cluster", cluster.record.name, "--json")
    assert code == 0, errors
    return json.loads(output)["goodput"]


def finished_by(text: str, kept: Path) -> None:
    """Wait until a checkpoint is whole: then it is under its final name."""
    until(kept.is_dir, lambda: f"no {kept}: {text}")


def damage(cache: Path) -> None:
    """Cut off every kept program, or change a byte of it."""
    programs = sorted(cache.glob("*.program"))
    assert programs
    for number, path in enumerate(programs):
        data = path.read_bytes()
        path.write_bytes(data[:-7] if number % 2 else data[:-1] + bytes([data[-1] ^ 1]))


def mix_in_another_program(cluster: Cluster) -> int:
    """Compute something; returns how many programs were compiled for it."""
    before = cluster.status()["compile_cache"]["misses"]
    with cluster.controller() as controller:
        assert controller.run("result = float(mix(sharded(devices_of(0, 1)), 3).sum())") == harness.total(4)
    cluster.wait_sessions(0)
    return cluster.status()["compile_cache"]["misses"] - before


def test_goodput_of_a_recovery_and_a_second_run_that_compiles_nothing(place: Place) -> None:
    first, second = place.folder / "first", place.folder / "second"
    options = ("--max-slice-restarts", "unlimited", "--metrics-port", "0", "--set", "goodput_report_seconds=0.5")
    cluster = harness.bring_up(place, TOPOLOGY, *options)
    before = scrape(cluster)
    assert (before["ridgeway_executors"], before["ridgeway_slices_up"], before["ridgeway_sessions"]) == (2, 2, 0)

    began = time.time()
    run = train(cluster, first)
    finished_by(run.output, first / "20")
    run.says(r"^step 23 ", "stdout")
    (session,) = cluster.status()["sessions"]
    assert session["goodput"]["step_program"] == "jit_train_step"
    assert session["array_bytes"] > 0
    cluster.kill_worker(1)
    assert run.wait() == 0, run.describe()
    ended = time.time()
    cluster.wait_sessions(0)

    # Steps that the trainer printed twice are those that it had to do again.
    printed = [int(step) for step, _ in harness.LOSSES.findall(run.output)]
    assert "restored step 20 on 4 devices" in run.output, run.describe()
    repeated = len(printed) - len(set(printed))
    (account,) = goodput_of(cluster)
    assert account["ended"]
    seconds = account["seconds"]
    assert sum(seconds.values()) == pytest.approx(account["wall_seconds"], abs=1e-3)
    assert account["undecided_seconds"] == 0.0
    # All of its life from the first request to the last, and no more than the process took.
    assert 0.0 < account["wall_seconds"] <= ended - began
    assert account["recoveries"] == 1
    assert account["saves"] >= 3
    # One that was done but followed by no other when the slice was lost looks like one that was under way.
    assert account["repeated_steps"] in (repeated - 1, repeated)
    assert account["steps"] - account["repeated_steps"] == STEPS
    for category in ("stepping", "repeating", "compiling", "waiting_for_hardware", "restoring"):
        assert seconds[category] > 0.0, (category, seconds)
    assert account["compile_misses"] > 0
    (recovery,) = cluster.events(0, "recovery_completed")
    assert seconds["waiting_for_hardware"] + seconds["restoring"] <= recovery["seconds"] + seconds["compiling"] + 1.0

    after = scrape(cluster)
    assert after["ridgeway_recovery_seconds_count"] == 1
    assert after["ridgeway_recovery_seconds_sum"] == pytest.approx(recovery["seconds"])
    assert after['ridgeway_session_seconds{category="stepping",session="1"}'] == pytest.approx(seconds["stepping"])
    assert after['ridgeway_compiled_programs_total{cache="miss"}'] == account["compile_misses"]
    assert after['ridgeway_generations_total{outcome="ready"}'] >= 2
    assert after["ridgeway_executors"] == 2
    text = "\n".join(place.call("timeline")[1:2])
    assert "Session 1: goodput " in text and "repeating lost steps" in text
    harness.take_down(cluster)

    # Another head, other processes, the same job: everything is there.
    cluster = harness.bring_up(place, TOPOLOGY)
    run = train(cluster, second)
    assert run.wait() == 0, run.describe()
    cluster.wait_sessions(0)
    cache = cluster.status()["compile_cache"]
    assert (cache["misses"], cache["problem"]) == (0, None), cluster.events(0, "compiled", cache="miss")
    assert cache["hits"] > 0
    assert 0 < cache["bytes"] <= cache["limit_bytes"]
    assert Path(cache["folder"]).is_relative_to(place.folder)
    (account,) = goodput_of(cluster)
    assert account["compile_misses"] == 0
    compiled = mix_in_another_program(cluster)
    assert compiled > 0
    harness.take_down(cluster)

    # What was damaged meanwhile is compiled anew.
    damage(Path(cache["folder"]))
    cluster = harness.bring_up(place, TOPOLOGY)
    assert mix_in_another_program(cluster) == compiled
    assert cluster.status()["compile_cache"]["problem"] is None
    harness.take_down(cluster)
