"""The head's table of Python processes, with an agent and links that only remember what they were sent."""

from typing import Any

from ridgeway.cluster.agent_link import AgentLink
from ridgeway.cluster.python_processes import EXPLANATION_SECONDS, PythonProcess, PythonProcesses
from ridgeway.protocol.status import Code, Status
from ridgeway.settings import Settings


class Link:
    """One end of a link."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.closed = False

    def send(self, message: Any, buffers: Any = ()) -> None:
        self.sent.append([*message, *buffers])

    def close(self) -> None:
        self.closed = True


class Head:
    """The table, a clock and one agent."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.settings = Settings(executor_start_timeout_seconds=30.0)
        self.table = PythonProcesses(
            self.settings, lambda kind, **fields: self.events.append((kind, fields)), lambda: self.now
        )
        self.to_agent = Link()
        self.agent = AgentLink(7, self.to_agent, {})  # pyright: ignore[reportArgumentType]
        self.lost: list[tuple[int, Status]] = []

    def start(self, lost_objects: dict[int, str] | None = None) -> PythonProcess:
        return self.table.start(
            1, 2, 3, "slice 2 host 0", self.agent, lost_objects or {}, lambda *_: None,
            lambda process, status: self.lost.append((process.number, status)),
        )  # fmt: skip

    def join(self, process: PythonProcess) -> Link:
        link = Link()
        assert self.table.joined(process.number, link, "127.0.0.1", 4000, 99) is process  # pyright: ignore
        return link

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.table.tick(self.now)


def test_what_is_sent_before_it_is_there_arrives_first_and_in_order():
    head = Head()
    process = head.start({5: "gone"})
    assert head.to_agent.sent == [["start_python", process.number, {"slot": 2, "slots": 3}]]
    called = []
    process.when_joined(lambda: called.append(process.port))
    process.send(["load", "1"], [b"pickle"])
    process.send(["call", 1])
    link = head.join(process)
    process.send(["call", 2])
    assert link.sent == [
        ["welcome", {"lost_objects": {5: "gone"}}], ["load", "1", b"pickle"], ["call", 1], ["call", 2],
    ]  # fmt: skip
    assert called == [4000]
    process.when_joined(lambda: called.append("at once"))
    assert called == [4000, "at once"]


def test_the_agent_says_why_it_ended_also_when_its_link_closed_first():
    head = Head()
    process = head.start()
    head.join(process)
    head.table.closed(process)
    head.tick(EXPLANATION_SECONDS / 2)
    assert head.lost == []
    head.table.exited(process.number, -11)
    [(number, status)] = head.lost
    assert number == process.number
    assert status == Status(Code.DATA_LOSS, "the Python process of slice 2 host 0 was lost: killed by SIGSEGV")
    assert process.lost is status
    assert head.events[-1] == ("python_lost", {"session": 1, "place": "slice 2 host 0", "cause": "killed by SIGSEGV"})
    head.tick(10 * EXPLANATION_SECONDS)
    assert len(head.lost) == 1


def test_without_an_explanation_the_closed_link_is_the_reason():
    head = Head()
    process = head.start()
    head.join(process)
    head.table.closed(process)
    head.tick(2 * EXPLANATION_SECONDS)
    [(_, status)] = head.lost
    assert status.code is Code.DATA_LOSS and status.message.endswith("its connection closed")


def test_one_that_does_not_come_up_is_given_up():
    head = Head()
    process = head.start()
    called = []
    process.when_joined(lambda: called.append(process.lost))
    head.tick(29.0)
    assert head.lost == []
    head.table.forgive(5.0)
    head.tick(4.0)
    assert head.lost == []
    head.tick(2.0)
    [(_, status)] = head.lost
    assert status.code is Code.DEADLINE_EXCEEDED and "executor_start_timeout_seconds" in status.message
    assert head.to_agent.sent[-1][:2] == ["kill_python", process.number]
    assert called == [status]
    assert head.table.joined(process.number, Link(), "127.0.0.1", 1, 1) is None  # pyright: ignore


def test_a_lost_host_takes_its_processes_along_and_no_others():
    head = Head()
    first, second = head.start(), head.start()
    head.join(first)
    head.table.agent_lost(8, "another one")
    assert head.lost == []
    head.table.agent_lost(7, "connection to its agent closed")
    assert [number for number, _ in head.lost] == [first.number, second.number]
    assert all("slice 2 host 0 was lost: connection to its agent closed" in s.message for _, s in head.lost)
    assert list(head.table) == []


def test_the_end_of_a_session_is_no_loss():
    head = Head()
    process = head.start()
    link = head.join(process)
    head.table.end(process)
    assert link.closed and head.lost == []
    assert head.to_agent.sent[-1] == ["end_python", process.number]
    head.table.exited(process.number, 0)
    head.table.closed(process)
    head.tick(100.0)
    assert head.lost == [] and [kind for kind, _ in head.events] == ["python_started"]


def test_a_lost_executor_is_told_to_all():
    head = Head()
    process = head.start()
    link = head.join(process)
    head.table.peer_lost(4, Status(Code.DATA_LOSS, "gone"))
    assert link.sent[-1] == ["peer_lost", 4, int(Code.DATA_LOSS), "gone"]
