"""The agent of one host: holds the link to the head, supervises the executor, outlives its crashes.

This module is the shell around `ridgeway.worker.agent_core`.  It imports neither jax nor numpy, so that it is
up in a tenth of a second and small; the template process imports them.

Exit codes: 0 stopped, 2 refused or wrongly called, 3 the head is gone, 4 the template cannot be started, 5 another
worker has the place.
"""

import argparse
import asyncio
import collections
import importlib.metadata
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ridgeway import processes
from ridgeway.settings import Settings, load_settings
from ridgeway.transport.authentication import AuthenticationError
from ridgeway.transport.frames import FrameError
from ridgeway.transport.stream_link import LinkClosed, StreamLink, open_link
from ridgeway.worker import agent_core as core
from ridgeway.worker import template
from ridgeway.worker.process_identity import hello_versions

DEFAULT_CONNECT_TIMEOUT_SECONDS = 60.0
#: Longest pause between two looks at the clock.
TICK_SECONDS = 0.25
#: How long what was killed may take to be gone.
KILL_DEADLINE_SECONDS = 2.0
#: How long last messages may take to be sent.
FLUSH_DEADLINE_SECONDS = 0.5
STDERR_TAIL_LINES = 8
SECRET_VARIABLE = "RIDGEWAY_CLUSTER_SECRET"


class AgentProcess:
    """Sockets, processes and clock of one agent; every decision is `AgentCore`'s."""

    def __init__(self, identity: core.Identity, settings: Settings, options: argparse.Namespace):
        self._identity = identity
        self._options = options
        self._core = core.AgentCore(identity, settings, options.connect_timeout_seconds, time.monotonic())
        self._exit_code: asyncio.Future[int] | None = None
        self._link: StreamLink | None = None
        self._link_task: asyncio.Task[None] | None = None
        self._template: asyncio.subprocess.Process | None = None
        self._template_writer: asyncio.StreamWriter | None = None
        # Requests made while the next template has no socket yet: between the end of one and the start of another.
        self._unsent: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._adopts = False

    async def run(self) -> int:
        """Live until an `Exit` effect; returns the exit code, with everything started here gone."""
        loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        loop.add_signal_handler(signal.SIGINT, self._handle, core.StopRequested("SIGINT"))
        loop.add_signal_handler(signal.SIGTERM, self._handle, core.PreemptionAnnounced("SIGTERM"))
        self._adopts = processes.adopt_orphans()
        self._spawn(self._tick())
        self._handle(core.Started())
        try:
            return await self._exit_code
        finally:
            await self._end()

    def _handle(self, event: core.Event) -> None:
        for effect in self._core.handle(event, time.monotonic()):
            self._apply(effect)

    def _apply(self, effect: core.Effect) -> None:
        match effect:
            case core.Send(message):
                if self._link is not None:
                    self._link.send(message)
            case core.Say(text):
                self._say(text)
            case core.Connect(delay_seconds):
                self._link_task = self._spawn(self._connect(delay_seconds))
            case core.CloseLink():
                if self._link is not None:
                    self._link.close()
                    self._link = None
            case core.StartTemplate():
                self._unsent.clear()
                self._spawn(self._run_template())
            case core.KillTemplate():
                self._signal_template(signal.SIGKILL)
            case core.SignalTemplate(number):
                self._signal_template(number)
            case core.Fork(role, number, arguments):
                line = json.dumps({"fork": role, "id": number, "arguments": arguments}).encode() + b"\n"
                if self._template_writer is None:
                    self._unsent.append(line)
                else:
                    self._template_writer.write(line)
            case core.SignalChild(pid, number):
                processes.send_signal(pid, number)
            case core.SignalSelf(number):
                os.kill(os.getpid(), number)
            case core.Exit(code):
                assert self._exit_code is not None
                if not self._exit_code.done():
                    self._exit_code.set_result(code)

    def _say(self, text: str) -> None:
        stamp = "" if sys.stderr.isatty() else time.strftime("%H:%M:%S ")
        # In one write: its children write to the same log.
        sys.stderr.write(f"{stamp}ridgeway worker ({self._core.place}): {text}\n")
        sys.stderr.flush()

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self._exit_code is not None
            if not self._exit_code.done():
                self._exit_code.set_exception(error)

    async def _tick(self) -> None:
        while True:
            interval = self._core.settings.heartbeat_interval_seconds
            await asyncio.sleep(max(0.02, min(TICK_SECONDS, interval / 2)))
            self._handle(core.Tick(None if self._link is None else self._link.acknowledged_seconds))
            if self._adopts:
                processes.reap_adopted(self._template.pid if self._template is not None else None)

    # ---- the head

    async def _connect(self, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        identity = self._identity
        timeout = self._core.settings.handshake_timeout_seconds
        try:
            link = await open_link(identity.head_host, identity.head_port, identity.secret, timeout)
        except AuthenticationError as error:
            self._handle(core.NotAuthenticated(str(error)))
            return
        except (OSError, TimeoutError) as error:
            self._handle(core.ConnectFailed(str(error) or "timed out"))
            return
        try:
            link.send(["hello", self._core.hello()])
            async with asyncio.timeout(timeout):
                answer, _ = await link.receive()
        except (LinkClosed, FrameError, TimeoutError) as error:
            link.close()
            self._handle(core.ConnectFailed(f"no answer to hello: {error or 'timed out'}"))
            return
        if answer[0] != "welcome":
            link.close()
            self._handle(core.Refused(f"refused by the head: {answer[-1]}", taken=answer[1] == "ALREADY_EXISTS"))
            return
        self._link = link
        self._handle(core.Welcomed(answer[1]))
        reason = "closed on this side"
        try:
            while self._link is link:
                message, _ = await link.receive()
                self._handle(core.MessageReceived(message))
        except (LinkClosed, FrameError) as error:
            reason = str(error)
        if self._link is link:
            link.close()
            self._link = None
            self._handle(core.LinkLost(reason))

    # ---- the template

    def _signal_template(self, number: int) -> None:
        if self._template is not None and self._template.returncode is None:
            processes.send_signal(self._template.pid, number)

    async def _run_template(self) -> None:
        """One template from start to end. What the imports write to stderr is kept for the message when it
        dies; its children write straight to this agent's stderr."""
        ours, theirs = socket.socketpair()
        # Written to before the process exists, so that no order of the head has to wait for it.
        reader, self._template_writer = await asyncio.open_connection(sock=ours, limit=template.LINE_LIMIT_BYTES)
        self._template_writer.writelines(self._unsent)
        self._unsent.clear()
        log = os.dup(2)
        command = [
            sys.executable, "-m", "ridgeway.worker.template",
            "--control-descriptor", str(theirs.fileno()),
            "--log-descriptor", str(log),
            "--parent-pid", str(os.getpid()),
            "--preload", self._options.preload,
            *(f"--entry-module={option}" for option in self._options.entry_module),
        ]  # fmt: skip
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(), log),
            )
        except OSError as error:
            self._template_writer.transport.abort()
            self._template_writer = None
            self._handle(core.TemplateDied(core.FORK_FAILED_CODE, str(error)))
            return
        finally:
            theirs.close()
            os.close(log)
        self._template = child
        assert child.stderr is not None
        tail: collections.deque[str] = collections.deque(maxlen=STDERR_TAIL_LINES)
        copying = self._spawn(self._copy_stderr(child.stderr, tail))
        await self._read_template(reader)
        exit_code = await child.wait()
        await asyncio.wait([copying], timeout=FLUSH_DEADLINE_SECONDS)
        self._template_writer.transport.abort()
        self._template_writer = None
        self._handle(core.TemplateDied(exit_code, " | ".join(tail)))

    async def _read_template(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reader.readline()
            except (ConnectionError, ValueError):
                return
            if not line.endswith(b"\n"):
                return
            match json.loads(line):
                case {"ready": seconds}:
                    self._handle(core.TemplateReady(seconds))
                case {"forked": role, "id": number, "pid": pid}:
                    self._handle(core.Forked(role, number, pid))
                case {"fork_failed": role, "id": number, "message": message}:
                    self._handle(core.ForkFailed(role, number, message))
                case {"succeeded": role, "id": number, "pid": pid}:
                    self._handle(core.Succeeded(role, number, pid))
                case {"exited": role, "id": number, "code": code, "running": running}:
                    self._handle(core.ChildExited(role, number, code, running))

    async def _copy_stderr(self, stream: asyncio.StreamReader, tail: collections.deque[str]) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # A line over the reader's limit: dropped.
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                tail.append(text)
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    async def _end(self) -> None:
        """Kill what is left and see it gone."""
        self._signal_template(signal.SIGKILL)
        if self._link is not None:
            await self._link.close_gently(FLUSH_DEADLINE_SECONDS)
        if self._template is not None:
            try:
                await asyncio.wait_for(self._template.wait(), KILL_DEADLINE_SECONDS)
            except TimeoutError:
                self._say(f"the template process (pid {self._template.pid}) does not end")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def read_secret(secret_file: str | None) -> str:
    """The cluster's secret, from a file or from the environment.

    Raises:
      ValueError: there is none; the message says what to do.
    """
    if secret_file is not None:
        path = Path(secret_file)
        try:
            if path.stat().st_mode & 0o077:
                raise ValueError(f"secret file {path} can be read by others; run: chmod 600 {path}")
            secret = path.read_text().strip()
        except OSError as error:
            raise ValueError(f"cannot read the secret file {path}: {error.strerror}") from None
        if not secret:
            raise ValueError(f"the secret file {path} is empty")
        return secret
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise ValueError(f"no cluster secret: set {SECRET_VARIABLE}, or name the head's secret file with --secret-file")
    return secret


def address_towards(host: str, port: int) -> str:
    """The address of this machine's interface that leads to ``host``; nothing is sent for it.

    Raises:
      ValueError: the host has no address.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"--head {host}:{port} leads nowhere: {error.strerror or error}") from None


def split_address(text: str) -> tuple[str, int]:
    """``("10.0.0.1", 29001)`` of ``10.0.0.1:29001``; an IPv6 address is written in brackets.

    Raises:
      ValueError: not of that form.
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    return host, int(port)


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(core.EXIT_REFUSED, f"ridgeway worker: {message}; see `ridgeway worker --help`\n")


def build_parser() -> argparse.ArgumentParser:
    """The agent's command line."""
    parser = _Parser(
        prog="ridgeway worker",
        allow_abbrev=False,
        description="Join a cluster as one host. The cluster's secret is taken from --secret-file or from "
        f"{SECRET_VARIABLE}; shape and settings come from the head.",
    )
    parser.add_argument("--head", required=True, metavar="HOST:PORT", help="cluster address of the head")
    parser.add_argument("--slice", type=int, metavar="S", help="its slice; without it any free place")
    parser.add_argument("--host", type=int, metavar="H", help="its number within the slice")
    parser.add_argument("--standby", action="store_true", help="wait, ready, for a place that becomes free")
    parser.add_argument(
        "--address", metavar="A",
        help="address at which other workers reach this host (default: its own on the way to the head)",
    )  # fmt: skip
    parser.add_argument("--secret-file", metavar="PATH", help="file with the cluster's secret (mode 0600)")
    parser.add_argument("--launch-id", default="", metavar="ID", help="name that the launcher knows this process by")
    parser.add_argument(
        "--connect-timeout-seconds", type=float, default=DEFAULT_CONNECT_TIMEOUT_SECONDS, metavar="N",
        help="how long to try to reach the head (default %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--entry-module", action="append", default=[], metavar="ROLE=MODULE",
        help="run another module as executor or compiler (for tests)",
    )  # fmt: skip
    parser.add_argument("--preload", default=template.DEFAULT_PRELOAD, help=argparse.SUPPRESS)
    return parser


def _versions() -> dict[str, str]:
    try:
        return hello_versions()
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{error.name} is not installed beside {sys.executable}; install ridgeway there") from None


def _identity(options: argparse.Namespace) -> core.Identity:
    head_host, head_port = split_address(options.head)
    if (options.slice is None) != (options.host is None):
        raise ValueError("--slice and --host go together: give both, or neither for any free place")
    if options.standby and options.slice is not None:
        raise ValueError("--standby waits for any free place: leave out --slice and --host")
    if options.slice is not None and (options.slice < 0 or options.host < 0):
        raise ValueError(f"--slice {options.slice} --host {options.host}: both count from 0")
    template.parse_entry_modules(options.entry_module)
    return core.Identity(
        head_host=head_host,
        head_port=head_port,
        secret=read_secret(options.secret_file),
        slice=options.slice,
        host=options.host,
        standby=options.standby,
        address=options.address or address_towards(head_host, head_port),
        launch_id=options.launch_id,
        pid=os.getpid(),
        hostname=socket.gethostname(),
        versions=_versions(),
    )


def main(argv: list[str] | None = None, after_parsing: Callable[[], None] | None = None) -> int:
    """Run an agent; returns its exit code.

    Args:
      argv: command line without the program's name.
      after_parsing: called once the command line is known to be right.
    """
    options = build_parser().parse_args(argv)
    try:
        identity = _identity(options)
        settings = load_settings()
    except ValueError as error:
        print(f"ridgeway worker: {error}", file=sys.stderr)
        return core.EXIT_REFUSED
    if after_parsing is not None:
        after_parsing()
    processes.never_fail_at_output()
    processes.raise_descriptor_limit()
    # The template and its children have no use for it, and it should not show in their environment.
    os.environ.pop(SECRET_VARIABLE, None)
    return asyncio.run(AgentProcess(identity, settings, options).run())


if __name__ == "__main__":
    sys.exit(main())
