"""An asyncio event loop whose clock jumps to the next timer: hours pass in milliseconds, always in the same way."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

CANCELLATIONS = 200
#: Of simulated time: what a failed history leaves may wait for something that never comes.
CLEAR_AWAY_SECONDS = 0.01


class NothingLeftToHappen(RuntimeError):
    """Everybody waits for somebody else: a deadlock of what is simulated."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their times; there is no I/O, no thread and no wall clock."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        # The base class asks a selector how long it may sleep; here sleeping is only a jump.
        self._selector = self

    def time(self) -> float:
        """Seconds since the beginning of the history."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """The base class's way to sleep."""
        if timeout is None:
            raise NothingLeftToHappen
        self._now += max(timeout, 0.0)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a simulation to its end; what still runs then is dropped."""
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(main)
    finally:
        with contextlib.suppress(NothingLeftToHappen):
            # Each gets the chance to clear away; what takes being cancelled for one more failure is told again.
            for _ in range(CANCELLATIONS):
                left = asyncio.all_tasks(loop)
                if not left:
                    break
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left, timeout=CLEAR_AWAY_SECONDS))
        loop.close()
