"""`ridgeway chaos`: faults from a seed on a running cluster, which gets over them."""

import json
from pathlib import Path

import e2e_harness as harness
from e2e_harness import Cluster, Controller, total

from benchmarks import soak_report
from benchmarks.soak_resources import Sample, trends

pytestmark = harness.MARKS


def test_faults_of_a_seed_strike_and_are_overcome(cluster: Cluster, controller: Controller) -> None:
    everywhere = "result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())"
    assert controller.run(everywhere) == total(6)
    before, since = cluster.wait_whole(), cluster.now()
    options = ("chaos", "--cluster", cluster.record.name, "--seed", "3", "--mtbf-seconds", "0.2")
    kinds = "kill-executor,kill-agent,illegal-instruction,pause-executor,kill-compiler"
    chosen = ("--faults", kinds, "--moments", "any,recovery,start-up", "--count", "4")
    code, plan, errors = cluster.place.call(*options, *chosen, "--show")
    assert code == 0, errors
    assert len(plan.splitlines()) == 4
    code, _, errors = cluster.place.call(*options, *chosen)
    assert code == 0, errors
    said = errors.splitlines()
    assert "seed 3" in said[0] and "4 faults done" in said[-1]
    for planned, struck in zip(plan.splitlines(), said[1:-1], strict=True):
        # The same faults as shown, at the same moments.
        assert planned.partition("s, ")[2] in struck
    after = cluster.wait_whole()
    assert cluster.events(since, "host_lost")
    assert any(after[slot].executor_pid != before[slot].executor_pid for slot in before)
    assert controller.run(everywhere) == total(6)


def test_what_cannot_be_done_is_said(cluster: Cluster) -> None:
    name = ("--cluster", cluster.record.name)
    for arguments, text in (
        (("--faults", "earthquake"), "'earthquake' is no fault; known: kill-executor"),
        (("--faults", "cut-host"), "'cut-host' cannot be done to this cluster: its workers have no network namespaces"),
        (("--faults", "full-disk"), "name a --disk"),
        (("--moments", "save"), "the head does not know when a program is at 'save'"),
        (("--disk", "/"), "not on a small file system of its own"),
    ):
        code, _, errors = cluster.place.call("chaos", *name, *arguments)
        assert code == 2 and text in errors, errors


def test_a_soak_is_judged_by_what_grows() -> None:
    def sample(fault: int, threads: float) -> Sample:
        usage = {"memory": 100 << 20, "threads": threads, "sockets": 5, "files": 9}
        return Sample(fault, float(fault), 6, {"head": [usage], "executors": [dict(usage), dict(usage)]})

    flat = trends([sample(n, 20 + n % 3) for n in range(1, 60)])
    assert {(t.role, t.metric) for t in flat} >= {("head", "threads"), ("executors", "memory")}
    assert all(trend.flat for trend in flat)
    growing = [t for t in trends([sample(n, 20 + n) for n in range(1, 60)]) if not t.flat]
    assert {(t.role, t.metric) for t in growing} == {("head", "threads"), ("executors", "threads")}
    assert trends([sample(n, 20) for n in range(1, 10)]) == []


def test_a_soak_of_few_faults_is_written_down(tmp_path: Path) -> None:
    base = tmp_path / "soak"
    options = {"mode": "pause", "faults": 1, "kinds": ["kill-agent"]}
    report = soak_report.result(
        options=options, strikes=[], samples=[], events=[], problem="it hung", wrong=[], exact=0, steps=7,
        last_step=6, attempts=1, seconds=3.0,
    )  # fmt: skip
    assert not report["good"]
    soak_report.write(report | {"command": "again"}, base)
    assert json.loads(base.with_suffix(".json").read_text())["pause"]["problem"] == "it hung"
    assert "NOT as it must be" in base.with_suffix(".md").read_text()
    assert base.with_suffix(".png").stat().st_size > 1000
