"""Worn executors are renewed at a quiet moment: a fresh process goes on with everything that one held.

The executor says when it is worn (it keeps threads and sockets of generations that ended badly); here it is decided
when it is told to be renewed: when it is in no generation, so that all it holds can be in host memory at once.
"""

from collections.abc import Callable
from typing import Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.protocol.status import Status

AGAIN_AFTER_SECONDS = 2.0
"""An executor that could not be renewed because something was under way is asked again then at the earliest."""


class Renewals:
    """``engaged``: whether an executor must stay the process that it is for now, as one in a generation. ``emit`` gets
    events, ``names`` a slot's."""

    def __init__(
        self, clock: Callable[[], float], emit: Callable[..., Any], engaged: Callable[[ExecutorLink], bool],
        names: Callable[[int], dict[str, int]],
    ):  # fmt: skip
        self._clock = clock
        self._emit = emit
        self._engaged = engaged
        self._names = names
        self._not_before: dict[int, float] = {}
        """executor -> when it may be asked again; infinity while it is being renewed"""

    def consider(self, link: ExecutorLink, worn: bool) -> None:
        """An executor has said whether it is worn."""
        now = self._clock()
        if not worn or link.lost is not None or link.suspended or self._engaged(link):
            return
        if now < self._not_before.get(link.number, 0.0):
            return
        self._not_before[link.number] = float("inf")

        def answered(error: Status | None, fields: list[Any], buffers: list[bytes]) -> None:
            if error is not None:
                self._not_before.pop(link.number, None)
                return
            self._not_before[link.number] = self._clock() + AGAIN_AFTER_SECONDS
            renewed, detail = fields
            if renewed:
                link.pid = detail
                seconds = round(self._clock() - now, 4)
                self._emit("executor_renewed", **self._names(link.slot), pid=detail, seconds=seconds)

        link.request("renew", [], answered)

    def forget(self, number: int) -> None:
        """An executor is gone."""
        self._not_before.pop(number, None)
