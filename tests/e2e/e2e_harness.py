"""Clusters of real processes, programs that use them, and the proof that nothing of them is left.

Everything a test starts runs in a `Place`.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from places import DEADLINE_SECONDS, ROOT, MarkedPlace, Running, child_set_up, until

from ridgeway.launch import control
from ridgeway.launch.cluster_folder import ClusterRecord, read_record
from ridgeway.launch.environment import command_environment

TRAINER = ROOT / "examples" / "plain_trainer.py"
CONTROLLER = Path(__file__).with_name("controller_program.py")
ANY_PORTS = ("--proxy-port", "0", "--cluster-port", "0")
#: Of every test module here.
MARKS = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes and sockets as Linux shows them"),
]


class Place(MarkedPlace):
    """Where a test's processes live."""

    def record(self, name: str = "ridgeway") -> ClusterRecord:
        """How to reach a cluster that runs here; waits until its head serves."""
        return until(lambda: read_record(self.runtime / name), lambda: f"cluster {name} never served")

    def start(self, command: Sequence[str], prefix: Sequence[str] = (), **environment: str) -> Running:
        """Start a process (behind the command ``prefix``)."""
        return self.launch([*prefix, *command], **environment)

    def ridgeway(self, *arguments: str, prefix: Sequence[str] = (), **environment: str) -> Running:
        """Start ``ridgeway arguments...``."""
        return self.start([sys.executable, "-m", "ridgeway.cli.main", *arguments], prefix, **environment)

    def call(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of ``ridgeway arguments...``."""
        running = self.ridgeway(*arguments, **environment)
        code = running.wait()
        return code, running.output, "\n".join(running.stderr)


@contextlib.contextmanager
def place_in(folder: Path) -> Iterator[Place]:
    """A place; what a failed test leaves in it is killed."""
    place = Place(folder)
    try:
        yield place
    finally:
        place.end()


@dataclasses.dataclass
class Host:
    """One host of a status."""

    slice: int
    host: int
    state: str
    incarnation: int | None
    pid: int
    executor_pid: int
    generation: int | None
    restarts: int


class Cluster:
    """A running cluster, as a user at its machine sees it."""

    def __init__(self, place: Place, record: ClusterRecord):
        self.place = place
        self.record = record
        self._stack = contextlib.ExitStack()
        self._control = self._stack.enter_context(control.connect(record))
        slices, hosts, _ = record.topology
        self.slots = [(s, h) for s in range(slices) for h in range(hosts)]

    def close(self) -> None:
        """Drop this test's own link to it."""
        self._stack.close()

    # ---- what is the case

    def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask the head."""
        return self._control.request(verb, **arguments)

    def status(self) -> dict[str, Any]:
        """What `ridgeway status --json` shows."""
        return self.request("status")

    def hosts(self) -> dict[tuple[int, int], Host]:
        """All hosts by (slice, host)."""
        names = [field.name for field in dataclasses.fields(Host)]
        found = [host for piece in self.status()["slices"] for host in piece["hosts"]]
        return {(h["slice"], h["host"]): Host(**{name: h[name] for name in names}) for h in found}

    def host(self, slice_index: int, host: int = 0) -> Host:
        """One host."""
        return self.hosts()[slice_index, host]

    def went_on(self, before: Host, after: Host) -> bool:
        """Whether a host is the one that it was and has lost nothing: its executor is the same process, or one that it
        was renewed by, which goes on with everything that it held (a generation that never drains wears it out)."""
        renewed = {e["pid"] for e in self.events(0, "executor_renewed", slice=after.slice, host=after.host)}
        same = (before.pid, before.incarnation, before.restarts) == (after.pid, after.incarnation, after.restarts)
        return same and after.executor_pid in renewed | {before.executor_pid}

    def is_whole(self) -> bool:
        """Whether every host is ready."""
        return all(host.state == "ready" for host in self.hosts().values())

    def wait_whole(self) -> dict[tuple[int, int], Host]:
        """Wait until every host is ready."""
        until(self.is_whole, lambda: f"{self.hosts()}\n{self.describe()}")
        return self.hosts()

    def wait_sessions(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many programs are connected."""
        until(lambda: len(self.status()["sessions"]) == count, lambda: self.status()["sessions"])
        return self.status()["sessions"]

    # ---- events

    def now(self) -> int:
        """The sequence number that the next event will have."""
        since = 0
        while True:
            answer = self.request("events", since=since)
            if not answer["events"]:
                return answer["next"]
            since = answer["next"]

    def events(self, since: int = 0, kind: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Events from a sequence number on, those of one kind and with these fields only."""
        found: list[dict[str, Any]] = []
        while True:
            answer = self.request("events", since=since)
            if not answer["events"]:
                break
            found += answer["events"]
            since = answer["next"]
        return [e for e in found if kind in (None, e["kind"]) and fields.items() <= e.items()]

    def wait_event(self, since: int, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event; returns the first."""
        found = until(
            lambda: self.events(since, kind, **fields), lambda: f"no {kind} {fields} in {self.events(since)}"
        )
        return found[0]

    def describe(self) -> str:
        """The ends of the logs, for a failure's message."""
        lines: list[str] = []
        for path in sorted(Path(self.record.logs_folder).glob("*.log")):
            lines += [f"==> {path.name} <==", *path.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(lines)

    # ---- accidents

    def kill_worker(self, slice_index: int, host: int = 0, number: int = signal.SIGKILL) -> Host:
        """Signal an agent (by pid, as an accident would); returns the host as it was."""
        found = self.host(slice_index, host)
        os.kill(found.pid, number)
        return found

    def kill_executor(self, slice_index: int, host: int = 0, number: int = signal.SIGKILL) -> Host:
        """Signal the process that owns the devices; returns the host as it was."""
        found = self.host(slice_index, host)
        os.kill(found.executor_pid, number)
        return found

    # ---- programs

    def environment(self) -> dict[str, str]:
        """What a program needs to use this cluster."""
        return command_environment({}, "127.0.0.1", self.record.proxy_port)

    def start(self, *command: str) -> Running:
        """Start a program that uses this cluster."""
        return self.place.start(command, **self.environment())

    def train(self, checkpoints: Path, *arguments: str) -> Running:
        """Start the plain trainer of the examples."""
        return self.start(sys.executable, str(TRAINER), "--checkpoints", str(checkpoints), *arguments)

    def controller(self) -> "Controller":
        """Start a program that does what it is told; see `controller_program`."""
        return Controller(self.place, self.environment())


def bring_up(place: Place, topology: str, *options: str) -> Cluster:
    """`ridgeway up` with any free ports."""
    code, _, errors = place.call("up", "--topology", topology, *ANY_PORTS, *options)
    assert code == 0, errors
    name = options[options.index("--cluster") + 1] if "--cluster" in options else "ridgeway"
    return Cluster(place, place.record(name))


def take_down(cluster: Cluster) -> None:
    """`ridgeway down`; nothing may be left."""
    cluster.place.note_ports()
    cluster.close()
    code, _, errors = cluster.place.call("down", "--cluster", cluster.record.name)
    assert code == 0, errors
    cluster.place.assert_nothing_left()


@contextlib.contextmanager
def cluster_in(folder: Path, topology: str, *options: str) -> Iterator[Cluster]:
    """A cluster of its own that is up, and afterwards down without a trace."""
    with place_in(folder) as place:
        cluster = bring_up(place, topology, *options)
        yield cluster
        take_down(cluster)


def total(devices: int, factor: float = 1.0) -> Any:
    """What the sum of a controller's ``sharded`` over so many devices is, ``mix`` or not; compare with ``==``."""
    return pytest.approx(factor * sum(number % 97 for number in range(devices * 4 * 256)), rel=1e-4)


class ProgramError(Exception):
    """What a controller's code raised: the exception's type (with its module) and text."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


JAX_RUNTIME_ERROR = "jax.errors.JaxRuntimeError"


class Controller:
    """A stock JAX program in a process of its own, driven line by line."""

    def __init__(
        self, place: Place, environment: dict[str, str], prefix: Sequence[str] = (), python: str = sys.executable
    ):
        self._errors = (place.folder / f"controller-{uuid.uuid4().hex[:8]}.err").open("w+")
        self.process = subprocess.Popen(
            [*prefix, python, str(CONTROLLER)],
            env={**place.environment, **environment},
            cwd=place.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            preexec_fn=child_set_up(),
        )
        self._lines: list[dict[str, Any]] = []
        self._heard = 0
        threading.Thread(target=self._read, daemon=True).start()
        self.pid: int = self.finish()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return f"controller {self.process.pid} (exit code {self.process.poll()}):\n{self._errors.read()[-5000:]}"

    def _next(self, seconds: float) -> dict[str, Any]:
        def here() -> bool:
            assert len(self._lines) > self._heard or self.process.poll() is None, self.describe()
            return len(self._lines) > self._heard

        until(here, self.describe, seconds)
        self._heard += 1
        return self._lines[self._heard - 1]

    def start(self, code: str) -> None:
        """Have it execute something; `hear` and `finish` tell how far it is."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"code": code}) + "\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = DEADLINE_SECONDS) -> Any:
        """The next thing that the running code says."""
        message = self._next(seconds)
        assert "said" in message, message
        return message["said"]

    def finish(self, seconds: float = DEADLINE_SECONDS) -> Any:
        """Wait for the end of what was started, whatever it still says; returns its ``result``.

        Raises:
          ProgramError: it raised.
        """
        while True:
            message = self._next(seconds)
            if "error" in message:
                raise ProgramError(message["error"], message["text"])
            if "result" in message:
                return message["result"]

    def run(self, code: str, seconds: float = DEADLINE_SECONDS) -> Any:
        """Execute something; returns its ``result``.

        Raises:
          ProgramError: it raised.
        """
        self.start(code)
        return self.finish(seconds)

    def error_of(self, code: str | None = None, seconds: float = DEADLINE_SECONDS) -> str:
        """The text of the `JaxRuntimeError` that the code (or what was started) raises; anything else fails."""
        if code is not None:
            self.start(code)
        try:
            value = self.finish(seconds)
        except ProgramError as error:
            assert error.kind == JAX_RUNTIME_ERROR, error
            return error.text
        raise AssertionError(f"raised nothing, but gave {value!r}")

    def close(self) -> None:
        """End the program as a program ends."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise AssertionError(f"does not end: {self.describe()}") from None
        self._errors.close()


#: What the trainer does in the tests that compare losses: checkpoints at steps 0, 20, 40 and 60.
TRAINING_STEPS = 70
TRAINING_PERIOD = 20
TRAINING = ("--steps", str(TRAINING_STEPS), "--checkpoint-period", str(TRAINING_PERIOD))
#: By then a step is committed or about to be, and most are still to come.
TRAINING_SAFE_STEP = TRAINING_PERIOD + 4

LOSSES = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


def losses(output: str) -> dict[int, str]:
    """The losses in a trainer's output by step; of a step that was repeated, the last."""
    return {int(step): loss for step, loss in LOSSES.findall(output)}


def train_natively(place: Place, checkpoints: Path, processes: int, devices_each: int) -> list[Running]:
    """The trainer as multi-controller jax: gloo collectives between processes, no Ridgeway."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    return [
        place.start(
            [sys.executable, str(TRAINER), "--checkpoints", str(checkpoints), *TRAINING],
            JAX_PLATFORMS="cpu",
            JAX_NUM_CPU_DEVICES=str(devices_each),
            JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
            JAX_COORDINATOR_ADDRESS=coordinator,
            JAX_NUM_PROCESSES=str(processes),
            JAX_PROCESS_ID=str(index),
        )
        for index in range(processes)
    ]


def family_of(pid: int) -> list[int]:
    """A process and all its descendants."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(*pids: int) -> None:
    """Wait until processes have ended."""
    until(lambda: all(is_gone(pid) for pid in pids), lambda: f"still there: {[p for p in pids if not is_gone(p)]}")
