"""The process that imports jax once and forks executors, compilers and Python processes from it, in about 10 ms each.

It stays single-threaded and makes no backend, which is what makes the fork safe.  It obeys its agent over a
socket with one JSON object a line::

    agent -> template   {"fork": role, "id": n, "arguments": {...}}
    template -> agent   {"ready": seconds, "threads": n}
                        {"forked": role, "id": n, "pid": pid}
                        {"fork_failed": role, "id": n, "message": text}
                        {"exited": role, "id": n, "code": exit code, negative for a signal,
                         "running": [[program, name], ...] that it was executing}
                        {"succeeded": role, "id": n, "pid": pid}: another process has taken the place of n's

An executor may ask it for a successor of itself (see `worker.succession`). It ends when the socket closes, and its
children end with it.  Secrets travel in ``arguments``, over the socket.
"""

import argparse
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from ridgeway import processes
from ridgeway.worker.running_programs import RunningPrograms

#: What an executor that has a successor exits with, what it asks for one with, and with how many sockets at most.
EXIT_SUCCEEDED = 75
SUCCESSOR_REQUEST = b"successor\n"
DESCRIPTORS_LIMIT = 253

#: Role of a child -> the module whose ``main(arguments: dict) -> int`` it runs.
DEFAULT_ENTRY_MODULES = {
    "executor": "ridgeway.worker.executor",
    "compiler": "ridgeway.worker.compiler",
    "python": "ridgeway.worker.python_host",
}

#: What is imported before the entry modules.
DEFAULT_PRELOAD = "jax"

LINE_LIMIT_BYTES = 16 << 20

Entry = Callable[[dict[str, Any]], int]


def parse_entry_modules(options: list[str]) -> dict[str, str]:
    """Entry modules with ``role=module`` overrides applied.

    Raises:
      ValueError: an override is not of that form.
    """
    modules = dict(DEFAULT_ENTRY_MODULES)
    for option in options:
        role, separator, module = option.partition("=")
        if not separator or not module or role not in modules:
            raise ValueError(f"--entry-module {option!r} is not executor=MODULE, compiler=MODULE or python=MODULE")
        modules[role] = module
    return modules


def thread_count() -> int:
    """Threads of this process, those of native libraries included (Linux; elsewhere 1 is assumed)."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


@dataclasses.dataclass(slots=True)
class _Child:
    role: str
    number: int
    arguments: dict[str, Any]
    channel: socket.socket | None = None
    """Over which an executor asks for its successor."""
    predecessor: int | None = None
    """The process whose place it is to take."""
    running: RunningPrograms = dataclasses.field(default_factory=RunningPrograms)
    """What it executes."""


class Template:
    """The loop that forks and reaps."""

    def __init__(self, control: socket.socket, log_descriptor: int, entries: dict[str, Entry]):
        self._control = control
        self._log_descriptor = log_descriptor
        self._entries = entries
        self._pid = os.getpid()
        self._children: dict[int, _Child] = {}
        self._ended_early: dict[int, int] = {}
        """predecessor -> exit code of a successor that ended before it was heard that it had taken over"""
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self, seconds: float) -> None:
        """Announce readiness and obey until the agent closes the socket.

        Args:
          seconds: what the imports took, for the agent to report.
        """
        for end in (self._wakeup_reader, self._wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ)
        self._tell({"ready": seconds, "threads": thread_count()})
        pending = b""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wakeup_reader:
                    self._wakeup_reader.recv(4096)
                    continue
                if key.data is not None:
                    self._asked(key.data)
                    continue
                data = self._control.recv(1 << 16)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                if len(pending) > LINE_LIMIT_BYTES:
                    raise RuntimeError(f"a request of more than {LINE_LIMIT_BYTES} bytes from the agent")
                for line in lines:
                    self._fork(json.loads(line))
            self._reap()

    def _fork(self, request: dict[str, Any]) -> None:
        role, number = request["fork"], request["id"]
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = self._start(_Child(role, number, request["arguments"]), ())
        except OSError as error:
            self._tell({"fork_failed": role, "id": number, "message": str(error)})
            return
        self._tell({"forked": role, "id": number, "pid": pid})

    def _start(self, child: _Child, inherited: Sequence[int]) -> int:
        """Fork a child that has some descriptors more.

        Raises:
          OSError: it cannot be forked.
        """
        theirs: socket.socket | None = None
        if child.role == "executor":
            child.channel, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:
            for end in (child.channel, theirs):
                if end is not None:
                    end.close()
            raise
        if pid == 0:
            child.running.adopt()
            arguments = dict(child.arguments)
            if theirs is not None:
                arguments |= {"inherited": list(inherited), "template_descriptor": theirs.detach()}
            self._become(child.role, arguments, [*inherited, *([arguments["template_descriptor"]] if theirs else [])])
        self._children[pid] = child
        if child.channel is not None and theirs is not None:
            theirs.close()
            child.channel.setblocking(False)
            self._selector.register(child.channel, selectors.EVENT_READ, pid)
        return pid

    def _asked(self, pid: int) -> None:
        """An executor wants a successor, or has ended."""
        child = self._children.get(pid)
        if child is None or child.channel is None:
            return
        try:
            data, descriptors, _, _ = socket.recv_fds(child.channel, 4096, DESCRIPTORS_LIMIT)
        except OSError:
            data, descriptors = b"", []
        try:
            if data != SUCCESSOR_REQUEST:
                self._close_channel(child)
                return
            sys.stdout.flush()
            sys.stderr.flush()
            self._start(_Child(child.role, child.number, child.arguments, predecessor=pid), descriptors)
        except OSError as error:
            # The executor sees the end of the channel that it has sent along, and goes on without.
            print(f"ridgeway template: no successor of executor {child.number}: {error}", file=sys.stderr, flush=True)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _close_channel(self, child: _Child) -> None:
        if child.channel is not None:
            self._selector.unregister(child.channel)
            child.channel.close()
            child.channel = None

    def _become(self, role: str, arguments: dict[str, Any], keep: Collection[int]) -> NoReturn:
        """In the child: let go of everything of the template's, then run the entry point and end."""
        code = 1
        try:
            processes.die_with_parent(self._pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(self._log_descriptor, 1)
            os.dup2(self._log_descriptor, 2)
            # Closed as objects first: one collected later would close a number that is somebody else's.
            channels = [child.channel for child in self._children.values() if child.channel is not None]
            for end in (self._selector, self._control, self._wakeup_reader, self._wakeup_writer, *channels):
                end.close()
            first = 3
            for kept in [*sorted(keep), _highest_descriptor() + 1]:
                os.closerange(first, kept)
                first = kept + 1
            for stream in (sys.stdout, sys.stderr):
                # A whole line in one write, also with PYTHONUNBUFFERED: several processes share the log.
                stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
            faulthandler.enable()
            result = self._entries[role](arguments)
            code = result if isinstance(result, int) else 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else (0 if error.code is None else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                # Without interpreter shutdown: threads of the runtime may still run and would crash in it.
                os._exit(code & 0xFF)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._ended(pid, os.waitstatus_to_exitcode(status))

    def _ended(self, pid: int, code: int) -> None:
        child = self._children.pop(pid)
        self._close_channel(child)
        if child.predecessor in self._children:
            # Nobody's child yet. If its predecessor has let go already, this end is the executor's.
            self._ended_early[child.predecessor] = code
            return
        early = self._ended_early.pop(pid, None)
        successors = [(p, c) for p, c in self._children.items() if c.predecessor == pid]
        if code == EXIT_SUCCEEDED and successors:
            successor, heir = successors[0]
            heir.predecessor = None
            child.running.close()
            self._tell({"succeeded": child.role, "id": child.number, "pid": successor})
            return
        for successor, heir in successors:
            # Its predecessor ended in the middle: whatever it has is not to be trusted.
            heir.predecessor = None
            processes.send_signal(successor, signal.SIGKILL)
            self._children.pop(successor)
            self._close_channel(heir)
        if code == EXIT_SUCCEEDED and early is not None:
            code = early
        self._tell({"exited": child.role, "id": child.number, "code": code, "running": child.running.read()})
        child.running.close()

    def _tell(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")


def _highest_descriptor() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return max(int(name) for name in os.listdir(folder))
        except (OSError, ValueError):
            continue
    return os.sysconf("SC_OPEN_MAX") - 1


def main(argv: list[str] | None = None) -> int:
    """Import, then serve. Started by the agent only."""
    parser = argparse.ArgumentParser(prog="python -m ridgeway.worker.template", allow_abbrev=False)
    parser.add_argument("--control-descriptor", type=int, required=True, help="inherited socket")
    parser.add_argument("--log-descriptor", type=int, required=True, help="what children write to")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--preload", default=DEFAULT_PRELOAD, help="modules, with commas, imported first")
    parser.add_argument("--entry-module", action="append", default=[], help="ROLE=MODULE")
    arguments = parser.parse_args(argv)
    processes.die_with_parent(arguments.parent_pid)
    processes.never_fail_at_output()
    # The agent decides, here and in the children: a Ctrl-C in its terminal reaches the whole process group, and some
    # schedulers send SIGTERM to every process of a job.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=arguments.control_descriptor)

    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ.pop("JAX_BACKEND_TARGET", None)
    started = time.monotonic()
    for name in filter(None, arguments.preload.split(",")):
        importlib.import_module(name)
    entries: dict[str, Entry] = {
        role: importlib.import_module(module).main
        for role, module in parse_entry_modules(arguments.entry_module).items()
    }
    seconds = time.monotonic() - started
    if thread_count() > 1:
        print(
            f"ridgeway template: {thread_count()} threads after the imports; a forked executor may hang. "
            "Find which of the imported modules starts a thread.",
            file=sys.stderr,
            flush=True,
        )
    # What is imported is never garbage: collections in the children would only copy its pages.
    gc.collect()
    gc.freeze()
    try:
        Template(control, arguments.log_descriptor, entries).serve(seconds)
    except (BrokenPipeError, ConnectionResetError):
        pass  # The agent is gone.
    return 0


if __name__ == "__main__":
    sys.exit(main())
