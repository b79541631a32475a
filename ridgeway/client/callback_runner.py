"""Runs host callbacks when the server asks for it, answers what compilations ask and prints what workers print, over a
stream that is opened when there is a first one of these."""

import atexit
import itertools
import os
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ridgeway.protocol import callback_link

CONNECT_SECONDS = 30.0
FLUSH_SECONDS = 2.0
"""How long the end of a program waits for the last output of workers."""
RECONNECT_PAUSE_SECONDS = 0.5
THREADS_AT_FIRST = 4
THREADS = 32
"""Callbacks at once. One may wait for another, when it runs a program that has callbacks itself."""

OWN_FRAMES = 2
"""The first frames of a callback's traceback are `CallbackRunner`'s and its caller's."""

Run = Callable[[list[list[int]], bytes], bytes]
"""From the operands' shapes and bytes to the results' bytes."""


class _Threads:
    """As `concurrent.futures.ThreadPoolExecutor`, but at work until the very end of the interpreter: when a program
    ends, jax waits for the callbacks that are still to come."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started = 0
        self._idle = threading.Semaphore(0)
        for _ in range(THREADS_AT_FIRST):
            self._start(idle=True)

    def _start(self, idle: bool) -> None:
        threading.Thread(target=self._loop, args=(idle,), name="host-callback", daemon=True).start()
        self._started += 1

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` on a thread."""
        if not self._idle.acquire(blocking=False) and self._started < THREADS:
            try:
                self._start(idle=False)
            except RuntimeError:
                pass  # the interpreter is ending: one of those there are will do it
        self._work.put(work)

    def _loop(self, idle: bool) -> None:
        while True:
            if idle:
                self._idle.release()
            self._work.get()()
            idle = True


class CallbackRunner:
    """Of one process and one server."""

    def __init__(self, address: str):
        self._address = address
        self._client = callback_link.new_client()
        self._numbers = itertools.count(1)
        self._callbacks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._threads = _Threads()
        self._ready = threading.Event()
        self._problem = "no answer"
        self._process = os.getpid()
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sessions: list[int] = []
        self._flushes: dict[int, threading.Event] = {}
        threading.Thread(target=self._serve, name="host-callbacks", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Not so in a forked child, which has no threads of this."""
        return self._process == os.getpid()

    def add(self, run: Run) -> tuple[int, ...]:
        """The name by which a program announces a callback. The caller keeps ``run`` alive as long as it may be called.

        Raises:
          RuntimeError: the server does not answer.
        """
        if not self._ready.wait(CONNECT_SECONDS):
            raise RuntimeError(f"host callbacks need a connection to {self._address}: {self._problem}")
        number = next(self._numbers)
        self._callbacks[number] = run
        return callback_link.callback_name(self._client, number)

    def follow(self, session: int) -> None:
        """Print from now on what the session's colocated Python prints on workers."""
        self._sessions.append(session)
        self._outgoing.put(callback_link.pack(["follow", session]))
        atexit.register(self.flush)

    def flush(self) -> None:
        """Wait for output that is on its way, within `FLUSH_SECONDS`."""
        if self.usable and self._ready.is_set():
            number = next(self._numbers)
            arrived = self._flushes[number] = threading.Event()
            self._outgoing.put(callback_link.pack(["flush", number]))
            arrived.wait(FLUSH_SECONDS)

    def _serve(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._serve_once()
            except Exception as error:
                self._problem = str(error)
            self._ready.clear()
            pause.wait(RECONNECT_PAUSE_SECONDS)

    def _serve_once(self) -> None:
        import grpc  # here, since it is not needed before there is a callback

        outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._outgoing = outgoing
        outgoing.put(callback_link.pack(["hello", *self._client]))
        for session in list(self._sessions):
            outgoing.put(callback_link.pack(["follow", session]))
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(self._address, options) as channel:
            stream = channel.stream_stream(callback_link.PATH)(_forever(outgoing))
            for data in stream:
                message = callback_link.unpack(data)
                if message[0] == "ready":
                    self._ready.set()
                elif message[0] == "call":
                    self._threads.submit(lambda rest=message[1:]: self._run(outgoing, *rest))
                elif message[0] == "ask":
                    self._threads.submit(lambda rest=message[1:]: _answer(outgoing, *rest))
                elif message[0] == "output":
                    _print(*message[1:])
                elif message[0] == "flushed":
                    self._flushes.pop(message[1], threading.Event()).set()

    def _run(
        self, outgoing: "queue.SimpleQueue[bytes]", call: int, number: int, shapes: list[list[int]], operands: bytes
    ) -> None:
        run = self._callbacks.get(number)
        try:
            if run is None:
                raise RuntimeError("the program of this callback is gone")
            answer = ["result", call, run(shapes, operands)]
        except BaseException as error:
            answer = ["failed", call, _told(error)]
        outgoing.put(callback_link.pack(answer))


def _answer(outgoing: "queue.SimpleQueue[bytes]", number: int, question: bytes) -> None:
    from ridgeway.client import compiler_callbacks  # here, since it needs more of jax than most programs have loaded

    try:
        answer = ["result", number, compiler_callbacks.answer(question)]
    except BaseException as error:
        answer = ["failed", number, _told(error)]
    outgoing.put(callback_link.pack(answer))


def _told(error: BaseException) -> str:
    frames = error.__traceback__
    for _ in range(OWN_FRAMES):
        frames = frames.tb_next if frames is not None else None
    return "".join(traceback.format_exception(type(error), error, frames))


def _print(place: str, stream: str, line: str) -> None:
    try:
        print(f"{place}: {line}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)
    except (OSError, ValueError):
        pass  # nobody reads this program's output any more


def _forever(outgoing: "queue.SimpleQueue[bytes]") -> Iterator[bytes]:
    while True:
        yield outgoing.get()


_lock = threading.Lock()
_runners: dict[str, CallbackRunner] = {}


def runner_for(target: str) -> CallbackRunner:
    """The runner for a server, by what stands in ``JAX_BACKEND_TARGET``."""
    address = target.rpartition("://")[2]
    with _lock:
        runner = _runners.get(address)
        if runner is None or not runner.usable:
            runner = _runners[address] = CallbackRunner(address)
        return runner
