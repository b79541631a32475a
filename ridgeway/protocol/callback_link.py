"""The side channel between a client with Ridgeway's plugin and the proxy server: host callbacks, workers' output.

jaxlib's client can announce host callbacks with a program, but its open build cannot run them.  So the plugin keeps a
stream of its own to the server's port, a gRPC method whose messages are MessagePack lists::

    client -> server   ["hello", client id]        once, first
                       ["result", call, bytes]
                       ["failed", call, text]      the callback raised
                       ["follow", session]         have what this session's colocated Python prints, be asked for it
                       ["flush", number]
    server -> client   ["ready"]                   once, first
                       ["call", call, callback number of this client, shapes of the operands, bytes]
                       ["ask", number, question]   what a compilation asks (`compiler_callbacks`), answered like a call
                       ["output", place, "stdout" or "stderr", line]
                       ["flushed", number]         all output that was there at that flush has been sent

Operands and results are the arrays' bytes, row-major, one after the other.  A program announces a callback with the
client's id and number as the lengths of a few more operands, which it does not have: nothing else of what jaxlib's
client sends about a callback can be chosen.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgpack

SERVICE = "ridgeway.HostCallbacks"
METHOD = "Run"
PATH = f"/{SERVICE}/{METHOD}"

type Client = tuple[int, ...]
"""Id of a process with the plugin."""

_CLIENT_PARTS = 3
_PART_LIMIT = 1 << 48
NAME_OPERANDS = _CLIENT_PARTS + 1


def pack(message: list[Any]) -> bytes:
    """A message."""
    return msgpack.packb(message, use_bin_type=True)  # pyright: ignore[reportReturnType]


def unpack(data: bytes) -> list[Any]:
    """The inverse of `pack`.

    Raises:
      ValueError: not a message.
    """
    try:
        message = msgpack.unpackb(data, raw=False)
    except Exception as error:
        raise ValueError(f"not a message: {error}") from None
    if not isinstance(message, list) or not message:
        raise ValueError("not a message: a list that begins with its kind is expected")
    return message


def new_client() -> Client:
    """An id for a client, random enough to be its own."""
    return tuple(secrets.randbelow(_PART_LIMIT) for _ in range(_CLIENT_PARTS))


def callback_name(client: Client, number: int) -> tuple[int, ...]:
    """The lengths of the first `NAME_OPERANDS` operands that the client declares for a callback, all of rank 1."""
    return (*client, number)


def parse_callback_name(shapes: Sequence[Sequence[int]]) -> tuple[Client, int]:
    """Client id and number from the shapes of those operands.

    Raises:
      ValueError: it is something else.
    """
    if len(shapes) != NAME_OPERANDS or any(len(shape) != 1 for shape in shapes):
        raise ValueError("a host callback that Ridgeway's plugin has not made")
    lengths = tuple(shape[0] for shape in shapes)
    return lengths[:-1], lengths[-1]
