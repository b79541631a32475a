"""The head's end of one executor: orders out in one sequence, replies in, and the verdict when it is lost."""

from collections.abc import Callable, Sequence
from typing import Any

from ridgeway.protocol.status import Code, Status
from ridgeway.transport import frames
from ridgeway.transport.frames import Buffer
from ridgeway.transport.stream_link import StreamLink

Reply = Callable[[Status | None, list[Any], list[bytes]], None]
"""Called once with (error or None, the reply's fields, its buffers)."""


class ExecutorLink:
    """One executor process.  After a loss it stays as the record of what was lost and why; its slot gets a new one.

    Every order has its place in one sequence per executor.  Nothing here waits.
    """

    def __init__(self, number: int, agent: int, link: StreamLink, transfer_host: str, transfer_port: int, pid: int):
        self.number = number
        self.agent = agent
        self.link = link
        self.transfer_host = transfer_host
        self.transfer_port = transfer_port
        self.pid = pid
        self.slot = -1
        self.place = "a standby"
        self.lost: Status | None = None
        self.loaded_programs: set[str] = set()
        self.memory_bytes = 0
        self.host_array_bytes = 0
        """Of arrays in its host memory (memory kind ``pinned_host``)."""
        self.executions = 0
        """Executions ordered so far."""
        self.ordered = 0
        """Orders sent so far; an executor that has dispatched fewer is behind."""
        self.progressed = 0.0
        self._observed = (0, 0)
        self._replies: dict[int, Reply] = {}
        self._next_request = 0
        self._free: list[int] = []

    def send(self, message: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send one order, after the frees that were decided before it. Dropped if the executor is lost."""
        if self.lost is None:
            if self._free:
                self.flush_frees()
            self.ordered += 1
            self.link.send(message, buffers)

    def send_packed(self, frame: bytes) -> None:
        """`send` of a frame that several executors get."""
        if self.lost is None:
            if self._free:
                self.flush_frees()
            self.ordered += 1
            self.link.send_packed(frame)

    def send_aside(self, message: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send something that the executor's reader acts on at once, outside the sequence of orders."""
        if self.lost is None:
            self.link.send(message, buffers)

    def request(self, kind: str, fields: Sequence[Any], on_reply: Reply, buffers: Sequence[Buffer] = ()) -> None:
        """Send an order that is answered. ``on_reply`` is called exactly once, with the loss if the executor is
        lost before it has answered."""
        if self.lost is not None:
            on_reply(self.lost, [], [])
            return
        self._next_request += 1
        self._replies[self._next_request] = on_reply
        self.send([kind, self._next_request, *fields], buffers)

    def observe_progress(self, now: float, dispatched: int, completed: int) -> None:
        """A heartbeat: note when this executor last got anywhere."""
        if (dispatched, completed) != self._observed:
            self.progressed = now
        self._observed = (dispatched, completed)

    def free(self, group: int) -> None:
        """Let the executor forget a buffer group; goes out with the next order, or by `flush_frees`."""
        if self.lost is None:
            self._free.append(group)

    def flush_frees(self) -> None:
        """Send the frees that were decided so far."""
        if self._free and self.lost is None:
            groups, self._free = self._free, []
            self.ordered += 1
            self.link.send_packed(frames.pack(["free", groups]))

    def on_reply(self, request: int, error: Status | None, fields: list[Any], buffers: list[bytes]) -> None:
        """A reply arrived."""
        callback = self._replies.pop(request, None)
        if callback is not None:
            callback(error, fields, buffers)

    @property
    def waiting_replies(self) -> int:
        """Requests that are not answered yet."""
        return len(self._replies)

    def lose(self, deadline: bool, description: str) -> Status:
        """Mark as lost and answer everything that waits; returns the status that all its data now has."""
        code = Code.DEADLINE_EXCEEDED if deadline else Code.DATA_LOSS
        status = Status(code, f"{self.place} (executor {self.number}) was lost: {description}")
        self.lost = status
        self.link.close()
        self._free = []
        replies, self._replies = self._replies, {}
        for callback in replies.values():
            callback(status, [], [])
        return status
