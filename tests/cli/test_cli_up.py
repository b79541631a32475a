"""`ridgeway up`, `down` and what looks at a running cluster; `head` and `worker` started by hand."""

import json
import os
import re
import signal
import stat
import sys
from pathlib import Path

import pytest
from cli_harness import Running, World, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes and their environment as Linux does"),
]

PORTS = ("--proxy-port", "0", "--cluster-port", "0")


def up(world: World, *arguments: str) -> dict[str, str]:
    """Bring a cluster up; returns what it says to export."""
    code, output, errors = world.call("up", *PORTS, *arguments)
    assert code == 0, errors
    lines = output.splitlines()
    assert len(lines) == 3
    return dict(re.fullmatch(r"export (\w+)=(\S+)", line).groups() for line in lines)  # type: ignore[union-attr]


def test_up_look_and_down(world: World) -> None:
    environment = up(world, "--topology", "2x1x3")
    assert environment["JAX_PLATFORMS"] == "proxy"
    assert environment["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] == "true"
    # It is nobody's child and has no terminal.
    record_file = world.runtime / "ridgeway" / "cluster.json"
    record = json.loads(record_file.read_text())
    assert environment["JAX_BACKEND_TARGET"] == f"grpc://127.0.0.1:{record['proxy_port']}"
    assert stat.S_IMODE(record_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(record_file.parent.stat().st_mode) == 0o700
    for process in world.processes():
        assert record["secret"] not in " ".join(process.cmdline())
    status = world.status()
    assert status["topology"] == [2, 1, 3] and status["supervisor_pid"] == record["supervisor_pid"]
    code, output, _ = world.call("status")
    assert code == 0 and "2x1x3" in output and output.count("ready") == 2 and "no program is connected" in output

    code, _, errors = world.call("up", *PORTS)
    assert code == 2 and "already runs" in errors and len(errors.splitlines()) == 1

    # A second cluster beside it, and then each has to be named.
    up(world, "--cluster", "other")
    code, _, errors = world.call("status")
    assert code == 2 and "2 clusters are running (other, ridgeway); choose with --cluster NAME" in errors
    code, output, _ = world.call("status", "--cluster", "other", "--json")
    assert json.loads(output)["topology"] == [1, 1, 1]
    code, _, errors = world.call("down", "--cluster", "other")
    assert code == 0, errors

    following = world.start("events", "--follow", "--json")
    following.says('"slice_ready"', "stdout")
    assert world.call("kill", "slice=1")[0] == 0
    following.says('"host_lost"', "stdout")
    code, output, _ = world.call("events", "--kind", "host_lost")
    assert code == 0 and "slice=1 host=0" in output

    logs = world.start("logs", "--head", "--follow")
    until(lambda: [h["state"] for h in world.hosts()] == ["ready", "ready"])
    code, output, errors = world.call("down")
    assert code == 0 and "is down" in errors
    assert following.wait() == 0
    assert logs.wait() == 0
    world.assert_nothing_left()
    code, output, _ = world.call("logs", "--cluster", "ridgeway")
    assert code == 0 and "==> supervisor.log <==" in output and "==> worker-1-0.2.log <==" in output


def test_a_killed_supervisor_leaves_nothing_that_disturbs(world: World) -> None:
    up(world)
    os.kill(world.status()["supervisor_pid"], signal.SIGKILL)
    until(lambda: not world.processes(), lambda: str(world.processes()))
    code, _, errors = world.call("status")
    assert code == 2 and "no cluster is running" in errors
    up(world)
    assert world.call("down")[0] == 0
    world.assert_nothing_left()


def test_the_head_of_a_standing_cluster_dies(world: World) -> None:
    up(world)
    os.kill(world.status()["head"]["pid"], signal.SIGKILL)
    world.assert_nothing_left()
    code, output, _ = world.call("logs")
    assert code == 0 and "it has failed: the head killed by SIGKILL" in output


def test_ctrl_c_while_it_comes_up(world: World) -> None:
    running = world.start("up", *PORTS)
    running.says("head is up")
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 130
    assert running.stderr[-1] == "ridgeway: interrupted; everything is down"
    world.assert_nothing_left()


def test_down_ends_what_run_has_up(world: World) -> None:
    running = world.start("run", *PORTS, "--", sys.executable, "-c", "import time; time.sleep(600)")
    running.says("running: ")
    assert world.call("down")[0] == 0
    assert running.wait() == 128 + signal.SIGTERM
    world.assert_nothing_left()


def test_only_the_newest_logs_are_kept(world: World) -> None:
    parent = world.folder / "state" / "ridgeway" / "ridgeway"
    for number in range(7):
        (parent / f"2020-01-01T00-00-0{number}").mkdir(parents=True)
    assert world.call("run", *PORTS, "--", "true")[0] == 0
    names = sorted(path.name for path in parent.iterdir())
    assert len(names) == 5 and names[0] == "2020-01-01T00-00-03"


def start_worker(world: World, port: str, secret: Path, *arguments: str) -> Running:
    return world.start("worker", "--head", f"127.0.0.1:{port}", "--secret-file", str(secret), *arguments)


def test_head_and_workers_by_hand(world: World) -> None:
    secret = world.folder / "secret"
    head = world.start("head", "--slices", "2", *PORTS, "--secret-file", str(secret))
    port = re.search(r"HOST:(\d+)", head.says("waiting for 2 workers"))[1]  # type: ignore[index]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    workers = [start_worker(world, port, secret, "--slice", str(s), "--host", "0") for s in range(2)]
    until(lambda: [h["state"] for h in world.hosts()] == ["ready", "ready"], head.describe)

    taken = start_worker(world, port, secret, "--slice", "0", "--host", "0")
    assert taken.wait() == 5
    assert len(taken.stderr) == 1 and "slice 0 host 0 is taken" in taken.stderr[0]
    outside = start_worker(world, port, secret, "--slice", "5", "--host", "0")
    assert outside.wait() == 2
    assert len(outside.stderr) == 1 and "no slice 5" in outside.stderr[0]
    other = world.folder / "other"
    other.write_text("another cluster's\n")
    other.chmod(0o600)
    stranger = start_worker(world, port, other, "--slice", "0", "--host", "0")
    assert stranger.wait() == 2
    assert len(stranger.stderr) == 1 and "has another cluster secret" in stranger.stderr[0]

    # Nobody replaces these: the one that dies stays away, the others go on.
    workers[1].process.kill()
    until(lambda: [h["state"] for h in world.hosts()] == ["ready", "absent"], head.describe)
    again = start_worker(world, port, secret)
    until(lambda: [h["state"] for h in world.hosts()] == ["ready", "ready"], head.describe)

    # Without a head the workers end, and say why.
    os.kill(world.status()["head"]["pid"], signal.SIGKILL)
    assert head.wait() == 1
    for worker in (workers[0], again):
        assert worker.wait() == 3
        assert "the link to the head closed" in worker.stderr[-1]
    world.assert_nothing_left()


def test_a_head_by_hand_stops_its_workers(world: World) -> None:
    secret = world.folder / "secret"
    head = world.start("head", *PORTS, "--secret-file", str(secret))
    port = re.search(r"HOST:(\d+)", head.says("waiting for 1 workers"))[1]  # type: ignore[index]
    worker = start_worker(world, port, secret)
    until(lambda: [h["state"] for h in world.hosts()] == ["ready"], head.describe)
    head.process.send_signal(signal.SIGINT)
    assert head.wait() == 0
    assert worker.wait() == 0
    world.assert_nothing_left()
