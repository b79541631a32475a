"""The order to let a fresh process take this executor's place, when it is worn; see `succession`."""

import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ridgeway.transport.blocking_link import BlockingLink
from ridgeway.worker import succession
from ridgeway.worker.succession import NotNow

if TYPE_CHECKING:
    from ridgeway.worker.executor import Executor

QUIET_SECONDS = 1.0
"""How long what is under way may take to be over; the head's orders wait meanwhile."""
POLL_SECONDS = 0.002


class Renewal:
    """Handler of ``renew``, for one executor. ``template``: the descriptor of the channel to its template, or None."""

    def __init__(self, executor: "Executor", template: int | None):
        self._executor = executor
        self._template = None if template is None else socket.socket(fileno=template)
        self.ties: list[Callable[[], str | None]] = []
        """What binds this process: each says what it is, or None. It cannot be handed on."""
        self.handlers: dict[str, Callable[..., None]] = {"renew": self.renew}

    @property
    def worn(self) -> bool:
        """Whether this process holds much that nothing in it can free."""
        executor = self._executor
        limit = executor.settings.executor_aborts_limit
        return self._template is not None and (executor.abandoned > 0 or executor.aborts >= limit)

    def renew(self, request: int, attached: list[bytearray]) -> None:
        """Hand everything to a successor and end; or answer why not, and go on. The link's reader has stopped."""
        try:
            self._hand_over(request)
        except NotNow as reason:
            print(f"no fresh process takes over now: {reason}", flush=True)
            self._executor.reply(request, False, str(reason))
        self._executor.read_on()

    def _hand_over(self, request: int) -> None:
        executor = self._executor
        if self._template is None:
            raise NotNow("it has no template")
        if executor.runtime.generation > 0:
            raise NotNow(f"it is in generation {executor.runtime.generation}")
        if executor.promises.awaited:
            raise NotNow("bytes are on their way")  # the link that may bring them is not being read
        for tie in self.ties:
            if (reason := tie()) is not None:
                raise NotNow(reason)
        runtime = executor.runtime
        executor.store.drain(runtime, lambda error: executor.describe(error, runtime), lambda spans: False)
        end = time.monotonic() + QUIET_SECONDS
        while (reason := self._under_way(request)) is not None:
            if time.monotonic() >= end:
                raise NotNow(reason)
            time.sleep(POLL_SECONDS)
        gate = executor.server.gate
        if not gate.close(QUIET_SECONDS):
            raise NotNow("bytes of another executor are arriving")
        try:
            self._bequeath(self._template, request)
        except NotNow:
            gate.open()
            raise

    def _under_way(self, request: int) -> str | None:
        executor = self._executor
        for count, what in (
            (request - 1 - executor.answered, "answers are to be given"),
            (executor.waiters.outstanding, "something is waited for"),
            (executor.promises.awaited, "bytes are on their way"),
            (executor.transfers.unsent, "bytes are being sent"),
            (executor.callbacks.waiting, "a host callback is under way"),
        ):
            if count:
                return what
        return None

    def _bequeath(self, template: socket.socket, request: int) -> None:
        executor = self._executor
        ours, theirs = socket.socketpair()
        channel = BlockingLink(ours)
        try:
            with theirs:
                sockets = [theirs, executor.link.socket, *executor.server.sockets()]
                succession.ask_for_successor(template, sockets)
            state = executor.state() | {"request": request}
            succession.bequeath(channel, executor.store, executor.programs.sources, executor.promises, state)
            with executor.link.sending:  # nothing that this process says may come after what its successor says
                succession.let_go(channel)
                os._exit(succession.EXIT_SUCCEEDED)
        finally:
            channel.close()
