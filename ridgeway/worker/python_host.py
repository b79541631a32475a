"""The Python process: runs one session's colocated Python on one host, in a process of its own.

Not in the executor: user code may block, hold the interpreter, fork or crash, and what the executor holds must
outlive that.  The template forks one at the session's first call on a host; it ends with the session.

Calls of one stream (a thread of the controller) run in order, streams beside each other.  Arguments come from
executors over the transfer port, results are pushed to the executor's; strings travel with the call and its answer.
Messages of the head, all acted on by the reader at once::

    load PROGRAM NAME, the pickle | unload [PROGRAMS] | peer_lost EXECUTOR ...
    data TOKEN, strings | data_failed TOKEN ...
    call CALL PROGRAM STREAM ARGUMENTS RESULTS EXECUTOR [HOST, PORT]
      ARGUMENTS: for each a list of [[devices], token, shape if it is of strings]
      RESULTS: for each a list of [[devices], token], [] for strings

and to the head::

    objects PROGRAM NAME [IDS] | output STREAM LINE
    done CALL [[result, device, index of attached strings]], strings | failed CALL CODE TEXT GENERATION
"""

import atexit
import gc
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ridgeway import processes
from ridgeway import settings as runtime_settings
from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.transport import authentication, blocking_link
from ridgeway.transport.blocking_link import BlockingLink
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import output_capture
from ridgeway.worker.device_runtime import Runtime
from ridgeway.worker.failures import GenerationFailure
from ridgeway.worker.process_identity import hello_versions
from ridgeway.worker.promises import PromiseTable
from ridgeway.worker.transfers import TransferServer

EXIT_HEAD_GONE = 3
EXIT_REFUSED = 2
IDLE_STREAM_SECONDS = 60.0
LAST_RITES_SECONDS = 5.0
"""How long the user's exit handlers may take when the session is over."""


class _Program:
    """What the head loaded; unpickled by the first call, in its stream."""

    def __init__(self, number: str, name: str, pickled: bytes):
        self.number = number
        self.name = name
        self._pickled = pickled
        self._function: Any = None
        self._lock = threading.Lock()

    def function(self, loaded: Callable[["_Program", Any], None]) -> Any:
        """The function; ``loaded`` is called when it was unpickled just now."""
        from ridgeway.worker import python_functions

        with self._lock:
            if self._function is None:
                function = python_functions.Function(self.name, self._pickled)
                self._function, self._pickled, self.name = function, b"", function.name
                loaded(self, function)
            return self._function


    def forget_result(self) -> None:
        """It is not called any more."""
        with self._lock:
            if self._function is not None:
                self._function.forget_result()


class _Stream:
    """The calls of one thread of the controller, in order. Used under the host's lock but for taking work."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.outstanding = 0

    def put(self, work: Callable[[], None]) -> None:
        """Have it done."""
        self.outstanding += 1
        self.work.put(work)


class _Results:
    """Pushes shards to executors; the caller may rely on their having left this process."""

    def __init__(self, secret: str, timeout_seconds: float):
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._links: dict[tuple[str, int], BlockingLink] = {}
        self._lock = threading.Lock()

    def push(self, address: tuple[str, int], token: int, data: np.ndarray) -> None:
        """Send one shard.

        Raises:
          OSError: the executor cannot be reached (the head knows, or will soon, why).
        """
        with self._lock:
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = blocking_link.connect(*address, self._secret, self._timeout_seconds)
                link.set_timeout(self._timeout_seconds)
            message = ["push", token, dtypes.kind_of_dtype(data.dtype), list(data.shape)]
            try:
                link.send(message, [np.ascontiguousarray(data).reshape(-1).view(np.uint8).data])
            except OSError:
                link.close()
                del self._links[address]
                raise


class PythonHost:
    """State of one Python process."""

    def __init__(self, arguments: dict[str, Any], runtime: Runtime):
        self.settings = runtime_settings.Settings(**arguments["settings"])
        self.place: str = arguments["place"]
        self._runtime = runtime
        self.promises = PromiseTable()
        self.server = TransferServer(
            arguments["address"], arguments["secret"], self.promises, self.settings.handshake_timeout_seconds
        )
        self._results = _Results(arguments["secret"], self.settings.transfer_timeout_seconds)
        self._link: BlockingLink | None = None
        self._lost_objects: dict[int, str] = {}
        self._programs: dict[str, _Program] = {}
        self._streams: dict[int, _Stream] = {}
        self._lock = threading.Lock()
        self._dropping: threading.Event | None = None
        """set when what was dropped last is gone"""
        self._end_lines: Callable[[], None] = lambda: None

    def run(self, link: BlockingLink, lost_objects: dict[int, str]) -> int:
        """Serve until the session is over; returns the exit code."""
        self._link = link
        self._lost_objects = lost_objects
        self._end_lines = output_capture.capture(lambda stream, line: self._tell(["output", stream, line]))
        handlers: dict[str, Callable[..., None]] = {
            "load": self._load, "unload": self._unload, "call": self._call, "data": self._data,
            "data_failed": self._data_failed, "peer_lost": self._peer_lost,
        }  # fmt: skip
        try:
            while True:
                message, attached = link.receive()
                handlers[message[0]](*message[1:], attached=attached)
        except LinkClosed:
            return 0

    def _tell(self, message: list[Any], attached: list[bytes] | None = None) -> None:
        try:
            if self._link is not None:
                self._link.send(message, attached or [])
        except LinkClosed:
            pass  # the reader sees it too, and ends the process

    # ---- what the head says

    def _data(self, token: int, attached: list[bytearray]) -> None:
        self.promises.resolve(token, attached[0])

    def _data_failed(self, token: int, code: int, message: str, attached: list[bytearray]) -> None:
        self.promises.resolve(token, Status(Code(code), message))

    def _peer_lost(self, executor: int, code: int, message: str, attached: list[bytearray]) -> None:
        self.promises.peer_lost(executor, Status(Code(code), message))

    def _load(self, program: str, name: str, attached: list[bytearray]) -> None:
        self._programs[program] = _Program(program, name, bytes(attached[0]))

    def _unload(self, programs: list[str], attached: list[bytearray]) -> None:
        """Forget programs, and with them perhaps objects, whose ends are the user's code. That comes after all calls
        that were sent before (jax drops an object's first program when it has sent the next one), and, unless one of
        those still runs, before all that are sent after."""
        dropped = [self._programs.pop(program, None) for program in programs]
        done = threading.Event()

        def drop() -> None:
            for program in dropped:
                if program is not None:
                    program.forget_result()
            program = None
            dropped.clear()
            gc.collect()
            self._end_lines()
            done.set()

        with self._lock:
            busy = [stream for stream in self._streams.values() if stream.outstanding]
            left = len(busy)

            def reached() -> None:
                nonlocal left
                with self._lock:
                    left -= 1
                    last = left == 0
                if last:
                    drop()

            for stream in busy:
                stream.put(reached)
        if not busy:
            before, self._dropping = self._dropping, done

            def work() -> None:
                if before is not None:
                    before.wait()
                drop()

            threading.Thread(target=work, name="drop", daemon=True).start()

    def _call(
        self, call: int, program: str, stream: int, arguments: list[Any], results: list[Any], executor: int,
        address: list[Any], attached: list[bytearray],
    ) -> None:  # fmt: skip
        wanted = self._programs[program]
        dropping = self._dropping
        shards = [
            [(devices, self.promises.claim(token, executor), shape) for devices, token, shape in parts]
            for parts in arguments
        ]

        def work() -> None:
            if dropping is not None:
                dropping.wait(self.settings.python_drop_deadline_seconds)
            self._run(call, wanted, shards, results, (address[0], address[1]))

        with self._lock:
            thread = self._streams.get(stream)
            if thread is None:
                thread = self._streams[stream] = _Stream()
                name = f"python-stream-{stream}"
                threading.Thread(target=self._run_stream, args=(stream, thread), name=name, daemon=True).start()
            thread.put(work)

    # ---- threads of streams

    def _run_stream(self, number: int, stream: _Stream) -> None:
        while True:
            try:
                work = stream.work.get(timeout=IDLE_STREAM_SECONDS)
            except queue.Empty:
                with self._lock:
                    if not stream.outstanding:
                        del self._streams[number]
                        return
                continue
            work()
            del work  # it holds the program, whose end must not wait for the next call
            with self._lock:
                stream.outstanding -= 1

    def _run(
        self, call: int, program: _Program, shards: list[Any], results: list[Any], address: tuple[str, int]
    ) -> None:
        try:
            strings, attached = self._results_of(program, shards, results, address)
        except BaseException as error:
            self._end_lines()
            status = self._describe(error, program.name)
            generation = status.generation if isinstance(status, GenerationFailure) else 0
            self._tell(["failed", call, int(status.code), status.message, generation])
        else:
            self._end_lines()
            self._tell(["done", call, strings], attached)

    def _results_of(
        self, program: _Program, shards: list[Any], results: list[Any], address: tuple[str, int]
    ) -> tuple[list[Any], list[bytes]]:
        function = program.function(self._loaded)
        for number in function.objects:
            if number in self._lost_objects:
                raise statuses.data_loss(
                    f"the object of the colocated Python method {program.name!r} is gone, as "
                    f"{self._lost_objects[number]}; make a new one"
                ).error()
        timeout = self.settings.python_call_timeout_seconds
        arguments = []
        for index, parts in enumerate(shards):
            data = {
                device: part
                for devices, promise, shape in parts
                for part in [_decoded(promise.wait(timeout), shape)]
                for device in devices
            }
            arguments.append(function.argument(index, data, self._runtime))
        shards.clear()
        found = function.call(arguments, self._runtime)
        strings: list[Any] = []
        attached: list[bytes] = []
        for index, (made, targets) in enumerate(zip(found, results, strict=True)):
            if not targets:
                for device, data in made.items():
                    strings.append([index, device, len(attached)])
                    attached.append(dtypes.encode_host_buffer(data))
            for devices, token in targets:
                try:
                    self._results.push(address, token, made[devices[0]])
                except OSError as error:
                    raise statuses.data_loss(
                        f"the executor of {self.place} did not take a result of {program.name!r}: {error}"
                    ).error() from None
        return strings, attached

    def _loaded(self, program: _Program, function: Any) -> None:
        if function.objects:
            self._tell(["objects", program.number, program.name, sorted(function.objects)])

    def _describe(self, error: BaseException, name: str) -> Status:
        from ridgeway.worker import python_functions

        if isinstance(error, StatusError):
            return error.status
        if python_functions.is_lost_result(error):
            return statuses.data_loss(
                f"the result of the first call of {name!r} is gone with the Python process of {self.place} that "
                "had it; call it again"
            )
        what = f"colocated Python {name!r} on {self.place}"
        return python_functions.describe_error(error, what)


def _decoded(data: Any, shape: list[int] | None) -> np.ndarray:
    return data if shape is None else dtypes.decode_host_buffer(data, dtypes.KIND_STRING, tuple(shape))


def _guard_group() -> None:
    """Have what the user's code starts end with this process, however that ends and whoever has died before: a child
    without any other work kills the process group when the kernel tells it that its parent is dead."""
    os.setpgid(0, 0)
    parent = os.getpid()
    if os.fork() != 0:
        return
    try:
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
        processes.die_with_parent(parent, signal.SIGTERM)
        while True:
            signal.pause()
    finally:
        os._exit(0)


def _end_user_code() -> None:
    """What a Python program does at its end, as far as the user's code registered it, in bounded time."""
    thread = threading.Thread(target=atexit._run_exitfuncs, name="exit", daemon=True)
    thread.start()
    thread.join(LAST_RITES_SECONDS)


def main(arguments: dict[str, Any]) -> int:
    """Entry of the forked process; ``arguments`` as an agent's template gives them."""
    _guard_group()  # before there are threads
    name = f"python {arguments['python']}"
    timeout = arguments["settings"]["executor_start_timeout_seconds"]
    from ridgeway.worker import python_devices

    # As in a program that sets nothing: an executor's own code wants the wide types, user code may not.
    jax.config.update("jax_enable_x64", os.environ.get("JAX_ENABLE_X64", "").lower() in ("1", "true", "yes", "on"))
    runtime = python_devices.make_runtime(arguments["slot"], arguments["slots"], arguments["devices_per_host"])
    python_devices.make_default(runtime)
    try:
        host = PythonHost(arguments, runtime)
        link = blocking_link.connect(arguments["head_host"], arguments["head_port"], arguments["secret"], timeout)
        link.send(["hello", {
            "role": "python", "agent": arguments["agent"], "python": arguments["python"], "pid": os.getpid(),
            "versions": hello_versions(), "transfer_host": arguments["address"], "transfer_port": host.server.port,
        }])  # fmt: skip
        link.set_timeout(timeout)
        answer, _ = link.receive()
        link.set_timeout(None)
    except (OSError, LinkClosed, authentication.AuthenticationError) as error:
        print(f"{name}: {error}", flush=True)
        return EXIT_HEAD_GONE
    if answer[0] != "welcome":
        print(f"{name}: refused: {answer[-1]}", flush=True)
        return EXIT_REFUSED
    code = host.run(link, answer[1]["lost_objects"])
    _end_user_code()
    return code
