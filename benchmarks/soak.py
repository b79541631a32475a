"""A hundred faults in a row under one controller process, every one recovered, and nothing grows.

A program (`benchmarks.soak_program`) trains a small model without end while faults from a seed strike the cluster:
whole hosts, executors, signals that stop, pause and slow, a full disk, with ``--separate`` the network as well; at any
moment, also in the middle of another recovery. Afterwards every step's loss is compared with an undisturbed run's, and
what every process used is compared between the tenth fault and the last.

Run as ``python -m benchmarks.soak --mode pause --faults 100 --seed 0``; the seed is printed and gives the same faults
again. Results go to ``docs/results/soak.md``, ``.json`` and ``.png``. Exit code 1 if anything was not as it must be.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import soak_network, soak_report
from benchmarks.soak_resources import Sample, sample
from ridgeway.chaos.injection import Injector, Struck
from ridgeway.chaos.plan import AFTER_A_LOSS, Fault, Kind, Moment, Shape, plan
from ridgeway.chaos.run import EventFeed, Moments, links, wait_for_moment
from ridgeway.launch import checks, control
from ridgeway.launch.cluster_folder import ClusterRecord, find
from ridgeway.launch.environment import command_environment
from ridgeway.timeline.events import read_events

MODES = ("pause", "resize", "snapshots")
PROGRAM = Path(__file__).with_name("soak_program.py")
#: Anything that takes longer than this hangs.
HANG_SECONDS = 240.0
START_SECONDS = 120.0
POLL_SECONDS = 0.02
#: A moment that the fault before was to bring about, but did not, is waited for so long.
MOMENT_SECONDS = 8.0
#: Steps in a row after which a program is at work again.
STEPS_AFTERWARDS = 3
MTBF_SECONDS = 1.0
DISK_MEBIBYTES = 256
#: Deadlines of the cluster, short enough for what only they notice.
SETTINGS = (
    "heartbeat_timeout_seconds=4", "heartbeat_interval_seconds=0.5", "suspect_after_seconds=2",
    "progress_deadline_seconds=12", "orphan_policy=wait", "compiler_idle_seconds=0.5",
)  # fmt: skip
SILENCE_SECONDS = 4.0
#: Of the program. glibc keeps what was freed in arenas of its threads: with one, what grows is what is in use.
PROGRAM_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
#: Losses of the same step on different meshes differ by the order of their sums alone.
TOLERANCE = 1e-3


class SoakError(Exception):
    """The run cannot go on: something hangs, or has ended. The message says which."""


@dataclasses.dataclass
class Strike:
    """One fault and what came of it; times in seconds."""

    fault: Fault
    struck: Struck
    moment_came: bool
    seconds: float
    """Since the start."""
    step: int
    """The last step before."""
    recovered_seconds: float | None = None
    """Until every host was ready, what lasts was undone, and the program had made some steps after that."""
    attempts: int = 0
    """Attempts of the program that began from this fault until the next one's end."""
    lost: list[str] = dataclasses.field(default_factory=list)
    """Hosts and executors that the head lost from this fault until the next, with the cause."""


class Program:
    """The program as a process, its output read all the time."""

    def __init__(
        self, environment: dict[str, str], arguments: Sequence[str], devices: int, log: Path, moments: Moments | None
    ):
        self._log = log
        self._devices = devices
        self._moments = moments
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments], env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True,
            )  # fmt: skip
        self.attempts = 0
        self.steps = 0
        """Made, repeated ones included."""
        self.step = -1
        self.devices = 0
        """Of the last step."""
        self.losses: dict[int, str] = {}
        """Step -> loss, of a step that was repeated the last one's."""
        self.exact: dict[int, bool] = {}
        """Step -> whether it and all before it that led to it were made on the whole mesh."""
        self.differing: list[str] = []
        """Steps that gave another loss when they were repeated though both are exact."""
        self.end: int | None = None
        self.heard = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard = time.monotonic()
            match json.loads(line):
                case {"step": int(step), "loss": str(loss), "devices": int(devices)}:
                    exact = devices == self._devices and self.exact.get(step - 1, True)
                    if exact and self.exact.get(step, False) and self.losses[step] != loss:
                        self.differing.append(f"step {step}: {self.losses[step]}, then {loss}")
                    self.losses[step], self.exact[step] = loss, exact
                    self.step, self.devices = step, devices
                    self.steps += 1
                    self._say(Moment.STEP)
                case {"attempt": int(number)}:
                    self.attempts = number
                case {"moment": str(name)}:
                    self._say(Moment(name))
                case {"end": int(step)}:
                    self.end = step

    def _say(self, moment: Moment) -> None:
        if self._moments is not None:
            self._moments.say(moment)

    def check(self) -> None:
        """Raises:
        SoakError: it has ended.
        """
        code = self.process.poll()
        if code is not None and self.end is None:
            raise SoakError(f"the program ended with {code}: {self._tail()}")

    def _tail(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-4:])[-1500:]

    def finish(self, seconds: float) -> None:
        """Close its input and wait for its end.

        Raises:
          SoakError: it does not end, or not well.
        """
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise SoakError(f"the program does not end within {seconds:g} s") from None
        if code or self.end is None:
            raise SoakError(f"the program ended with {code}: {self._tail()}")

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()


class Soak:
    """One run on a cluster that is up and whole."""

    def __init__(
        self, record: ClusterRecord, injector: Injector, events: EventFeed, program: Program, moments: Moments,
        say: Callable[[str], None],
    ):  # fmt: skip
        self._record = record
        self._injector = injector
        self._events = events
        self._program = program
        self._moments = moments
        self._say = say
        self._started = time.monotonic()
        self.strikes: list[Strike] = []
        self.samples: list[Sample] = []

    def run(self, faults: Iterator[Fault], count: int) -> None:
        """Strike so many times, and see every fault recovered.

        Raises:
          SoakError: one was not, or the program ended.
        """
        self._wait("the first steps", lambda: self._program.steps >= STEPS_AFTERWARDS)
        open_strikes: list[Strike] = []
        hits = 0
        since = time.monotonic()
        fault = next(faults)
        while True:
            attempts = self._program.attempts
            self._pause(fault.pause_seconds)
            came = wait_for_moment(fault, self._moments, since, self._program.check, MOMENT_SECONDS)
            since = time.monotonic()
            strike = Strike(
                fault, self._injector.strike(fault), came, round(since - self._started, 3), self._program.step
            )
            self.strikes.append(strike)
            open_strikes.append(strike)
            hits += bool(strike.struck.pids or strike.struck.victims)
            self._say(
                f"[{since - self._started:6.0f} s, step {self._program.step}] {fault.describe()}"
                f"{'' if came else ' (which did not come)'}{'' if strike.struck.victims else '; nobody was there'}"
            )
            fault = next(faults)
            if fault.moment not in AFTER_A_LOSS or hits >= count:
                self._recovered(open_strikes)
                strike.attempts = self._program.attempts - attempts
                open_strikes = []
                self._take_sample()
                since = time.monotonic()
                if hits >= count:
                    break
        for strike, following in zip(self.strikes, [*self.strikes[1:], None], strict=True):
            end = following.struck.time if following is not None else float("inf")
            strike.lost = [
                f"slice {e['slice']} host {e['host']}{' executor' if e.get('executor_only') else ''}: {e['cause']}"
                for e in self._events.since(strike.struck.time, "host_lost")
                if e["monotonic"] < end
            ]

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._program.check()
            time.sleep(min(left, POLL_SECONDS))

    def _wait(self, what: str, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + HANG_SECONDS
        while not condition():
            self._program.check()
            if self._events.over:
                raise SoakError("the head ended")
            if time.monotonic() > end:
                raise SoakError(f"{what}: not within {HANG_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _recovered(self, strikes: Sequence[Strike]) -> None:
        """Wait until nothing of some faults is left."""

        def whole() -> bool:
            if any(s.fault.duration_seconds and s.struck.undone_at is None for s in strikes):
                return False
            return not self._has_dead(strikes) and all(
                host["state"] == "ready" for host in self._injector.hosts().values()
            )

        what = f"recovery from {'; '.join(strike.fault.describe() for strike in strikes)}"
        self._wait(f"{what}: every host ready", whole)
        steps = self._program.steps
        self._wait(f"{what}: steps", lambda: self._program.steps >= steps + STEPS_AFTERWARDS)
        # Ready and stepping at the same time: what was about to be lost is lost by now.
        self._wait(f"{what}: every host ready again", whole)
        now = time.monotonic()
        for strike in strikes:
            strike.recovered_seconds = round(now - strike.struck.time, 3)

    def _has_dead(self, strikes: Sequence[Strike]) -> bool:
        """Whether the head still shows a process that was made to end or to stop for good."""
        gone: set[int] = set()
        for strike in strikes:
            if not strike.fault.duration_seconds:
                gone |= set(strike.struck.pids)
        hosts = self._injector.hosts().values()
        return any(host["pid"] in gone or host["executor_pid"] in gone for host in hosts)

    def _take_sample(self) -> None:
        record = self._record
        processes: dict[str, list[int]] = {
            "controller": [self._program.process.pid], "supervisor": [record.supervisor_pid], "head": [record.head_pid],
        }  # fmt: skip
        with contextlib.suppress(psutil.NoSuchProcess):
            processes["rendezvous"] = [p.pid for p in psutil.Process(record.head_pid).children()]
        for host in self._injector.hosts().values():
            if host["pid"] is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                agent = psutil.Process(host["pid"])
                processes.setdefault("agents", []).append(agent.pid)
                for child in agent.children(recursive=True):
                    role = "executors" if child.pid == host["executor_pid"] else (
                        "templates" if child.ppid() == agent.pid else "compilers"
                    )
                    processes.setdefault(role, []).append(child.pid)
        number = self.strikes[-1].fault.number
        seconds = time.monotonic() - self._started
        self.samples.append(sample(number, seconds, self._program.devices, processes))


# ---- the whole


@contextlib.contextmanager
def _cluster(name: str, topology: str, standbys: int, separate: bool, work: Path) -> Iterator[ClusterRecord]:
    """A cluster that is up in the block and down after it."""
    command = [
        sys.executable, "-m", "benchmarks.soak_cluster", "--name", name, "--topology", topology,
        "--standby", str(standbys), *(f"--set={setting}" for setting in SETTINGS),
        *(["--separate"] if separate else []),
    ]  # fmt: skip
    with (work / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        if not process.stdout.readline():
            raise SoakError(f"the cluster did not come up; see {work / f'{name}.log'}")
        yield find(name)
    finally:
        process.stdin.close()
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _arguments(mode: str, slices: int, checkpoints: Path) -> list[str]:
    arguments = ["--checkpoints", str(checkpoints)]
    if mode != "pause":
        arguments += ["--minimum-slices", str(slices - 1)]
    if mode == "snapshots":
        # Checkpoints only for the loss of every slice at once, which no snapshot outlives.
        arguments += ["--snapshot-period", "1", "--checkpoint-period", "200"]
    return arguments


def _compare(program: Program, reference: Program) -> list[str]:
    """Steps whose loss is not the undisturbed run's: bit by bit on the same mesh, closely after another one."""
    found = list(program.differing)
    for step, loss in sorted(program.losses.items()):
        right = reference.losses.get(step)
        if right is None:
            found.append(f"step {step}: the undisturbed run did not make it")
        elif program.exact[step]:
            if loss != right:
                found.append(f"step {step}: {loss}, undisturbed {right}")
        elif abs(float(loss) - float(right)) > TOLERANCE * abs(float(right)):
            found.append(f"step {step}: {loss} after another mesh, undisturbed {right}")
    return found


@dataclasses.dataclass
class Options:
    """What a run is asked for."""

    mode: str
    faults: int
    seed: int
    topology: str
    standbys: int
    separate: bool
    kinds: frozenset[Kind] | None


def soak(options: Options, work: Path, disk: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Run it; the result as plain values, as `soak_report` shows it.

    Raises:
      SoakError: something hangs, or ended.
      ControlError: the head cannot be reached.
    """
    topology = checks.parse_topology(options.topology)
    slices, hosts = topology.slices, topology.hosts_per_slice
    name = f"soak-{os.getpid()}"
    with _cluster(name, options.topology, options.standbys, options.separate, work) as record:
        environment = command_environment(dict(os.environ), "127.0.0.1", record.proxy_port) | PROGRAM_ENVIRONMENT
        with links(record) as (client, events):
            moments = Moments(events)
            injector = Injector(record, client, disk)
            kinds = injector.kinds() if options.kinds is None else set(options.kinds)
            say(f"faults: {', '.join(sorted(kinds))}")
            when = set(Moment) - ({Moment.SNAPSHOT} if options.mode != "snapshots" else {Moment.SAVE})
            faults = plan(options.seed, Shape(slices, hosts), MTBF_SECONDS, SILENCE_SECONDS, kinds, when)
            devices = slices * hosts * topology.devices_per_host
            arguments = _arguments(options.mode, slices, work / "checkpoints")
            program = Program(environment, arguments, devices, work / "program.log", moments)
            run = Soak(record, injector, events, program, moments, say)
            problem = None
            began = time.monotonic()
            try:
                run.run(faults, options.faults)
                program.finish(HANG_SECONDS)
            except (SoakError, control.ControlError) as error:
                problem = str(error)
                say(problem)
            finally:
                injector.end()
                program.kill()
            seconds = time.monotonic() - began
        events_file = Path(record.logs_folder) / "events.jsonl"
        shutil.copy(events_file, work / "events.jsonl")
        wrong: list[str] = list(program.differing)
        if problem is None:
            furthest = max(program.losses)  # which an attempt that failed may have reached
            say(f"{len(run.strikes)} faults in {seconds:.0f} s; the undisturbed run of {furthest} steps")
            reference = Program(
                environment,
                [*_arguments("pause", slices, work / "reference"), "--pace-seconds", "0", "--steps", str(furthest)],
                devices, work / "reference.log", None,
            )  # fmt: skip
            try:
                reference.finish(HANG_SECONDS * 4)
            finally:
                reference.kill()
            wrong = _compare(program, reference)
    return soak_report.result(
        options=dataclasses.asdict(options) | {"kinds": sorted(kinds)}, strikes=run.strikes, samples=run.samples,
        events=read_events(work / "events.jsonl"), problem=problem, wrong=wrong, exact=sum(program.exact.values()),
        steps=program.steps, last_step=program.step, attempts=program.attempts, seconds=seconds,
    )  # fmt: skip


@contextlib.contextmanager
def _small_disk(work: Path) -> Iterator[Path | None]:
    """A small file system for everything that the cluster writes, if this machine allows one."""
    folder = work / "disk"
    folder.mkdir()
    if not soak_network.mount_disk(str(folder), DISK_MEBIBYTES):
        yield None
        return
    try:
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        yield folder
    finally:
        soak_network.unmount_disk(str(folder))


def _kinds(text: str | None) -> frozenset[Kind] | None:
    if text is None:
        return None
    try:
        return frozenset(Kind(name.strip()) for name in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"{error}; known: {', '.join(Kind)}") from None


@click.command(help=re.sub(r"``", "", __doc__ or ""))
@click.option("--mode", type=click.Choice(MODES), default="pause", show_default=True)
@click.option("--faults", type=click.IntRange(1), default=100, show_default=True, help="How many that hit somebody.")
@click.option("--seed", type=int, help="Gives the same faults again.  [default: a new one]")
@click.option("--topology", default="3x1x2", show_default=True, metavar="SxHxD")
@click.option("--standby", type=click.IntRange(0), default=1, show_default=True, help="Workers in reserve.")
@click.option("--separate", is_flag=True, help="Every host a network namespace; faults of the network as well.")
@click.option("--kinds", metavar="A,B", help="Only these faults.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for logs and checkpoints, kept.  [default: a temporary one]"
)
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("docs/results/soak"), show_default=True,
    help="Where the results go, without .md, .json and .png.",
)  # fmt: skip
def main(
    mode: str, faults: int, seed: int | None, topology: str, standby: int, separate: bool, kinds: str | None,
    work: Path | None, output: Path,
) -> None:  # fmt: skip
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    options = Options(mode, faults, seed, topology, 0 if separate else standby, separate, _kinds(kinds))
    again = f"python -m benchmarks.soak --mode {mode} --faults {faults} --seed {seed} --topology {topology}" + (
        " --separate" if separate else f" --standby {standby}"
    )
    click.echo(f"seed {seed}; again: {again}", err=True)
    folder = Path(tempfile.mkdtemp(prefix="ridgeway-soak-")) if work is None else work.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # As Ctrl-C: cluster and disk are taken away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if separate:
            soak_network.leave_for_a_namespace_of_our_own()
        with _small_disk(folder) as disk:
            report = soak(options, folder, disk, lambda text: click.echo(text, err=True))
    except (SoakError, control.ControlError, checks.CheckError, soak_network.NotAllowed) as error:
        raise click.ClickException(f"{error} (seed {seed}; logs in {folder})") from None
    report["command"] = again
    soak_report.write(report, output)
    if not report["good"]:
        what = report["problem"] or "; ".join([*report["wrong"][:3], *report["grown"]]) or "a fault was not recovered"
        click.echo(f"not as it must be: {what} (again: {again}; logs in {folder})", err=True)
        sys.exit(1)
    if work is None:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
