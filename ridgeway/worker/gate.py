"""Lets threads that receive stop between two messages, so that another process can go on with their sockets."""

import os
import select
import socket
import threading


class Gate:
    """Each receiver calls `enter` once, `wait` before every message, and `leave` at its end."""

    def __init__(self, closed: bool = False) -> None:
        self._read, self._write = os.pipe()
        self._changed = threading.Condition()
        self._closed = closed
        if closed:
            os.write(self._write, b"x")
        self._receivers = 0
        self._parked = 0

    def enter(self) -> None:
        """A receiver begins; until it waits for the first time the gate cannot be closed."""
        with self._changed:
            self._receivers += 1

    def leave(self) -> None:
        """A receiver ends."""
        with self._changed:
            self._receivers -= 1
            self._changed.notify_all()

    def wait(self, connection: socket.socket) -> None:
        """Return when there is something to read (or to accept, or an end to see) and the gate is open."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(self._read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._read not in ready:
                return
            with self._changed:
                self._parked += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._closed)
                self._parked -= 1

    def close(self, timeout_seconds: float) -> bool:
        """Stop all receivers between two messages; False, and the gate stays open, if one does not get there in
        time."""
        with self._changed:
            self._closed = True
            os.write(self._write, b"x")
            if self._changed.wait_for(lambda: self._parked == self._receivers, timeout_seconds):
                return True
        self.open()
        return False

    def open(self) -> None:
        """Let everybody go on."""
        with self._changed:
            os.read(self._read, 1)
            self._closed = False
            self._changed.notify_all()
