"""However a cluster ends, no process, socket or folder of it is left, also with a program in the middle of a step."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import e2e_harness as harness
from e2e_harness import Place, Running, until

from ridgeway.timeline.events import read_events

pytestmark = harness.MARKS

#: Steps with collectives for ever.
PROGRAM = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
values = jax.device_put(np.ones((4, 8), np.float32), sharding)
step = jax.jit(lambda x: x * 0.5 + x.sum(0) / 8)
print("stepping", float(step(values)[0, 0]), flush=True)
while True:
    values = step(values)
    values[0, 0].item()
"""


def run_program(place: Place) -> Running:
    """`ridgeway run` with a program that steps."""
    run = place.ridgeway("run", "--topology", "2x1x1", *harness.ANY_PORTS, "--", sys.executable, "-c", PROGRAM)
    run.says("^stepping 1.0", "stdout")
    place.note_ports()
    return run


def test_after_an_interrupt(place: Place) -> None:
    run = run_program(place)
    os.killpg(run.pid, signal.SIGINT)
    # A Python program that is interrupted may also end by an exception, with 1.
    assert run.wait() in (128 + signal.SIGINT, 1), run.describe()
    place.assert_nothing_left()


def test_after_a_sigkill_of_the_supervisor(place: Place) -> None:
    run = run_program(place)
    run.process.kill()
    run.wait()
    until(lambda: not place.processes(), lambda: str(place.processes()))
    # Nobody lived to remove the folder; whoever looks next does.
    code, _, errors = place.call("status")
    assert code == 2 and "no cluster is running" in errors
    place.assert_nothing_left()


def test_after_down_under_a_program(place: Place) -> None:
    cluster = harness.bring_up(place, "2x1x1")
    with contextlib.closing(cluster.controller()) as controller:
        controller.start("""
values = sharded(devices_of(0, 1))
say("stepping")
while True:
    values = mix(values, 30)
    float(values[0, 0])
""")
        assert controller.hear() == "stepping"
        place.note_ports()
        cluster.close()
        logs = Path(cluster.record.logs_folder)
        code, _, errors = place.call("down")
        assert code == 0, errors
        # The cluster is gone while the program still is there; jax decides whether that raises or ends it.
        until(lambda: not [p for p in place.processes() if p.pid != controller.pid])
        controller.process.kill()
        controller.process.wait()
    place.assert_nothing_left()
    kinds = [event["kind"] for event in read_events(logs / "events.jsonl")]
    assert "session_ended" in kinds[kinds.index("cluster_stopping") :]
    assert kinds.index("cluster_stopped") == len(kinds) - 1, kinds


def test_after_a_start_that_failed(place: Place) -> None:
    broken = place.folder / "broken"
    broken.mkdir()
    (broken / "jax.py").write_text("raise ImportError('this jax is broken on purpose')\n")
    path = f"{broken}:{place.environment['PYTHONPATH']}"
    run = place.ridgeway("run", "--topology", "2x1x1", *harness.ANY_PORTS, "--", "true", PYTHONPATH=path)
    run.says("starting 2 workers")
    place.note_ports()
    assert run.wait() == 2, run.describe()
    assert run.stderr[-1].startswith("ridgeway: error: ") and "broken on purpose" in run.stderr[-1]
    place.assert_nothing_left()
