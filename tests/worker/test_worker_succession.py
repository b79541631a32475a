"""A fresh process goes on with what a worn executor holds."""

import socket
import threading
from collections.abc import Iterator

import forking
import pytest
from forking import Lab

from ridgeway.worker.gate import Gate


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with forking.lab_of("succession_scenarios") as lab:
        yield lab


def test_a_successor_has_everything(lab: Lab) -> None:
    assert lab.run("everything_arrives") == {"first_device": 10, "request": 5}


def test_nothing_is_handed_over_while_bytes_are_on_their_way(lab: Lab) -> None:
    assert lab.run("bytes_on_their_way_are_not_handed_over") == ["bytes of buffer group 1 are on their way"]


def test_a_successor_that_dies_changes_nothing(lab: Lab) -> None:
    reasons = lab.run("a_successor_that_dies_changes_nothing")
    assert "the successor failed" in reasons[0]
    assert "the template cannot be asked" in reasons[1]


class _Receiver(threading.Thread):
    """Collects bytes, one by one, through a gate."""

    def __init__(self, gate: Gate):
        super().__init__(daemon=True)
        self.ours, self._theirs = socket.socketpair()
        self.got: list[bytes] = []
        self.arrived = threading.Semaphore(0)
        self._gate = gate
        gate.enter()
        self.start()

    def run(self) -> None:
        while True:
            self._gate.wait(self._theirs)
            data = self._theirs.recv(1)
            if not data:
                self._gate.leave()
                return
            self.got.append(data)
            self.arrived.release()


def test_receivers_stop_between_two_messages_and_go_on() -> None:
    gate = Gate()
    receivers = [_Receiver(gate) for _ in range(3)]
    for receiver in receivers:
        receiver.ours.sendall(b"a")
        assert receiver.arrived.acquire(timeout=60.0)
    assert gate.close(60.0)
    for receiver in receivers:
        receiver.ours.sendall(b"b")
        assert not receiver.arrived.acquire(timeout=0.05)
    gate.open()
    for receiver in receivers:
        assert receiver.arrived.acquire(timeout=60.0)
        assert receiver.got == [b"a", b"b"]
    # One that has ended is waited for no more.
    receivers[0].ours.close()
    receivers[0].join(60.0)
    assert gate.close(60.0)
    gate.open()


def test_a_receiver_in_the_middle_of_a_message_keeps_the_gate_open() -> None:
    gate = Gate()
    gate.enter()
    receiver = _Receiver(gate)
    assert not gate.close(0.05)
    receiver.ours.sendall(b"a")
    assert receiver.arrived.acquire(timeout=60.0)
    gate.leave()
    assert gate.close(60.0)


def test_a_gate_that_is_closed_at_first_lets_nobody_through() -> None:
    gate = Gate(closed=True)
    receiver = _Receiver(gate)
    receiver.ours.sendall(b"a")
    assert not receiver.arrived.acquire(timeout=0.05)
    gate.open()
    assert receiver.arrived.acquire(timeout=60.0)
