"""Processes, machines and the connections between them, with everything that goes wrong there."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ridgeway.transport import frames
from ridgeway.transport.stream_link import LinkClosed

Item = tuple[list[Any], list[bytes]] | None
"""A message with its buffers, or the end of the stream."""

LATENCY_SECONDS = 0.0004
JITTER_SECONDS = 0.002


class SimulationFailure(AssertionError):
    """Something happened that must not."""


class World:
    """Clock, chance, and who can reach whom, of one history."""

    def __init__(self, random_source: random.Random):
        self.random = random_source
        self.loop = asyncio.get_running_loop()
        self.log: list[str] = []
        self.over = False
        """the history has ended; what is still cleared away is no part of it"""
        self.failure: asyncio.Future[None] = self.loop.create_future()
        self.unreachable: set[frozenset[str]] = set()
        """pairs of machines whose worker-to-worker connections are cut"""
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self.loop.set_exception_handler(self._callback_failed)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.loop.time()

    def number(self) -> int:
        """A fresh number: a pid, a port."""
        self._numbers += 1
        return self._numbers

    def say(self, text: str) -> None:
        """Keep a line for whoever reads a failing history."""
        if not self.over:
            self.log.append(f"{self.now:9.4f}  {text}")

    def violation(self, text: str) -> None:
        """Something happened that must not: the history ends."""
        error = SimulationFailure(text)
        if not self.failure.done():
            self.failure.set_exception(error)
        raise error

    def _callback_failed(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception") or SimulationFailure(context["message"])
        if not self.failure.done():
            self.failure.set_exception(error)

    def task(self, work: Any) -> "asyncio.Task[None]":
        """Run a coroutine; what it raises ends the history."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)

    def can_reach(self, one: "Machine", other: "Machine") -> bool:
        """Whether two workers' own connections get through."""
        return not self.unreachable or frozenset((one.name, other.name)) not in self.unreachable


class Machine:
    """Where processes run: it can be slow, and cut off from the head in either direction."""

    def __init__(self, world: World, name: str):
        self.world = world
        self.name = name
        self.slowness = 1.0
        self.blocked = {"to_head": False, "from_head": False}
        self.touched: str | None = None
        """the fault that was done to it, if any: only then may what runs on it be lost"""
        self.was_ready = False
        self.pipes: list[Pipe] = []

    def heal(self) -> None:
        """Let everything through again, in order."""
        self.blocked = dict.fromkeys(self.blocked, False)
        for pipe in self.pipes:
            pipe.flush()


class Process:
    """Something that can be killed, stopped and continued. What happens to it goes through `run`."""

    def __init__(self, machine: Machine, name: str):
        self.machine = machine
        self.world = machine.world
        self.name = name
        self.pid = machine.world.number()
        self.alive = True
        self.stopped = False
        self.connections: list[Connection] = []
        self.on_end: Callable[[int], None] | None = None
        self._held: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function as this process: never once it is dead, later while it is stopped."""
        if not self.alive:
            return
        if self.stopped:
            self._held.append((function, arguments))
        else:
            function(*arguments)

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """`run` later; on a slow machine later still."""
        self.world.loop.call_later(seconds * self.machine.slowness, self.run, function, *arguments)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive:
            self.stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        while self._held and self.alive and not self.stopped:
            function, arguments = self._held.popleft()
            function(*arguments)

    def end(self, exit_code: int) -> None:
        """The process is gone; the kernel closes its connections."""
        if not self.alive:
            return
        self.alive = False
        self._held.clear()
        for connection in self.connections:
            connection.process_gone()
        self.ended()
        if self.on_end is not None:
            self.world.loop.call_later(self.world.random.uniform(0.0005, 0.01), self.on_end, exit_code)

    def kill(self) -> None:
        """SIGKILL."""
        self.end(-9)

    def ended(self) -> None:
        """For subclasses: just died."""


class Pipe:
    """One direction of a connection: in order, after a delay, and not while the machine is cut off."""

    def __init__(self, machine: Machine, direction: str, deliver: Callable[[Item], None]):
        self._world = machine.world
        self._machine = machine
        self._direction = direction
        self._deliver = deliver
        self._queue: deque[tuple[float, Item]] = deque()
        self._last = 0.0
        machine.pipes.append(self)

    def put(self, item: Item) -> None:
        """Send a message, or the end."""
        world = self._world
        delay = (LATENCY_SECONDS + world.random.random() * JITTER_SECONDS) * self._machine.slowness
        self._last = max(self._last, world.loop.time() + delay)
        self._queue.append((self._last, item))
        world.loop.call_at(self._last, self.flush)

    def flush(self) -> None:
        """Deliver what is due."""
        now = self._world.loop.time() + 1e-9
        while self._queue and not self._machine.blocked[self._direction] and self._queue[0][0] <= now:
            self._deliver(self._queue.popleft()[1])

    def lose_tail(self) -> None:
        """A broken connection loses what is under way, from some message on."""
        keep = self._world.random.randint(0, len(self._queue))
        while len(self._queue) > keep:
            self._queue.pop()

    def drop(self) -> None:
        """Nobody reads any more."""
        self._queue.clear()


class Connection:
    """A link between the head and a process; `head` is the head's end, with the interface of `StreamLink`."""

    def __init__(
        self,
        process: Process,
        head_gate: "Process",
        on_message: Callable[[list[Any], list[bytes]], None],
        on_closed: Callable[[], None],
    ):
        self._process = process
        self._on_message = on_message
        self._on_closed = on_closed
        self._to_head = Pipe(process.machine, "to_head", lambda item: head_gate.run(self.head.arrived, item))
        self._from_head = Pipe(process.machine, "from_head", lambda item: process.run(self._arrived, item))
        # A head that is stopped says nothing, whatever its tasks would like to.
        put = self._from_head.put
        self.head = HeadLink(lambda item: head_gate.run(put, item), self._head_closed)
        self._open = True
        process.connections.append(self)

    def send(self, message: Sequence[Any], buffers: Sequence[bytes] = ()) -> None:
        """The process sends; on a closed connection nothing happens, as its reader learns of that."""
        if self._open:
            self._to_head.put((list(message), list(buffers)))

    def _arrived(self, item: Item) -> None:
        if not self._open:
            return
        if item is None:
            self._end()
            self._on_closed()
        else:
            self._on_message(*item)

    def close(self) -> None:
        """The process closes its end."""
        if self._open:
            self._end()
            self._to_head.put(None)

    def process_gone(self) -> None:
        """The kernel closes the end of a process that died; some of what it sent may be lost with it."""
        if self._open:
            self._end()
            if self._process.world.random.random() < 0.5:
                self._to_head.lose_tail()
            self._to_head.put(None)

    def reset(self) -> None:
        """The network breaks the connection: both ends see it closed."""
        if self._open:
            self._to_head.lose_tail()
            self._from_head.lose_tail()
            self._to_head.put(None)
            self._from_head.put(None)

    def _head_closed(self) -> None:
        self._to_head.drop()
        self._from_head.lose_tail()
        self._from_head.put(None)

    def _end(self) -> None:
        self._open = False
        self._process.connections.remove(self)


class HeadLink:
    """The head's end, with what the head uses of `ridgeway.transport.stream_link.StreamLink`."""

    unsent_bytes = 0
    peer_address = "simulated"

    def __init__(self, put: Callable[[Item], None], on_close: Callable[[], None]):
        self._put = put
        self._on_close = on_close
        self._inbox: deque[Item] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self.closed = False
        self.watch: Callable[[Sequence[Any]], None] | None = None
        """sees every message that the head sends"""

    def send(self, message: Sequence[Any], buffers: Sequence[Any] = ()) -> None:
        if self.closed:
            return
        if self.watch is not None:
            self.watch(message)
        self._put((list(message), list(buffers)))

    def send_packed(self, frame: bytes) -> None:
        self.send(frames.unpack_body(frame[frames.PREFIX.size :]))

    async def drain(self) -> None:
        pass

    def arrived(self, item: Item) -> None:
        if self.closed:
            return
        self._inbox.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def receive(self) -> tuple[list[Any], list[bytes]]:
        while not self._inbox and not self.closed:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        item = None if self.closed else self._inbox.popleft()
        if item is None:
            raise LinkClosed("connection closed")
        return item

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._inbox.clear()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        self._on_close()

    async def close_gently(self, timeout_seconds: float) -> None:
        """What was sent arrives before the end does."""
        if not self.closed:
            self._put(None)
            self.closed = True
