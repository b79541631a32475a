"""Several device sets in use, kills at bad moments: the survivors always get to right results again.

`make survivors` does the same fifty times and writes down what it saw.
"""

from pathlib import Path

import e2e_harness as harness
from e2e_harness import Cluster

from benchmarks import survivors

pytestmark = harness.MARKS

KILLS = 6
#: Four of the six kills fall into a new generation's first 250 ms, two hit executors alone.
SEED = 52


def test_results_are_the_reference_after_every_kill(cluster: Cluster, tmp_path: Path) -> None:
    said: list[str] = []
    run = survivors.Survivors(cluster.record, cluster.place.environment, tmp_path / "program.log", said.append)
    report = run.run(KILLS, SEED)
    assert report.good, survivors.render(report)
    assert len(report.kills) == len(said) == KILLS
    assert {kill.moment for kill in report.kills} == {"stepping", "new generation"}
    assert {kill.target for kill in report.kills} == {"worker", "executor"}
    assert report.rounds >= sum(kill.recovered_seconds is not None for kill in report.kills)
    assert any("was lost" in text for text in report.errors), report.errors
    survivors.write(report, tmp_path / "survivors")
    assert "**Everything as it must be**" in (tmp_path / "survivors.md").read_text()
