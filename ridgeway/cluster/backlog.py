"""What one executor has been given and has not got to yet, so that a program which runs far ahead of its devices is
made to wait before memory is full: natively a device's own queue does that.

Pure: told what is sent and what was reached, tells whether that is too much.
"""

from collections.abc import Callable

MARK_BYTES = 16 << 20
MARK_ORDERS = 256
"""After so much the executor is asked to say when it has come so far."""


class Backlog:
    """Counts for one executor.

    Args:
      bytes_limit: bytes sent or announced above which it `is_full`.
      orders_limit: orders sent above which it `is_full`.
    """

    __slots__ = ("_bytes_limit", "_orders_limit", "_unmarked_bytes", "_unmarked_orders", "_waiting", "announced",
                 "bytes", "orders")  # fmt: skip

    def __init__(self, bytes_limit: int, orders_limit: int):
        self._bytes_limit = bytes_limit
        self._orders_limit = orders_limit
        self._unmarked_bytes = 0
        self._unmarked_orders = 0
        self._waiting: list[Callable[[], None]] = []
        self.bytes = 0
        self.orders = 0
        self.announced = 0
        """bytes that its orders name and that the client still has to deliver"""

    @property
    def is_full(self) -> bool:
        """Whether whoever adds to it should wait."""
        return self.bytes + self.announced > self._bytes_limit or self.orders > self._orders_limit

    def sent(self, orders: int, count: int) -> bool:
        """So many orders and bytes went out; whether it is time to ask for a mark, with `mark`."""
        self.orders += orders
        self.bytes += count
        self._unmarked_orders += orders
        self._unmarked_bytes += count
        return self._unmarked_bytes >= MARK_BYTES or self._unmarked_orders >= MARK_ORDERS

    def mark(self) -> tuple[int, int]:
        """What to give to `reached` once everything that was sent so far has been reached."""
        taken = self._unmarked_orders, self._unmarked_bytes
        self._unmarked_orders = self._unmarked_bytes = 0
        return taken

    def reached(self, orders: int, count: int) -> None:
        """The executor came to a mark (or is lost)."""
        self.orders -= orders
        self.bytes -= count
        self._look()

    def announce(self, count: int) -> None:
        """The client is to deliver so many bytes; negative: it has, or they will not come."""
        self.announced += count
        if count < 0:
            self._look()

    def clear(self) -> None:
        """The executor is lost: nothing waits for it any more."""
        self.bytes = self.orders = self.announced = 0
        self._unmarked_bytes = self._unmarked_orders = 0
        self._bytes_limit = self._orders_limit = 1 << 62
        self._look()

    def when_relieved(self, callback: Callable[[], None]) -> None:
        """Call back once, at once if it is not full."""
        self._waiting.append(callback)
        self._look()

    def _look(self) -> None:
        if self._waiting and not self.is_full:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()
