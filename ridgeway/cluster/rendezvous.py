"""Key-value services for generations, in a process of their own.

XLA's CPU collectives find each other through jaxlib's distributed service.  It is native code that may end its
process, so it lives in a child that holds no state worth keeping: when it dies, generations that are being made
fail and are made again.  Run as
``python -m ridgeway.cluster.rendezvous ADDRESS PARENT_PID``; commands and answers are lines::

    new            ->  port NUMBER
    close NUMBER   ->  closed NUMBER
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from ridgeway import processes

START_TIMEOUT_SECONDS = 60.0
COMMAND_TIMEOUT_SECONDS = 10.0
SERVICE_HEARTBEAT_SECONDS = 100_000
"""Far out on purpose: Ridgeway detects failures itself; the service must never act on its own."""
REGISTER_TIMEOUT_SECONDS = 60


class RendezvousError(RuntimeError):
    """No key-value service can be had."""


class Rendezvous:
    """The head's handle: keeps some services ready, so that forming a generation does not wait for one."""

    def __init__(self, address: str, spare: int):
        self._address = address
        self._spare = spare
        self._ready: asyncio.Queue[int] = asyncio.Queue()
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling = False

    async def start(self) -> None:
        """Start the child and make the first services.

        Raises:
          RendezvousError: it did not start.
        """
        await self._start_process()
        await self._fill()

    async def _start_process(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ridgeway.cluster.rendezvous",
            self._address,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_SECONDS)
        except TimeoutError:
            line = b""
        if line.strip() != b"ready":
            raise RendezvousError("the rendezvous process did not start; see the head's log")

    async def take(self, timeout_seconds: float) -> int:
        """The port of a fresh service; another one is made behind it.

        Raises:
          RendezvousError: none could be had in time.
        """
        self._background(self._fill)
        try:
            return await asyncio.wait_for(self._ready.get(), timeout_seconds)
        except TimeoutError:
            raise RendezvousError(f"no key-value service within {timeout_seconds} s") from None

    def take_nowait(self) -> int | None:
        """The port of a service that is ready, or None."""
        if self._process is not None and self._process.returncode is not None:
            self._forget_services()
        self._background(self._fill)
        try:
            return self._ready.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def close_service(self, port: int) -> None:
        """End a service that nobody is attached to any more."""
        self._background(self._close, port)

    async def _close(self, port: int) -> None:
        with contextlib.suppress(RendezvousError):
            await self._command(f"close {port}")

    async def _fill(self) -> None:
        if self._filling:
            return  # many ask while there is none; each would make one
        self._filling = True
        try:
            while self._ready.qsize() < self._spare:
                answer = await self._command("new")
                self._ready.put_nowait(int(answer.split()[1]))
        finally:
            self._filling = False

    def _forget_services(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()

    async def _command(self, text: str) -> str:
        async with self._lock:
            for attempt in range(2):
                process = self._process
                if process is None or process.returncode is not None:
                    self._forget_services()
                    await self._start_process()
                    process = self._process
                assert process is not None and process.stdin is not None and process.stdout is not None
                try:
                    process.stdin.write(text.encode() + b"\n")
                    line = await asyncio.wait_for(process.stdout.readline(), COMMAND_TIMEOUT_SECONDS)
                except (TimeoutError, ConnectionError):
                    line = b""
                if line:
                    return line.decode().strip()
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                if attempt:
                    break
        raise RendezvousError("the rendezvous process died twice")

    def _background(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: int) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: int) -> None:
        try:
            await work(*arguments)
        except RendezvousError as error:
            print(f"ridgeway head: rendezvous: {error}", file=sys.stderr, flush=True)

    async def stop(self) -> None:
        """End the child. What was still to be told it is dropped: it would only be started anew for that."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def free_port(address: str) -> int:
    """A TCP port that is free now on ``address``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def main(address: str, parent: int) -> None:
    """The child: serve commands until standard input ends."""
    processes.die_with_parent(parent)
    processes.never_fail_at_output()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from jaxlib import _jax  # type: ignore[attr-defined]  # pyright: ignore  # the only native code outside workers; see the module's text

    services: dict[int, object] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "new":
            port = free_port(address)
            # One node, recoverable, everybody connects as node 0: connecting then never waits for a missing peer.
            services[port] = _jax.get_distributed_runtime_service(
                f"{address}:{port}",
                1,
                heartbeat_timeout=SERVICE_HEARTBEAT_SECONDS,
                cluster_register_timeout=REGISTER_TIMEOUT_SECONDS,
                shutdown_timeout=1,
                recoverable=True,
            )
            print("port", port, flush=True)
        else:
            service = services.pop(int(words[1]), None)
            if service is not None:
                # Aside: with a stopped client still attached it takes five seconds, and others want new ones.
                shutdown = service.shutdown  # type: ignore[attr-defined]  # jaxlib ships no types for it
                threading.Thread(target=shutdown, daemon=True).start()
            print("closed", words[1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
