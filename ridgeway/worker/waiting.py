"""Threads that wait for what one runtime computes, so that the order thread never does.

When a generation is aborted some of its executions may never return (known holes in gloo's and XLA's set-up of
communicators).  The runtime is then abandoned: everything that still waits on it is answered with the first cause,
and its threads are left behind.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ridgeway.protocol.status import Status

THREADS = 16
BULK_THREADS = 2
"""For what comes in large numbers, such as the arrays of a snapshot: enough to use the memory's speed."""

Deliver = Callable[[Any, "Status | None"], None]
"""Called once with (result, None) or (None, error)."""


class _Task:
    __slots__ = ("_lock", "_spans", "_waits_for", "deliver", "done", "in_order", "risky")

    def __init__(self, deliver: Deliver, spans: bool, waits_for: Any = None):
        self.deliver = deliver
        self._spans = spans
        self._waits_for = waits_for
        self.in_order = False
        self.risky = False
        self.done = False
        self._lock = threading.Lock()

    @property
    def spans(self) -> bool:
        """Whether it waits for what executors compute together; when that is computed, copying it takes nobody else."""
        array = self._waits_for
        return self._spans and (array is None or not array.is_ready())

    def finish(self, result: Any, error: Status | None) -> bool:
        with self._lock:
            if self.done:
                return False
            self.done = True
            self._waits_for = None
        self.deliver(result, error)
        return True


class Waiters:
    """Waits on behalf of one runtime. ``describe`` turns an exception into its status."""

    def __init__(self, describe: Callable[[BaseException], Status]):
        self._describe = describe
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="waiter")
        self._bulk = ThreadPoolExecutor(BULK_THREADS, thread_name_prefix="bulk-waiter")
        self._executions: queue.SimpleQueue[tuple[Any, _Task] | None] = queue.SimpleQueue()
        self._tasks: dict[_Task, None] = {}
        self._lock = threading.Lock()
        self._abandoned: Status | None = None
        self.completed = 0
        self.executing = 0
        """Executions that were started, and whose end has not been delivered."""
        self.risky = 0
        """Those of them that may fail on this executor alone."""
        self._completions: threading.Thread | None = None

    def submit(
        self, wait: Callable[[], Any], deliver: Deliver, spans: bool = False, bulk: bool = False, array: Any = None
    ) -> None:
        """Run ``wait`` on a thread and deliver what it returns or raises. ``spans``: it waits for what executors
        compute together, namely for ``array`` (None: all the time). ``bulk``: many of these come at once, and others
        must not queue behind them."""
        task = self._register(deliver, spans, array)
        if task is not None:
            (self._bulk if bulk else self._pool).submit(self._run, wait, task)

    def execution(self, token: Any, deliver: Deliver, spans: bool, risky: bool = False) -> None:
        """Deliver when an execution is complete. Executions complete in order, so one thread waits for them all.
        ``risky``: it may fail on this executor alone while it runs."""
        task = self._register(deliver, spans)
        if task is None:
            return
        task.in_order, task.risky = True, risky
        with self._lock:
            self.executing += 1
            self.risky += risky
        if self._completions is None:
            self._completions = threading.Thread(target=self._wait_for_executions, name="completions", daemon=True)
            self._completions.start()
        self._executions.put((token, task))

    @property
    def outstanding(self) -> int:
        """How much is being waited for."""
        return len(self._tasks)

    @property
    def outstanding_together(self) -> int:
        """How much of it executors compute together."""
        with self._lock:
            return sum(task.spans for task in self._tasks)

    def _register(self, deliver: Deliver, spans: bool, array: Any = None) -> _Task | None:
        task = _Task(deliver, spans, array)
        with self._lock:
            if self._abandoned is None:
                self._tasks[task] = None
                return task
        task.finish(None, self._abandoned)
        return None

    def _finish(self, task: _Task, result: Any, error: Status | None) -> None:
        task.finish(result, error)
        with self._lock:
            self._tasks.pop(task, None)
            self.executing -= task.in_order
            self.risky -= task.risky

    def _run(self, wait: Callable[[], Any], task: _Task) -> None:
        try:
            result, error = wait(), None
        except Exception as exception:
            result, error = None, self._describe(exception)
        self._finish(task, result, error)

    def _wait_for_executions(self) -> None:
        while (entry := self._executions.get()) is not None:
            token, task = entry
            try:
                token.block_until_ready()
                error = None
            except Exception as exception:
                error = self._describe(exception)
            self.completed += 1
            self._finish(task, None, error)

    def abandon(self, cause: Status) -> None:
        """Answer with ``cause`` what still waits for executors together, and whatever else comes."""
        with self._lock:
            self._abandoned = cause
            # The thread that waits for executions in order is stuck at one of them: none behind it would be answered.
            tasks = [task for task in self._tasks if task.spans or task.in_order]
            for task in tasks:
                del self._tasks[task]
        for task in tasks:
            task.finish(None, cause)

    def close(self) -> None:
        """Nothing waits any more: let the threads end."""
        self._executions.put(None)
        self._pool.shutdown(wait=False)
        self._bulk.shutdown(wait=False)
