"""The process that imports jax once and forks executors, compilers and Python processes from it, in about 10 ms each.

It stays single-threaded and makes no backend, which is what makes the fork safe.  It obeys its agent over a
socket with one JSON object a line::

    agent -> template   {"fork": role, "id": n, "arguments": {...}}
    template -> agent   {"ready": seconds, "threads": n}
                        {"forked": role, "id": n, "pid": pid}
                        {"fork_failed": role, "id": n, "message": text}
                        {"exited": role, "id": n, "code": exit code, negative for a signal}

It ends when the socket closes, and its children end with it.  Secrets travel in ``arguments``, over the
socket.
"""

import argparse
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
from collections.abc import Callable
from typing import Any, NoReturn

from ridgeway import processes

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


class Template:
    """The loop that forks and reaps."""

    def __init__(self, control: socket.socket, log_descriptor: int, entries: dict[str, Entry]):
        self._control = control
        self._log_descriptor = log_descriptor
        self._entries = entries
        self._pid = os.getpid()
        self._children: dict[int, tuple[str, int]] = {}
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
            pid = os.fork()
        except OSError as error:
            self._tell({"fork_failed": role, "id": number, "message": str(error)})
            return
        if pid == 0:
            self._become(role, request["arguments"])
        self._children[pid] = (role, number)
        self._tell({"forked": role, "id": number, "pid": pid})

    def _become(self, role: str, arguments: dict[str, Any]) -> NoReturn:
        """In the child: let go of everything of the template's, then run the entry point and end."""
        code = 1
        try:
            processes.die_with_parent(self._pid)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(self._log_descriptor, 1)
            os.dup2(self._log_descriptor, 2)
            # Closed as objects first: one collected later would close a number that is somebody else's.
            for end in (self._selector, self._control, self._wakeup_reader, self._wakeup_writer):
                end.close()
            os.closerange(3, _highest_descriptor() + 1)
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
                role, number = self._children.pop(pid)
                self._tell({"exited": role, "id": number, "code": os.waitstatus_to_exitcode(status)})

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
    # The agent decides; a Ctrl-C in its terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
