"""What an executor may start after it has refused an execution that others of its generation may have started.

Collectives find each other by their order alone.  If this executor went on to the next program while a peer waits in
the refused one, the two would exchange numbers that do not belong together, and nobody would notice.  So it waits
until the head has heard that everybody refused, or ends the generation.
"""

import threading
import time
from collections.abc import Callable

_LOOK_SECONDS = 0.005


class Agreement:
    """`refused` and `reached` are called by the order thread, `everybody_refused` by the reader."""

    def __init__(self) -> None:
        self._refused: int | None = None
        self._agreed = threading.Event()

    def refused(self, execution: int) -> None:
        """This executor did not start an execution."""
        self._agreed.clear()
        self._refused = execution

    def everybody_refused(self, execution: int) -> None:
        """The head says that no member has started it."""
        if execution == self._refused:
            self._agreed.set()

    def reached(self, ended: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait until the last refusal is settled, or its generation has ``ended``; False if neither comes in time."""
        deadline = time.monotonic() + timeout_seconds
        while self._refused is not None and not self._agreed.wait(_LOOK_SECONDS):
            if ended():
                break
            if time.monotonic() >= deadline:
                return False
        self._refused = None
        return True
