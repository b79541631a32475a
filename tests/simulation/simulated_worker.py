"""A worker machine: the real `AgentCore` in a simulated process, its template, executors and compilers."""

import signal
from collections.abc import Callable
from typing import Any

from simulated_executor import SimulatedExecutor
from simulated_network import Connection, Machine, Process

from ridgeway.settings import Settings
from ridgeway.worker import agent_events as core
from ridgeway.worker.agent_core import AgentCore

TICK_SECONDS = 0.25
TEMPLATE_SECONDS = (0.1, 0.3)
FORK_SECONDS = (0.005, 0.02)
CONNECT_TIMEOUT_SECONDS = 20.0


class SimulatedCompiler(Process):
    """Compiles whatever it is asked to, by sending it back."""

    def __init__(self, machine: Machine, number: int, agent: int, cluster: Any):
        super().__init__(machine, f"compiler {number}")
        self.number = number
        self.head: str | None = None
        """for which it was started"""
        self._agent = agent
        self._cluster = cluster
        self._connection: Connection | None = None

    def connect(self) -> None:
        """Say hello to the head."""
        hello = {
            "role": "compiler", "agent": self._agent, "compiler": self.number, "pid": self.pid,
            "versions": self._cluster.versions, "environment": "", "head": self.head,
        }  # fmt: skip
        self._connection = self._cluster.connect(self, hello, self._message, lambda: self.end(3))

    def _message(self, message: list[Any], attached: list[bytes]) -> None:
        if message[0] == "refused":
            self.end(2)
        elif message[0] == "compile":
            self.after(self.world.random.uniform(0.01, 0.2), self._reply, message[1], attached)

    def _reply(self, request: int, attached: list[bytes]) -> None:
        assert self._connection is not None
        self._connection.send(["reply", request, {"length": len(attached[0])}], attached)


class SimulatedAgent(Process):
    """An agent process as the supervisor launches it."""

    def __init__(
        self, machine: Machine, launch_id: str, slot: tuple[int, int] | None, settings: Settings, cluster: Any,
        on_exit: Callable[[int], None],
    ):  # fmt: skip
        super().__init__(machine, f"agent {launch_id}")
        self.on_end = on_exit
        self._cluster = cluster
        self._settings = settings
        identity = core.Identity(
            head_host="10.0.0.1", head_port=1, secret="", slice=None if slot is None else slot[0],
            host=None if slot is None else slot[1], standby=slot is None, address="10.0.0.2", launch_id=launch_id,
            pid=self.pid, hostname=machine.name, versions=cluster.versions,
        )  # fmt: skip
        self.core = AgentCore(identity, settings, CONNECT_TIMEOUT_SECONDS, self.world.now)
        self.children: dict[int, SimulatedExecutor | SimulatedCompiler] = {}
        self._template_ready = False
        self._template_number = 0
        self._waiting_forks: list[core.Fork] = []
        self._connection: Connection | None = None
        self._acknowledged_at = self.world.now
        self.handle(core.Started())
        self.after(TICK_SECONDS, self._tick)

    def handle(self, event: core.Event) -> None:
        """Something happened: do what the real decisions say."""
        for effect in self.core.handle(event, self.world.now):
            if self.alive:
                self._apply(effect)

    def _tick(self) -> None:
        self.handle(core.Tick(self._acknowledged_seconds()))
        self.after(TICK_SECONDS, self._tick)

    def _acknowledged_seconds(self) -> float | None:
        """The kernel of the head's machine answers as long as the network does, the head's process stopped or not."""
        if self._connection is None:
            return None
        if not any(self.machine.blocked.values()):
            self._acknowledged_at = self.world.now
        return self.world.now - self._acknowledged_at

    def executors(self) -> list[SimulatedExecutor]:
        """The executor processes of this machine."""
        return [child for child in self.children.values() if isinstance(child, SimulatedExecutor)]

    def everything(self) -> list[Process]:
        """All processes of this machine."""
        return [self, *self.children.values()]

    def kill_all(self) -> None:
        """The machine, or a supervisor, ends everything at once."""
        for process in self.everything():
            process.kill()

    def ended(self) -> None:
        for child in list(self.children.values()):
            # The kernel kills children of a dead parent, a moment later.
            self.world.loop.call_later(self.world.random.uniform(0.0005, 0.02), child.kill)

    def _apply(self, effect: core.Effect) -> None:
        random = self.world.random
        match effect:
            case core.StartTemplate():
                self._template_ready = False
                self._template_number += 1
                self.after(random.uniform(*TEMPLATE_SECONDS), self._template_done, self._template_number)
            case core.KillTemplate():
                self.after(0.005, self.handle, core.TemplateDied(-9, ""))
            case core.Connect(delay_seconds):
                self.after(delay_seconds, self._connect)
            case core.CloseLink():
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            case core.Send(message):
                if self._connection is not None:
                    self._connection.send(message)
            case core.Fork():
                self._waiting_forks.append(effect)
                self._fork()
            case core.SignalChild(pid, number):
                child = self.children.get(pid)
                if child is not None and number == signal.SIGKILL:
                    child.kill()
            case core.Exit(code):
                self.end(code)

    def _template_done(self, number: int) -> None:
        if number == self._template_number:
            self._template_ready = True
            self.handle(core.TemplateReady(0.2))
            self._fork()

    def _fork(self) -> None:
        if not self._template_ready:
            return
        forks, self._waiting_forks = self._waiting_forks, []
        for fork in forks:
            self.after(self.world.random.uniform(*FORK_SECONDS), self._forked, fork)

    def _forked(self, fork: core.Fork) -> None:
        arguments = fork.arguments
        child: SimulatedExecutor | SimulatedCompiler
        if fork.role == "executor":
            settings = Settings(**arguments["settings"])
            child = SimulatedExecutor(
                self.machine, fork.number, arguments["agent"], arguments["devices_per_host"], settings, self._cluster
            )
        else:
            child = SimulatedCompiler(self.machine, fork.number, arguments["agent"], self._cluster)
        child.head = arguments["head"]
        self.children[child.pid] = child
        child.on_end = lambda code: self.run(self._child_ended, fork.role, fork.number, child.pid, code)
        child.after(self.world.random.uniform(*FORK_SECONDS), child.connect)
        self.handle(core.Forked(fork.role, fork.number, child.pid))

    def _child_ended(self, role: str, number: int, pid: int, code: int) -> None:
        self.children.pop(pid, None)
        self.handle(core.ChildExited(role, number, code))

    # ---- the link

    def _connect(self) -> None:
        if not self._cluster.reachable(self.machine):
            self.after(1.0, self.handle, core.ConnectFailed("timed out"))
            return
        self._connection = self._cluster.connect(self, self.core.hello(), self._message, self._closed)

    def _message(self, message: list[Any], attached: list[bytes]) -> None:
        match message:
            case ["welcome", welcome]:
                self.handle(core.Welcomed(welcome))
            case ["refused", code, text]:
                self.handle(core.Refused(text, taken=code == "ALREADY_EXISTS"))
            case _:
                self.handle(core.MessageReceived(message))

    def _closed(self) -> None:
        self._connection = None
        if self.core.agent is None:
            self.handle(core.ConnectFailed("the head closed the connection"))
        else:
            self.handle(core.LinkLost("connection closed"))
