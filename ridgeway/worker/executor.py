"""The executor: the process that owns a host's devices and runs the head's orders, one after the other.

Three kinds of thread: the *reader* takes messages from the head, acts at once on those that stand outside the
sequence (abort, bytes for a promise) and queues the rest; the *order thread* runs orders in sequence and never
waits for what it can start asynchronously; *waiters* wait for results and send replies.
"""

import functools
import gc
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ridgeway import settings as runtime_settings
from ridgeway.processes import memory_bytes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.transport import authentication, blocking_link
from ridgeway.transport.frames import FrameError
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import buffers, device_runtime, running_programs, succession
from ridgeway.worker.agreement import Agreement
from ridgeway.worker.buffer_orders import BufferOrders
from ridgeway.worker.callbacks import CallbackCaller, without_own_frames
from ridgeway.worker.device_runtime import EnteringGeneration, Runtime
from ridgeway.worker.failures import GenerationFailure
from ridgeway.worker.persistence import PersistenceOrders
from ridgeway.worker.process_identity import hello_versions
from ridgeway.worker.profiling import Profiling
from ridgeway.worker.program_orders import ProgramOrders
from ridgeway.worker.promises import Ended, PromiseTable
from ridgeway.worker.renewal import Renewal
from ridgeway.worker.suspend_orders import SuspendOrders
from ridgeway.worker.transfers import TransferClient, TransferServer
from ridgeway.worker.waiting import Waiters

EXIT_HEAD_GONE = 3
EXIT_REFUSED = 2
EXIT_BROKEN = 70
BUSY_CPU_FRACTION = 0.05
"""An executor that uses more of a core than this, on a machine that may be crowded, is computing."""
ABANDONED_LIMIT = 8
"""Abandoned runtimes hold threads and memory for good: with so many the executor ends itself and is replaced."""


class Executor:
    """State of one executor process, which begins with the ``legacy`` of a predecessor if it has one."""

    def __init__(
        self, link: blocking_link.BlockingLink, arguments: dict[str, Any], legacy: succession.Legacy | None = None
    ):
        self.link = link
        self.settings = runtime_settings.Settings(**arguments["settings"])
        self.address: str = arguments["address"]
        self._head_host: str = arguments["head_host"]
        self.devices_per_host: int = arguments["devices_per_host"]
        self.first_device = 0
        self.promises = PromiseTable()
        self.store = buffers.BufferStore(self.settings.transfer_timeout_seconds)
        self.transfers = TransferClient(arguments["secret"], self.settings.transfer_timeout_seconds)
        self.server = TransferServer(
            self.address, arguments["secret"], self.promises, self.settings.handshake_timeout_seconds,
            () if legacy is None else legacy.sockets,
        )  # fmt: skip
        self.callbacks = CallbackCaller(
            self.promises, link.send, self.settings.callback_timeout_seconds, self._callback_failed
        )
        self.saved = False
        """its state is in the scratch folder: this process has nothing more to do"""
        self.unfinished: dict[str, Callable[[], int]] = {
            "operations": lambda: self.waiters.outstanding,
            "transfers to here": lambda: self.promises.awaited + self.store.promised,
            "transfers to others": lambda: self.transfers.unsent,
        }
        """What goes on beside the sequence of orders, and how much of it: the state is saved when there is none."""
        self.running = running_programs.of_this_process()
        """in memory that the template made, which reads it when this process has died"""
        self._lock = threading.Lock()
        self.agreement = Agreement()
        self._missed_generation = 0
        """the last one that could not be entered"""
        self._orders: queue.SimpleQueue[tuple[list[Any], list[bytearray]]] = queue.SimpleQueue()
        self._received = 0
        self._dispatched = 0
        self._completed_before = 0
        self._waits = 0
        self._entering: EnteringGeneration | None = None
        self._services: dict[int, queue.SimpleQueue[str]] = {}
        self._cancelled: dict[int, Status] = {}
        """generations that were aborted and not yet left"""
        self._abandoned: list[Runtime] = []
        """runtimes whose executions never returned; dropping one would block"""
        self.aborts = 0
        """Aborted generations that this process has left."""
        self._read_on = threading.Event()
        self.answered = 0
        """Requests of the head that were; it numbers them from 1 on."""
        if legacy is not None:
            self._inherit(legacy)
        self.runtime = device_runtime.runtime_alone(self.first_device, self.devices_per_host)
        self.waiters = self._new_waiters(self.runtime)
        buffer_orders = BufferOrders(self)
        persistence = PersistenceOrders(self, buffer_orders)
        self.unfinished["pieces for storage"] = persistence.unfinished
        profiling = Profiling(self.settings, link.send)
        self._aside: dict[str, Callable[..., None]] = {
            "profile_start": profiling.start, "profile_stop": profiling.stop,
            "data": self._data, "data_failed": self._data_failed, "peer_lost": self._peer_lost,
            "service": self._service_here, "abort": self._abort, "everybody_refused": self._everybody_refused,
            **persistence.aside,
        }  # fmt: skip
        self.programs = ProgramOrders(self)
        if legacy is not None:
            self.programs.sources.update(legacy.programs)
        self.renewal = Renewal(self, arguments.get("template_descriptor"))
        self.renewal.ties.append(profiling.tie)
        self._handlers: dict[str, Callable[..., None]] = {
            "assign": self._assign, "reached": self._say_reached,
            "leave_generation": self._leave_generation, "enter_generation": self._enter_generation,
            **buffer_orders.handlers, **self.programs.handlers, **persistence.handlers, **self.renewal.handlers,
            **SuspendOrders(self).handlers,
        }  # fmt: skip

    # ---- threads

    def run(self) -> int:
        """Serve until the head is gone; returns the exit code."""
        threading.Thread(target=self._run_orders, name="orders", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()
        try:
            while True:
                message, attached = self.link.receive()
                aside = self._aside.get(message[0])
                if aside is not None:
                    aside(*message[1:], attached=attached)
                else:
                    self._received += 1
                    self._orders.put((message, attached))
                    if message[0] == "renew":
                        # What follows may be for the successor.
                        self._read_on.wait()
                        self._read_on.clear()
        except LinkClosed:
            return 0 if self.saved else EXIT_HEAD_GONE

    def read_on(self) -> None:
        """The order to renew was not carried out: the reader may go on."""
        self._read_on.set()

    @property
    def abandoned(self) -> int:
        """Clients that were left behind with executions that never returned."""
        return len(self._abandoned)

    def state(self) -> dict[str, Any]:
        """What a successor has to know besides what is held, once the present order is done."""
        return {
            "first_device": self.first_device, "received": self._received, "dispatched": self._dispatched + 1,
            "completed": self._completed_before + self.waiters.completed, "waits": self._waits,
            "missed_generation": self._missed_generation, "answered": self.answered,
        }  # fmt: skip

    def _inherit(self, legacy: succession.Legacy) -> None:
        state = legacy.state
        self.first_device = state["first_device"]
        self._received, self._dispatched = state["received"], state["dispatched"]
        self._completed_before, self._waits = state["completed"], state["waits"]
        self._missed_generation, self.answered = state["missed_generation"], state["answered"]
        self.promises.inherit(legacy.promises, state["lost_peers"])
        self.store.inherit(legacy.store)

    def _run_orders(self) -> None:
        while True:
            message, attached = self._orders.get()
            try:
                self._handlers[message[0]](*message[1:], attached=attached)
            except LinkClosed:
                return
            except BaseException:
                # Head and executor no longer agree on what there is here: nothing this process holds can be trusted.
                traceback.print_exc()
                os._exit(EXIT_BROKEN)
            self._dispatched += 1

    def _send_heartbeats(self) -> None:
        pause = threading.Event()
        while True:
            self.heartbeat()
            self.promises.expire(self.settings.transfer_timeout_seconds)
            pause.wait(self.settings.heartbeat_interval_seconds)

    def heartbeat(self) -> None:
        """Tell the head that this process lives, and how far it is."""
        waiters = self.waiters
        outstanding = self._dispatched < self._received or waiters.outstanding > 0
        if self.callbacks.waiting:
            outstanding = False  # it is the controller that takes its time
        completed = self._completed_before + waiters.completed + self._waits
        held, worn = self.store.host_memory_bytes(), self.renewal.worn
        self._tell(["heartbeat", self._dispatched, completed, outstanding, memory_bytes(os.getpid()), held, worn])

    def progressed(self) -> None:
        """Something long goes on as it should: the head sees it by the next heartbeat."""
        self._waits += 1

    def _tell(self, message: list[Any]) -> None:
        try:
            self.link.send(message)
        except LinkClosed:
            pass  # the reader sees it too, and ends the process

    # ---- errors and answers

    def describe(self, error: BaseException, runtime: Runtime) -> Status:
        """The status of an exception that came from ``runtime``; the first cause wins over its consequences."""
        given = error.status if isinstance(error, StatusError) else None
        if given is not None and not (isinstance(given, GenerationFailure) and given.generation == runtime.generation):
            return given
        if runtime.aborted is not None:
            return runtime.aborted
        text = without_own_frames(str(error))
        if given is None and runtime.generation > 0 and statuses.is_collective_failure(text):
            return GenerationFailure(Code.ABORTED, f"collective failed: {text[:500]}", runtime.generation)
        return given or statuses.classify_runtime_error(text)

    def wait_for_agreement(self, runtime: Runtime) -> None:
        """Before a program of several executors is started: let it be settled how earlier ones end that may have failed
        here alone.

        Raises:
          statuses.StatusError: the generation has ended, or the head did not say in time.
        """
        waiters = self.waiters
        while runtime.aborted is None and (waiters.risky or (self.agreement.doubtful and waiters.executing)):
            time.sleep(0.001)  # a callback has its deadline, and so has a generation in which nothing gets on
        patience = self.settings.disagreement_seconds + self.settings.generation_create_timeout_seconds
        settled = self.agreement.reached(lambda: runtime.aborted is not None, patience)
        if runtime.aborted is not None:
            raise runtime.aborted.error()
        if not settled:
            text = "it is not known whether all members refused an execution"
            raise GenerationFailure(Code.ABORTED, text, runtime.generation).error()

    def _callback_failed(self, text: str) -> None:
        """A device whose callback raised takes part in its program's collectives no more: if that has not ended the
        program soon, nothing will."""
        runtime, waiters = self.runtime, self.waiters
        status = statuses.classify_runtime_error(text)

        def tell() -> None:
            if runtime.aborted is None and waiters.risky:
                self._tell(["stuck", runtime.generation, int(status.code), status.message])

        timer = threading.Timer(self.settings.disagreement_seconds, tell)
        timer.daemon = True
        timer.start()

    def not_entered(self, program: str) -> Status:
        """The error of a program whose generation this executor could not enter."""
        return GenerationFailure(Code.ABORTED, f"the generation of {program} does not stand", self._missed_generation)

    def execution_failed(self, execution: int, status: Status, runtime: Runtime) -> None:
        """Tell the head, which must know when members of a generation disagree."""
        self._tell(["execution_failed", execution, runtime.generation, *_error_fields(status, runtime)])

    def _count_answer(self) -> None:
        with self._lock:
            self.answered += 1

    def reply(self, request: int, *fields: Any, attached: tuple[bytes, ...] = ()) -> None:
        """Answer a request."""
        self._count_answer()
        try:
            self.link.send(["reply", request, *fields], attached)
        except LinkClosed:
            pass

    def reply_error(self, request: int, status: Status, runtime: Runtime) -> None:
        """Answer a request with an error."""
        self._count_answer()
        self._tell(["error", request, *_error_fields(status, runtime)])

    def answer(self, request: int, runtime: Runtime, attach: bool = False) -> Callable[[Any, Status | None], None]:
        """A waiter's delivery that answers a request, with the result attached if asked."""

        def deliver(result: Any, error: Status | None) -> None:
            if error is not None:
                self.reply_error(request, error, runtime)
            else:
                self.reply(request, attached=(result,) if attach else ())

        return deliver

    def _new_waiters(self, runtime: Runtime) -> Waiters:
        return Waiters(lambda error: self.describe(error, runtime))

    # ---- outside the sequence

    def _data(self, token: int, attached: list[bytearray]) -> None:
        self.promises.resolve(token, attached[0])

    def _data_failed(self, token: int, code: int, message: str, attached: list[bytearray]) -> None:
        self.promises.resolve(token, Status(Code(code), message))

    def _everybody_refused(self, execution: int, attached: list[bytearray]) -> None:
        self.agreement.everybody_refused(execution)

    def _peer_lost(self, executor: int, code: int, message: str, attached: list[bytearray]) -> None:
        self.promises.peer_lost(executor, Status(Code(code), message))

    def _service_here(self, generation: int, address: str, attached: list[bytearray]) -> None:
        # The head may listen on all of its addresses; the one that leads there from here is this link's.
        host, port = self._head_host, address.rpartition(":")[2]
        self._service(generation).put(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    def _service(self, generation: int) -> "queue.SimpleQueue[str]":
        with self._lock:
            return self._services.setdefault(generation, queue.SimpleQueue())

    def _abort(self, generation: int, code: int, message: str, attached: list[bytearray]) -> None:
        cause = Status(Code(code), message)
        with self._lock:
            self._cancelled[generation] = cause
            entering, runtime = self._entering, self.runtime
        self._service(generation).put("")
        if entering is not None and entering.generation == generation:
            entering.abort(cause)
        if runtime.generation == generation:
            self.callbacks.abandon(cause)
            runtime.abort(cause, self.heartbeat)

    # ---- orders: generations

    def _say_reached(self, request: int, attached: list[bytearray]) -> None:
        """The head paces those who run far ahead by this."""
        self.reply(request)

    def _assign(self, slot: int, first_device: int, attached: list[bytearray]) -> None:
        self.first_device = first_device
        self._leave()

    def _leave(self) -> None:
        """Bring everything to host memory and go on alone."""
        old, waiters = self.runtime, self.waiters
        generation = old.generation
        describe = functools.partial(self.describe, runtime=old)
        lost, stuck = self.store.drain(old, describe, self._gives_up(old), self._still_at_it)
        # Also executions whose results nobody keeps: leaving in the middle of one would fail it for the others.
        stays = stuck > 0 or self._still_waiting(waiters, old)
        self._completed_before += waiters.completed
        if stays:
            assert old.aborted is not None
            waiters.abandon(old.aborted)
            self._abandoned.append(old)
        else:
            waiters.close()
        self.aborts += old.aborted is not None
        old.close()
        runtime = device_runtime.runtime_alone(self.first_device, self.devices_per_host)
        with self._lock:
            self.runtime = runtime
        self.waiters = self._new_waiters(runtime)
        self.agreement = Agreement()
        del old, waiters, describe
        gc.collect()  # clients and devices refer to each other: without this, sockets and threads of the old one stay
        if lost:
            print(f"leaving generation {generation}: {lost} shards lost, {stuck} of them never computed", flush=True)
        if len(self._abandoned) >= ABANDONED_LIMIT:
            print(f"{len(self._abandoned)} generations never ended here; ending this executor", flush=True)
            os._exit(EXIT_BROKEN)

    def _still_waiting(self, waiters: Waiters, runtime: Runtime) -> bool:
        """Wait for what executors compute together; whether it stays without an answer, the runtime being aborted."""
        gives_up = self._gives_up(runtime)
        while waiters.outstanding_together:
            if gives_up(True):
                return True
            time.sleep(0.005)
        return False

    def _gives_up(self, runtime: Runtime) -> Callable[[bool], bool]:
        """When to stop waiting for what an aborted runtime computes.

        What spans executors is poisoned anyway and may never return (gloo leaves senders waiting): it gets a third of
        the time that the head gives this executor.  What this executor computes alone is waited for while it computes;
        but not long beside something that never returns, which may hold the threads that the rest would need, or burn
        the processor time that looks like work.
        """
        patience = self.settings.drain_deadline_seconds / 3
        looked, cpu = time.monotonic(), time.process_time()

        def gives_up(spans: bool) -> bool:
            nonlocal looked, cpu
            now = time.monotonic()
            if runtime.aborted is None:
                return False
            aborted_for = now - runtime.aborted_at
            if spans:
                return aborted_for >= patience
            if aborted_for >= self.settings.drain_deadline_seconds and self.waiters.outstanding_together:
                return True
            if now - looked < patience:
                return False
            busy = (time.process_time() - cpu) / (now - looked) > BUSY_CPU_FRACTION
            looked, cpu = now, time.process_time()
            if busy:
                self._still_at_it()
            return not busy

        return gives_up

    def _still_at_it(self) -> None:
        """Let the head see progress that no order's completion shows."""
        self._waits += 1
        self.heartbeat()

    def ended(self, runtime: Runtime, spans: bool) -> Ended:
        """For an execution that waits for bytes: once its generation was aborted, one that spans executors need not
        wait any longer, and one that is this executor's alone goes on waiting without being taken for stuck."""

        def ended() -> Status | None:
            if runtime.aborted is not None and not spans:
                self._still_at_it()
            return runtime.aborted if spans else None

        return ended

    def _leave_generation(self, request: int, generation: int, attached: list[bytearray]) -> None:
        if self.runtime.generation == generation:
            self._leave()
        with self._lock:
            self._services.pop(generation, None)
            self._cancelled.pop(generation, None)
        self.reply(request, self.renewal.worn)

    def _enter_generation(
        self, request: int, generation: int, rank: int, first_devices: list[int], attached: list[bytearray]
    ) -> None:
        self._leave()
        timeout = self.settings.generation_create_timeout_seconds
        entering = EnteringGeneration(generation, rank, first_devices, self.devices_per_host, timeout)
        with self._lock:
            self._entering = entering
        try:
            try:
                service = self._service(generation).get(timeout=timeout)
            except queue.Empty:
                raise statuses.deadline_exceeded("the head named no key-value service in time").error() from None
            with self._lock:
                cancelled = self._cancelled.get(generation)
            if cancelled is not None:
                raise cancelled.error()
            runtime = entering.run(service, self.address)
        except Exception as error:
            status = error.status if isinstance(error, StatusError) else Status(Code.ABORTED, str(error)[:300])
            with self._lock:
                self._entering = None
                self._services.pop(generation, None)
            self._missed_generation = generation
            status = entering.aborted or status
            self._count_answer()
            self._tell(["error", request, int(status.code), status.message, True, generation])
            return
        waiters = self._new_waiters(runtime)
        with self._lock:
            self._entering = None
            self._services.pop(generation, None)
            self.runtime = runtime
            cancelled = self._cancelled.get(generation)
        self.waiters.close()
        self.waiters = waiters
        if cancelled is not None:
            runtime.abort(cancelled, self.heartbeat)
        self.reply(request)


def _error_fields(status: Status, runtime: Runtime) -> list[Any]:
    if isinstance(status, GenerationFailure) and status.generation > 0:
        return [int(status.code), status.message, True, status.generation]
    return [int(status.code), status.message, False, runtime.generation]


def main(arguments: dict[str, Any]) -> int:
    """Entry of the forked process; ``arguments`` as an agent's template gives them."""
    gc.freeze()  # what was imported stays for good: collections need not look at it
    timeout = arguments["settings"]["executor_start_timeout_seconds"]
    name = f"executor {arguments['executor']}"
    if arguments.get("inherited"):
        return _succeed(name, arguments)
    try:
        link = blocking_link.connect(arguments["head_host"], arguments["head_port"], arguments["secret"], timeout)
        executor = Executor(link, arguments)
        link.send(["hello", {
            "role": "executor", "agent": arguments["agent"], "executor": arguments["executor"], "pid": os.getpid(),
            "versions": hello_versions(), "transfer_host": executor.address, "transfer_port": executor.server.port,
            "head": arguments["head"],
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
    return executor.run()


def _succeed(name: str, arguments: dict[str, Any]) -> int:
    """Begin where a predecessor lets go."""
    started = time.monotonic()
    try:
        channel, legacy = succession.inherit(arguments["inherited"])
        executor = Executor(legacy.link, arguments, legacy)
        succession.commit(channel)
    except (OSError, LinkClosed, FrameError) as error:
        print(f"{name}: not succeeded: {error}", flush=True)
        return EXIT_REFUSED
    executor.server.gate.open()
    executor.reply(legacy.state["request"], True, os.getpid())
    print(f"{name}: a new process goes on with it, made in {time.monotonic() - started:.2f} s", flush=True)
    return executor.run()
