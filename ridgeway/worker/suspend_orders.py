"""Orders of a preemption: save everything that this executor holds, or take over what another one has saved."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import StatusError
from ridgeway.worker import saved_state

if TYPE_CHECKING:
    from ridgeway.worker.executor import Executor

LOOK_SECONDS = 0.002


class SuspendOrders:
    """Handlers by order name, for one executor."""

    def __init__(self, executor: "Executor"):
        self._executor = executor
        self.handlers: dict[str, Callable[..., None]] = {"suspend": self.suspend, "restore": self.restore}

    def suspend(
        self, request: int, scratch: str, path: str, slot: int, notice_seconds: float, attached: list[bytearray]
    ) -> None:
        """Answer with the mark of the state that was written to ``path``, its size in bytes and more about it. Whatever
        was ordered before comes to its end first, and is answered first."""
        executor = self._executor
        began = time.monotonic()
        deadline = began + notice_seconds
        try:
            if not scratch:
                raise saved_state.StateError("the head has no --scratch-folder")
            self._become_quiet(deadline)
            quiet = time.monotonic()
            groups = executor.store.groups
            saved = saved_state.save(groups, Path(path), slot, deadline, executor.progressed)
        except StatusError as error:
            executor.reply_error(request, error.status, executor.runtime)
        except saved_state.StateError as error:
            executor.reply_error(request, statuses.data_loss(str(error)), executor.runtime)
        else:
            executor.saved = True
            times = {"quiet_seconds": round(quiet - began, 4), "save_seconds": round(time.monotonic() - quiet, 4)}
            executor.reply(request, saved.mark, saved.bytes, {"groups": saved.groups, **times})

    def _become_quiet(self, deadline: float) -> None:
        """Until nothing is computed, sent or awaited any more, and everything is in host memory."""
        executor = self._executor
        runtime = executor.runtime

        def too_late(spans: bool) -> bool:
            executor.progressed()
            return time.monotonic() > deadline

        _, uncomputed = executor.store.drain(runtime, lambda error: executor.describe(error, runtime), too_late)
        waiting = [f"{uncomputed} shards that were being computed"] if uncomputed else self._waits_for()
        while waiting:
            if too_late(True):
                raise statuses.data_loss(f"the notice was over before the end of {' and '.join(waiting)}").error()
            time.sleep(LOOK_SECONDS)
            waiting = self._waits_for()
        executor.store.keep_in_host_memory()

    def _waits_for(self) -> list[str]:
        unfinished = self._executor.unfinished
        return [f"{count} {what}" for what, how_many in unfinished.items() if (count := how_many())]

    def restore(
        self, request: int, path: str, slot: int, mark: str, answered: int, attached: list[bytearray]
    ) -> None:
        """Take over the groups that were saved at ``path``; answered when all of them are here. ``answered``: how many
        requests the other executor has answered, this one's own being counted with them from now on."""
        executor = self._executor
        try:
            groups = saved_state.load(Path(path), slot, mark, executor.progressed)
        except saved_state.StateError as error:
            executor.reply_error(request, statuses.data_loss(str(error)), executor.runtime)
            return
        for number, group in groups.items():
            executor.store.set(number, group)
        shutil.rmtree(path, ignore_errors=True)
        executor.answered = answered - 1  # which the answer to this order makes good
        executor.reply(request)
