"""The head's end of one executor: orders out in one sequence, replies in, and the verdict when it is lost."""

from collections.abc import Callable, Sequence
from typing import Any

from ridgeway.cluster.backlog import Backlog
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

    def __init__(
        self, number: int, agent: int, link: StreamLink, transfer_host: str, transfer_port: int, pid: int,
        backlog: Backlog,
    ):  # fmt: skip
        self.number = number
        self.agent = agent
        self.link = link
        self.transfer_host = transfer_host
        self.transfer_port = transfer_port
        self.pid = pid
        self.backlog = backlog
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
        self._held: list[tuple[Any, Sequence[Buffer]]] | None = None
        self._saved = False
        self._on_answer: Callable[[], None] | None = None

    @property
    def suspended(self) -> bool:
        """Whether orders wait for a replacement that has the state."""
        return self._held is not None

    def suspend(self) -> None:
        """Hold every order from now on."""
        self._held = []

    def detach(self) -> None:
        """The state is saved: the process behind this link is nobody any more."""
        self._saved = True
        self.link.close()

    def adopt(self, other: "ExecutorLink") -> None:
        """Go on in another process, which has the state: everything that refers to this executor is valid again. The
        orders that waited go out, in order."""
        assert self._held is not None and self.lost is None
        self.number, self.agent, self.pid = other.number, other.agent, other.pid
        self.link, self.transfer_host, self.transfer_port = other.link, other.transfer_host, other.transfer_port
        self.memory_bytes, self.host_array_bytes = other.memory_bytes, other.host_array_bytes
        self.progressed, self._observed, self.ordered = other.progressed, other._observed, other.ordered
        self.loaded_programs.clear()
        self._saved = False
        held, self._held = self._held, None
        for message, buffers in held:
            if isinstance(message, bytes):
                self.send_packed(message)
            else:
                self.send(message, buffers)

    @property
    def held_orders(self) -> int:
        """Orders that wait while this executor is suspended."""
        return len(self._held or ())

    def send(self, message: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send one order, after the frees that were decided before it. Dropped if the executor is lost."""
        if self._held is not None:
            self._held.append((message, buffers))
        elif self.lost is None:
            if self._free:
                self.flush_frees()
            self.ordered += 1
            self.link.send(message, buffers)
            self._sent(1, buffers)

    def send_packed(self, frame: bytes) -> None:
        """`send` of a frame that several executors get."""
        if self._held is not None:
            self._held.append((frame, ()))
        elif self.lost is None:
            if self._free:
                self.flush_frees()
            self.ordered += 1
            self.link.send_packed(frame)
            self._sent(1, ())

    def send_promised(self, token: int, data: Buffer) -> None:
        """Send the bytes that an order before named by a token."""
        if self.lost is None:
            self.link.send(["data", token], [data])
            self._sent(0, (data,))

    def _sent(self, orders: int, buffers: Sequence[Buffer]) -> None:
        if self.backlog.sent(orders, sum(memoryview(buffer).nbytes for buffer in buffers)):
            taken = self.backlog.mark()
            self.request("reached", [], lambda *_: self.backlog.reached(*taken))

    def send_aside(self, message: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send something that the executor's reader acts on at once, outside the sequence of orders. One whose state is
        saved waits for nothing that this could be about."""
        if self.lost is None and not self._saved:
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

    @property
    def requests(self) -> int:
        """Requests made so far."""
        return self._next_request

    def request_last(self, kind: str, fields: Sequence[Any], on_reply: Reply) -> None:
        """A `request` whose answer is handed on only when all earlier ones are answered, whatever overtook what."""
        earlier = set(self._replies)
        if not earlier:
            self.request(kind, fields, on_reply)
            return
        answer: list[Any] = []

        def look() -> None:
            if answer and earlier.isdisjoint(self._replies):
                self._on_answer = None
                on_reply(*answer)

        def arrived(*what: Any) -> None:
            answer.extend(what)
            look()

        self._on_answer = look
        self.request(kind, fields, arrived)

    def observe_progress(self, now: float, dispatched: int, completed: int) -> None:
        """A heartbeat: note when this executor last got anywhere."""
        if (dispatched, completed) != self._observed:
            self.progressed = now
        self._observed = (dispatched, completed)

    def free(self, group: int) -> None:
        """Let the executor forget a buffer group; goes out with the next order, or by `flush_frees`."""
        if self._held is not None:
            if not (self._held and self._held[-1][0][0] == "free"):
                self._held.append((["free", []], ()))
            self._held[-1][0][1].append(group)
        elif self.lost is None:
            self._free.append(group)

    def flush_frees(self) -> None:
        """Send the frees that were decided so far."""
        if self._free and self.lost is None:
            groups, self._free = self._free, []
            self.ordered += 1
            self.link.send_packed(frames.pack(["free", groups]))
            self._sent(1, ())

    def on_reply(self, request: int, error: Status | None, fields: list[Any], buffers: list[bytes]) -> None:
        """A reply arrived."""
        callback = self._replies.pop(request, None)
        if callback is not None:
            callback(error, fields, buffers)
            if self._on_answer is not None:
                self._on_answer()

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
        self._held = None
        self._on_answer = None
        replies, self._replies = self._replies, {}
        for callback in replies.values():
            callback(status, [], [])
        self.backlog.clear()
        return status
