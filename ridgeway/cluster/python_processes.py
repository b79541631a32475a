"""The head's table of Python processes: one for each session on each host where it runs colocated Python.

Their state (objects, module variables) is theirs alone and dies with them.  A process is lost when its link closes,
when its host is lost, or when it is not there in time; who waits for it is told once, with the cause, for which the
agent, who saw how it ended, is waited for a moment.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ridgeway.cluster.agent_link import AgentLink
from ridgeway.processes import describe_exit
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.settings import Settings
from ridgeway.transport.frames import Buffer
from ridgeway.transport.stream_link import StreamLink

EXPLANATION_SECONDS = 1.0
"""How long after its link has closed the agent may take to say how a process ended."""

OnMessage = Callable[["PythonProcess", list[Any], list[bytes]], None]
OnLost = Callable[["PythonProcess", Status], None]


class PythonProcess:
    """One process, from the order to start it to its end."""

    def __init__(
        self, number: int, session: int, slot: int, place: str, agent: AgentLink, lost_objects: dict[int, str],
        on_message: OnMessage, on_lost: OnLost,
    ):  # fmt: skip
        self.number = number
        self.session = session
        self.slot = slot
        self.place = place
        self.agent = agent
        self.lost_objects = lost_objects
        """objects of the session that lived in an earlier process here, and what became of it"""
        self.on_message = on_message
        self.on_lost = on_lost
        self.loaded: set[str] = set()
        self.objects: set[int] = set()
        self.pid = 0
        self.host = ""
        self.port = 0
        self.lost: Status | None = None
        self.deadline: float | None = None
        """when it must have joined, or, once its link has closed, when nobody waits for an explanation any more"""
        self.link: StreamLink | None = None
        self._early: list[tuple[Sequence[Any], Sequence[Buffer]]] = []
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """Whether it has joined and its link is open."""
        return self.link is not None and self.lost is None

    def send(self, message: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send in order; kept until it has joined, dropped when it is lost."""
        if self.link is not None:
            self.link.send(message, buffers)
        elif self.lost is None:
            self._early.append((message, buffers))

    send_aside = send

    def when_joined(self, callback: Callable[[], None]) -> None:
        """Call back when it has an address, or is lost."""
        if self.link is not None or self.lost is not None:
            callback()
        else:
            self._waiting.append(callback)

    def open(self, link: StreamLink, host: str, port: int, pid: int) -> None:
        """It has joined."""
        self.link, self.host, self.port, self.pid = link, host, port, pid
        self.deadline = None
        early, self._early = self._early, []
        for message, buffers in early:
            link.send(message, buffers)
        self._call_back()

    def lose(self, status: Status) -> None:
        """It is gone."""
        if self.lost is not None:
            return
        self.lost = status
        self._early = []
        if self.link is not None:
            self.link.close()
        self._call_back()
        self.on_lost(self, status)

    def _call_back(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class PythonProcesses:
    """Starts and ends them; see `ResourceManager`, whose clock and events it uses."""

    def __init__(self, settings: Settings, emit: Callable[..., Any], clock: Callable[[], float]):
        self._settings = settings
        self._emit = emit
        self._clock = clock
        self._numbers = itertools.count(1)
        self._processes: dict[int, PythonProcess] = {}

    def __iter__(self) -> Iterator[PythonProcess]:
        return iter(list(self._processes.values()))

    def get(self, number: int) -> PythonProcess | None:
        """One by number."""
        return self._processes.get(number)

    def start(
        self, session: int, slot: int, slots: int, place: str, agent: AgentLink, lost_objects: dict[int, str],
        on_message: OnMessage, on_lost: OnLost,
    ) -> PythonProcess:  # fmt: skip
        """Have an agent start one; messages can be sent to it at once."""
        number = next(self._numbers)
        process = PythonProcess(number, session, slot, place, agent, lost_objects, on_message, on_lost)
        process.deadline = self._clock() + self._settings.executor_start_timeout_seconds
        self._processes[number] = process
        agent.send(["start_python", number, {"slot": slot, "slots": slots}])
        return process

    def joined(self, number: int, link: StreamLink, host: str, port: int, pid: int) -> PythonProcess | None:
        """A process said hello; None if nobody wants it any more."""
        process = self._processes.get(number)
        if process is None or process.link is not None or process.lost is not None:
            return None
        link.send(["welcome", {"lost_objects": process.lost_objects}])
        process.open(link, host, port, pid)
        self._emit("python_started", session=process.session, place=process.place, pid=pid)
        return process

    def closed(self, process: PythonProcess) -> None:
        """Its link has closed: soon its agent says why."""
        if process.number in self._processes and process.lost is None:
            process.deadline = self._clock() + EXPLANATION_SECONDS

    def exited(self, number: int, code: int) -> None:
        """Its agent saw it end."""
        process = self._processes.get(number)
        if process is not None:
            self._lose(process, Code.DATA_LOSS, describe_exit(code))

    def agent_lost(self, agent: int, reason: str) -> None:
        """The host is lost, and so are its Python processes."""
        for process in self:
            if process.agent.number == agent:
                self._lose(process, Code.DATA_LOSS, reason)

    def overdue(self, process: PythonProcess, description: str) -> None:
        """It does not answer: it is killed."""
        process.agent.send(["kill_python", process.number, description])
        self._lose(process, Code.DEADLINE_EXCEEDED, description)

    def retire(self, process: PythonProcess, description: str) -> None:
        """Nobody can use it any more: it is killed."""
        process.agent.send(["kill_python", process.number, description])
        self._lose(process, Code.DATA_LOSS, description)

    def end(self, process: PythonProcess) -> None:
        """The session is over. The process ends as its link closes; if it cannot, its agent ends it."""
        if self._processes.pop(process.number, None) is not None:
            process.on_lost = lambda *_: None
            process.lose(statuses.failed_precondition("the session is over"))
            process.agent.send(["end_python", process.number])

    def peer_lost(self, executor: int, status: Status) -> None:
        """An executor is lost: what it was to send will not come."""
        for process in self:
            process.send(["peer_lost", executor, int(status.code), status.message])

    def forgive(self, seconds: float) -> None:
        """The head itself stood still for so long."""
        for process in self:
            if process.deadline is not None:
                process.deadline += seconds

    def tick(self, now: float) -> None:
        """Apply deadlines."""
        for process in self:
            if process.deadline is None or now < process.deadline:
                continue
            if process.link is None:
                seconds = self._settings.executor_start_timeout_seconds
                description = f"it was not ready {seconds:g} s after its start (executor_start_timeout_seconds)"
                self.overdue(process, description)
            else:
                self._lose(process, Code.DATA_LOSS, "its connection closed")

    def _lose(self, process: PythonProcess, code: Code, description: str) -> None:
        del self._processes[process.number]
        status = Status(code, f"the Python process of {process.place} was lost: {description}")
        self._emit("python_lost", session=process.session, place=process.place, cause=description)
        process.lose(status)
