"""Kill worker after worker under a program with several overlapping sets of devices in use, and see it right again.

The hard part of losing a worker is what it does to the others: some crash by themselves, some never leave the
collective they are in, some are caught while they set one up. So workers are killed at random moments, half of
them within a new generation's first 250 ms, when the survivors connect to each other; the program
(`benchmarks.survivors_program`) must then give the reference results again, bit by bit, and must never have been
told anything but DATA_LOSS or DEADLINE_EXCEEDED.

Run as ``python -m benchmarks.survivors --kills 50 --seed 0``; the seed is printed and gives the same victims and
delays again. Results go to ``docs/results/survivors.md`` and ``.json``. Exit code 1 if anything was not as it must be.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ridgeway.launch import checks, control
from ridgeway.launch.cluster_folder import ClusterError, ClusterRecord
from ridgeway.launch.environment import command_environment
from ridgeway.launch.local import LaunchError, LocalCluster, LocalOptions

PROGRAM = Path(__file__).with_name("survivors_program.py")
#: A new generation is young for so long.
YOUNG_SECONDS = 0.25
#: Longest pause between a good round and a kill under stepping.
PAUSE_SECONDS = 0.3
#: Of ten kills, so many hit the executor alone and leave its agent.
EXECUTORS_OF_TEN = 3
#: Anything that takes longer than this hangs.
HANG_SECONDS = 120.0
POLL_SECONDS = 0.005
#: What the program may be told.
ALLOWED = ("DATA_LOSS: ", "DEADLINE_EXCEEDED: ")
SHOWN_ERRORS = 20
SHOWN_CHARACTERS = 160


class SurvivorsError(Exception):
    """The run cannot go on: a hang, or the program ended. The message says which."""


@dataclasses.dataclass
class Kill:
    """One kill and what came of it; times in seconds after it."""

    number: int
    slice: int
    host: int
    target: str
    """``worker`` (the agent, and with it the host) or ``executor``."""
    moment: str
    """``stepping``, or ``new generation``."""
    pid: int
    time: float
    """Monotonic clock."""
    delay_seconds: float
    """After the round, or the generation's start."""
    error_seconds: float | None = None
    """Until the program was told; None: it noticed nothing."""
    whole_seconds: float | None = None
    """Until every host was ready again."""
    recovered_seconds: float | None = None
    """Until the end of the first round that was begun afterwards and right; None: the next kill came before."""
    also_lost: list[str] = dataclasses.field(default_factory=list)
    """Other executors that were lost before the next kill, with the cause."""


@dataclasses.dataclass
class Report:
    """What a run showed."""

    seed: int
    topology: list[int]
    kills: list[Kill]
    rounds: int
    errors: dict[str, int]
    """Texts that the program was told, without the numbers of executors, and how often."""
    foreign: list[str]
    """Texts of a kind that it must never be told."""
    wrong: list[str]
    """Sets with a result that was not the reference's."""
    executors_recycled: int
    generations: int
    load_average: float

    @property
    def good(self) -> bool:
        """Whether everything was as it must be."""
        return not self.foreign and not self.wrong and self.kills[-1].recovered_seconds is not None


class _Program:
    """The program as a process, its output read all the time."""

    def __init__(self, environment: Mapping[str, str], seed: int, log: Path):
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(seed)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self.ready = False
        self.rounds: list[tuple[float, float]] = []
        self.errors: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        self.heard = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard = time.monotonic()
            match json.loads(line):
                case {"ready": _}:
                    self.ready = True
                case {"round": _, "begun": begun, "ended": ended}:
                    self.rounds.append((begun, ended))
                case {"error": text}:
                    self.errors.append((self.heard, text))
                case {"wrong": name}:
                    self.wrong.append(name)

    def check(self) -> None:
        """Raises:
        SurvivorsError: it has ended, or has been silent for too long.
        """
        code = self._process.poll()
        if code is not None:
            raise SurvivorsError(f"the program ended with {code}: {self._tail()}")
        if time.monotonic() - self.heard > HANG_SECONDS:
            raise SurvivorsError(f"the program hangs: not a word in {HANG_SECONDS:g} s")

    def _tail(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-5:])

    def end(self) -> None:
        """Close its input, or kill it if that does not end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Events:
    """The cluster's events from now on."""

    def __init__(self, client: control.ControlClient):
        self.list: list[dict[str, Any]] = []
        # The head sends all it remembers; what was before is none of this run's.
        self._started = time.monotonic()
        threading.Thread(target=self._read, args=(client,), daemon=True).start()

    def _read(self, client: control.ControlClient) -> None:
        with contextlib.suppress(control.ControlError, OSError):
            for event in client.follow(0):
                if event["monotonic"] >= self._started:
                    self.list.append(event)

    def since(self, moment: float, kind: str) -> list[dict[str, Any]]:
        """Events of a kind from a moment of the monotonic clock on."""
        return [event for event in self.list if event["monotonic"] >= moment and event["kind"] == kind]


class Survivors:
    """One run on a cluster of this machine that is up and whole.

    Args:
      record: the cluster.
      environment: of the program, to which what it needs for the cluster is added.
      log: for what the program writes to stderr.
      say: told about every kill.
    """

    def __init__(self, record: ClusterRecord, environment: Mapping[str, str], log: Path, say: Callable[[str], None]):
        self._record = record
        self._environment = command_environment(environment, "127.0.0.1", record.proxy_port)
        self._log = log
        self._say = say

    def run(self, kills: int, seed: int) -> Report:
        """Kill so many workers.

        Raises:
          SurvivorsError: something hangs, or the program ended.
          control.ControlError: the head cannot be reached.
        """
        chooser = random.Random(seed)
        done: list[Kill] = []
        with self._connections() as (client, events):
            program = _Program(self._environment, seed, self._log)
            try:
                self._wait(program, "the reference results", lambda: program.ready)
                for number in range(1, kills + 1):
                    done.append(self._one(client, events, program, chooser, number, done))
                self._recovered(client, program, done[-1])
                rounds, wrong, errors = len(program.rounds), list(program.wrong), list(program.errors)
            finally:
                program.end()
            return self._report(seed, done, rounds, wrong, errors, events)

    @contextlib.contextmanager
    def _connections(self) -> Iterator[tuple[control.ControlClient, _Events]]:
        with control.connect(self._record) as client, control.connect(self._record) as second:
            yield client, _Events(second)

    def _wait(self, program: _Program, what: str, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + HANG_SECONDS
        while not (value := condition()):
            program.check()
            if time.monotonic() > end:
                raise SurvivorsError(f"{what}: not within {HANG_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        return value

    def _hosts(self, client: control.ControlClient) -> dict[tuple[int, int], dict[str, Any]]:
        status = client.request("status")
        return {(h["slice"], h["host"]): h for piece in status["slices"] for h in piece["hosts"]}

    def _one(
        self,
        client: control.ControlClient,
        events: _Events,
        program: _Program,
        chooser: random.Random,
        number: int,
        done: list[Kill],
    ) -> Kill:
        slices, hosts, _ = self._record.topology
        # All choices first, so that a seed means the same whatever happens.
        where = (chooser.randrange(slices), chooser.randrange(hosts))
        target = "executor" if chooser.randrange(10) < EXECUTORS_OF_TEN else "worker"
        young = chooser.random() < 0.5 and number > 1
        delay = chooser.uniform(0.0, YOUNG_SECONDS if young else PAUSE_SECONDS)
        if young:
            self._young_generation(client, events, program, done[-1])
        elif done:
            self._recovered(client, program, done[-1])
        else:
            self._wait(program, "the first round", lambda: program.rounds)
        host = self._hosts(client)[where]
        pid = host["pid"] if target == "worker" else host["executor_pid"]
        if pid is None:  # It has died by itself meanwhile; then its replacement is the victim.
            host = self._wait(program, f"slice {where[0]} host {where[1]}", lambda: self._ready(client, where))
            pid = host["pid"] if target == "worker" else host["executor_pid"]
        time.sleep(delay)
        now = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        moment = "new generation" if young else "stepping"
        kill = Kill(number, *where, target, moment, pid, now, round(delay, 4))
        self._say(f"kill {number}: {target} of slice {kill.slice} host {kill.host}, {moment} + {delay * 1e3:.0f} ms")
        return kill

    def _ready(self, client: control.ControlClient, where: tuple[int, int]) -> dict[str, Any] | None:
        host = self._hosts(client)[where]
        return host if host["state"] == "ready" else None

    def _young_generation(
        self, client: control.ControlClient, events: _Events, program: _Program, last: Kill
    ) -> None:
        """Wait until everybody is asked into a common generation after the last kill."""
        slices, hosts, _ = self._record.topology
        self._whole(client, program, last)

        def formed() -> bool:
            return any(
                len(event["members"]) == slices * hosts for event in events.since(last.time, "generation_started")
            )

        self._wait(program, "a generation of all hosts", formed)

    def _whole(self, client: control.ControlClient, program: _Program, last: Kill) -> None:
        """Wait until the victim is replaced and every host is ready."""
        slot = (last.slice, last.host)
        key = "pid" if last.target == "worker" else "executor_pid"

        def whole() -> bool:
            found = self._hosts(client)
            return found[slot][key] != last.pid and all(host["state"] == "ready" for host in found.values())

        self._wait(program, "the replacement", whole)
        last.whole_seconds = last.whole_seconds or round(time.monotonic() - last.time, 4)

    def _recovered(self, client: control.ControlClient, program: _Program, last: Kill) -> None:
        """Wait for a round that began after the replacement and was right."""
        self._whole(client, program, last)
        whole = last.time + (last.whole_seconds or 0.0)
        ended = self._wait(
            program, "a good round", lambda: next((end for begun, end in list(program.rounds) if begun > whole), None)
        )
        last.recovered_seconds = round(ended - last.time, 4)

    def _report(
        self,
        seed: int,
        kills: list[Kill],
        rounds: int,
        wrong: list[str],
        errors: list[tuple[float, str]],
        events: _Events,
    ) -> Report:
        for kill, following in zip(kills, [*kills[1:], None], strict=True):
            _attribute(kill, following.time if following is not None else float("inf"), errors, events)
        texts = [text for _, text in errors]
        return Report(
            seed=seed,
            topology=list(self._record.topology),
            kills=kills,
            rounds=rounds,
            errors=dict(Counter(_without_numbers(text) for text in texts).most_common(SHOWN_ERRORS)),
            foreign=sorted({text[:500] for text in texts if not text.startswith(ALLOWED)}),
            wrong=wrong,
            executors_recycled=len(events.since(0.0, "executor_recycled")),
            generations=len(events.since(0.0, "generation_started")),
            load_average=round(os.getloadavg()[0], 1),
        )


def _attribute(kill: Kill, until: float, errors: list[tuple[float, str]], events: _Events) -> None:
    """Enter what happened after a kill and before the next."""
    seen = [moment for moment, _ in errors if kill.time <= moment < until]
    kill.error_seconds = round(seen[0] - kill.time, 4) if seen else None
    losses = [event for event in events.since(kill.time, "host_lost") if event["monotonic"] < until]
    own = _losses_of(kill, losses)
    kill.also_lost = [f"slice {e['slice']} host {e['host']}: {e['cause']}" for e in losses if e not in own]


def _losses_of(kill: Kill, losses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The losses that a kill is by itself: of a worker, its executor's link may close before the agent's."""
    here = [event for event in losses if (event["slice"], event["host"]) == (kill.slice, kill.host)]
    if kill.target == "executor":
        return here[:1]
    return [event for event in here if event["incarnation"] == here[0]["incarnation"]]


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)[:SHOWN_CHARACTERS]


# ---- showing it


def render(report: Report) -> str:
    """The report as Markdown."""
    kills = report.kills
    slices, hosts, devices = report.topology
    young = sum(kill.moment == "new generation" for kill in kills)
    others = sum(len(kill.also_lost) for kill in kills)
    lines = [
        "# Survivors",
        "",
        f"{len(kills)} SIGKILLs under a program with several overlapping sets of devices in use, on "
        f"{slices} slices x {hosts} hosts x {devices} devices, {young} of them within the first "
        f"{YOUNG_SECONDS * 1e3:.0f} ms of a new generation. Made by `make survivors "
        f"SURVIVORS_ARGS='--kills {len(kills)} --seed {report.seed}'`; load average at the end "
        f"{report.load_average}.",
        "",
        f"**{'Everything as it must be' if report.good else 'NOT as it must be'}**: "
        f"{report.rounds} rounds with every result bit-equal to the undisturbed one, {len(report.wrong)} wrong "
        f"results, {len(report.foreign)} errors of another kind than DATA_LOSS and DEADLINE_EXCEEDED.",
        "",
        "| seconds after the kill | median | largest | kills |",
        "|---|---|---|---|",
    ]
    for label, values in (
        ("error raised in the program", [k.error_seconds for k in kills]),
        ("every host ready again", [k.whole_seconds for k in kills]),
        ("first good round of all sets ended", [k.recovered_seconds for k in kills]),
    ):
        known = [value for value in values if value is not None]
        if known:
            lines.append(f"| {label} | {statistics.median(known):.2f} | {max(known):.2f} | {len(known)} |")
    lines += [
        "",
        f"Other executors lost on those occasions, and replaced as well: {others}; of these recycled because they "
        f"did not leave a generation in time: {report.executors_recycled}. Generations begun: {report.generations}.",
    ]
    if others:
        # What was behind it is the kill itself.
        texts = [cause.partition(": ")[2].partition(";")[0] for kill in kills for cause in kill.also_lost]
        lines += ["", "| cause of another's loss | times |", "|---|---|"]
        lines += [f"| {text} | {count} |" for text, count in Counter(map(_without_numbers, texts)).most_common()]
    for title, texts in (("Errors of another kind", report.foreign), ("Wrong results", report.wrong)):
        if texts:
            lines += ["", f"## {title}", "", *(f"- `{text}`" for text in texts)]
    return "\n".join(lines) + "\n"


def write(report: Report, base: Path) -> None:
    """Write ``base.md`` and ``base.json``."""
    base.parent.mkdir(parents=True, exist_ok=True)
    base.with_suffix(".md").write_text(render(report))
    content = {"good": report.good, **dataclasses.asdict(report)}
    base.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


async def _run(topology: str, kills: int, seed: int, standbys: int, say: Callable[[str], None]) -> Report:
    cluster = LocalCluster(
        LocalOptions(
            name=f"survivors-{os.getpid()}",
            topology=checks.parse_topology(topology),
            standbys=standbys,
            max_slice_restarts=None,
            cluster_port=0,
            proxy_port=0,
        ),
        lambda text: None,
    )
    try:
        record = await cluster.start()
        run = Survivors(record, os.environ, Path(record.logs_folder) / "program.log", say)
        return await asyncio.to_thread(run.run, kills, seed)
    finally:
        await cluster.stop("the run is over")


@click.command(help=__doc__)
@click.option("--kills", type=click.IntRange(1), default=50, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--topology", default="3x1x2", show_default=True, metavar="SxHxD")
@click.option("--standby", type=click.IntRange(0), default=0, show_default=True, help="Workers in reserve.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("docs/results/survivors"), show_default=True,
    help="Where the results go, without .md and .json.",
)  # fmt: skip
def main(kills: int, seed: int, topology: str, standby: int, output: Path) -> None:
    click.echo(f"seed {seed}", err=True)
    try:
        report = asyncio.run(_run(topology, kills, seed, standby, lambda text: click.echo(text, err=True)))
    except (SurvivorsError, LaunchError, ClusterError, control.ControlError, checks.CheckError) as error:
        raise click.ClickException(f"{error} (seed {seed})") from None
    write(report, output)
    click.echo(render(report), nl=False)
    sys.exit(0 if report.good else 1)


if __name__ == "__main__":
    main()
