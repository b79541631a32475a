import importlib.util
import re
from pathlib import Path

import pytest

from ridgeway.protocol import messages, status
from ridgeway.protocol.status import Code, Status

# Texts as XLA, gloo, NCCL and jax's distributed runtime write them.
COLLECTIVE_TEXTS = [
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
    "peer [127.0.0.1]:41532",
    "INTERNAL: Error dispatching computation: UNKNOWN: Gloo collective permute failed: Read error "
    "[127.0.0.1]:1: Connection reset by peer",
    "UNKNOWN: Gloo context initialization failed: [gloo/gloo/rendezvous/context.cc:60] Connect timeout",
    "DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:gloo/0,1/0 and duration: 30s",
    "ALREADY_EXISTS: Config key cpu:gloo/0,2048/0/1 already exists.",
    "XlaRuntimeError: UNKNOWN: Gloo AllGather failed: Timed out waiting 30000ms for recv operation",
    "INTERNAL: [id=3] Termination timeout for `all reduce` of 40 seconds exceeded. Expected 4 threads to "
    "join the rendezvous, but only 3 of them arrived on time.",
    "INTERNAL: NCCL operation ncclAllReduce(send, recv) failed: remote process exited or there was a network error",
    "ABORTED: Execution was aborted",
    "CANCELLED: ",
    "UNAVAILABLE: Socket closed",
    "INTERNAL: Failed to acquire clique: a peer task died",
    "INTERNAL: Broken pipe",
    "FAILED_PRECONDITION: The coordination service is not running",
]

# What a program, its arguments or its size does, and the code it must come back with.
PROGRAM_TEXTS = [
    ("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.", Code.RESOURCE_EXHAUSTED),
    (
        "INTERNAL: Out of memory allocating 12 bytes; while running all-reduce.3 in clique 0,1",
        Code.RESOURCE_EXHAUSTED,
    ),
    ("NOT_FOUND: failed to allocate buffer of 12GiB", Code.RESOURCE_EXHAUSTED),
    ("std::bad_alloc", Code.RESOURCE_EXHAUSTED),
    ("INTERNAL: NCCL operation ncclCommInitRank failed: CUDA error 'out of memory'", Code.RESOURCE_EXHAUSTED),
    ("INTERNAL: Buffer has been deleted or donated.", Code.INVALID_ARGUMENT),
    (
        "INVALID_ARGUMENT: Attempt to donate the same buffer twice in Execute() (flattened argument 1)",
        Code.INVALID_ARGUMENT,
    ),
    ("NOT_FOUND: Array has been deleted.", Code.INVALID_ARGUMENT),
    ("CANCELLED: GetReadyFuture() called on deleted or donated buffer", Code.INVALID_ARGUMENT),
    ("INVALID_ARGUMENT: Unknown datatype in allreduce", Code.INVALID_ARGUMENT),
    ("INVALID_ARGUMENT: Collective permute instruction failed verification", Code.INVALID_ARGUMENT),
    ("UNIMPLEMENTED: rendezvous on this platform", Code.UNIMPLEMENTED),
    ("NOT_FOUND: No registered implementation for custom call to foo for platform Host", Code.UNIMPLEMENTED),
    ("INTERNAL: RET_CHECK failure (xla/service/x.cc:3) a == b", Code.UNKNOWN),
    ("INTERNAL: CpuCallback error calling callback: ConnectionResetError: connection reset", Code.UNKNOWN),
    ("INVALID_ARGUMENT: shape named DATA_LOSS with NOT_FOUND and INTERNAL", Code.INVALID_ARGUMENT),
    ("some text of a Python exception: DEADLINE_EXCEEDED", Code.UNKNOWN),
    ("INTERNAL", Code.UNKNOWN),
    ("", Code.UNKNOWN),
    ("FAILED_PRECONDITION: not now", Code.FAILED_PRECONDITION),
]


def is_retried(text: str) -> bool:
    """As `pathwaysutils.elastic.is_error_due_to_slice_down` looks at the text of an error."""
    return any(word in text for word in ("DATA_LOSS", "DEADLINE_EXCEEDED", "NOT_FOUND", "INTERNAL"))


@pytest.mark.parametrize("text", COLLECTIVE_TEXTS)
def test_a_broken_collective_is_data_loss(text: str) -> None:
    assert status.is_collective_failure(text)
    result = status.classify_runtime_error(text)
    assert result.code is Code.DATA_LOSS
    assert text.rsplit(": ", 1)[-1].strip() in str(result)


@pytest.mark.parametrize(("text", "code"), PROGRAM_TEXTS)
def test_what_a_program_does_is_never_retried(text: str, code: Code) -> None:
    assert not status.is_collective_failure(text)
    result = status.classify_runtime_error(text)
    assert result.code is code
    assert not is_retried(str(result))
    assert result.message


@pytest.mark.parametrize("code", [Code.DATA_LOSS, Code.DEADLINE_EXCEEDED])
def test_a_loss_or_a_deadline_keeps_its_code(code: Code) -> None:
    result = status.classify_runtime_error(f"jaxlib.JaxRuntimeError: {code.name}: host 3 is down")
    assert result == Status(code, "host 3 is down")


def test_long_reports_are_read_at_both_ends() -> None:
    filling = "collective nccl peer barrier communicator gloo " * 20_000
    assert status.classify_runtime_error(f"INTERNAL: out of memory {filling}").code is Code.RESOURCE_EXHAUSTED
    assert status.classify_runtime_error(f"INTERNAL: {filling} out of memory").code is Code.RESOURCE_EXHAUSTED
    ended = status.classify_runtime_error(f"INTERNAL: {filling} Connection closed by peer")
    assert ended.code is Code.DATA_LOSS
    assert len(ended.message) > len(filling)
    unclear = status.classify_runtime_error(f"INTERNAL: {filling}")
    assert unclear.code is Code.UNKNOWN


def test_the_retried_words_are_those_of_the_installed_pathwaysutils() -> None:
    spec = importlib.util.find_spec("pathwaysutils")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pathwaysutils is not installed")
    source = (Path(spec.submodule_search_locations[0]) / "elastic" / "elastic.py").read_text()
    listed = re.findall(r"_ERROR_TYPES = frozenset\(\[(.*?)\]\)", source, re.DOTALL)
    words = {word for part in listed for word in re.findall(r'"(\w+)"', part)}
    assert words == {code.name for code in status.RETRIED_CODES}


@pytest.mark.parametrize(
    "make",
    [status.invalid_argument, status.unimplemented, status.resource_exhausted, status.failed_precondition],
)
def test_statuses_for_user_mistakes_hide_the_retried_words(make: object) -> None:
    result = make("no INTERNAL_thing, DATA_LOSS or NOT_FOUND")  # type: ignore[operator]
    assert not is_retried(str(result))
    assert result.message == "no internal_thing, data loss or not found"


def test_an_error_carries_its_status() -> None:
    with pytest.raises(status.StatusError, match=r"DATA_LOSS: host 2 died") as caught:
        raise status.data_loss("host 2 died").error()
    assert caught.value.status == Status(Code.DATA_LOSS, "host 2 died")
    assert not caught.value.status.ok


@pytest.mark.parametrize("code", list(Code))
def test_statuses_survive_the_wire(code: Code) -> None:
    given = Status(code, "a text")
    proto = messages.StatusProto()
    status.fill_status_proto(proto, given)
    assert status.status_from_proto(messages.StatusProto.FromString(proto.SerializeToString())) == given


def test_ok_is_present_on_the_wire() -> None:
    response = messages.IfrtResponse()
    status.fill_status_proto(response.response_metadata.status, status.OK)
    read = messages.IfrtResponse.FromString(response.SerializeToString())
    assert read.response_metadata.HasField("status")
    assert status.status_from_proto(read.response_metadata.status) is status.OK


def test_codes_have_the_numbers_of_the_protocol() -> None:
    described = messages.StatusProto.DESCRIPTOR.fields_by_name["code"].enum_type.values_by_name
    assert {code.name: int(code) for code in Code} == {
        name: value.number for name, value in described.items() if value.number <= 16
    }


def test_an_unknown_code_is_reported_as_unknown() -> None:
    proto = messages.StatusProto(code=20, message="new")
    assert status.status_from_proto(proto) == Status(Code.UNKNOWN, "status code 20: new")
