"""Which of the client's user contexts it may forget: a pure record of what was asked and answered.

With most requests jaxlib's client sends the number of a *user context*, where in the user's program the request comes
from, and keeps that context, a traceback, until the server has said that it holds it no more
(`ResponseMetadata.destroyed_user_context_ids`); a server that never does makes every controller grow by some 300 bytes
a request. This server holds none beyond its answer. Facts about the client (`rpc_helper.cc` of openxla/xla, and tried
with jaxlib 0.11.0 and 0.12.0):

* It counts references: every request with a context is to be answered for once.
* It forgets in the order of `ResponseMetadata.seq_num`, from 0, and waits at a gap for ever.
* It looks at both only in answers that have a body, not in errors, and not in answers to what it sends in batches
  (which has no context). So those get no number of the sequence, and what an error should have said the next one says.
* A context that it does not hold ends its process.
"""

#: In place of a number for an answer outside the sequence: one that the sequence never gets to.
OUTSIDE = (1 << 63) - 1


class UserContexts:
    """Of one session."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._unsaid: list[int] = []
        self._next = 0

    def asked(self, operation: int, context: int) -> None:
        """A request came with a context (0: none)."""
        if context:
            self._asked[operation] = context

    def answered(self, operation: int, has_body: bool) -> tuple[int, list[int]]:
        """A request is answered now.

        Returns:
          ``seq_num`` and ``destroyed_user_context_ids`` of the answer.
        """
        context = self._asked.pop(operation, 0)
        if not context:
            return OUTSIDE, []
        self._unsaid.append(context)
        if not has_body:
            return OUTSIDE, []
        number, self._next = self._next, self._next + 1
        said, self._unsaid = self._unsaid, []
        return number, said
