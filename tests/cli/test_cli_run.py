"""`ridgeway run` with real clusters: the command's environment and exit code, replacement, and no trace left."""

import contextlib
import json
import os
import pty
import select
import signal
import sys

import psutil
import pytest
from cli_harness import Running, World, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes and their environment as Linux does"),
]

PORTS = ("--proxy-port", "0", "--cluster-port", "0")
WAITS = "import time; print('waiting', flush=True); time.sleep(600)"


def start(world: World, *arguments: str, command: str = WAITS, **environment: str) -> Running:
    return world.start("run", *PORTS, *arguments, "--", sys.executable, "-u", "-c", command, **environment)


def test_a_jax_program_sees_the_cluster_and_its_exit_code_is_ours(world: World) -> None:
    command = (
        "import os, sys, json, jax, jax.numpy as jnp;"
        "print(json.dumps({'devices': len(jax.devices()), 'sum': float((jnp.arange(6.0) * 2).sum()),"
        "'env': {n: v for n, v in os.environ.items() if n.startswith(('JAX_', 'IFRT_', 'RIDGEWAY_CLUSTER'))}}));"
        "sys.exit(7)"
    )
    running = start(world, "--topology", "2x1x2", command=command)
    assert running.wait() == 7, running.describe()
    result = json.loads(running.stdout[0])
    assert result["devices"] == 4 and result["sum"] == 30.0
    environment = result["env"]
    assert environment.pop("JAX_BACKEND_TARGET").startswith("grpc://127.0.0.1:")
    assert environment == {"JAX_PLATFORMS": "proxy", "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true"}
    for words in ("head is up", "slice 0 is ready", "slice 1 is ready", "cluster is ready", "everything is down"):
        assert any(words in line for line in running.stderr), running.describe()
    world.assert_nothing_left()
    code, output, _ = world.call("events", "--json")
    kinds = [json.loads(line)["kind"] for line in output.splitlines()]
    assert code == 0 and "slice_ready" in kinds and "session_started" in kinds
    code, output, _ = world.call("logs", "--slice", "1")
    assert code == 0 and "joined cluster ridgeway as slice 1 host 0" in output


def test_a_command_that_a_signal_ends(world: World) -> None:
    running = start(world, command="import os; os.kill(os.getpid(), 9)")
    assert running.wait() == 128 + 9
    world.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_the_command_runs(world: World, number: int) -> None:
    running = start(world)
    running.says("waiting", "stdout")
    running.process.send_signal(number)
    assert running.wait() == 128 + number, running.describe()
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in running.stderr
    world.assert_nothing_left()


@pytest.mark.parametrize("insist", [False, True])
def test_ctrl_c_in_a_terminal(world: World, insist: bool) -> None:
    """The terminal gives it to the command; pressing it again and again ends a command that ignores it."""
    handler = "print('interrupted', flush=True)" + ("" if insist else "; sys.exit(3)")
    command = f"import signal, sys\ndef handle(*_): {handler}\nsignal.signal(signal.SIGINT, handle)\n"
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ignored where the tests run in a shell's background.
        os.chdir(world.folder)
        ridgeway = [sys.executable, "-m", "ridgeway.cli.main", "run", *PORTS]
        os.execve(
            sys.executable,
            [*ridgeway, "--", sys.executable, "-c", command + WAITS.replace("; ", "\n")],
            world.environment,
        )
    shown = bytearray()

    def see(text: bytes) -> bool:
        if select.select([terminal], [], [], 0.02)[0]:
            try:
                shown.extend(os.read(terminal, 65536))
            except OSError:
                pass  # So Linux says that nobody has the other end open any more.
        return text in shown

    until(lambda: see(b"waiting\r\n"), lambda: shown.decode())
    for number in range(1, 100):
        os.write(terminal, b"\x03")
        until(
            lambda n=number: see(b"ending the command") or shown.count(b"interrupted\r\n") >= n,
            lambda: shown.decode(),
        )
        if not insist or see(b"ending the command"):
            break
    until(lambda: see(b"everything is down"), lambda: shown.decode())
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == (128 + signal.SIGTERM if insist else 3)
    if insist:  # Otherwise the command may have ended before there was time to say so.
        assert b"press it 3 times" in shown
    world.assert_nothing_left()


def test_a_command_may_handle_ctrl_c_and_go_on(world: World) -> None:
    command = (
        "import signal, sys, time\n"
        "def handle(*_): print('saved', flush=True); sys.exit(5)\n"
        "signal.signal(signal.SIGINT, handle)\n" + WAITS.replace("; ", "\n")
    )
    running = start(world, command=command)
    running.says("waiting", "stdout")
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 5
    assert "saved" in running.stdout
    world.assert_nothing_left()


@pytest.mark.parametrize("moment", ["logs in", "head is up", "starting 2 workers", "slice . is ready"])
def test_interrupted_during_the_start(world: World, moment: str) -> None:
    running = start(world, "--slices", "2")
    running.says(moment)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 128 + signal.SIGTERM
    assert "waiting" not in running.stdout
    world.assert_nothing_left()


def test_killed_itself_it_takes_everything_with_it(world: World) -> None:
    running = start(world, "--slices", "2")
    running.says("waiting", "stdout")
    assert len(world.processes()) > 8
    running.process.send_signal(signal.SIGKILL)
    running.wait()
    until(lambda: not world.processes(), lambda: str(world.processes()))
    assert list(world.runtime.iterdir()) != []
    # What it left is recognised and removed by the next command.
    code, _, errors = world.call("status")
    assert code == 2 and "no cluster is running" in errors
    world.assert_nothing_left()


def test_the_head_dies(world: World) -> None:
    running = start(world)
    running.says("waiting", "stdout")
    os.kill(world.status()["head"]["pid"], signal.SIGKILL)
    line = running.says("the cluster has failed")
    assert "the head killed by SIGKILL" in line

    def agents() -> list[psutil.Process]:
        found = []
        for process in world.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] if "ridgeway.worker.agent" in process.cmdline() else []
        return found

    until(lambda: not agents())
    # The command is left a while to notice; a signal shortens that.
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 128 + signal.SIGTERM
    world.assert_nothing_left()


def test_the_head_dies_under_a_command_that_ends_well(world: World) -> None:
    release = world.folder / "release"
    command = (
        f"import os, time; print('waiting', flush=True)\nwhile not os.path.exists({str(release)!r}): time.sleep(.02)"
    )
    running = start(world, command=command)
    running.says("waiting", "stdout")
    os.kill(world.status()["head"]["pid"], signal.SIGKILL)
    running.says("the cluster has failed")
    release.touch()
    assert running.wait() == 1
    world.assert_nothing_left()


def test_dead_and_silent_workers_are_replaced(world: World) -> None:
    running = start(world, "--slices", "2", "--set", "heartbeat_timeout_seconds=3.0")
    running.says("waiting", "stdout")
    before = world.hosts()
    assert [host["state"] for host in before] == ["ready", "ready"]
    os.kill(before[1]["pid"], signal.SIGKILL)
    running.says("worker of slice 1 host 0 killed by SIGKILL; starting another one")
    until(lambda: [h["state"] for h in world.hosts()] == ["ready", "ready"], running.describe)
    after = world.hosts()
    assert after[1]["pid"] != before[1]["pid"]
    code, _, errors = world.call("kill", "slice=0", "--signal", "STOP")
    assert code == 0, errors
    running.says("slice 0 host 0 is lost: no heartbeat")
    until(lambda: not psutil.pid_exists(after[0]["pid"]), running.describe)
    until(lambda: [h["state"] for h in world.hosts()] == ["ready", "ready"], running.describe)
    code, output, _ = world.call("status")
    assert code == 0 and output.count("ready") == 2
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 128 + signal.SIGTERM
    world.assert_nothing_left()
    code, output, _ = world.call("logs", "--slice", "1", "--host", "0")
    assert "==> worker-1-0.log <==" in output and "==> worker-1-0.2.log <==" in output


def test_a_stopped_worker_can_be_continued_or_killed(world: World) -> None:
    running = start(world)
    running.says("waiting", "stdout")
    [host] = world.hosts()
    family = [psutil.Process(host["pid"]), *psutil.Process(host["pid"]).children(recursive=True)]
    assert world.call("kill", "slice=0,host=0", "--signal", "STOP")[0] == 0
    until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in family))
    assert world.call("kill", "slice=0,host=0", "--signal", "CONT")[0] == 0
    until(lambda: all(p.status() != psutil.STATUS_STOPPED for p in family))
    assert world.call("kill", "slice=0", "--signal", "STOP")[0] == 0
    until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in family))
    code, _, errors = world.call("kill", "slice=0")
    assert code == 0, errors
    running.says("worker of slice 0 host 0 killed by SIGKILL")
    until(lambda: [h["state"] for h in world.hosts()] == ["ready"], running.describe)
    for wrong, words in (("slice=1", "has slices 0..0"), ("slice=0,host=3", "there is no slice 0 host 3")):
        code, _, errors = world.call("kill", wrong)
        assert code == 2 and words in errors and len(errors.splitlines()) == 1


def test_a_standby_takes_the_place(world: World) -> None:
    running = start(world, "--slices", "2", "--standby", "1", "--replacement-delay-seconds", "0.3")
    running.says("a standby is ready")
    before = world.status()
    [standby] = before["standbys"]
    assert world.call("kill", "slice=1")[0] == 0
    running.says("a standby (takes|has taken) its place")
    until(lambda: world.hosts()[1]["pid"] == standby["pid"], running.describe)
    until(lambda: [s["state"] for s in world.status()["standbys"]] == ["ready"], running.describe)
    running.process.send_signal(signal.SIGTERM)
    running.wait()
    world.assert_nothing_left()


def test_a_slice_whose_restarts_are_used_up_is_given_up(world: World) -> None:
    running = start(world, "--slices", "2", "--max-slice-restarts", "0")
    running.says("waiting", "stdout")
    assert world.call("kill", "slice=1")[0] == 0
    running.says("slice 1 is given up")
    assert [piece["state"] for piece in world.status()["slices"]] == ["up", "down"]
    running.process.send_signal(signal.SIGTERM)
    running.wait()
    assert any("slice 1 was given up" in line for line in running.stderr)
    world.assert_nothing_left()


def test_a_worker_killed_during_the_start_is_replaced(world: World) -> None:
    running = start(world, "--slices", "2")
    running.says("starting 2 workers")

    def agents() -> list[psutil.Process]:
        return [p for p in world.processes() if "ridgeway.worker.agent" in p.cmdline()]

    until(agents)[0].kill()
    running.says("cluster is ready")
    running.says("waiting", "stdout")
    running.process.send_signal(signal.SIGTERM)
    running.wait()
    world.assert_nothing_left()


def test_workers_that_cannot_start_fail_the_start_with_the_reason(world: World) -> None:
    broken = world.folder / "broken"
    broken.mkdir()
    (broken / "jax.py").write_text("raise ImportError('this jax is broken on purpose')\n")
    path = os.pathsep.join([str(broken), world.environment["PYTHONPATH"]])
    running = start(world, PYTHONPATH=path)
    assert running.wait() == 2, running.describe()
    last = running.stderr[-1]
    assert last.startswith("ridgeway: error: ") and "this jax is broken on purpose" in last
    assert "waiting" not in running.stdout
    world.assert_nothing_left()


def test_a_start_that_takes_too_long_ends(world: World) -> None:
    slow = world.folder / "slow"
    slow.mkdir()
    (slow / "jax.py").write_text("import time; time.sleep(600)\n")
    path = os.pathsep.join([str(slow), world.environment["PYTHONPATH"]])
    running = start(world, "--start-timeout-seconds", "2", PYTHONPATH=path)
    assert running.wait() == 2
    assert "slices [0] of cluster 'ridgeway' are not ready after 2 s" in running.stderr[-1]
    world.assert_nothing_left()


def test_children_of_the_command_get_its_signals_too(world: World) -> None:
    pid_file = world.folder / "pid"
    command = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); print('waiting', flush=True); child.wait()"
    )
    running = start(world, command=command)
    running.says("waiting", "stdout")
    running.process.send_signal(signal.SIGTERM)
    running.wait()
    world.assert_nothing_left()
    assert pid_file.read_text()
