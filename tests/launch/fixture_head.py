"""The head's end of agents' links, driven by a test: real sockets, the real handshake, no decisions."""

import asyncio
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any, Self

from ridgeway.settings import Settings
from ridgeway.transport.stream_link import LinkClosed, StreamLink, accept_link

SECRET = "5ec4e7" * 8
FOLDER = Path(__file__).parent
DEADLINE_SECONDS = 20.0


@dataclasses.dataclass
class ConnectedAgent:
    """One agent's link, with what it said."""

    link: StreamLink
    hello: dict[str, Any]
    received: asyncio.Queue[list[Any]] = dataclasses.field(default_factory=asyncio.Queue)
    closed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    beats: int = 0

    async def next(self, kind: str) -> list[Any]:
        """The next message of a kind; others but heartbeats are lost."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                message = await self.received.get()
                if message[0] == kind:
                    return message


class FixtureHead:
    """Accepts agents; the test answers them."""

    def __init__(self, settings: Settings, secret: str = SECRET, port: int = 0):
        self.settings = settings
        self.secret = secret
        self.port = port
        self.refuse_with: str | None = None
        self.answers_heartbeats = True
        self.agents: asyncio.Queue[ConnectedAgent] = asyncio.Queue()
        self.links: list[StreamLink] = []
        self._incarnation = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for link in self.links:
            link.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link = await accept_link(reader, writer, self.secret, 5.0)
        except ConnectionError:
            writer.transport.abort()
            return
        self.links.append(link)
        (kind, hello), _ = await link.receive()
        assert kind == "hello"
        if self.refuse_with is not None:
            link.send(["refused", "INVALID_ARGUMENT", self.refuse_with])
            await link.close_gently(1.0)
            return
        self._incarnation += 1
        welcome = {
            "agent": self._incarnation,
            "slice": hello["slice"],
            "host": hello["host"],
            "devices_per_host": 2,
            "platform": "cpu",
            "settings": self.settings.to_dict(),
            "cluster": "fixture",
        }
        link.send(["welcome", welcome])
        agent = ConnectedAgent(link, hello)
        await self.agents.put(agent)
        try:
            while True:
                message, _ = await link.receive()
                if message[0] == "heartbeat":
                    agent.beats += 1
                    if self.answers_heartbeats:
                        link.send(["heartbeat"])
                else:
                    await agent.received.put(message)
        except (LinkClosed, ConnectionError):
            agent.closed.set()

    async def next_agent(self) -> ConnectedAgent:
        """The next agent that joined."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await self.agents.get()


class AgentUnderTest:
    """A real agent process with the stand-in children."""

    def __init__(
        self, port: int, *options: str, secret: str = SECRET, preload: str = "", entry: str = "", log: int | None = None
    ):  # fmt: skip
        self.process: asyncio.subprocess.Process | None = None
        entry = entry or "fixture_children"
        self._command = [
            sys.executable,
            "-m",
            "ridgeway.worker.agent",
            "--head",
            f"127.0.0.1:{port}",
            "--preload",
            preload,
            f"--entry-module=executor={entry}",
            f"--entry-module=compiler={entry}",
            *options,
        ]
        self._environment = {
            **os.environ,
            "RIDGEWAY_CLUSTER_SECRET": secret,
            "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[1])]),
        }
        self._log = bytearray()
        self._log_descriptor = log
        """where the agent's output goes instead of here"""
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if self._log_descriptor is None else self._log_descriptor,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        while data := await self.process.stdout.read(65536):
            self._log += data

    async def __aexit__(self, *_: object) -> None:
        assert self.process is not None and self._reading is not None
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await asyncio.wait([self._reading], timeout=5.0)

    @property
    def pid(self) -> int:
        """The agent's process id."""
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        """What agent, template and children wrote so far."""
        return self._log.decode()

    async def exit_code(self) -> int:
        """Wait for the end, of the log too."""
        assert self.process is not None and self._reading is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            code = await self.process.wait()
            await self._reading
            return code

    async def says(self, text: str) -> None:
        """Wait until the log has a text."""
        await until(lambda: text in self.log, lambda: f"{text!r} not in the log:\n{self.log}")


async def until(condition, describe=lambda: "condition not reached") -> None:  # type: ignore[no-untyped-def]
    """Wait for a condition, with a deadline."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, describe()
        await asyncio.sleep(0.01)
