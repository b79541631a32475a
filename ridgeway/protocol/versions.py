"""Versions of the IFRT proxy protocol this server speaks, and of the jax releases it is built for.

The windows were read off the wire: stock clients of the whole range offer protocol 16..25, and serialization
0..4 (jaxlib 0.11.0), 0..5 (0.11.1), 0..6 (0.11.2), 2..6 (0.12.0, 0.12.0.1). All were served, also by servers of
the others: the messages of the protocol itself are the same in all of them.
"""

from dataclasses import dataclass
from typing import Any

from ridgeway.protocol import status

#: Lowest and highest protocol version this server answers with (`IfrtProxyVersion.protocol_version`).
MIN_PROTOCOL_VERSION = 16
MAX_PROTOCOL_VERSION = 25

#: Lowest and highest serialization version (`IfrtProxyVersion.ifrt_serdes_version_number`).
MIN_SERDES_VERSION = 2
MAX_SERDES_VERSION = 6

#: First jax release supported, and the first release after the last supported one.
MIN_JAX_VERSION = (0, 11, 0)
JAX_VERSION_LIMIT = (0, 13, 0)

#: The supported range, as shown to people.
SUPPORTED_JAX = "0.11.0 to 0.12.x"


@dataclass(frozen=True, slots=True)
class ProxyVersion:
    """A pair of protocol and serialization version, as carried by `xla.ifrt.proxy.IfrtProxyVersion`."""

    protocol: int
    serdes: int


MIN_VERSION = ProxyVersion(MIN_PROTOCOL_VERSION, MIN_SERDES_VERSION)
MAX_VERSION = ProxyVersion(MAX_PROTOCOL_VERSION, MAX_SERDES_VERSION)


def version_from_proto(proto: Any) -> ProxyVersion:
    """Read an `IfrtProxyVersion` message."""
    return ProxyVersion(proto.protocol_version, proto.ifrt_serdes_version_number)


def fill_version_proto(proto: Any, version: ProxyVersion) -> None:
    """Write `version` into an `IfrtProxyVersion` message."""
    proto.protocol_version = version.protocol
    proto.ifrt_serdes_version_number = version.serdes


def negotiate(client_min: ProxyVersion, client_max: ProxyVersion) -> ProxyVersion:
    """Choose the highest version both sides speak, for the protocol and for serialization separately.

    Raises:
        StatusError: FAILED_PRECONDITION, naming both windows, if either has no version in common;
            INVALID_ARGUMENT if the client's own window is empty.
    """
    offered = (
        f"the client offers protocol {client_min.protocol}..{client_max.protocol} and "
        f"serialization {client_min.serdes}..{client_max.serdes}"
    )
    if client_min.protocol > client_max.protocol or client_min.serdes > client_max.serdes:
        raise status.invalid_argument(f"Empty version window: {offered}.").error()
    chosen = ProxyVersion(
        min(client_max.protocol, MAX_PROTOCOL_VERSION),
        min(client_max.serdes, MAX_SERDES_VERSION),
    )
    lowest = ProxyVersion(
        max(client_min.protocol, MIN_PROTOCOL_VERSION),
        max(client_min.serdes, MIN_SERDES_VERSION),
    )
    if chosen.protocol < lowest.protocol or chosen.serdes < lowest.serdes:
        raise status.failed_precondition(
            f"No IFRT proxy version in common: {offered}; this server speaks protocol "
            f"{MIN_PROTOCOL_VERSION}..{MAX_PROTOCOL_VERSION} and serialization "
            f"{MIN_SERDES_VERSION}..{MAX_SERDES_VERSION}. Use jax {SUPPORTED_JAX} in "
            "the program that connects."
        ).error()
    return chosen


def is_supported_jax(version: str) -> bool:
    """Whether a version of jax or jaxlib, such as "0.12.0.1" or "0.12.1.dev2026", is supported."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if len(digits) != len(part):
            break
    return len(numbers) >= 2 and MIN_JAX_VERSION[:2] <= tuple(numbers[:2]) < JAX_VERSION_LIMIT[:2]
