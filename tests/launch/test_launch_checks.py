"""What is looked at before a start, and what a program's environment becomes."""

import socket

import pytest

from ridgeway.cluster.topology import Topology
from ridgeway.launch import checks, environment, narration, supervision
from ridgeway.launch.checks import CheckError


def test_topologies():
    assert checks.parse_topology("3x1x2") == Topology(3, 1, 2)
    assert checks.parse_topology(" 3 X 4 X 4 ") == Topology(3, 4, 4)
    assert checks.make_topology("3", 1, "2") == Topology(3, 1, 2)


@pytest.mark.parametrize("text", ["", "3", "3x1", "3x1x2x1", "0x1x1", "3x-1x2", "3x1x2.0", "axbxc", "3x1x", "3x1x²"])
def test_what_is_no_topology(text):
    with pytest.raises(CheckError, match="three positive integers"):
        checks.parse_topology(text)


def test_ports():
    checks.check_port_free("127.0.0.1", 0, "--proxy-port")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CheckError, match=f"port {port} on 127.0.0.1 cannot be used .*--proxy-port"):
            checks.check_port_free("127.0.0.1", port, "--proxy-port")
    checks.check_port_free("127.0.0.1", port, "--proxy-port")


def test_memory():
    small, large = Topology(1, 1, 1), Topology(3, 4, 4)
    assert checks.cluster_bytes(small, 0) < checks.cluster_bytes(small, 1) < checks.cluster_bytes(large, 0)
    checks.check_memory(large, 2, checks.cluster_bytes(large, 2))
    with pytest.raises(CheckError, match=r"3x4x4 cluster with 2 standbys needs about .*--allow-overcommit"):
        checks.check_memory(large, 2, checks.cluster_bytes(large, 2) - 1)
    assert checks.available_bytes() > 0


def test_commands(tmp_path):
    checks.check_command(["true"])
    for command, words in ((["no-such-program"], "not on PATH"), ([], "no command"), (["/etc/passwd"], "executable")):
        with pytest.raises(CheckError, match=words):
            checks.check_command(command)


def test_the_commands_environment_is_what_it_was_and_three_variables():
    inherited = {"HOME": "/h", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--x"}
    assert environment.command_environment(inherited, "127.0.0.1", 29000) == {
        "HOME": "/h",
        "XLA_FLAGS": "--x",
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": "grpc://127.0.0.1:29000",
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    }
    runtime = environment.runtime_environment(environment.command_environment(inherited, "h", 1), "s3cret")
    assert runtime == {
        "HOME": "/h", "XLA_FLAGS": "--x", "RIDGEWAY_CLUSTER_SECRET": "s3cret"
    }  # fmt: skip


def test_events_in_plain_words_and_as_the_policy_sees_them():
    lost = {"kind": "host_lost", "slice": 2, "host": 1, "incarnation": 7, "cause": "its link closed"}
    assert narration.narrate(lost) == "slice 2 host 1 is lost: its link closed"
    assert narration.to_policy({**lost, "code": "DATA_LOSS"}) == supervision.HostLost(2, 1, 7, False)
    assert narration.to_policy({**lost, "code": "DEADLINE_EXCEEDED"}) == supervision.HostLost(2, 1, 7, True)
    executor = {**lost, "executor_only": True}
    assert narration.to_policy(executor) is None and "starts another one" in (narration.narrate(executor) or "")
    joining = {"kind": "host_joining", "slice": 0, "host": 0, "incarnation": 3, "launch_id": "launch-1"}
    assert narration.to_policy(joining) == supervision.HostJoining(0, 0, 3, "launch-1")
    assert narration.narrate(joining) is None
    generation = {"kind": "generation_ready", "generation": 2, "members": [[0, 0], [0, 1], [2, 0]], "seconds": 0.25}
    assert narration.narrate(generation) == "generation 2 of 3 hosts (slices 0, 2) made in 0.25 s"
    assert narration.narrate({"kind": "of the future"}) is None and narration.to_policy({}) is None
