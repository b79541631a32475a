"""Which of a session's host buffers may come in now.

A client starts to send every host buffer as soon as its program makes an array of it, each in a call of its own.  Taken
all at once they would fill the head's memory, and the first would be whole only when nearly all are.  So they come a
few at a time: those that a request already waits for first, in the order in which they were announced.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class _Upload:
    handle: int
    size: int
    go: Callable[[], None]


class Uploads:
    """Pure: told what wants to come and what has, calls back those that may start.

    Args:
      window_bytes: how much comes at a time; a larger buffer comes alone.
      ahead_limit_bytes: how much may be here, or come, that no request waits for yet.
      is_wanted: whether a request waits for the buffer of a handle. Such a one is always let in: what executors have
        been promised must come, or they would never get to the end of what the session's next requests wait for.
      bytes_here: bytes of buffers that are here and that nothing has taken yet.
    """

    def __init__(
        self, window_bytes: int, ahead_limit_bytes: int, is_wanted: Callable[[int], bool],
        bytes_here: Callable[[], int],
    ):  # fmt: skip
        self._window_bytes = window_bytes
        self._ahead_limit_bytes = ahead_limit_bytes
        self._is_wanted = is_wanted
        self._bytes_here = bytes_here
        self._wanted: dict[int, _Upload] = {}
        self._others: dict[int, _Upload] = {}
        self._number_of: dict[int, int] = {}
        self._next = 0
        self._coming = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many are not let in yet."""
        return len(self._wanted) + len(self._others)

    def ask(self, handle: int, size: int, go: Callable[[], None]) -> int:
        """Call ``go`` once the buffer may come, at once when the session is over; returns what `forget` takes."""
        self._next += 1
        upload = _Upload(handle, size, go)
        if self._closed:
            self._let_in(upload)
        else:
            (self._wanted if self._is_wanted(handle) else self._others)[self._next] = upload
            self._number_of[handle] = self._next
            self.look()
        return self._next

    def wanted(self, handle: int) -> None:
        """A request began to wait for a buffer."""
        number = self._number_of.get(handle)
        if number in self._others:
            self._wanted[number] = self._others.pop(number)
            self.look()

    def forget(self, number: int) -> bool:
        """It will not come after all; False if it was let in already, and is still to be `ended`."""
        upload = self._wanted.pop(number, None) or self._others.pop(number, None)
        if upload is None:
            return False
        self._forget_handle(upload, number)
        self.look()
        return True

    def ended(self, size: int) -> None:
        """One that was let in is whole, or has broken off."""
        self._coming -= size
        self.look()

    def look(self) -> None:
        """Let in what may come now; to be called when buffers that were here have been taken."""
        while self.waiting:
            table = self._wanted or self._others
            number, upload = next(iter(table.items()))
            if self._coming and self._coming + upload.size > self._window_bytes:
                return
            if table is self._others:
                ahead = self._coming + self._bytes_here()
                if ahead and ahead + upload.size > self._ahead_limit_bytes:
                    return
            del table[number]
            self._forget_handle(upload, number)
            self._let_in(upload)

    def _forget_handle(self, upload: _Upload, number: int) -> None:
        if self._number_of.get(upload.handle) == number:
            del self._number_of[upload.handle]

    def _let_in(self, upload: _Upload) -> None:
        self._coming += upload.size
        upload.go()

    def close(self) -> None:
        """The session is over: whoever waits finds that out."""
        self._closed = True
        waiting = [*self._wanted.values(), *self._others.values()]
        self._wanted, self._others, self._number_of = {}, {}, {}
        for upload in waiting:
            self._let_in(upload)
