"""The head's handle on the real process that holds key-value services."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import ridgeway
from ridgeway.cluster.rendezvous import Rendezvous

HOST = "127.0.0.1"
PATIENCE_SECONDS = 60.0
"""More than anything here takes; only a hang reaches it."""


def run(test: Callable[[Rendezvous], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(ridgeway.__file__).parents[1]))

    async def with_rendezvous() -> None:
        rendezvous = Rendezvous(HOST, 2)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await rendezvous.start()
            try:
                await test(rendezvous)
            finally:
                await rendezvous.stop()

    asyncio.run(with_rendezvous())


async def next_port(rendezvous: Rendezvous) -> int:
    while (port := rendezvous.take_nowait()) is None:
        await asyncio.sleep(0.01)
    return port


def answers(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 5.0).close()
    except OSError:
        return False
    return True


def test_services_are_ready_and_made_anew_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rendezvous: Rendezvous) -> None:
        at_once = [rendezvous.take_nowait() for _ in range(3)]
        assert None not in at_once[:2]
        assert at_once[2] is None
        ports = [*at_once[:2], *[await next_port(rendezvous) for _ in range(3)]]
        assert len(set(ports)) == 5
        for port in ports:
            assert port is not None
            assert answers(port)
            rendezvous.close_service(port)

    run(test, monkeypatch)


def test_asking_often_while_there_is_none_makes_no_more_than_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rendezvous: Rendezvous) -> None:
        taken = [rendezvous.take_nowait() for _ in range(50)]
        assert sum(port is not None for port in taken) == 2
        assert await rendezvous.take(PATIENCE_SECONDS) > 0
        # All that the asking set off has been done once another command is answered.
        for _ in range(3):
            await asyncio.gather(*rendezvous._tasks)
        assert rendezvous._ready.qsize() == 2

    run(test, monkeypatch)


def test_a_process_that_died_is_replaced_and_its_services_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rendezvous: Rendezvous) -> None:
        process = rendezvous._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        port = await next_port(rendezvous)
        assert answers(port)
        assert rendezvous._process is not process
        # What belonged to the dead one may still be closed.
        rendezvous.close_service(1)
        await asyncio.gather(*rendezvous._tasks)

    run(test, monkeypatch)
