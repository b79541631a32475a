"""The compiler: a process that compiles programs for the head, so that neither an executor's orders nor its data
are touched by a compilation, or by one that crashes XLA."""

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ridgeway.protocol.status import StatusError, internal
from ridgeway.transport import authentication, blocking_link
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import compilation
from ridgeway.worker.executor import EXIT_HEAD_GONE, EXIT_REFUSED
from ridgeway.worker.partitioning import Ask
from ridgeway.worker.process_identity import hello_versions

PARALLEL_COMPILATIONS = 2


class Activity:
    """Whether compilations are under way, and since when there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._ended = time.monotonic()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """One is under way in the block."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                self._ended = time.monotonic()

    def idle_seconds(self) -> float:
        """Since the last one ended; 0 while there is one."""
        with self._lock:
            return 0.0 if self._count else time.monotonic() - self._ended


def main(arguments: dict[str, Any]) -> int:
    """Entry of the forked process; ``arguments`` as an agent's template gives them."""
    timeout = arguments["settings"]["executor_start_timeout_seconds"]
    try:
        link = blocking_link.connect(arguments["head_host"], arguments["head_port"], arguments["secret"], timeout)
        link.send(["hello", {
            "role": "compiler", "agent": arguments["agent"], "compiler": arguments["compiler"], "pid": os.getpid(),
            "versions": hello_versions(), "environment": compilation.environment_fingerprint(),
            "head": arguments["head"],
        }])  # fmt: skip
        link.set_timeout(timeout)
        answer, _ = link.receive()
        link.set_timeout(None)
    except (OSError, LinkClosed, authentication.AuthenticationError) as error:
        print(f"compiler {arguments['compiler']}: {error}", flush=True)
        return EXIT_HEAD_GONE
    if answer[0] != "welcome":
        print(f"compiler {arguments['compiler']}: refused: {answer[-1]}", flush=True)
        return EXIT_REFUSED
    activity = Activity()
    settings = arguments["settings"]
    intervals = settings["heartbeat_interval_seconds"], settings["compiler_idle_seconds"]
    threading.Thread(target=_heartbeats, args=(link, activity, *intervals), name="heartbeats", daemon=True).start()
    pool = ThreadPoolExecutor(PARALLEL_COMPILATIONS, thread_name_prefix="compile")
    questions = _Questions(link, settings["compile_timeout_seconds"])
    try:
        while True:
            message, attached = link.receive()
            if message[0] in ("answer", "unanswered"):
                questions.answered(*message)
            else:
                pool.submit(_work, link, activity, questions, message, attached)
    except LinkClosed:
        return EXIT_HEAD_GONE


def _heartbeats(
    link: blocking_link.BlockingLink, activity: Activity, interval_seconds: float, idle_seconds: float
) -> None:
    pause = threading.Event()
    try:
        while not pause.wait(interval_seconds):
            link.send(["heartbeat"])
            if activity.idle_seconds() >= idle_seconds:
                compilation.release_clients()
    except LinkClosed:
        pass


class _Questions:
    """What running compilations have asked the head."""

    def __init__(self, link: blocking_link.BlockingLink, timeout_seconds: float):
        self._link = link
        self._timeout_seconds = timeout_seconds
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[bytes]] = {}

    def ask(self, request: int, question: bytes) -> bytes:
        """The controller's answer to a question of the compilation ``request``.

        Raises:
          RuntimeError: it has none; the text says why.
          TimeoutError: it did not answer in time.
        """
        number = next(self._numbers)
        waiting = self._waiting[number] = Future()
        try:
            self._link.send(["ask", request, number, question])
            return waiting.result(self._timeout_seconds)
        finally:
            del self._waiting[number]

    def answered(self, kind: str, number: int, answer: Any) -> None:
        """The head's answer, or its text why there is none."""
        waiting = self._waiting.get(number)
        if waiting is None:
            return  # nobody waits for it any more
        if kind == "answer":
            waiting.set_result(answer)
        else:
            waiting.set_exception(RuntimeError(answer))


def _work(
    link: blocking_link.BlockingLink, activity: Activity, questions: _Questions, message: list[Any],
    attached: list[bytearray],
) -> None:  # fmt: skip
    request = message[1]
    try:
        with activity.compiling():
            answer, results = _answer(message, attached, functools.partial(questions.ask, request))
        link.send(["reply", request, answer], results)
    except LinkClosed:
        pass
    except Exception as error:
        status = error.status if isinstance(error, StatusError) else internal(f"the compiler failed: {error!r}")
        try:
            link.send(["error", request, int(status.code), status.message])
        except LinkClosed:
            pass


def _answer(message: list[Any], attached: list[bytearray], ask: Ask) -> tuple[Any, list[bytes]]:
    kind, _, options, replicas, partitions = message
    if kind == "compile":
        metadata, serialized = compilation.compile_program(bytes(attached[0]), options, replicas, partitions, ask)
        return metadata, [serialized]
    return compilation.program_text(bytes(attached[0]), options, replicas, partitions), []
