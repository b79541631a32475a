"""Whole histories of a simulated cluster, each made from a seed.

A test is a chunk of histories, because each takes only milliseconds. The message of a failure names the one history
with its seed, says how it came to that, and ends with the command that runs it alone.
"""

import asyncio
import random
import re

import pytest
import virtual_time
from histories import run_history
from machine_histories import run_machine_history
from simulated_executor import SimulatedExecutor
from simulated_network import SimulationFailure, World
from simulated_xla import Call, XlaWorld

from ridgeway.cluster.generations import Generations
from ridgeway.cluster.membership import Membership
from ridgeway.cluster.suspension import Suspensions
from ridgeway.proxy.arrays import Array
from ridgeway.proxy.suspension_gate import SuspensionGate

CHUNKS = 60
HISTORIES = 20
MACHINE_CHUNKS = 30
MACHINE_HISTORIES = 100


@pytest.mark.parametrize("seed", range(CHUNKS), ids=lambda seed: f"seed={seed}")
def test_histories(seed: int) -> None:
    for number in range(HISTORIES):
        run_history(f"{seed}.{number}")


@pytest.mark.parametrize("seed", range(MACHINE_CHUNKS), ids=lambda seed: f"seed={seed}")
def test_machine_histories(seed: int) -> None:
    for number in range(MACHINE_HISTORIES):
        run_machine_history(f"{seed}.{number}")


# ---- the simulation itself: the same each time, and it notices


def test_a_history_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stories: list[list[str]] = []
    create = World.__init__

    def remember(self: World, random_source: random.Random) -> None:
        create(self, random_source)
        stories.append(self.log)

    monkeypatch.setattr(World, "__init__", remember)
    for _ in range(2):
        run_history("7.1")
    assert stories[0] == stories[1]
    assert len(stories[0]) > 20


def _first_failure(limit: int) -> str:
    for number in range(limit):
        try:
            run_history(f"broken.{number}")
        except SimulationFailure as failure:
            return str(failure)
    pytest.fail(f"{limit} histories passed")


def test_survivors_that_are_told_of_no_abort_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generations, "_abort", lambda self, now, generation, cause, lost: [])
    assert "history broken." in _first_failure(150)


def test_a_lost_array_that_can_be_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Array, "problem", lambda self, manager: self.error)
    assert "were lost" in _first_failure(100)


def test_an_executor_that_is_never_recycled_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "_recycle_stuck_executor", lambda self, now: [])
    assert "has waited" in _first_failure(100)


def test_a_silent_host_that_is_never_given_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tick = Membership.tick

    def deaf(self: Membership, now: float) -> list:
        for agent in self.agents.values():
            agent.heard = now
        return tick(self, now)

    monkeypatch.setattr(Membership, "tick", deaf)
    assert "history broken." in _first_failure(100)


def test_collectives_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = XlaWorld.call
    swapped: dict[int, int] = {}

    def confused(self: XlaWorld, clique: tuple, rank: int, execution: int, value: int, done: object) -> Call:
        # One member takes every second pair of executions for each other.
        if rank == 0 and execution % 4 in (1, 2):
            execution += 1 if execution % 4 == 1 else -1
            swapped[execution] = swapped.get(execution, 0) + 1
        return call(self, clique, rank, execution, value, done)

    monkeypatch.setattr(XlaWorld, "call", confused)
    assert "against each other" in _first_failure(10)
    assert swapped


def test_requests_that_do_not_wait_for_a_suspended_host_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuspensionGate, "admit", lambda self, touched, work: work())
    assert "history broken." in _first_failure(100)


def test_a_replacement_without_the_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgetful(self: SimulatedExecutor, request: int, *fields: object, attached: object) -> None:
        self.send(["reply", request])

    monkeypatch.setattr(SimulatedExecutor, "_order_restore", forgetful)
    assert "buffer group" in _first_failure(100)


def test_a_suspension_without_an_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Suspensions, "overdue", lambda self, now: [])
    monkeypatch.setattr(SimulatedExecutor, "_order_restore", lambda self, *fields, attached: None)
    assert re.search("has waited|operations wait", _first_failure(100))


def test_a_deadlock_is_noticed() -> None:
    async def everybody_waits() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(virtual_time.NothingLeftToHappen):
        virtual_time.run(everybody_waits())
