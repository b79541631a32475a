"""Runs functions in processes of their own, forked in milliseconds from one that has imported jax.

A test of XLA clients needs a fresh process: clients, threads and jax's own state stay for the life of one. Importing
jax takes seconds, so it is done once, as for executors.
"""

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import ridgeway

PATIENCE_SECONDS = 120.0
"""More than anything here takes; only a hang reaches it."""
PRELOADED = ["jax", "jax.numpy", "ridgeway.worker.buffers", "ridgeway.worker.compilation"]


class ScenarioFailed(AssertionError):
    """What went wrong in the other process, with its traceback."""


class Scenario:
    """A function of a module that runs in a process of its own; it may exchange values with the test on the way."""

    def __init__(self, context: multiprocessing.context.ForkServerContext, module: str, name: str, arguments: tuple):
        self.name = name
        self._link, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, module, name, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, value: Any) -> None:
        """Give the scenario a value."""
        self._link.send(value)

    def receive(self) -> Any:
        """What the scenario says or, in the end, returns.

        Raises:
          ScenarioFailed: it raised, died, or said nothing for too long.
        """
        if not self._link.poll(PATIENCE_SECONDS):
            self.kill()
            raise ScenarioFailed(f"{self.name} said nothing for {PATIENCE_SECONDS} s")
        try:
            kind, value = self._link.recv()
        except EOFError:
            self.process.join(PATIENCE_SECONDS)
            raise ScenarioFailed(f"{self.name} ended with exit code {self.process.exitcode}") from None
        if kind == "failed":
            raise ScenarioFailed(f"{self.name} failed:\n{value}")
        return value

    def signal(self, number: int) -> None:
        """Send a signal; a killed process is gone afterwards."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(PATIENCE_SECONDS)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join(PATIENCE_SECONDS)


class Lab:
    """Starts scenarios of one module."""

    def __init__(self, module: str):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, module])
        self._module = module
        self._running: list[Scenario] = []

    def start(self, name: str, *arguments: Any) -> Scenario:
        """Start a scenario beside the test."""
        scenario = Scenario(self._context, self._module, name, arguments)
        self._running.append(scenario)
        return scenario

    def run(self, name: str, *arguments: Any) -> Any:
        """Run a scenario to its end; what it returns."""
        return self.start(name, *arguments).receive()

    def clear_away(self) -> None:
        """End whatever still runs."""
        for scenario in self._running:
            if scenario.process.is_alive():
                scenario.kill()
        self._running.clear()


@contextlib.contextmanager
def lab_of(module: str) -> Iterator[Lab]:
    """A lab with its parent process; both are gone afterwards."""
    paths = [str(Path(__file__).parent), str(Path(ridgeway.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    wanted = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    before = {name: os.environ.get(name) for name in wanted}
    lab = Lab(module)
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    try:
        yield lab
    finally:
        lab.clear_away()
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # there is no public way


@contextlib.contextmanager
def rendezvous(address: str = "127.0.0.1") -> Iterator["Services"]:
    """The real process that holds key-value services."""
    source = str(Path(ridgeway.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeway.cluster.rendezvous", address, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    try:
        services = Services(process, address)
        yield services
    finally:
        process.kill()
        process.communicate()


class Services:
    """Commands to a rendezvous process."""

    def __init__(self, process: "subprocess.Popen[str]", address: str):
        self._process = process
        self._address = address
        assert self._answer() == ["ready"]

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def _command(self, text: str) -> list[str]:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()
        return self._answer()

    def new(self) -> str:
        """The address of a fresh service."""
        word, port = self._command("new")
        assert word == "port"
        return f"{self._address}:{port}"

    def close(self, service: str) -> None:
        """End a service."""
        port = service.rpartition(":")[2]
        assert self._command(f"close {port}") == ["closed", port]


def _run(link: multiprocessing.connection.Connection, module: str, name: str, arguments: tuple) -> None:
    code = 0
    try:
        function = getattr(importlib.import_module(module), name)
        link.send(("value", function(*arguments, link=link)))
    except BaseException:
        code = 1
        link.send(("failed", traceback.format_exc()))
    # Threads of XLA that still run would crash in an orderly end of the interpreter.
    link.close()
    os._exit(code)
