"""What jaxlib gives the executors of a generation: a key-value service to meet at, and collectives.

It has the habits that were measured with real processes: whoever enters waits for all others; a collective needs
every member, matches the members' calls by their order alone, and after a death some survivors get an error while
others hang until they abort; a service that ends takes whoever is attached to it along.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulated_network import World

from ridgeway.protocol.status import Code, Status

if TYPE_CHECKING:
    from simulated_executor import SimulatedExecutor

BROKEN = Status(Code.ABORTED, "collective failed: Gloo all-reduce failed: Connection closed by peer")

Done = Callable[[int | Status], None]


@dataclasses.dataclass(slots=True)
class Call:
    """One member's part in a collective execution."""

    execution: int
    value: int
    done: Done
    answered: bool = False


class XlaWorld:
    """The executors that met at one service."""

    def __init__(self, world: World, port: int):
        self._world = world
        self.port = port
        self.generation: int | None = None
        self.attached: dict[int, SimulatedExecutor] = {}
        """by rank"""
        self._arrivals: dict[int, asyncio.Future[None]] = {}
        self._cliques: dict[tuple[int, ...], list[dict[int, Call]]] = {}

    def arrive(self, executor: "SimulatedExecutor", generation: int, rank: int, count: int) -> "asyncio.Future[None]":
        """Attach; the future is done when all ``count`` members have met."""
        if self.generation not in (None, generation):
            self._world.violation(
                f"the service of generation {self.generation} was given to generation {generation} too"
            )
        self.generation = generation
        if rank in self.attached:
            self._world.violation(f"two executors entered generation {generation} as rank {rank}")
        self.attached[rank] = executor
        future = self._arrivals[rank] = self._world.loop.create_future()
        if len(self._arrivals) == count:
            self._world.loop.call_later(self._world.random.uniform(0.005, 0.03), self._all_here, count)
        return future

    def _all_here(self, count: int) -> None:
        if len(self.attached) < count or not all(e.alive for e in self.attached.values()):
            return  # somebody died or gave up meanwhile: the others wait in vain
        if not self._connected(list(self.attached.values())) or any(e.stopped for e in self.attached.values()):
            self._world.loop.call_later(0.05, self._all_here, count)
            return
        for future in self._arrivals.values():
            if not future.done():
                future.set_result(None)

    def _connected(self, executors: "list[SimulatedExecutor]") -> bool:
        reach = self._world.can_reach
        return all(reach(a.machine, b.machine) for a in executors for b in executors if a is not b)

    def detach(self, executor: "SimulatedExecutor") -> None:
        """A member leaves: what it still had to do in collectives never happens."""
        for rank, member in list(self.attached.items()):
            if member is executor:
                del self.attached[rank]

    def call(self, clique: tuple[int, ...], rank: int, execution: int, value: int, done: Done) -> Call:
        """A member's part of an execution among the ranks of ``clique`` begins."""
        call = Call(execution, value, done)
        rounds = self._cliques.setdefault(clique, [])
        mine = next((round for round in rounds if rank not in round), None)
        if mine is None:
            mine = {}
            rounds.append(mine)
        mine[rank] = call
        missing = [member for member in clique if member not in self.attached or not self.attached[member].alive]
        if missing and self._world.random.random() < 0.5:
            # A neighbour of the dead one sees its connection closed; the others hang.
            self._world.loop.call_later(self._world.random.uniform(0.0, 0.01), self._finish, call, rank, BROKEN)
        elif len(mine) == len(clique):
            self._world.loop.call_later(self._world.random.uniform(0.001, 0.01), self._complete, clique, mine)
        return call

    def _complete(self, clique: tuple[int, ...], calls: dict[int, Call]) -> None:
        members = [self.attached.get(rank) for rank in clique]
        if any(member is None or not member.alive for member in members):
            for rank, call in calls.items():
                if self._world.random.random() < 0.5:
                    self._finish(call, rank, BROKEN)
            return
        executions = {call.execution for call in calls.values()}
        if len(executions) > 1:
            # Nobody would notice: the numbers would be wrong.
            self._world.violation(
                f"members of generation {self.generation} run executions {sorted(executions)} against each other"
            )
        present = [member for member in members if member is not None]
        if not self._connected(present) or any(member.stopped for member in present):
            self._world.loop.call_later(0.05, self._complete, clique, calls)
            return
        if len({call.value for call in calls.values()}) > 1:
            self._world.violation(f"members of generation {self.generation} computed with different values")
        for rank, call in calls.items():
            # Not at the same moment everywhere: a death may fall between.
            self._world.loop.call_later(self._world.random.uniform(0.0, 0.004), self._finish, call, rank, call.value)

    def _finish(self, call: Call, rank: int, result: int | Status) -> None:
        executor = self.attached.get(rank)
        if call.answered or executor is None or not executor.alive:
            return
        call.answered = True
        executor.run(call.done, result)

    def member_died(self, executor: "SimulatedExecutor") -> None:
        """Connections to it break: its neighbours' collectives fail, the others' hang."""
        ranks = [rank for rank, member in self.attached.items() if member is executor]
        for clique, rounds in list(self._cliques.items()):
            if not any(rank in clique for rank in ranks):
                continue
            for calls in list(rounds):
                for rank, call in list(calls.items()):
                    if not call.answered and rank not in ranks and self._world.random.random() < 0.5:
                        self._finish(call, rank, BROKEN)


class SimulatedRendezvous:
    """The head's handle for key-value services, as `ridgeway.cluster.rendezvous.Rendezvous` has it."""

    def __init__(self, world: World, spare: int, is_lost: "Callable[[SimulatedExecutor], bool]"):
        self._world = world
        self._spare = spare
        self._is_lost = is_lost
        self._ready: list[int] = []
        self._being_made = 0
        self.worlds: dict[int, XlaWorld] = {}
        self.outage_until = 0.0
        self.open_services = 0
        self._fill()

    def _fill(self) -> None:
        while len(self._ready) + self._being_made < self._spare:
            self._being_made += 1
            delay = max(self.outage_until - self._world.now, 0.0) + self._world.random.uniform(0.002, 0.02)
            self._world.loop.call_later(delay, self._made)

    def _made(self) -> None:
        self._being_made -= 1
        port = self._world.number()
        self.worlds[port] = XlaWorld(self._world, port)
        self._ready.append(port)

    def take_nowait(self) -> int | None:
        port = self._ready.pop(0) if self._ready else None
        self._fill()
        if port is not None:
            self.open_services += 1
        return port

    def close_service(self, port: int) -> None:
        xla = self.worlds.pop(port)
        self.open_services -= 1
        for executor in xla.attached.values():
            if executor.alive and not self._is_lost(executor):
                self._world.violation(f"the service of generation {xla.generation} ended under {executor.name}")

    def crash(self) -> None:
        """The process with all services dies."""
        self._ready.clear()
        for xla in self.worlds.values():
            for executor in list(xla.attached.values()):
                executor.machine.touched = "service died"
                executor.after(self._world.random.uniform(0.001, 0.05), executor.end, -6)
            xla.attached.clear()
            xla.generation = -1
        self._fill()
