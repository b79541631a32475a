"""Requests that jax sends rarely, or only in other releases, one by one at the server's port."""

import contextlib
from collections.abc import Iterator
from typing import Any

import e2e_harness as harness
import numpy as np
import pytest
from e2e_harness import Cluster, until
from port_client import F32, PortClient

from ridgeway.protocol import dtypes, messages, shardings
from ridgeway.protocol.status import RETRIED_CODES, Code

pytestmark = harness.MARKS

S32 = dtypes.kind_by_name("S32")
VALUES = np.arange(1, 9, dtype=np.float32)
HANDLE = 1
DEVICE = 1


class Session:
    """A client with an array of `VALUES` under `HANDLE` on `DEVICE`."""

    def __init__(self, client: PortClient):
        self.client = client
        number = client.send("init_request", client.body("init_request"))
        self.number = until(lambda: client.answers.get(number)).init_response.session_id
        client.make_array(self.number, HANDLE, DEVICE, VALUES.tobytes())

    def ask(self, kind: str, body: Any) -> tuple[Code, str, Any]:
        """Code, message and body of the answer."""
        number = self.client.send(kind, body)
        response = until(lambda: self.client.answers.get(number))
        status = response.response_metadata.status
        return Code(status.code), status.message, getattr(response, kind.replace("_request", "_response"))

    def read(self, handle: int) -> bytes:
        """The bytes of an array.

        Raises:
          AssertionError: with the error that is its value.
        """
        body = self.client.body("copy_to_host_buffer_request")
        body.array_handle, body.host_buffer_handle = handle, 1000 + handle
        code, text, _ = self.ask("copy_to_host_buffer_request", body)
        assert code is Code.OK, f"{code.name}: {text}"
        return self.client.look_up(self.number, 1000 + handle)

    def error_of(self, handle: int) -> str:
        """The error that is the value of an array."""
        with pytest.raises(AssertionError) as caught:
            self.read(handle)
        return str(caught.value)


@pytest.fixture
def session(cluster: Cluster) -> Iterator[Session]:
    """A session with one array, on the cluster of three slices with two devices each."""
    with contextlib.closing(PortClient(cluster.record.proxy_port)) as client:
        yield Session(client)
    cluster.wait_sessions(0)


def fill_spec(spec: Any, kind: int, shape: tuple[int, ...], *devices: int) -> None:
    """An `ArraySpecProto`: on one device, or replicated over several."""
    spec.dtype.kind = kind
    spec.shape.dims.extend(shape)
    if len(devices) == 1:
        spec.sharding.MergeFromString(shardings.single_device_sharding_proto(devices[0]))
    else:
        replicated = messages.OpSharding(type=0).SerializeToString()
        spec.sharding.MergeFromString(shardings.hlo_sharding_proto(devices, replicated))


def test_bitcast_reads_the_same_bytes(session: Session) -> None:
    body = session.client.body("bitcast_arrays_request")
    body.array_handles.extend([HANDLE, HANDLE, HANDLE])
    body.result_handles.extend([2, 3, 4])
    fill_spec(body.array_specs.add(), S32, (2, 4), DEVICE)
    fill_spec(body.array_specs.add(), F32, (8,), DEVICE)  # nothing changes: no bytes are read
    fill_spec(body.array_specs.add(), S32, (7,), DEVICE)
    code, _, response = session.ask("bitcast_arrays_request", body)
    assert code is Code.OK and list(response.array_handles) == [2, 3, 4]
    assert session.read(2) == session.read(3) == VALUES.tobytes()
    assert "INVALID_ARGUMENT" in session.error_of(4) and "differ in size" in session.error_of(4)


def test_reshard_spreads_over_slices_and_donates(session: Session) -> None:
    body = session.client.body("reshard_arrays_request")
    body.array_handles.append(HANDLE)
    body.result_handles.append(2)
    body.copy_semantics = 3  # donate
    fill_spec(body.array_specs.add(), F32, (8,), 0, 2, 4, 5)
    assert session.ask("reshard_arrays_request", body)[0] is Code.OK
    deleted = session.client.body("is_array_deleted_request")
    deleted.array_handle = HANDLE
    assert session.ask("is_array_deleted_request", deleted)[2].deleted
    disassemble = session.client.body("disassemble_into_single_device_arrays_request")
    disassemble.array_handle = 2
    _, _, response = session.ask("disassemble_into_single_device_arrays_request", disassemble)
    assert [session.read(handle) for handle in response.array_handles] == [VALUES.tobytes()] * 4
    assert "deleted or donated" in session.error_of(HANDLE)


def test_remap_by_positions_as_older_clients_ask(session: Session) -> None:
    session.client.make_array(session.number, 2, 3, (VALUES * 2).tobytes())
    body = session.client.body("remap_arrays_request")
    body.array_handles.extend([HANDLE, 2])
    body.result_handles.append(3)
    fill_spec(body.plan.output_specs.add(), F32, (8,), 3, DEVICE)
    for source, place in ((1, 0), (0, 1)):
        mapping = body.plan.mappings.add(in_array=source, out_array=0)
        for name, value in (("from_start", 0), ("from_end", 1), ("to_start", place), ("to_end", place + 1)):
            getattr(mapping, name).append(value)
        mapping.from_step.append(1)
        mapping.to_step.append(1)
    assert session.ask("remap_arrays_request", body)[0] is Code.OK
    assert session.read(3) == (VALUES * 2).tobytes()
    body.plan.mappings.pop()
    del body.result_handles[:]
    body.result_handles.append(4)
    session.ask("remap_arrays_request", body)
    assert f"no shards for devices [{DEVICE}]" in session.error_of(4)


def test_an_error_array_is_its_error_whatever_is_made_of_it(session: Session) -> None:
    body = session.client.body("make_error_arrays_request")
    body.error.code, body.error.message = int(Code.DATA_LOSS), "the first cause"
    body.array_handles.append(2)
    fill_spec(body.array_specs.add(), F32, (8,), 0, 1)
    assert session.ask("make_error_arrays_request", body)[0] is Code.OK
    copy = session.client.body("copy_arrays_request")
    copy.array_handles.append(2)
    copy.result_handles.append(3)
    copy.device_ids.extend([4, 5])
    copy.copy_semantics = 3
    assert session.ask("copy_arrays_request", copy)[0] is Code.OK
    shard = session.client.body("fully_replicated_shard_request")
    shard.array_handle, shard.result_handle = 3, 4
    assert session.ask("fully_replicated_shard_request", shard)[0] is Code.OK
    for handle in (2, 3, 4):
        assert "DATA_LOSS: the first cause" in session.error_of(handle)
    ready = session.client.body("check_value_ready_request")
    ready.value_handles.append(4)
    assert session.ask("check_value_ready_request", ready)[:2] == (Code.DATA_LOSS, "the first cause")


def test_a_refused_request_binds_its_error_to_what_it_was_to_make(session: Session) -> None:
    body = session.client.body("copy_arrays_request")
    body.array_handles.append(77)
    body.result_handles.append(78)
    code, text, _ = session.ask("copy_arrays_request", body)
    assert code is Code.INVALID_ARGUMENT and "no array 77" in text
    assert "no array 77" in session.error_of(78)  # a client that does not wait for the answer still learns why
    execute = session.client.body("loaded_executable_execute_request")
    execute.loaded_executable_handle = 5
    execute.result_array_handle.append(79)
    execute.result_status_handle = 80
    assert session.ask("loaded_executable_execute_request", execute)[0] is Code.INVALID_ARGUMENT
    assert "no executable 5" in session.error_of(79)
    fetch = session.client.body("loaded_executable_fetch_execute_result_request")
    fetch.result_status_handle = 80
    assert "no executable 5" in session.ask("loaded_executable_fetch_execute_result_request", fetch)[1]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("loaded_executable_mpmd_metadata_request", Code.UNIMPLEMENTED),
        ("loaded_executable_mpmd_cost_analysis_request", Code.UNIMPLEMENTED),
        ("loaded_executable_metadata_request", Code.INVALID_ARGUMENT),
        ("loaded_executable_cost_analysis_request", Code.INVALID_ARGUMENT),
        ("loaded_executable_human_readable_program_text_request", Code.INVALID_ARGUMENT),
        ("loaded_host_callback_return_request", Code.INVALID_ARGUMENT),
        ("check_future_request", Code.INVALID_ARGUMENT),
        ("is_array_deleted_request", Code.INVALID_ARGUMENT),
        ("compile_request", Code.UNIMPLEMENTED),
    ],
)
def test_a_mistake_is_not_taken_for_a_lost_slice(session: Session, kind: str, code: Code) -> None:
    found, text, _ = session.ask(kind, session.client.body(kind))
    assert found is code and text
    assert not any(retried.name in text for retried in RETRIED_CODES), text
