"""What people get wrong, against a cluster that runs: one line that says what to do, an exit code, nothing left."""

import importlib.metadata
import re

import e2e_harness as harness
import grpc
import pytest
from e2e_harness import Cluster, Controller, Place, total

from ridgeway.protocol import messages, versions
from ridgeway.protocol.status import RETRIED_CODES
from ridgeway.protocol.versions import ProxyVersion
from ridgeway.transport import blocking_link
from ridgeway.worker.agent_core import EXIT_PLACE_TAKEN, EXIT_REFUSED
from ridgeway.worker.process_identity import hello_versions

pytestmark = harness.MARKS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--topology", "3x0x2", "--", "true"), r"hosts per slice is '0'; .* three positive integers"),
        (("run", "--slices", "three", "--", "true"), r"slices is 'three'; .* three positive integers"),
        (("up", "--topology", "4000x1x8", *harness.ANY_PORTS), r"needs about .* GiB .* lower --slices"),
        (("run", *harness.ANY_PORTS, "--", "no-such-program"), r"command 'no-such-program' not found .* correct PATH"),
        (("run", *harness.ANY_PORTS, "--set", "orphan_policy=stay", "--", "true"), r"neither 'exit' nor 'wait'"),
    ],
)
def test_a_wrong_command_line(place: Place, arguments: tuple[str, ...], words: str) -> None:
    code, output, errors = place.call(*arguments)
    assert code == 2 and output == ""
    assert len(errors.splitlines()) == 1 and re.search(words, errors), errors
    place.assert_nothing_left()


@pytest.mark.parametrize("option", ["--proxy-port", "--cluster-port"])
def test_a_port_that_another_cluster_has(cluster: Cluster, place: Place, option: str) -> None:
    port = cluster.record.proxy_port if option == "--proxy-port" else cluster.record.cluster_port
    code, output, errors = place.call("run", *harness.ANY_PORTS, option, str(port), "--", "true")
    assert code == 2 and output == ""
    assert len(errors.splitlines()) == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in errors and f"choose another with {option}" in errors
    place.assert_nothing_left()


def refused_worker(
    cluster: Cluster, place: Place, secret: str, *arguments: str, exit_code: int = EXIT_REFUSED, **environment: str
) -> str:
    """The one line with which a worker that must not join ends."""
    before = cluster.hosts()
    worker = place.ridgeway(
        "worker", "--head", f"127.0.0.1:{cluster.record.cluster_port}", *arguments,
        RIDGEWAY_CLUSTER_SECRET=secret, **environment,
    )  # fmt: skip
    assert worker.wait() == exit_code, worker.describe()
    assert worker.stdout == [] and len(worker.stderr) == 1, worker.describe()
    place.assert_nothing_left()
    assert cluster.hosts() == before
    return worker.stderr[0]


def test_a_worker_with_another_jaxlib(cluster: Cluster, place: Place) -> None:
    # The worker is a real one that finds another release's metadata before the installed one.
    metadata = place.folder / "other" / "jaxlib-0.10.2.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.10.2\n")
    path = f"{metadata.parents[1]}:{place.environment['PYTHONPATH']}"
    line = refused_worker(cluster, place, cluster.record.secret, PYTHONPATH=path)
    assert f"this cluster runs jaxlib {importlib.metadata.version('jaxlib')}" in line
    assert "has 0.10.2; install the same version on every host" in line


def test_a_worker_with_another_secret(cluster: Cluster, place: Place) -> None:
    line = refused_worker(cluster, place, "not the secret of this cluster")
    assert "has another cluster secret" in line and "give this worker the secret of that cluster" in line


def test_a_worker_for_a_place_that_is_taken(cluster: Cluster, place: Place) -> None:
    taken = ("--slice", "1", "--host", "0")
    line = refused_worker(cluster, place, cluster.record.secret, *taken, exit_code=EXIT_PLACE_TAKEN)
    assert "slice 1 host 0 is taken" in line and "choose another slot or --standby" in line
    line = refused_worker(cluster, place, cluster.record.secret)
    assert "all 3 host slots of this 3x1x2 cluster are taken; start it with --standby" in line
    line = refused_worker(cluster, place, cluster.record.secret, "--slice", "7", "--host", "0")
    assert "no slice 7" in line


def test_a_stranger_who_says_hello(cluster: Cluster) -> None:
    link = blocking_link.connect("127.0.0.1", cluster.record.cluster_port, cluster.record.secret, 10.0)
    try:
        link.set_timeout(harness.DEADLINE_SECONDS)
        hello = {"role": "executor", "agent": 1, "executor": 999_999, "pid": 1, "versions": hello_versions()}
        link.send(["hello", {**hello, "transfer_host": "127.0.0.1", "transfer_port": 1}])
        answer, _ = link.receive()
        assert answer[:2] == ["refused", "INVALID_ARGUMENT"] and "stale" in answer[2]
    finally:
        link.close()


def test_a_client_whose_protocol_window_does_not_overlap(cluster: Cluster) -> None:
    request = messages.GrpcGetVersionRequest()
    lowest = ProxyVersion(versions.MAX_PROTOCOL_VERSION + 1, versions.MIN_SERDES_VERSION)
    highest = ProxyVersion(versions.MAX_PROTOCOL_VERSION + 9, versions.MAX_SERDES_VERSION)
    versions.fill_version_proto(request.min_version, lowest)
    versions.fill_version_proto(request.max_version, highest)
    with grpc.insecure_channel(f"127.0.0.1:{cluster.record.proxy_port}") as channel:
        call = channel.unary_unary(f"/{messages.SERVICE_NAME}/GetVersion")
        with pytest.raises(grpc.RpcError) as raised:
            call(request.SerializeToString(), timeout=harness.DEADLINE_SECONDS)
    error = raised.value
    assert isinstance(error, grpc.Call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    details = error.details() or ""
    assert f"the client offers protocol {lowest.protocol}..{highest.protocol}" in details
    assert f"this server speaks protocol {versions.MIN_PROTOCOL_VERSION}..{versions.MAX_PROTOCOL_VERSION}" in details
    assert f"Use jax {versions.SUPPORTED_JAX}" in details and "\n" not in details


def test_a_program_with_credentials_that_the_proxy_does_not_have(cluster: Cluster) -> None:
    # The program itself would fail only after two minutes of trying to connect (jaxlib 0.12). Where the variable is not
    # set at all, Ridgeway's plugin sets it.
    environment = {**cluster.environment(), "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "false"}
    code, output, _ = cluster.place.call("doctor", **environment)
    assert code == 1
    [line] = [line for line in output.splitlines() if line.startswith("PROBLEM")]
    assert "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS is 'false'" in line
    assert "export IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true" in line


def test_a_program_that_cannot_be_compiled(cluster: Cluster, controller: Controller) -> None:
    text = controller.error_of("""
call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((3,), np.float32))
jax.jit(call).lower(np.ones(3, np.float32)).compile()
""")
    assert text.startswith("UNIMPLEMENTED: ") and "no_such_target" in text
    # A mistake of the program: elastic managers must not take it for a lost slice and try for ever.
    assert not any(code.name in text for code in RETRIED_CODES)
    assert controller.run("result = float(mix(sharded(devices_of(0, 1, 2)), 3).sum())") == total(6)
