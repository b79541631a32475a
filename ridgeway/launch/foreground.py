"""`ridgeway run`: cluster up, the user's command with the right environment, cluster down, the command's code."""

import asyncio
import os
import shlex
import signal
import textwrap
import time
from collections.abc import Callable, Sequence

from ridgeway.launch.child_processes import Process
from ridgeway.launch.environment import command_environment
from ridgeway.launch.local import LaunchError, LocalCluster, LocalOptions
from ridgeway.processes import die_with_parent, signal_name

#: How long the command may take to end after it was asked to.
COMMAND_GRACE_SECONDS = 10.0
#: How long it may take after a Ctrl-C that did not come from a terminal, where nobody can press it again.
INTERRUPT_GRACE_SECONDS = 30.0
#: So many Ctrl-C within so many seconds end a command that does not react to it.
INSISTING_INTERRUPTS = 3
INSISTING_SECONDS = 3.0

EXIT_CLUSTER_FAILED = 1
SHOWN_COMMAND_CHARACTERS = 200
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run(options: LocalOptions, command: Sequence[str], say: Callable[[str], None]) -> int:
    """Returns the command's exit code; 128 + n when signal n ended it; 1 when the cluster failed under a command
    that did not notice.

    Raises:
      LaunchError, cluster_folder.ClusterError: the cluster did not come up. Nothing is left running.
    """
    signals: asyncio.Queue[int] = asyncio.Queue(maxsize=100)
    loop = asyncio.get_running_loop()

    def received(number: int) -> None:
        if not signals.full():
            signals.put_nowait(number)

    for number in SIGNALS:
        # SIGHUP stays ignored under nohup.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, received, number)
    cluster = LocalCluster(options, say)
    reason = "the start failed"
    try:
        interrupted = await until_signal(cluster.start(), signals)
        if interrupted is not None:
            reason = f"{signal_name(interrupted)} during the start"
            return 128 + interrupted
        assert cluster.record is not None
        code, reason = await _Command(cluster, command, say).run(signals)
        return code
    finally:
        await cluster.stop(reason)


async def until_signal(work: object, signals: asyncio.Queue[int]) -> int | None:
    """Do something unless a signal comes first; returns the signal."""
    task = asyncio.ensure_future(work)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(signals.get())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return None
        return waiting.result()
    finally:
        for future in (task, waiting):
            future.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


class _Command:
    """The user's command while the cluster is up."""

    def __init__(self, cluster: LocalCluster, command: Sequence[str], say: Callable[[str], None]):
        self._cluster = cluster
        self._command = list(command)
        self._say = say
        self._shares_terminal = owns_terminal()
        self._interrupts: list[float] = []
        self._kill_at = float("inf")
        self._asked_to_end = False

    async def run(self, signals: asyncio.Queue[int]) -> tuple[int, str]:
        """Returns the exit code and why the cluster is to be stopped."""
        process = await self._start()
        ended = asyncio.ensure_future(process.wait())
        cluster_failed = False
        waiting: asyncio.Future[int] = asyncio.ensure_future(signals.get())
        failure: set[asyncio.Future[str]] = {self._cluster.failure}
        try:
            while True:
                timeout = None if self._kill_at == float("inf") else max(0.0, self._kill_at - time.monotonic())
                await asyncio.wait([ended, waiting, *failure], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    break
                if waiting.done():
                    self._signal(process, waiting.result())
                    waiting = asyncio.ensure_future(signals.get())
                if failure and self._cluster.failure.done():
                    failure = set()
                    cluster_failed = True
                    self._say(f"the cluster has failed: {self._cluster.failure.result()}")
                    self._kill_at = min(self._kill_at, time.monotonic() + COMMAND_GRACE_SECONDS)
                if time.monotonic() >= self._kill_at:
                    self._insist(process)
        finally:
            waiting.cancel()
            ended.cancel()
            if process.returncode is None:
                self._send(process, signal.SIGKILL)
        return self._result(process.returncode or 0, cluster_failed)

    async def _start(self) -> Process:
        record = self._cluster.record
        assert record is not None
        parent = os.getpid()
        self._say(f"running: {textwrap.shorten(shlex.join(self._command), SHOWN_COMMAND_CHARACTERS)}")
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                env=command_environment(os.environ, "127.0.0.1", record.proxy_port),
                # In the terminal's group it reads from the terminal and gets Ctrl-C from it; elsewhere a group of
                # its own lets signals reach its children too.
                process_group=None if self._shares_terminal else 0,
                preexec_fn=lambda: die_with_parent(parent),
            )
        except OSError as error:
            raise LaunchError(f"cannot run {self._command[0]!r}: {error.strerror}") from None

    def _signal(self, process: Process, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._shares_terminal:
            # The terminal has sent it to the command as well; what it does with it is its own affair.
            self._interrupts = [t for t in self._interrupts if now - t < INSISTING_SECONDS] + [now]
            if len(self._interrupts) >= INSISTING_INTERRUPTS:
                self._say("Ctrl-C again and again: ending the command")
                self._send(process, signal.SIGTERM)
                self._kill_at = min(self._kill_at, now + COMMAND_GRACE_SECONDS)
            elif len(self._interrupts) == 1:
                self._say(
                    f"Ctrl-C is the command's to handle; press it {INSISTING_INTERRUPTS} times within "
                    f"{INSISTING_SECONDS:g} s to end everything"
                )
            return
        grace = INTERRUPT_GRACE_SECONDS if number == signal.SIGINT else COMMAND_GRACE_SECONDS
        self._say(f"{signal_name(number)}: passed on to the command, which has {grace:g} s to end")
        self._send(process, number)
        self._asked_to_end = True
        self._kill_at = min(self._kill_at, now + grace)

    def _insist(self, process: Process) -> None:
        if self._asked_to_end:
            self._say("the command does not end: killing it")
            self._send(process, signal.SIGKILL)
            self._kill_at = float("inf")
        else:
            self._say("ending the command")
            self._send(process, signal.SIGTERM)
            self._asked_to_end = True
            self._kill_at = time.monotonic() + COMMAND_GRACE_SECONDS

    def _send(self, process: Process, number: int) -> None:
        try:
            if self._shares_terminal:
                process.send_signal(number)
            else:
                os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # It has just ended.

    def _result(self, code: int, cluster_failed: bool) -> tuple[int, str]:
        for slice_index, reason in sorted(self._cluster.given_up.items()):
            self._say(f"slice {slice_index} was given up: {reason}")
        if code < 0:
            return 128 - code, f"the command was ended by {signal_name(-code)}"
        if cluster_failed:
            return code or EXIT_CLUSTER_FAILED, "it has failed"
        return code, f"the command has ended with code {code}"


def owns_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, so that Ctrl-C goes to its whole group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
