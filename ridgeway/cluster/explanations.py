"""Why an executor ended: known to its agent some milliseconds after the head has seen its connection close.

Errors that name a lost executor wait so long before they go to the client, who then reads what happened and not only
that something did.  Nothing else waits for it.
"""

import re
from collections import OrderedDict
from collections.abc import Callable

from ridgeway.protocol.status import Status

KEPT = 1000
_LOST = re.compile(r"\(executor (\d+)\) was lost")

Deliver = Callable[[Status], None]


class Explanations:
    """Explanations that have come, and errors that wait for some."""

    def __init__(self, patience_seconds: float):
        self._patience_seconds = patience_seconds
        self._texts: OrderedDict[int, str] = OrderedDict()
        self._waiting: dict[int, tuple[float, int, list[tuple[Status, Deliver]]]] = {}
        """executor -> deadline, agent, and what waits"""

    def wait(self, now: float, executor: int, agent: int) -> None:
        """An executor was lost whose agent will say why."""
        if executor not in self._texts:
            self._waiting[executor] = (now + self._patience_seconds, agent, [])

    def explain(self, executor: int, text: str) -> None:
        """Its agent has said it."""
        self._texts[executor] = text
        if len(self._texts) > KEPT:
            self._texts.popitem(last=False)
        self._let_go(executor)

    def agent_gone(self, agent: int) -> None:
        """This agent says nothing any more."""
        for executor, (_, its_agent, _) in list(self._waiting.items()):
            if its_agent == agent:
                self._let_go(executor)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for executor, (deadline, _, _) in list(self._waiting.items()):
            if now >= deadline:
                self._let_go(executor)

    def _let_go(self, executor: int) -> None:
        entry = self._waiting.pop(executor, None)
        if entry is not None:
            for status, deliver in entry[2]:
                deliver(self._with_text(status, executor))

    def _with_text(self, status: Status, executor: int) -> Status:
        text = self._texts.get(executor)
        if text is None or text in status.message:
            return status
        return Status(status.code, f"{status.message} ({text})")

    def when_explained(self, status: Status, deliver: Deliver) -> None:
        """Deliver an error, with the explanation of the loss that it names; at once unless that may still come."""
        match = _LOST.search(status.message)
        if match is None:
            deliver(status)
            return
        executor = int(match[1])
        entry = self._waiting.get(executor)
        if entry is not None:
            entry[2].append((status, deliver))
        else:
            deliver(self._with_text(status, executor))
