"""Several device sets in use, kills at bad moments: the survivors always get to right results again.

`make survivors` does the same fifty times and writes down what it saw.
"""

from pathlib import Path

import e2e_harness as harness
from e2e_harness import Cluster, Controller, total

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


def test_a_growing_generation_disturbs_no_running_program(cluster: Cluster, controller: Controller) -> None:
    controller.run("""
import time
# So small that XLA runs it in the thread that starts programs: whoever has it is late for what comes next.
spin = jax.jit(lambda x, turns: jax.lax.fori_loop(0, turns, lambda turn, v: v * 0.5 + turn, x))
result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())
""")
    since = cluster.now()
    for lone in (2, 0, 1):
        # A loss ends the generation of all; the next program makes one of two slices. The one after the next makes
        # it grow while a program that nobody wants the result of is connecting on one slice, not begun on the other.
        cluster.kill_executor(lone)
        cluster.wait_event(since, "host_lost", slice=lone)
        cluster.wait_whole()
        since = cluster.now()
        pair = [index for index in (0, 1, 2) if index != lone]
        value = controller.run(f"""
first, second = sharded(devices_of(*{pair})), sharded(devices_of(0, 1, 2))
alone = jax.device_put(np.float32(0), devices_of({pair[0]})[0])
jax.block_until_ready((first, second, alone))
result = float(mix(sharded([devices_of(index)[0] for index in {pair}]), 3)[0, 0])
spin(alone, 100_000_000)
mix(first, 3)
jax.block_until_ready(jax.device_put(np.float32(0), devices_of({lone})[0]))  # also tells that the result is not kept
time.sleep(0.3)
result = float(mix(second, 3).sum())
""")
        assert value == total(6)
        assert [len(e["members"]) for e in cluster.events(since, "generation_started")] == [2, 3]
        assert cluster.events(since, "generation_aborted") == []
    assert controller.run("result = float(mix(second, 3).sum())") == total(6)
