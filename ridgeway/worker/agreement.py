"""What an executor may start after it has refused an execution that others of its generation may have started.

Collectives find each other by their order alone.  If this executor went on to the next program while a peer waits in
the refused one, the two would exchange numbers that do not belong together, and nobody would notice.  So it waits
until the head has heard that everybody refused, or ends the generation.

An execution that was started may fail on one executor too: what a host callback raises, or an argument that is an error
by then, ends it here while the others are in its collectives.  So before a program of several executors is started,
those that may end so are waited for; and once something has failed while it ran, everything that runs.
"""

import threading
import time
from collections.abc import Callable

_LOOK_SECONDS = 0.005


class Agreement:
    """`reached` is called by the order thread, `refused` also by the one that waits for executions, `everybody_refused`
    by the reader."""

    def __init__(self) -> None:
        self.doubtful = False
        """Something failed while it ran, in this generation."""
        self._refused: int | None = None
        self._agreed = threading.Event()

    def refused(self, execution: int) -> None:
        """This executor did not start an execution."""
        self._agreed.clear()
        self._refused = execution

    def failed(self, execution: int, spans: bool) -> None:
        """An execution, of several executors or not, failed while it ran."""
        self.doubtful = True
        if spans:
            self.refused(execution)

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
