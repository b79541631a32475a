"""A compiled program as it travels: serialized, with what is needed to load and run it anywhere."""

import dataclasses
from typing import Any

import numpy as np

from ridgeway.protocol import dtypes

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramSource:
    """A program for one assignment of devices.

    ``inputs`` and ``outputs`` are global (shape, dtype) pairs; ``assignment`` has one row of device ids per replica.
    """

    program: str
    name: str
    options: bytes
    assignment: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[Shape, np.dtype], ...]
    outputs: tuple[tuple[Shape, np.dtype], ...]
    output_memory_kinds: tuple[str | None, ...]
    serialized: bytes
    callbacks: tuple[Any, ...] = ()
    """of each host callback its number and results, see `worker.callbacks`"""

    @property
    def devices(self) -> tuple[int, ...]:
        """Device ids in the program's order."""
        return tuple(device for row in self.assignment for device in row)

    def to_fields(self) -> list[Any]:
        """For a link, without the serialized executable (which goes as a buffer)."""
        return [
            self.program, self.name, self.options, self.assignment,
            [[shape, dtypes.kind_of_dtype(dtype)] for shape, dtype in self.inputs],
            [[shape, dtypes.kind_of_dtype(dtype)] for shape, dtype in self.outputs],
            self.output_memory_kinds, self.callbacks,
        ]  # fmt: skip


def from_fields(fields: list[Any], serialized: bytes) -> ProgramSource:
    """The inverse of `ProgramSource.to_fields`."""
    program, name, options, assignment, inputs, outputs, memory_kinds, callbacks = fields
    return ProgramSource(
        program, name, options, tuple(tuple(row) for row in assignment), _arrays(inputs), _arrays(outputs),
        tuple(memory_kinds), serialized, tuple(callbacks),
    )  # fmt: skip


def _arrays(pairs: list[Any]) -> tuple[tuple[Shape, np.dtype], ...]:
    return tuple((tuple(shape), dtypes.dtype_of_kind(kind)) for shape, kind in pairs)
