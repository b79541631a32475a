"""Programs that ask the server itself for something: pathwaysutils' JSON requests in place of a program.

A request is a JSON object with one member, whose name says which kind it is.
"""

import base64
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ridgeway.protocol import messages, shardings
from ridgeway.protocol import status as statuses
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import StatusError
from ridgeway.proxy import profiling
from ridgeway.proxy.arrays import Array
from ridgeway.proxy.dispatch import Done
from ridgeway.proxy.persistence import ReadProgram, WriteProgram, parse_read, parse_write

if TYPE_CHECKING:
    from ridgeway.proxy.session import Session

PLUGIN_PROGRAM = "xla::ifrt::PluginProgram"
_PREFIX = b"__serialized_plugin_program "


class PluginProgram(Protocol):
    """A request that can be executed any number of times."""

    name: str
    devices: tuple[int, ...]
    """of its arguments: the client counts their shards"""

    def execute(self, session: "Session", arguments: list[Array], done: Done) -> list[Array]:
        """Start it; the results' values may be there later. ``done`` is called once, when all of it is done or with
        the first error.

        Raises:
          StatusError: the arguments do not fit; ``done`` is not called.
        """
        ...


class ReshardProgram:
    """``reshardRequest`` of `pathwaysutils.experimental.reshard`: each argument under another sharding."""

    name = "reshard"

    def __init__(self, body: Any):
        self._sources = [_sharding(entry) for entry in body["inSharding"]]
        self._targets = [_sharding(entry) for entry in body["outSharding"]]
        self._donate = bool(body.get("donateInput", False))
        if len(self._sources) != len(self._targets):
            raise ValueError("as many inSharding as outSharding")
        self.devices = self._sources[0].devices if self._sources else ()

    def execute(self, session: "Session", arguments: list[Array], done: Done) -> list[Array]:
        """See `PluginProgram`."""
        if len(arguments) != len(self._targets):
            raise statuses.invalid_argument(f"resharding {len(self._targets)} arrays, not {len(arguments)}").error()
        results = []
        for argument, target in zip(arguments, self._targets, strict=True):
            result = Array(argument.kind, argument.shape, target)
            session.services.dispatcher.reshard(argument, result, reuse=True)
            if self._donate:
                argument.give_away()
            results.append(result)
        session.services.dispatcher.ready(results, done)
        return results


_KINDS: dict[str, Callable[[Any], PluginProgram]] = {
    "reshardRequest": ReshardProgram,
    "persistenceWriteRequest": lambda body: WriteProgram([parse_write(body)]),
    "persistenceReadRequest": lambda body: ReadProgram([parse_read(body)]),
    "bulk_persistence_write_request": lambda body: WriteProgram([parse_write(each) for each in body["write_requests"]]),
    "bulk_persistence_read_request": lambda body: ReadProgram([parse_read(each) for each in body["read_requests"]]),
    profiling.REQUEST_KIND: profiling.ProfileProgram,
}


def parse(data: bytes) -> PluginProgram:
    """The program in a serialized `PluginProgram`.

    Raises:
      StatusError: INVALID_ARGUMENT, it cannot be read, or is of a kind that is not known here (pathwaysutils' tests
        expect this code for it).
    """
    try:
        [(kind, body)] = json.loads(data.removeprefix(_PREFIX)).items()
    except (ValueError, AttributeError):
        raise statuses.invalid_argument("Bad PluginProgram: not a JSON object with one member").error() from None
    make = _KINDS.get(kind)
    if make is None:
        raise statuses.invalid_argument(
            f"Bad PluginProgram: requests of kind {kind!r} are not supported; known: {', '.join(_KINDS)}"
        ).error()
    try:
        return make(body)
    except StatusError:
        raise
    except Exception as error:
        raise statuses.invalid_argument(f"Bad PluginProgram: {kind}: {error!r}").error() from None


def close(program: PluginProgram, session: "Session") -> None:
    """The client has dropped a program, or is gone."""
    if isinstance(program, profiling.ProfileProgram):
        program.close(session)


def _sharding(entry: Any) -> Sharding:
    devices = tuple(int(device) for device in entry["devices"]["device_ids"])
    blob = shardings.hlo_sharding_proto(
        devices, base64.b64decode(entry["xla_hlo_sharding"]), entry.get("memory_kind") or None
    )
    return shardings.parse(messages.ShardingProto.FromString(blob))
