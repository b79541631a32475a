"""A head without a network: the real resource manager, links that only remember, and a clock that a test moves."""

from collections.abc import Sequence
from typing import Any

from ridgeway.cluster.agent_link import AgentLink
from ridgeway.cluster.backlog import Backlog
from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import TICK_SECONDS, ResourceManager
from ridgeway.cluster.topology import Topology
from ridgeway.protocol.status import Status
from ridgeway.settings import Settings
from ridgeway.transport import frames

SETTINGS = Settings(
    heartbeat_timeout_seconds=10.0, drain_deadline_seconds=1.0, membership_settle_seconds=2.0, disagreement_seconds=0.5,
    probe_hold_seconds=10.0, pending_order_limit=3,
)  # fmt: skip


class RememberingLink:
    """What the manager sends; `StreamLink`'s sending half."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        self.closed = False

    def send(self, message: Sequence[Any], buffers: Sequence[Any] = ()) -> None:
        if not self.closed:
            self.sent.append(list(message))

    def send_packed(self, frame: bytes) -> None:
        self.send(frames.unpack_body(frame[frames.PREFIX.size :]))

    def close(self) -> None:
        self.closed = True

    def of(self, kind: str) -> list[list[Any]]:
        return [message for message in self.sent if message[0] == kind]


class Services:
    """Ports in order; `have` says whether one is ready."""

    def __init__(self) -> None:
        self.next = 100
        self.have = True
        self.closed: list[int] = []

    def take_nowait(self) -> int | None:
        if not self.have:
            return None
        self.next += 1
        return self.next

    def close_service(self, port: int) -> None:
        self.closed.append(port)


class Head:
    """A manager and its surroundings."""

    def __init__(self, slices: int = 3, hosts_per_slice: int = 1, settings: Settings = SETTINGS):
        self.now = 1000.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.services = Services()
        self.manager = ResourceManager(
            Topology(slices, hosts_per_slice, 2), settings, lambda kind, **fields: self.events.append((kind, fields)),
            self.services, "10.0.0.1", clock=lambda: self.now,  # type: ignore[arg-type]
        )  # fmt: skip
        self.links: dict[int, RememberingLink] = {}

    def agent(self, slot: int | None = None, standby: bool = False) -> int:
        manager = self.manager
        number = manager.membership.new_number()
        effects = manager.membership.agent_joined(self.now, number, slot, standby)
        link = self.links[number] = RememberingLink()
        manager.agents[number] = AgentLink(number, link, {})  # type: ignore[arg-type]
        manager.agents[number].slot = slot
        manager.apply(effects[1:])
        return number

    def executor(self, agent: int) -> ExecutorLink:
        manager = self.manager
        record = manager.membership.agents[agent].executor
        assert record is not None
        link = self.links[record.number] = RememberingLink()
        executor = ExecutorLink(record.number, agent, link, "10.0.0.2", 7, 1, Backlog(1 << 30, 1000))  # type: ignore[arg-type]
        effects = manager.membership.executor_joined(self.now, agent, record.number)
        manager.executors[record.number] = executor
        manager.apply(effects)
        return executor

    def host(self, slot: int) -> ExecutorLink:
        return self.executor(self.agent(slot))

    def hosts(self) -> list[ExecutorLink]:
        return [self.host(slot) for slot in range(self.manager.topology.slots)]

    def sent(self, executor: ExecutorLink, kind: str) -> list[list[Any]]:
        return self.links[executor.number].of(kind)

    def reply(self, executor: ExecutorLink, kind: str) -> None:
        """The executor answers its last order of a kind."""
        executor.on_reply(self.sent(executor, kind)[-1][1], None, [], [])

    def form(self, *executors: ExecutorLink) -> int:
        """A generation that stands."""
        self.manager.span(executors)
        for executor in executors:
            self.reply(executor, "enter_generation")
        generation = self.manager.generations.generation_of(executors[0].number)
        assert generation is not None
        assert generation.ready
        return generation.number

    def close_executor(self, executor: ExecutorLink, description: str = "connection closed") -> None:
        membership = self.manager.membership
        self.manager.apply(membership.executor_closed(self.now, executor.number, description))

    def close_agent(self, executor: ExecutorLink, description: str = "connection closed") -> None:
        membership = self.manager.membership
        self.manager.apply(membership.agent_closed(self.now, executor.agent, description))

    def told(self) -> None:
        """A controller reads of a loss."""
        self.manager.holds.told(self.now)

    def wait(self, seconds: float) -> None:
        """Time passes in ticks; everybody says that he lives."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += TICK_SECONDS
            for number in self.manager.membership.agents:
                self.manager.membership.agent_heard(self.now, number)
            for number in self.manager.membership.executors:
                self.manager.membership.executor_heard(self.now, number, 0, 0, False)
            self.manager.tick()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


class Answer:
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.answers: list[Status | None] = []

    def __call__(self, status: Status | None) -> None:
        self.answers.append(status)
