"""The side channel by which a client's profiler also gets the traces of the cluster, and how traces are put together.

Beside the IFRT proxy's service the server's port has a gRPC method for it, a stream of MessagePack lists::

    client -> server   ["start", options]              once, first; see `Options`
    server -> client   ["started"] or ["refused", why]
    client -> server   ["stop"]
    server -> client   ["part", name, start, bytes that follow], ["data", bytes]*   once for each process
                       ["end", [problem, ...]]

A part is a serialized `tensorflow.profiler.XSpace`, the format of jaxlib's profiler, which xprof and perfetto read.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ridgeway.protocol import messages

SERVICE = "ridgeway.Profiling"
METHOD = "Run"
PATH = f"/{SERVICE}/{METHOD}"
CHUNK_BYTES = 2 << 20

PLANE_PREFIX = "/device:CUSTOM:"
"""Planes whose names begin so are shown whatever they are of (XLA's ``kCustomPlanePrefix``); of several planes of a
host's threads in one trace only one would be."""
_FIRST_PLANE_ID = 1000
"""Beyond the ids of the planes that the controller's own profiler makes: the trace viewer tells planes by them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What to record; levels as in `jax.profiler.ProfileOptions`."""

    host_tracer_level: int = 2
    python_tracer_level: int = 0
    seconds: float = 0.0
    """recording ends after so long by itself; 0: only when it is stopped"""

    def to_fields(self) -> list[int | float]:
        """For a message."""
        return [self.host_tracer_level, self.python_tracer_level, self.seconds]

    @classmethod
    def from_fields(cls, fields: Any) -> "Options":
        """The inverse of `to_fields`.

        Raises:
          ValueError: it is something else.
        """
        if not isinstance(fields, list) or len(fields) != 3 or not all(type(field) in (int, float) for field in fields):
            raise ValueError("profile options are a list of three numbers")
        host, python, seconds = fields
        return cls(max(0, min(int(host), 3)), max(0, min(int(python), 3)), max(0.0, float(seconds)))


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What one process recorded. Times in ``data`` count from ``start`` (nanoseconds since 1970)."""

    name: str
    start: int
    data: bytes


def together(traces: Iterable[Trace]) -> bytes:
    """One serialized XSpace of several processes' traces, with times since 1970: each of their planes that has events
    becomes one with the process's name.

    Raises:
      ValueError: a trace is no XSpace.
    """
    result = messages.XSpace()
    for trace in traces:
        try:
            space = messages.XSpace.FromString(trace.data)
        except Exception as error:
            raise ValueError(f"the trace of {trace.name} cannot be read: {error}") from None
        shown = [plane for plane in space.planes if plane.lines]
        for index, plane in enumerate(shown):
            for line in plane.lines:
                line.timestamp_ns += trace.start
            copy = result.planes.add()
            copy.CopyFrom(plane)
            copy.id = _FIRST_PLANE_ID + len(result.planes)
            # Names distinguish planes too.
            copy.name = PLANE_PREFIX + trace.name + ("" if index == 0 else f" {plane.name.strip('/')}")
    return result.SerializeToString()


def chunks(trace: Trace) -> Iterable[list[Any]]:
    """The messages that carry a trace."""
    yield ["part", trace.name, trace.start, len(trace.data)]
    view = memoryview(trace.data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield ["data", bytes(view[start : start + CHUNK_BYTES])]


class Collector:
    """Puts traces together again from messages, with a bound on their size."""

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._parts: list[tuple[str, int, int, list[bytes]]] = []
        self.problems: list[str] = []
        self.ended = False

    def add(self, message: list[Any]) -> None:
        """A message of the server.

        Raises:
          ValueError: it is none of a trace, or there is more than the bound.
        """
        match message:
            case ["part", str(name), int(start), int(size)]:
                self._bytes += size
                if self._bytes > self._limit_bytes:
                    raise ValueError(f"the traces of the cluster have more than {self._limit_bytes} bytes")
                self._parts.append((name, start, size, []))
            case ["data", bytes(data)] if self._parts:
                _, _, size, pieces = self._parts[-1]
                pieces.append(data)
                if sum(map(len, pieces)) > size:
                    raise ValueError("a trace has more bytes than were announced")
            case ["end", list(problems)]:
                self.problems = [str(problem) for problem in problems]
                self.ended = True
            case _:
                raise ValueError(f"not a message of a trace: {str(message[0])[:40]!r}")

    def traces(self) -> list[Trace]:
        """What has come."""
        return [Trace(name, start, b"".join(pieces)) for name, start, _, pieces in self._parts]
