"""Requests to the server in place of programs."""

import base64
import json

import pytest

from ridgeway.protocol import messages
from ridgeway.protocol.status import Code, StatusError
from ridgeway.proxy import plugin_programs


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


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"__serialized_plugin_program not json", Code.INVALID_ARGUMENT),
        (b"[]", Code.INVALID_ARGUMENT),
        (request(), Code.INVALID_ARGUMENT),
        (request(printTextRequest={"badParamName": "foo"}), Code.UNIMPLEMENTED),
        (request(reshardRequest={"inSharding": []}), Code.INVALID_ARGUMENT),
        (request(reshardRequest={"inSharding": [sharding(1)], "outSharding": []}), Code.INVALID_ARGUMENT),
        (request(reshardRequest={"inSharding": [{"devices": 3}], "outSharding": [1]}), Code.INVALID_ARGUMENT),
    ],
)
def test_a_bad_request_is_the_programs_mistake(data: bytes, code: Code) -> None:
    with pytest.raises(StatusError) as caught:
        plugin_programs.parse(data)
    assert caught.value.status.code is code
    assert "Bad PluginProgram" in caught.value.status.message
