"""The cluster port on a real socket: who is let in, who is refused and told why, and that nobody disturbs others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from remembering_head import Services

from ridgeway.cluster.connections import Connections
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.cluster.topology import Topology
from ridgeway.settings import Settings
from ridgeway.transport import stream_link
from ridgeway.transport.authentication import AuthenticationError
from ridgeway.transport.stream_link import LinkClosed, StreamLink

HOST = "127.0.0.1"
PATIENCE_SECONDS = 20.0
VERSIONS = {"ridgeway": "0.1.0", "jaxlib": "0.12.0.1", "jax": "0.12.0.1", "python": "3.12.1"}


class Port:
    """The cluster port of a head."""

    def __init__(self, settings: Settings):
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.problems: list[dict[str, Any]] = []
        self.manager = ResourceManager(
            Topology(2, 1, 2), settings, lambda kind, **fields: self.events.append((kind, fields)),
            Services(), HOST,  # type: ignore[arg-type]
        )  # fmt: skip
        self.connections = Connections(self.manager, "the secret", "test", VERSIONS, self._control)
        self.number = 0

    async def _control(self, link: StreamLink) -> None:
        message, _ = await link.receive()
        link.send(["echo", message])
        await link.close_gently(1.0)

    async def connect(self, secret: str = "the secret") -> StreamLink:
        return await stream_link.open_link(HOST, self.number, secret, 5.0)

    async def hello(self, **fields: Any) -> tuple[StreamLink, list[Any]]:
        """Connect and say hello; the link and what the head answers first."""
        link = await self.connect()
        link.send(["hello", {"versions": VERSIONS, "hostname": "worker-1", **fields}])
        message, _ = await link.receive()
        return link, message

    async def refusal(self, code: str = "INVALID_ARGUMENT", **fields: Any) -> str:
        """Why a hello is refused; the connection is then closed."""
        link, message = await self.hello(**fields)
        assert message[:2] == ["refused", code]
        with pytest.raises(LinkClosed):
            await link.receive()
        return message[2]

    async def event(self, kind: str) -> dict[str, Any]:
        """The next event of a kind."""
        while True:
            for position, (found, fields) in enumerate(self.events):
                if found == kind:
                    del self.events[position]
                    return fields
            await asyncio.sleep(0.005)

    async def works(self) -> None:
        """A worker can still join."""
        link, message = await self.hello(role="agent", standby=True)
        assert message[0] == "welcome"
        link.close()


def at_port(test: Callable[[Port], Awaitable[None]], settings: Settings | None = None) -> None:
    """Run a test beside a head's cluster port; nothing may go wrong there unseen."""

    async def run() -> None:
        port = Port(settings or Settings())
        asyncio.get_running_loop().set_exception_handler(lambda _, context: port.problems.append(context))
        _, port.number = await port.connections.start(HOST, 0)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await test(port)
                await port.works()
        finally:
            await port.connections.stop()
        assert port.problems == []

    asyncio.run(run())


# ---- who is let in


def test_a_worker_is_welcomed_with_its_place_and_the_clusters_settings() -> None:
    async def test(port: Port) -> None:
        link, (_, welcome) = await port.hello(role="agent", slice=1, host=0, launch_id="launch-3")
        assert (welcome["slice"], welcome["host"]) == (1, 0)
        assert welcome["devices_per_host"] == 2
        assert welcome["cluster"] == "test"
        assert Settings(**welcome["settings"]) == port.manager.settings
        joining = await port.event("host_joining")
        assert (joining["incarnation"], joining["launch_id"]) == (welcome["agent"], "launch-3")
        link.close()

    at_port(test)


def test_a_whole_worker_joins_and_is_lost_when_its_connection_closes() -> None:
    async def test(port: Port) -> None:
        agent, (_, welcome) = await port.hello(role="agent", slice=0, host=0)
        ordered: dict[str, int] = {}
        while len(ordered) < 2:
            message, _ = await agent.receive()
            if message[0].startswith("start_"):
                ordered[message[0].removeprefix("start_")] = message[1]
        executor, answer = await port.hello(
            role="executor", agent=welcome["agent"], executor=ordered["executor"], pid=2, transfer_host=HOST,
            transfer_port=1, head=welcome["head"],
        )  # fmt: skip
        assert answer == ["welcome", {}]
        assert (await executor.receive())[0] == ["assign", 0, 0]
        compiler, answer = await port.hello(
            role="compiler", agent=welcome["agent"], compiler=ordered["compiler"], pid=3, environment="flags",
            head=welcome["head"],
        )  # fmt: skip
        assert answer == ["welcome", {}]
        assert port.manager.compilers.environment == "flags"
        assert (await port.event("slice_ready"))["slice"] == 0
        agent.close()
        lost = await port.event("host_lost")
        assert lost["cause"] == "connection to its agent closed"
        # Whatever else it had is closed with it.
        for link in (executor, compiler):
            with pytest.raises(LinkClosed):
                while True:
                    await link.receive()

    at_port(test)


def test_a_command_gets_a_control_link() -> None:
    async def test(port: Port) -> None:
        link, answer = await port.hello(role="control")
        assert answer == ["welcome", {"cluster": "test"}]
        link.send(["request", 1])
        assert (await link.receive())[0] == ["echo", ["request", 1]]

    at_port(test)


# ---- who is refused


@pytest.mark.parametrize("name", ["jaxlib", "ridgeway"])
@pytest.mark.parametrize("role", ["agent", "executor", "compiler"])
def test_another_version_is_refused_and_both_are_named(name: str, role: str) -> None:
    async def test(port: Port) -> None:
        text = await port.refusal(
            role=role, versions={**VERSIONS, name: "0.0.9"}, agent=1, executor=2, compiler=2, pid=1,
            transfer_host=HOST, transfer_port=1,
        )  # fmt: skip
        assert f"this cluster runs {name} {VERSIONS[name]}" in text
        assert "0.0.9" in text
        assert "worker-1" in text

    at_port(test)


def test_another_secret_is_refused_and_recorded() -> None:
    async def test(port: Port) -> None:
        with pytest.raises(AuthenticationError, match="another cluster secret"):
            await port.connect("another")
        assert "wrong cluster secret" in (await port.event("connection_refused"))["reason"]

    at_port(test)


def test_a_place_that_is_taken_or_is_none_is_refused() -> None:
    async def test(port: Port) -> None:
        holders = [await port.hello(role="agent", slice=1, host=0)]
        assert "slice 1 host 0 is taken" in await port.refusal("ALREADY_EXISTS", role="agent", slice=1, host=0)
        text = await port.refusal(role="agent", slice=2, host=0)
        assert "there is no slice 2 host 0 in a cluster of 2x1x2" in text
        holders.append(await port.hello(role="agent"))
        assert "all 2 host slots" in await port.refusal(role="agent")

    at_port(test)


def test_processes_of_an_earlier_head_are_refused_though_their_numbers_are_in_use() -> None:
    async def test(port: Port) -> None:
        agent, (_, welcome) = await port.hello(role="agent", slice=0, host=0)
        message, _ = await agent.receive()
        while message[0] != "start_executor":
            message, _ = await agent.receive()
        place = {"agent": welcome["agent"], "pid": 1, "transfer_host": HOST, "transfer_port": 1}
        for head in ({}, {"head": "0123456789abcdef"}):
            assert "an earlier head" in await port.refusal(role="executor", executor=message[1], **place, **head)
            assert "an earlier head" in await port.refusal(role="compiler", compiler=1, **place, **head)
        assert port.manager.executors == {}
        agent.close()

    at_port(test)


def test_processes_that_nobody_ordered_are_refused() -> None:
    async def test(port: Port) -> None:
        agent, (_, welcome) = await port.hello(role="agent", slice=0, host=0)
        place = {
            "agent": welcome["agent"], "pid": 1, "transfer_host": HOST, "transfer_port": 1, "head": welcome["head"],
        }  # fmt: skip
        assert "stale" in await port.refusal(role="executor", executor=999, **place)
        assert "stale" in await port.refusal(role="compiler", compiler=999, **place)
        agent.close()

    at_port(test)


# ---- who is no worker at all


@pytest.mark.parametrize("role", [None, "", "proxy", 7, ["agent"]])
def test_an_unknown_role_is_refused(role: Any) -> None:
    async def test(port: Port) -> None:
        assert "known: agent, executor, compiler, control" in await port.refusal(role=role)

    at_port(test)


@pytest.mark.parametrize(
    "hello",
    [
        ["hello", {"role": "executor", "versions": VERSIONS}],
        ["hello", {"role": "executor", "versions": VERSIONS, "executor": "x", "agent": 1}],
        ["hello", {"role": "compiler", "versions": VERSIONS, "compiler": 1}],
        ["hello", {"role": "agent", "versions": VERSIONS, "slice": "first"}],
        ["hello", {"role": "agent", "versions": "all"}],
        ["hello", {"role": "agent", "versions": VERSIONS, "slice": [1]}],
        ["hello"], ["hello", 1], ["hello", {}, {}], ["goodbye", {}],
    ],
)  # fmt: skip
def test_a_hello_that_makes_no_sense_is_refused_and_nothing_breaks(hello: list[Any]) -> None:
    async def test(port: Port) -> None:
        link = await port.connect()
        link.send(hello)
        with pytest.raises(LinkClosed):
            while True:
                message, _ = await link.receive()
                assert message[0] == "refused"
        await port.event("connection_refused")

    at_port(test)


def test_whoever_says_nothing_is_closed_in_time() -> None:
    async def test(port: Port) -> None:
        link = await port.connect()
        with pytest.raises(LinkClosed):
            await link.receive()
        await port.event("connection_refused")

    at_port(test, Settings(handshake_timeout_seconds=0.5))


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000)])
def test_a_port_scanner_disturbs_nobody(data: bytes) -> None:
    async def test(port: Port) -> None:
        reader, writer = await asyncio.open_connection(HOST, port.number)
        writer.write(data)
        writer.write_eof()
        await reader.read()
        writer.close()
        await port.event("connection_refused")

    at_port(test)


@pytest.mark.parametrize(
    "message",
    [
        ["process_exited"], ["process_exited", "executor"], ["process_exited", "executor", "x", "y"],
        ["template_ready"], ["unknown", 1, 2],
    ],
)  # fmt: skip
def test_an_agent_that_talks_nonsense_is_at_worst_lost(message: list[Any]) -> None:
    async def test(port: Port) -> None:
        link, _ = await port.hello(role="agent", slice=0, host=0)
        link.send(message)
        link.close()
        await port.event("host_lost")

    at_port(test)


def test_an_agent_that_sends_no_frames_is_lost_and_told_as_such() -> None:
    async def test(port: Port) -> None:
        link, _ = await port.hello(role="agent", slice=0, host=0)
        link._writer.write(b"\xff" * 100)
        assert "not a message" in (await port.event("host_lost"))["cause"]

    at_port(test)
