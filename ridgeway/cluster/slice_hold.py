"""Work for a slice that is on its way back, held for a bounded time instead of refused.

pathwaysutils asks every slice whether it lives, and asks again only ten seconds later if one said no.  Holding the
question until the replacement is there (or surely not coming soon) makes recovery start when the slice does.  Only
work that lies wholly on that slice is held, so nothing else waits.
"""

from collections.abc import Callable

from ridgeway.protocol.status import Status, resource_exhausted

Continuation = Callable[[Status | None], None]
"""Called once: with None when the slice is up, or with the error that the work ends in."""


class Hold:
    """Work that waits for something, in order. ``cause`` says for what: "slice 2"."""

    def __init__(self, cause: str, limit: int):
        self._cause = cause
        self._limit = limit
        self._backlog: list[Continuation] = []

    def defer(self, continuation: Continuation) -> None:
        """Hold one piece of work; over the limit it fails at once."""
        if len(self._backlog) >= self._limit:
            continuation(
                resource_exhausted(
                    f"more than {self._limit} operations wait for {self._cause} (pending_order_limit)"
                )
            )
        else:
            self._backlog.append(continuation)

    def finish(self, error: Status | None) -> None:
        """Let everything go on, or fail."""
        backlog, self._backlog = self._backlog, []
        for continuation in backlog:
            continuation(error)


class SliceHold(Hold):
    """The held work of one slice."""

    def __init__(self, slice_index: int, opened: float, deadline: float, limit: int):
        super().__init__(f"slice {slice_index}", limit)
        self.slice_index = slice_index
        self.opened = opened
        self.deadline = deadline
