"""The cluster port: authenticates whoever connects, reads the hello, and turns messages into membership's events."""

import asyncio
import contextlib
import secrets
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from ridgeway.cluster.agent_link import AgentLink
from ridgeway.cluster.backlog import Backlog
from ridgeway.cluster.compilers import Compiler
from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.membership import Refuse, Welcome
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.protocol.status import Code, Status
from ridgeway.transport import stream_link
from ridgeway.transport.authentication import AuthenticationError
from ridgeway.transport.frames import FrameError
from ridgeway.transport.stream_link import LinkClosed, StreamLink

ControlHandler = Callable[[StreamLink], Awaitable[None]]

GENTLE_CLOSE_SECONDS = 2.0
_NONSENSE = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What taking a message apart raises that does not have the fields it should."""


class Connections:
    """Serves the cluster port of one head."""

    def __init__(
        self, manager: ResourceManager, secret: str, cluster: str, versions: dict[str, str], control: ControlHandler
    ):
        self._manager = manager
        self._secret = secret
        self._cluster = cluster
        self._versions = versions
        self._control = control
        self._head = secrets.token_hex(8)
        """tells this head from others that the cluster has had"""
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address.

        Raises:
          OSError: the port is taken or the address is not this machine's.
        """
        self._server = await asyncio.start_server(self._serve, host, port, limit=stream_link.READ_LIMIT_BYTES)
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def stop(self) -> None:
        """Stop listening and close what is open."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        timeout = self._manager.settings.handshake_timeout_seconds
        try:
            link = await stream_link.accept_link(reader, writer, self._secret, timeout)
            message, _ = await asyncio.wait_for(link.receive(), timeout)
        except (AuthenticationError, LinkClosed, FrameError, TimeoutError) as error:
            self._manager.emit("connection_refused", reason=str(error) or "no hello in time")
            writer.transport.abort()
            return
        try:
            hello = message[1] if message[0] == "hello" and len(message) == 2 and isinstance(message[1], dict) else {}
            role = hello.get("role")
            serve = {
                "agent": self._serve_agent, "executor": self._serve_executor,
                "compiler": self._serve_compiler, "python": self._serve_python, "control": self._serve_control,
            }.get(str(role))  # fmt: skip
            if serve is None:
                known = "agent, executor, compiler, control, python"
                await self._refuse(link, f"a hello with role {role!r}; known: {known}")
            else:
                await serve(link, hello)
        except (LinkClosed, FrameError, ConnectionError):
            pass
        except _NONSENSE as error:
            await self._refuse(link, f"a hello that makes no sense ({error!r})")
        finally:
            link.close()

    async def _refuse(self, link: StreamLink, message: str, code: Code = Code.INVALID_ARGUMENT) -> None:
        self._manager.emit("connection_refused", reason=message)
        link.send(["refused", code.name, message])
        await link.close_gently(GENTLE_CLOSE_SECONDS)

    def _version_problem(self, hello: dict[str, Any]) -> str | None:
        theirs = hello.get("versions") or {}
        for name in ("jaxlib", "ridgeway"):
            if theirs.get(name) != self._versions[name]:
                return (
                    f"this cluster runs {name} {self._versions[name]}, the {hello.get('role')} on "
                    f"{hello.get('hostname', 'that host')} has {theirs.get(name)}; "
                    "install the same version on every host"
                )
        return None

    def _stale(self, hello: dict[str, Any]) -> str | None:
        """Every head counts from 1, so a process that an earlier one had ordered may have a number that is in use."""
        if hello.get("head") != self._head:
            return f"this {hello['role']} is stale: it was started for an earlier head"
        return None

    async def _serve_control(self, link: StreamLink, hello: dict[str, Any]) -> None:
        link.send(["welcome", {"cluster": self._cluster}])
        await self._control(link)

    async def _serve_agent(self, link: StreamLink, hello: dict[str, Any]) -> None:
        manager = self._manager
        problem = self._version_problem(hello)
        slot: int | None = None
        if problem is None and hello.get("slice") is not None:
            try:
                slot = manager.topology.slot_of(int(hello["slice"]), int(hello.get("host") or 0))
            except ValueError as error:
                problem = str(error)
        if problem is not None:
            await self._refuse(link, problem)
            return
        number = manager.membership.new_number()
        effects = manager.membership.agent_joined(
            manager.clock(), number, slot, bool(hello.get("standby")), str(hello.get("launch_id", ""))
        )
        answer = effects[0]
        if isinstance(answer, Refuse):
            await self._refuse(link, answer.message, Code.ALREADY_EXISTS if answer.taken else Code.INVALID_ARGUMENT)
            return
        assert isinstance(answer, Welcome)
        agent = AgentLink(number, link, hello)
        agent.slot = answer.slot
        manager.agents[number] = agent
        names = (None, None)
        if answer.slot is not None:
            names = (manager.topology.slice_of_slot(answer.slot), manager.topology.host_of_slot(answer.slot))
        agent.send(["welcome", {
            "agent": number, "slice": names[0], "host": names[1], "platform": "cpu", "cluster": self._cluster,
            "devices_per_host": manager.topology.devices_per_host, "settings": manager.settings.to_dict(),
            "head": self._head,
        }])  # fmt: skip
        manager.apply(effects[1:])
        heartbeats = asyncio.create_task(self._send_heartbeats(agent))
        description = "connection to its agent closed"
        try:
            while True:
                message, _ = await link.receive()
                manager.membership.agent_heard(manager.clock(), number)
                if message[0] == "process_exited":
                    self._process_exited(agent, *message[1:])
                elif message[0] == "draining":
                    manager.membership.agent_draining(number)
                elif message[0] == "preempted" and agent.slot is not None and number in manager.agents:
                    manager.preempt(agent.slot, float(message[1]), str(message[2]))
        except FrameError as error:
            description = f"its agent sent something that is not a message ({error})"
        except _NONSENSE as error:
            description = f"its agent sent a message that makes no sense ({error!r})"
            traceback.print_exc()
        finally:
            heartbeats.cancel()
            manager.apply(manager.membership.agent_closed(manager.clock(), number, description))

    def _process_exited(
        self, agent: AgentLink, role: str, number: int, code: int, running: list[list[str]] | None = None
    ) -> None:
        if agent.slot is not None and role == "executor":
            self._manager.executor_exited(agent.slot, number, code, [(p, n) for p, n in running or ()])
        elif role == "python":
            self._manager.pythons.exited(number, code)
        manager = self._manager
        manager.apply(manager.membership.process_exited(manager.clock(), agent.number, number))

    async def _send_heartbeats(self, agent: AgentLink) -> None:
        while True:
            agent.send(["heartbeat"])
            await asyncio.sleep(self._manager.settings.heartbeat_interval_seconds)

    async def _serve_executor(self, link: StreamLink, hello: dict[str, Any]) -> None:
        manager = self._manager
        number = int(hello["executor"])
        problem = self._version_problem(hello) or self._stale(hello)
        if problem is not None:
            await self._refuse(link, problem)
            return
        executor = ExecutorLink(
            number,
            int(hello["agent"]),
            link,
            str(hello["transfer_host"]),
            int(hello["transfer_port"]),
            int(hello["pid"]),
            Backlog(manager.settings.link_buffer_limit_bytes, manager.settings.queued_order_limit),
        )
        effects = manager.membership.executor_joined(manager.clock(), executor.agent, number)
        if effects and isinstance(effects[0], Refuse):
            await self._refuse(link, effects[0].message)
            return
        manager.executors[number] = executor
        link.send(["welcome", {}])
        manager.apply(effects)
        description = "connection to its executor closed"
        try:
            while True:
                message, buffers = await link.receive()
                # One that took the place of a suspended executor is that one since.
                self._on_executor_message(manager.executors.get(number, executor), message, buffers)
        except FrameError as error:
            description = f"its executor sent something that is not a message ({error})"
        except _NONSENSE as error:
            description = f"its executor sent a message that makes no sense ({error!r})"
            traceback.print_exc()
        finally:
            manager.apply(manager.membership.executor_closed(manager.clock(), number, description))
            manager.executors.pop(number, None)

    def _on_executor_message(self, executor: ExecutorLink, message: list[Any], buffers: list[bytes]) -> None:
        manager = self._manager
        match message[0]:
            case "reply":
                executor.on_reply(message[1], None, message[2:], buffers)
            case "error":
                _, request, code, text, collective, generation = message
                manager.settle(
                    executor.place,
                    Status(Code(code), text),
                    collective,
                    generation,
                    lambda status: executor.on_reply(request, status, [], []),
                )
            case "heartbeat":
                _, dispatched, completed, outstanding, memory, held, worn = message
                executor.memory_bytes, executor.host_array_bytes = memory, held
                executor.observe_progress(manager.clock(), dispatched, completed)
                behind = dispatched < executor.ordered
                manager.membership.executor_heard(
                    manager.clock(), executor.number, dispatched, completed, outstanding, behind
                )
                manager.renewals.consider(executor, worn)
            case "execution_failed":
                _, execution, generation, code, text, collective, failed_generation = message
                status = Status(Code(code), text)
                if collective:
                    status = manager.cause_of(failed_generation) or status
                manager.execution_failed(executor, execution, status, generation)
            case "stuck":
                _, generation, code, text = message
                manager.stuck(executor, Status(Code(code), text), generation)
            case "callback":
                _, number, token, shapes = message
                manager.on_host_callback(executor, number, token, shapes, buffers[0])
            case "profile_data":
                _, number, start, problem = message
                manager.on_profile_data(executor, number, start, problem, buffers[0] if buffers else b"")
            case "transfer_failed":
                _, token, code, text, target = message
                receiver = manager.pythons.get(-target) if target < 0 else manager.executors.get(target)
                if receiver is not None:
                    receiver.send_aside(["data_failed", token, code, text])

    async def _serve_compiler(self, link: StreamLink, hello: dict[str, Any]) -> None:
        manager = self._manager
        number, agent = int(hello["compiler"]), int(hello["agent"])
        problem = self._version_problem(hello) or self._stale(hello)
        if problem is None:
            effects = manager.membership.compiler_joined(agent, number)
            if effects and isinstance(effects[0], Refuse):
                problem = effects[0].message
        if problem is not None:
            await self._refuse(link, problem)
            return
        compiler = Compiler(number, agent, link, int(hello["pid"]), str(hello.get("environment", "")))
        link.send(["welcome", {}])
        manager.compilers.add(compiler)
        try:
            while True:
                manager.compilers.on_reply(compiler, *(await link.receive()))
        finally:
            manager.compilers.remove(number)
            with contextlib.suppress(KeyError):
                manager.apply(manager.membership.compiler_closed(number))

    async def _serve_python(self, link: StreamLink, hello: dict[str, Any]) -> None:
        pythons = self._manager.pythons
        problem = self._version_problem(hello)
        process = None
        if problem is None:
            process = pythons.joined(
                int(hello["python"]), link, str(hello["transfer_host"]), int(hello["transfer_port"]), int(hello["pid"])
            )
        if process is None:
            await self._refuse(link, problem or "the session of this Python process is over")
            return
        try:
            while True:
                process.on_message(process, *(await link.receive()))
        finally:
            pythons.closed(process)
