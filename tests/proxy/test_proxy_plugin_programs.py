"""Requests to the server in place of programs."""

import base64
import json

import pytest

from ridgeway.protocol import dtypes, messages
from ridgeway.protocol.status import Code, StatusError
from ridgeway.proxy import persistence, plugin_programs


def request(**members: object) -> bytes:
    return b"__serialized_plugin_program " + json.dumps(members).encode()


def sharding(*devices: int) -> dict[str, object]:
    replicated = base64.b64encode(messages.OpSharding(type=0).SerializeToString()).decode()
    return {"devices": {"device_ids": devices}, "xla_hlo_sharding": replicated, "memory_kind": "pinned_host"}


def test_a_reshard_request_names_the_devices_of_its_arguments() -> None:
    program = plugin_programs.parse(
        request(reshardRequest={"donateInput": True, "inSharding": [sharding(4, 2)], "outSharding": [sharding(1)]})
    )
    assert (program.name, program.devices) == ("reshard", (4, 2))


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


def persistent(**changes: object) -> dict[str, object]:
    """An array of a read request; of a write request with ``shape=[4, 2]``."""
    described: dict[str, object] = {
        "b64_location": text("/checkpoints/1"),
        "b64_name": text("params.w"),
        "b64_hlo_sharding_string": sharding(0)["xla_hlo_sharding"],
        "shape": {"xla_primitive_type_str": "BF16", "dimensions": [4, 2]},
        "devices": {"device_ids": [3, 1]},
        "timeout": {"seconds": 2, "nanos": 500_000_000},
    }
    return described | changes


def test_persistence_requests_come_alone_or_in_bulk() -> None:
    write, read = persistent(shape=[4, 2]), persistent()
    for name, body in (
        ("persistence_write", {"persistenceWriteRequest": write}),
        ("persistence_write", {"bulk_persistence_write_request": {"write_requests": [write, write]}}),
        ("persistence_read", {"persistenceReadRequest": read}),
        ("persistence_read", {"bulk_persistence_read_request": {"read_requests": [read, read]}}),
    ):
        program = plugin_programs.parse(request(**body))
        assert (program.name, program.devices) == (name, (3, 1))


def test_a_persistence_request_is_read_as_the_client_wrote_it() -> None:
    target = persistence.parse_read(persistent())
    assert (target.location, target.name, target.shape) == ("/checkpoints/1", "params.w", (4, 2))
    assert (dtypes.kind_name(target.kind), target.sharding.devices, target.timeout_seconds) == ("BF16", (3, 1), 2.5)
    assert persistence.parse_write(persistent(shape=[], timeout=None)).timeout_seconds == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"b64_location": text("relative/path")}, Code.INVALID_ARGUMENT),
        ({"b64_location": "?"}, Code.INVALID_ARGUMENT),
        ({"b64_name": text("../../etc")}, Code.INVALID_ARGUMENT),
        ({"b64_name": text("")}, Code.INVALID_ARGUMENT),
        ({"b64_hlo_sharding_string": text("nonsense")}, Code.INVALID_ARGUMENT),
        ({"shape": {"xla_primitive_type_str": "F99", "dimensions": [4]}}, Code.UNIMPLEMENTED),
        ({"shape": {"xla_primitive_type_str": "F32", "dimensions": [-4]}}, Code.INVALID_ARGUMENT),
        ({"shape": [4]}, Code.INVALID_ARGUMENT),
        ({"devices": {"device_ids": []}}, Code.INVALID_ARGUMENT),
        ({"devices": {"device_ids": [1, 1]}}, Code.INVALID_ARGUMENT),
        ({"devices": 3}, Code.INVALID_ARGUMENT),
        ({"timeout": {"seconds": "soon"}}, Code.INVALID_ARGUMENT),
    ],
)
def test_a_bad_persistence_request_is_the_programs_mistake(changes: dict[str, object], code: Code) -> None:
    with pytest.raises(StatusError) as caught:
        plugin_programs.parse(request(persistenceReadRequest=persistent(**changes)))
    assert caught.value.status.code is code


def test_a_profile_request_is_known_in_both_of_its_forms() -> None:
    plain = {"traceLocation": "/tmp/profiles", "maxNumHosts": 1, "includeResourceManagers": True}
    xprof = {"traceDirectory": "/tmp/profiles", "hostTraceLevel": 1, "pwTraceOptions": {"enablePythonTracer": True}}
    for body in (plain, {**plain, "xprofTraceOptions": xprof, "maxDurationSecs": 1.5}):
        program = plugin_programs.parse(request(profileRequest=body))
        assert (program.name, program.devices) == ("profile", (0,))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"__serialized_plugin_program not json", Code.INVALID_ARGUMENT),
        (b"[]", Code.INVALID_ARGUMENT),
        (request(), Code.INVALID_ARGUMENT),
        (request(printTextRequest={"badParamName": "foo"}), Code.INVALID_ARGUMENT),
        (request(reshardRequest={"inSharding": []}), Code.INVALID_ARGUMENT),
        (request(profileRequest={"maxNumHosts": 1}), Code.INVALID_ARGUMENT),
        (request(profileRequest={"traceLocation": "x", "maxNumHosts": "many"}), Code.INVALID_ARGUMENT),
        (request(reshardRequest={"inSharding": [sharding(1)], "outSharding": []}), Code.INVALID_ARGUMENT),
        (request(reshardRequest={"inSharding": [{"devices": 3}], "outSharding": [1]}), Code.INVALID_ARGUMENT),
    ],
)
def test_a_bad_request_is_the_programs_mistake(data: bytes, code: Code) -> None:
    with pytest.raises(StatusError) as caught:
        plugin_programs.parse(data)
    assert caught.value.status.code is code
    assert "Bad PluginProgram" in caught.value.status.message
