"""Requests that wait while hosts are suspended: which, in what order, how many."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeway.proxy import array_requests, cluster_requests, executable_requests, touching
from ridgeway.proxy.suspension_gate import SuspensionGate


class Gate:
    """A gate, the slots that are suspended, and what has passed."""

    def __init__(self, limit: int = 100):
        self.slots: set[int] = set()
        self.done: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        suspender: Any = self
        self.gate = SuspensionGate(suspender, 1, limit, lambda kind, **fields: self.events.append((kind, fields)))

    def now(self) -> float:
        return 0.0

    def places(self, slots: Iterable[int]) -> list[list[int]]:
        return [[slot, 0] for slot in slots]

    def ask(self, name: str, *slots: int) -> None:
        self.gate.admit(lambda: slots, lambda: self.done.append(name))


def test_everything_passes_while_nothing_is_suspended() -> None:
    gate = Gate()
    gate.gate.admit(lambda: pytest.fail("nobody needs to know"), lambda: gate.done.append("a"))
    assert gate.done == ["a"] and not gate.gate.closed


def test_from_the_first_that_touches_it_on_everything_waits_in_order() -> None:
    gate = Gate()
    gate.slots = {1}
    gate.ask("elsewhere", 0)
    gate.ask("there", 0, 1)
    gate.ask("behind it", 0)
    gate.ask("nowhere")
    assert gate.done == ["elsewhere"]
    gate.gate.reopen()
    assert gate.done == ["elsewhere"]
    gate.slots = {2}
    gate.gate.reopen()
    assert gate.done == ["elsewhere", "there", "behind it", "nowhere"]
    (held, where), (released, how) = gate.events
    assert (held, where["hosts"]) == ("session_held", [[1, 0]])
    assert (released, how["requests"]) == ("session_released", 3)


def test_two_suspensions_that_end_one_after_the_other() -> None:
    gate = Gate()
    gate.slots = {1, 2}
    gate.ask("one", 1)
    gate.ask("two", 2)
    gate.ask("one again", 1)
    gate.slots = {2}
    gate.gate.reopen()
    assert gate.done == ["one"]
    gate.slots = set()
    gate.gate.reopen()
    assert gate.done == ["one", "two", "one again"]


def test_what_is_asked_while_the_gate_opens_comes_last() -> None:
    gate = Gate()
    gate.slots = {1}
    gate.gate.admit(lambda: (1,), lambda: (gate.ask("asked by the first"), gate.done.append("first")))
    gate.ask("second")
    gate.slots = set()
    gate.gate.reopen()
    assert gate.done == ["first", "second", "asked by the first"]


def test_no_more_is_read_than_the_limit() -> None:
    gate = Gate(limit=2)
    told: list[bool] = []
    gate.slots = {1}
    gate.ask("one", 1)
    assert not gate.gate.full
    gate.ask("two")
    assert gate.gate.full
    gate.gate.when_room(lambda: told.append(True))
    gate.gate.reopen()
    assert told == []
    gate.slots = set()
    gate.gate.reopen()
    assert told == [True] and not gate.gate.full


def test_a_session_that_ends_forgets_what_it_asked() -> None:
    gate = Gate(limit=1)
    told: list[bool] = []
    gate.slots = {1}
    gate.ask("one", 1)
    gate.gate.when_room(lambda: told.append(True))
    gate.gate.close()
    gate.slots = set()
    gate.gate.reopen()
    assert gate.done == [] and told == [True]


def test_every_kind_of_request_is_known() -> None:
    handled = {*array_requests.HANDLERS, *executable_requests.HANDLERS, *cluster_requests.HANDLERS}
    known = touching.NO_ORDERS | set(touching._DEVICES)
    assert handled <= known, "say which hosts these requests touch"
    assert not touching.NO_ORDERS & set(touching._DEVICES)


def test_a_kind_that_is_not_known_touches_everything() -> None:
    topology = SimpleNamespace(slots=3)
    session: Any = SimpleNamespace(services=SimpleNamespace(manager=SimpleNamespace(topology=topology)))
    assert list(touching.slots_touched(session, "something_new", None)) == [0, 1, 2]
