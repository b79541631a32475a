"""Which fault strikes whom, when: a pure function of a seed.

Fault number n depends on the seed and on n alone, so a run is replayed by its seed and a part of it by its beginning.
What a fault really meets (the process ids, whether its moment came) is the shell's to find and to write down.
"""

import dataclasses
import enum
import random
from collections.abc import Collection, Iterator

Host = tuple[int, int]
"""(slice, host)."""


class Kind(enum.StrEnum):
    """What is done to a host. The worker of a host is its agent with everything that this started."""

    KILL_EXECUTOR = "kill-executor"
    KILL_AGENT = "kill-agent"
    """SIGKILL of the agent: the kernel ends its children with it."""
    KILL_TEMPLATE = "kill-template"
    KILL_COMPILER = "kill-compiler"
    OUT_OF_MEMORY = "out-of-memory"
    """SIGKILL of the host's largest process, which is the one that the kernel would choose."""
    ILLEGAL_INSTRUCTION = "illegal-instruction"
    """SIGILL of the executor."""
    TERMINATE = "terminate"
    """SIGTERM of the agent."""
    STOP_EXECUTOR = "stop-executor"
    """SIGSTOP, for good: only a deadline notices it."""
    STOP_WORKER = "stop-worker"
    PAUSE_EXECUTOR = "pause-executor"
    """SIGSTOP and, after a while, SIGCONT."""
    PAUSE_WORKER = "pause-worker"
    SLOW_HOST = "slow-host"
    """Its processes get a part of the time only."""
    CUT_HOST = "cut-host"
    """Nothing reaches it or leaves it; nobody is told."""
    CUT_OUTBOUND = "cut-outbound"
    """What it sends gets nowhere; what others send arrives."""
    CUT_INBOUND = "cut-inbound"
    CUT_PAIR = "cut-pair"
    """Two hosts do not reach each other; everybody else reaches both."""
    FULL_DISK = "full-disk"
    """The disk of the cluster's logs, events and compile cache has no room."""


NETWORK_KINDS = frozenset({Kind.CUT_HOST, Kind.CUT_OUTBOUND, Kind.CUT_INBOUND, Kind.CUT_PAIR})
"""Those that need hosts in network namespaces of their own."""


class Moment(enum.StrEnum):
    """When it is done."""

    ANY = "any"
    STEP = "step"
    COMPILE = "compile"
    SNAPSHOT = "snapshot"
    SAVE = "save"
    STARTUP = "start-up"
    """A worker joins."""
    RESTORE = "restore"
    """A controller that knows of a loss brings its state back."""
    REFORMING = "re-forming"
    """Executors are asked into a new generation."""
    RECOVERY = "recovery"
    """A host has just been lost."""


AFTER_A_LOSS = frozenset({Moment.STARTUP, Moment.RESTORE, Moment.REFORMING, Moment.RECOVERY})
"""Moments that the fault before brings about: nobody waits for its recovery first."""
PROGRAMS_OWN = frozenset({Moment.STEP, Moment.SNAPSHOT, Moment.SAVE})
"""Moments of which only the program knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Trait:
    weight: float
    lasts: tuple[float, float] | None = None
    """Shortest and longest, as parts of the time after which silence is a death; None: it is not undone."""
    alone: bool = False
    """One host (or pair) at a time."""


_TRAITS = {
    Kind.KILL_EXECUTOR: _Trait(4.0),
    Kind.KILL_AGENT: _Trait(4.0),
    Kind.KILL_TEMPLATE: _Trait(1.0),
    Kind.KILL_COMPILER: _Trait(0.5),
    Kind.OUT_OF_MEMORY: _Trait(1.0),
    Kind.ILLEGAL_INSTRUCTION: _Trait(1.0),
    Kind.TERMINATE: _Trait(1.0),
    Kind.STOP_EXECUTOR: _Trait(0.5, alone=True),
    Kind.STOP_WORKER: _Trait(1.0),
    Kind.PAUSE_EXECUTOR: _Trait(1.0, (0.1, 0.8)),
    Kind.PAUSE_WORKER: _Trait(1.0, (0.1, 1.5)),
    Kind.SLOW_HOST: _Trait(1.0, (0.5, 1.5)),
    Kind.CUT_HOST: _Trait(1.5, (0.3, 1.5)),
    Kind.CUT_OUTBOUND: _Trait(0.7, (0.3, 1.5), alone=True),
    Kind.CUT_INBOUND: _Trait(0.7, (0.3, 1.5), alone=True),
    Kind.CUT_PAIR: _Trait(0.7, (0.3, 1.5), alone=True),
    Kind.FULL_DISK: _Trait(0.5, (0.5, 1.5), alone=True),
}

_MOMENT_WEIGHTS = {
    Moment.ANY: 1.0,
    Moment.STEP: 4.0,
    Moment.COMPILE: 1.0,
    Moment.SNAPSHOT: 1.0,
    Moment.SAVE: 1.0,
    Moment.STARTUP: 1.0,
    Moment.RESTORE: 1.0,
    Moment.REFORMING: 1.0,
    Moment.RECOVERY: 1.0,
}

#: How many are hit at once.
_SCOPES = {"one": 14.0, "slice": 3.0, "several": 2.0, "all": 1.0}
#: Longest time between a moment and the fault; the hard cases lie within a quarter of a second.
_OFFSET_LIMIT_SECONDS = {Moment.STEP: 0.3, Moment.ANY: 0.3, Moment.REFORMING: 0.25, Moment.COMPILE: 0.15}
_OFFSET_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What there is to be hit."""

    slices: int
    hosts_per_slice: int

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All of them."""
        return tuple((s, h) for s in range(self.slices) for h in range(self.hosts_per_slice))


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault, as planned."""

    number: int
    """From 1."""
    kind: Kind
    moment: Moment
    pause_seconds: float
    """Peace before the moment is waited for."""
    offset_seconds: float
    """From the moment to the fault."""
    hosts: tuple[Host, ...]
    """Those that are hit; of `Kind.CUT_PAIR` the two that lose each other."""
    duration_seconds: float
    """Until it is undone; 0: it is not."""

    def describe(self) -> str:
        """One line for people."""
        hosts = ", ".join(f"slice {s} host {h}" for s, h in self.hosts)
        lasting = f" for {self.duration_seconds:.1f} s" if self.duration_seconds else ""
        return f"fault {self.number}: {self.kind} of {hosts}{lasting}, at {self.moment} + {self.offset_seconds:.2f} s"


def possible(kinds: Collection[Kind], shape: Shape) -> list[Kind]:
    """The kinds that a cluster of this shape can suffer, in a fixed order."""
    return [kind for kind in Kind if kind in kinds and (kind is not Kind.CUT_PAIR or len(shape.hosts) > 1)]


def plan(
    seed: int,
    shape: Shape,
    mtbf_seconds: float,
    silence_seconds: float,
    kinds: Collection[Kind],
    moments: Collection[Moment],
) -> Iterator[Fault]:
    """The faults of a seed, without end.

    Args:
      seed: what everything depends on.
      shape: the cluster.
      mtbf_seconds: mean of the pauses, which are exponentially distributed; faults that are to hit a recovery follow
        the one before without a pause.
      silence_seconds: after how long the cluster takes silence for death; what lasts is measured by it.
      kinds: which there may be.
      moments: likewise.

    Raises:
      ValueError: no kind or no moment is left to choose from.
    """
    chosen = possible(kinds, shape)
    when = [moment for moment in Moment if moment in moments]
    if not chosen or not when:
        raise ValueError("no fault to choose from" if not chosen else "no moment to choose from")
    number = 0
    while True:
        number += 1
        yield _fault(random.Random(f"{seed}/{number}"), number, shape, mtbf_seconds, silence_seconds, chosen, when)


def _fault(
    chooser: random.Random, number: int, shape: Shape, mtbf: float, silence: float, kinds: list[Kind],
    moments: list[Moment],
) -> Fault:  # fmt: skip
    kind = chooser.choices(kinds, [_TRAITS[kind].weight for kind in kinds])[0]
    trait = _TRAITS[kind]
    moment = chooser.choices(moments, [_MOMENT_WEIGHTS[moment] for moment in moments])[0]
    pause = chooser.expovariate(1.0 / mtbf) if mtbf > 0 else 0.0
    offset = chooser.uniform(0.0, _OFFSET_LIMIT_SECONDS.get(moment, _OFFSET_SECONDS))
    part = chooser.random()
    scope = chooser.choices(list(_SCOPES), list(_SCOPES.values()))[0]
    order = list(shape.hosts)
    chooser.shuffle(order)
    several = chooser.randint(2, max(2, len(order)))
    if moment in AFTER_A_LOSS and number > 1:
        pause = 0.0
    if kind is Kind.CUT_PAIR:
        hosts = order[:2]
    elif trait.alone or scope == "one":
        hosts = order[:1]
    elif scope == "slice":
        hosts = [host for host in order if host[0] == order[0][0]]
    else:
        hosts = order if scope == "all" else order[:several]
    duration = 0.0
    if trait.lasts is not None:
        shortest, longest = trait.lasts
        duration = silence * (shortest + part * (longest - shortest))
    return Fault(number, kind, moment, round(pause, 3), round(offset, 3), tuple(hosts), round(duration, 3))


def moment_of(event: dict[str, object]) -> Moment | None:
    """The moment that an event of the head begins; None for one that begins none."""
    return _MOMENT_EVENTS.get(str(event.get("kind")))


_MOMENT_EVENTS = {
    "host_joining": Moment.STARTUP,
    "compile_started": Moment.COMPILE,
    "arrays_made": Moment.RESTORE,
    "generation_started": Moment.REFORMING,
    "host_lost": Moment.RECOVERY,
}
