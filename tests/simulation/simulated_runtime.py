"""What an executor holds and runs: numbers in the place of arrays, and executions that come to an end by themselves."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from simulated_xla import Call, XlaWorld

from ridgeway.protocol.status import Status


def mix(program: str, values: list[int]) -> int:
    """What a program computes, in executors and in the controller that checks them."""
    result = sum(program.encode())
    for value in values:
        result = (result * 1_000_003 + value) % (1 << 62)
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationFailure(Status):
    """As `ridgeway.worker.failures.GenerationFailure`, which would bring jax along."""

    generation: int = 0


class Pending:
    """A value that comes later: a number, or the error in its place."""

    def __init__(self) -> None:
        self.value: int | Status | None = None
        self._callbacks: list[Callable[[], None]] = []

    def resolve(self, value: int | Status) -> None:
        if self.value is None:
            self.value = value
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        if self.value is None:
            self._callbacks.append(callback)
        else:
            callback()


class Promise(Pending):
    """Bytes on their way."""

    claimed = False
    claimed_at = 0.0
    source: int | None = None


class Execution(Pending):
    """One execution on one runtime; its results all have its value."""

    def __init__(self, runtime: "Runtime", number: int, program: "Program", inputs: list["int | Pending"]):
        super().__init__()
        self.runtime = runtime
        self.number = number
        self.program = program
        self.inputs = inputs
        self.call: Call | None = None


Shard = int | Status | Pending


class Program:
    """A loaded program: a name, its devices, and which arguments it takes over."""

    def __init__(self, name: str, devices: tuple[int, ...], donated: tuple[int, ...]):
        self.name = name
        self.devices = devices
        self.donated = donated


class Runtime:
    """A client: alone, or a member of a generation."""

    def __init__(self, generation: int, first_devices: list[int], per_host: int, rank: int, xla: XlaWorld | None):
        self.generation = generation
        self.rank = rank
        self.xla = xla
        self.rank_of = {first + k: r for r, first in enumerate(first_devices) for k in range(per_host)}
        self.local = {device for device, owner in self.rank_of.items() if owner == rank}
        self.aborted: Status | None = None
        self.aborted_at = 0.0
        self.queue: list[Execution] = []
        self.changed: asyncio.Future[None] | None = None

    def poke(self) -> None:
        if self.changed is not None and not self.changed.done():
            self.changed.set_result(None)


class Waiters:
    """Answers that wait for what one runtime computes."""

    def __init__(self) -> None:
        self.tasks: dict[int, Callable[[Any, Status | None], None]] = {}
        self.completed = 0
        self._next = 0
        self._abandoned: Status | None = None

    def register(self, deliver: Callable[[Any, Status | None], None]) -> Callable[[Any, Status | None], None]:
        if self._abandoned is not None:
            deliver(None, self._abandoned)
            return lambda result, error: None
        self._next += 1
        number = self._next
        self.tasks[number] = deliver

        def finish(result: Any, error: Status | None) -> None:
            waiting = self.tasks.pop(number, None)
            if waiting is not None:
                waiting(result, error)

        return finish

    def abandon(self, cause: Status) -> None:
        self._abandoned = cause
        tasks, self.tasks = self.tasks, {}
        for deliver in tasks.values():
            deliver(None, cause)
