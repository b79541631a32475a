"""Compiled programs and the executables that sessions make of them."""

import dataclasses
import hashlib
from typing import Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.protocol import messages, shardings
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import Status
from ridgeway.proxy.host_callbacks import HostCallback

DEFAULT_MEMORY_KIND = "device"


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledProgram:
    """What compiling gave, independent of devices, sessions and generations.

    ``metadata`` is described at `ridgeway.worker.compilation.compile_program`.
    """

    key: str
    metadata: dict[str, Any]
    serialized: bytes
    options: bytes
    replicas: int
    partitions: int
    private: bool = False
    """compiled for one session, whose Python was asked"""


def program_key(artifact: bytes, options: bytes, replicas: int, partitions: int, platform: str) -> str:
    """What identifies a compilation: program, options without devices, number of devices, platform (with the
    versions that compiled code depends on)."""
    digest = hashlib.sha256()
    for part in (artifact, options, f"{replicas}x{partitions}".encode(), platform.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


class Executable:
    """A compiled program on given devices, as one session holds it."""

    def __init__(
        self, compiled: CompiledProgram, assignment: tuple[tuple[int, ...], ...],
        callbacks: dict[int, HostCallback] | None = None,
    ):  # fmt: skip
        self.compiled = compiled
        self.callbacks = callbacks or {}
        """its host callbacks by their handles in the session"""
        self.running = 0
        """executions that are not complete, counted if there are callbacks"""
        self.dropped = False
        """the client has no use for it any more"""
        self.assignment = assignment
        self.devices = tuple(device for row in assignment for device in row)
        self.name: str = compiled.metadata["name"]
        self.key = compiled.key[:32]
        self.program = f"{self.key}@{hashlib.sha256(repr(assignment).encode()).hexdigest()[:16]}"
        if self.callbacks:
            # Nobody else's: what it calls belongs to this session.
            self.program += "#" + ",".join(str(callback.number) for callback in self.callbacks.values())
        self.donated = frozenset(compiled.metadata["donated"])
        self.arguments = len(compiled.metadata["inputs"])
        self.executions = 0
        self.executors: tuple[ExecutorLink, ...] | Status = ()
        self.epoch = -1
        self.outputs: list[tuple[int, tuple[int, ...], Sharding]] = []
        self.response = messages.LoadedExecutableExecuteResponse()
        """what an execution is answered with, but for the handles"""
        self._describe_outputs()

    def _describe_outputs(self) -> None:
        metadata = self.compiled.metadata
        op_shardings = metadata["output_shardings"]
        for index, (shape, kind) in enumerate(metadata["outputs"]):
            memory_kind = self.output_memory_kind(index)
            if len(self.devices) == 1:
                blob = shardings.single_device_sharding_proto(self.devices[0], memory_kind)
            else:
                op_sharding = b"" if op_shardings is None else op_shardings[index]  # empty: replicated
                blob = shardings.hlo_sharding_proto(self.devices, op_sharding, memory_kind)
            output = self.response.outputs.add()
            output.dtype.kind = kind
            output.shape.dims.extend(shape)
            output.sharding.MergeFromString(blob)
            self.outputs.append((kind, tuple(shape), shardings.parse(output.sharding)))

    def output_memory_kind(self, index: int) -> str | None:
        """The memory kind of a result, None for the device's default."""
        kinds = self.compiled.metadata["output_memory_kinds"]
        kind = kinds[index] if index < len(kinds) else None
        return None if kind == DEFAULT_MEMORY_KIND else kind

    def load_order(self) -> tuple[list[Any], list[bytes]]:
        """The order that gives this program to an executor."""
        metadata = self.compiled.metadata
        kinds = [self.output_memory_kind(index) for index in range(len(metadata["outputs"]))]
        return [
            "load", self.program, self.name, self.compiled.options, self.assignment, metadata["inputs"],
            metadata["outputs"], kinds, [[c.number, c.results] for c in self.callbacks.values()],
        ], [self.compiled.serialized]  # fmt: skip
