"""What a user gets wrong is one line on stderr, exit code 2, and nothing left running."""

import socket
import subprocess
import sys

import pytest
from cli_harness import World

from ridgeway.cli.main import main

PORTS = ("--proxy-port", "0", "--cluster-port", "0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--slices", "0", "--", "true"), "slices is '0'; a topology is three positive integers"),
        (("run", "--slices", "-3", "--", "true"), "slices is '-3'; a topology is three positive integers"),
        (("run", "--hosts-per-slice", "two", "--", "true"), "hosts per slice is 'two'"),
        (("run", "--devices-per-host", "1.5", "--", "true"), "devices per host is '1.5'"),
        (("run", "--topology", "3x2", "--", "true"), "topology '3x2' is not three positive integers"),
        (("run", "--topology", "3x1x2", "--slices", "3", "--", "true"), "give one"),
        (("run", "--topology", "300x40x8", *PORTS, "--", "true"), "lower --slices"),
        (("run", *PORTS), "no command to run"),
        (("run", *PORTS, "--", "no-such-program"), "command 'no-such-program' not found"),
        (("run", *PORTS, "--", "/etc/passwd"), "it is not executable"),
        (("run", "--cluster", "a/b", *PORTS, "--", "true"), "cluster name 'a/b'"),
        (("run", "--proxy-port", "70000", "--", "true"), "70000 is not in the range"),
        (("run", "--proxy-port", "4567", "--cluster-port", "4567", "--", "true"), "they must differ"),
        (("run", "--standby", "-1", "--", "true"), "-1 is not in the range"),
        (("run", "--max-slice-restarts", "many", "--", "true"), "neither a count nor 'unlimited'"),
        (("run", "--set", "heartbeat", "--", "true"), "--set 'heartbeat' is not NAME=VALUE"),
        (("run", "--set", "no_such=1", "--", "true"), "unknown setting 'no_such'"),
        (("run", "--set", "heartbeat_timeout_seconds=soon", "--", "true"), "is not a float"),
        (("run", "--nonsense"), "No such option"),
        (("nonsense",), "No such command 'nonsense'"),
        (("status",), "no cluster is running"),
        (("status", "--cluster", "other"), "no cluster named 'other' is running"),
        (("down",), "no cluster is running"),
        (("kill", "slice=0"), "no cluster is running"),
        (("kill", "0"), "'0' names no worker"),
        (("kill", "host=1"), "names no slice"),
        (("kill", "slice=0,host=x"), "names no worker"),
        (("kill", "slice=0", "--signal", "HUP"), "'HUP' is not one of"),
        (("events",), "no cluster was started here yet"),
        (("events", "--kind", "host_lots"), "'host_lots' (did you mean 'host_lost'?); known: arrays_made"),
        (("events", "--cluster", "other"), "cluster 'other' has no logs"),
        (("timeline",), "no cluster was started here yet"),
        (("logs",), "no cluster was started here yet"),
        (("logs", "--host", "1"), "--host needs --slice"),
        (("logs", "--head", "--slice", "0"), "give one"),
        (("head", "--slices", "1"), "no cluster secret"),
        (("worker", "--head", "127.0.0.1:1"), "no cluster secret"),
        (("worker", "--slice", "1"), "--head"),
    ],
)
def test_one_line(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    for name, value in world.environment.items():
        if name.startswith("XDG_"):
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("RIDGEWAY_CLUSTER_SECRET", raising=False)
    try:
        code = main(list(arguments))
    except SystemExit as error:
        code = error.code
    output, errors = capsys.readouterr()
    assert code == 2, errors
    assert words in errors
    assert len(errors.splitlines()) == 1, errors
    assert output == ""
    world.assert_nothing_left()


@pytest.mark.parametrize("option", ["--proxy-port", "--cluster-port"])
def test_a_port_in_use(world: World, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, _, errors = world.call("run", *PORTS, option, str(port), "--", "true")
    assert code == 2
    assert f"port {port} on 127.0.0.1 cannot be used (Address already in use)" in errors and option in errors
    assert len(errors.splitlines()) == 1
    world.assert_nothing_left()


def test_a_secret_file_that_others_can_read(world: World) -> None:
    path = world.folder / "secret"
    path.write_text("hidden\n")
    path.chmod(0o644)
    code, _, errors = world.call("worker", "--head", "127.0.0.1:1", "--secret-file", str(path))
    assert code == 2 and f"run: chmod 600 {path}" in errors and len(errors.splitlines()) == 1


def test_a_runtime_folder_that_is_not_ours_alone(world: World) -> None:
    world.runtime.mkdir(mode=0o777)
    world.runtime.chmod(0o777)
    code, _, errors = world.call("status")
    assert code == 2 and "not a folder of yours alone" in errors


@pytest.mark.parametrize("verb", ["run", "up", "down", "status", "events", "timeline", "logs", "kill", "head"])
def test_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"Usage: ridgeway {verb}" in capsys.readouterr().out


def test_general_help_and_version(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and main(["--help"]) == 0
    assert capsys.readouterr().out.count("Commands:") == 2
    code, output, _ = world.call("--version")
    assert code == 0 and output.startswith("ridgeway, version ")
    code, output, _ = world.call("worker", "--help")
    assert code == 0 and "--head HOST:PORT" in output


def test_the_command_starts_without_jax(world: World) -> None:
    code = (
        "import sys, ridgeway.cli.main as m; c = [m.cli.get_command(None, n) for n in m.cli.list_commands(None)];"
        "print(sorted({'jax', 'numpy', 'rich', 'grpc', 'matplotlib', 'psutil'} & set(sys.modules)))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], env=world.environment, text=True)
    assert output.strip() == "[]"
