"""Which worker is replaced, when, and when no more: a pure state machine, event in, effects out.

A *launch* is one worker process that the supervisor started, for a slot (slice, host) or as a standby.  The
head decides who is lost and which standby takes which place; this policy follows it and sees to it that every
slot has a process, as a Job controller would.  `ridgeway.launch.local` is the shell.

The restart budget is counted as Pathways counts it: a slice may use ``max_slice_restarts x hosts per slice``
replacements of its workers.  Workers whose end was announced (preemptions) are nobody's fault: they have a budget of
their own, ``max_preemptions x hosts per slice``.
"""

import dataclasses
import math

from ridgeway.processes import describe_exit
from ridgeway.worker.agent_core import EXIT_NO_TEMPLATE, EXIT_PLACE_TAKEN, EXIT_REFUSED

Slot = tuple[int, int]
"""(slice, host)."""

START_FAILURES_LIMIT = 3
"""A worker that was never ready and ended by itself so often in a row will not start this time either."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses, and the policy's own limits in seconds."""

    slices: int
    hosts_per_slice: int
    standbys: int = 0
    max_slice_restarts: int | None = 10
    """None: without limit."""
    max_preemptions: int | None = None
    """The same for workers that left as announced."""
    replacement_delay_seconds: float = 0.0
    """Imitates the time a scheduler takes to find another machine."""
    join_timeout_seconds: float = 60.0
    """A started process that has not joined the head by then is killed."""
    standby_take_over_seconds: float = 3.0
    """How long the head is left to give a waiting standby the place of a dead worker before a process is
    started for it."""
    lost_exit_seconds: float = 2.0
    """How long a process that the head lost may take to end by itself before it is killed."""
    backoff_first_seconds: float = 0.5
    backoff_limit_seconds: float = 8.0
    """Pause before a process whose predecessors never became ready: doubled each time from first to limit."""
    standby_refill_delay_seconds: float = 8.0
    """After a standby has taken a place, how long its successor is held back: starting one costs a core for a second
    or two, which the recovery that is under way needs."""
    standby_failure_limit: int = 5
    """After so many standbys in a row that ended without having joined, no more are started."""


# ---- events


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerExited:
    """A launched process ended (negative exit code: by that signal)."""

    launch_id: str
    exit_code: int


@dataclasses.dataclass(frozen=True, slots=True)
class HostJoining:
    """The head has given a slot to a worker process."""

    slice: int
    host: int
    incarnation: int
    launch_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class HostReady:
    """A slot's devices can be used."""

    slice: int
    host: int
    incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class HostLost:
    """The head gave up a slot's worker."""

    slice: int
    host: int
    incarnation: int
    silent: bool
    """It did not answer any more, so it will not end by itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostPreempted:
    """A slot's worker will end soon, by itself or not: that was announced to the head."""

    slice: int
    host: int
    incarnation: int
    notice_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class StandbyReady:
    """A standby waits for a place, everything imported."""

    launch_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class StandbyLost:
    """The head gave up a standby."""

    launch_id: str


Event = WorkerExited | HostJoining | HostReady | HostLost | HostPreempted | StandbyReady | StandbyLost


# ---- effects


@dataclasses.dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process for a slot, or (None) a standby. `expect`: tell the head first that it comes."""

    launch_id: str
    slot: Slot | None
    expect: bool


@dataclasses.dataclass(frozen=True, slots=True)
class KillWorker:
    """SIGKILL a process."""

    launch_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReportExit:
    """Tell the head how a slot's process ended."""

    slice: int
    host: int
    launch_id: str
    description: str


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the head that nothing more will come for a slice."""

    slice: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class TookOver:
    """A standby is now a slot's worker (its log belongs to that slot)."""

    launch_id: str
    slot: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class CannotStart:
    """A slot that never was ready has workers that end by a mistake which no replacement mends."""

    launch_id: str
    slot: Slot
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    text: str


Effect = StartWorker | KillWorker | ReportExit | GiveUp | TookOver | CannotStart | Say


@dataclasses.dataclass(slots=True)
class _Launch:
    slot: Slot | None
    started: float
    standby: bool
    incarnation: int | None = None
    ready: bool = False
    kill_at: float = math.inf
    unwanted: bool = False
    """It lost the race for its slot before it joined: its end counts for nothing."""
    succeeded: bool = False
    """The head lost it and a standby has its place already: its end counts, but nothing is to be started."""
    preempted: bool = False
    """Its end was announced."""


@dataclasses.dataclass(slots=True)
class _SlotState:
    launch_id: str | None = None
    """The process that has the slot or is to have it."""
    start_at: float = math.inf
    """When a process is to be started for it."""
    awaits_standby: bool = False
    failures: int = 0
    """Processes in a row that ended without having been ready."""


class Supervision:
    """The policy's state. `handle` and `tick` take the time in seconds of a monotonic clock."""

    def __init__(self, options: Options):
        self.options = options
        self.slots: dict[Slot, _SlotState] = {
            (s, h): _SlotState() for s in range(options.slices) for h in range(options.hosts_per_slice)
        }
        self.restarts = [0] * options.slices
        """Replacements used, per slice."""
        self.preemptions = [0] * options.slices
        """Those of them for workers that left as announced are counted here instead."""
        self.given_up: dict[int, str] = {}
        """Slice -> reason."""
        self._launches: dict[str, _Launch] = {}
        self._next_launch = 0
        self._standbys_begun = options.standbys == 0
        self._standby_start_at: list[float] = []
        self._standby_failures = 0
        self._was_ready: set[Slot] = set()

    # ---- what is the case

    def restart_budget(self) -> float:
        """Replacements a slice may use."""
        return self._budget(self.options.max_slice_restarts)

    def _budget(self, limit: int | None) -> float:
        return math.inf if limit is None else limit * self.options.hosts_per_slice

    def next_wakeup(self) -> float:
        """When `tick` has something to do next; infinity for never."""
        times = [state.start_at for state in self.slots.values()]
        times += [launch.kill_at for launch in self._launches.values()]
        times += self._standby_start_at
        return min(times, default=math.inf)

    def slot_of(self, launch_id: str) -> Slot | None:
        """The slot of a running process; None for a standby or an unknown one."""
        launch = self._launches.get(launch_id)
        return launch.slot if launch is not None else None

    # ---- events

    def begin(self, now: float) -> list[Effect]:
        """Start a worker for every slot. Standbys follow once all of those are ready, so that they do not
        compete with them."""
        effects: list[Effect] = []
        for slot in self.slots:
            effects += self._start(now, slot, expect=False)
        return effects

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event."""
        match event:
            case WorkerExited(launch_id, exit_code):
                return self._exited(now, launch_id, exit_code)
            case HostJoining():
                return self._joining(now, event)
            case HostReady():
                return self._ready(now, event)
            case HostLost():
                return self._lost(now, event)
            case HostPreempted():
                return self._preempted(now, event)
            case StandbyReady():
                self._standby_failures = 0
                return []
            case StandbyLost(launch_id):
                return [KillWorker(launch_id)] if launch_id in self._launches else []

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: start and kill what is due."""
        effects: list[Effect] = []
        for launch_id, launch in self._launches.items():
            if now >= launch.kill_at:
                launch.kill_at = math.inf
                effects.append(KillWorker(launch_id))
        for slot, state in self.slots.items():
            if now >= state.start_at:
                effects += self._start(now, slot, expect=True)
        due = [time for time in self._standby_start_at if now >= time]
        for time in due:
            # A cold replacement and a standby would race for a free place.
            if all(self._is_served(slot) for slot in self.slots):
                self._standby_start_at.remove(time)
                effects += self._start(now, None, expect=False)
            else:
                self._standby_start_at.remove(time)
                self._standby_start_at.append(now + self.options.backoff_first_seconds)
        return effects

    def _is_served(self, slot: Slot) -> bool:
        if slot[0] in self.given_up:
            return True
        launch_id = self.slots[slot].launch_id
        return launch_id is not None and self._launches[launch_id].incarnation is not None

    def _start(self, now: float, slot: Slot | None, expect: bool) -> list[Effect]:
        self._next_launch += 1
        launch_id = f"launch-{self._next_launch}"
        kill_at = now + self.options.join_timeout_seconds if slot is not None else math.inf
        self._launches[launch_id] = _Launch(slot, now, standby=slot is None, kill_at=kill_at)
        if slot is not None:
            state = self.slots[slot]
            state.launch_id, state.start_at, state.awaits_standby = launch_id, math.inf, False
        return [StartWorker(launch_id, slot, expect)]

    def _joining(self, now: float, event: HostJoining) -> list[Effect]:
        slot = (event.slice, event.host)
        launch = self._launches.get(event.launch_id)
        if launch is None or slot not in self.slots:
            return []
        launch.incarnation = event.incarnation
        launch.kill_at = math.inf
        launch.ready = False
        if launch.slot == slot:
            return []
        # A standby takes a place.
        state = self.slots[slot]
        effects: list[Effect] = [TookOver(event.launch_id, slot)]
        rival = state.launch_id
        if rival is not None and rival in self._launches:
            predecessor = self._launches[rival]
            if predecessor.incarnation is None:
                predecessor.unwanted = True
                effects.append(KillWorker(rival))
            else:
                # The head's word of its death was faster than the kernel's.
                predecessor.succeeded = True
                predecessor.kill_at = min(predecessor.kill_at, now + self.options.lost_exit_seconds)
        launch.slot = slot
        state.launch_id, state.start_at, state.awaits_standby = event.launch_id, math.inf, False
        self._standby_failures = 0
        delay = max(self.options.replacement_delay_seconds, self.options.standby_refill_delay_seconds)
        self._standby_start_at.append(now + delay)
        if event.slice in self.given_up:
            effects.append(KillWorker(event.launch_id))
        return effects

    def _ready(self, now: float, event: HostReady) -> list[Effect]:
        slot = (event.slice, event.host)
        if slot not in self.slots:
            return []
        state = self.slots[slot]
        launch = self._launches.get(state.launch_id or "")
        if launch is not None and launch.incarnation == event.incarnation:
            launch.ready = True
            state.failures = 0
            self._was_ready.add(slot)
        if not self._standbys_begun and len(self._was_ready) == len(self.slots):
            self._standbys_begun = True
            self._standby_start_at += [now] * self.options.standbys
        return []

    def _lost(self, now: float, event: HostLost) -> list[Effect]:
        for launch_id, launch in self._launches.items():
            if launch.incarnation == event.incarnation and launch.slot == (event.slice, event.host):
                if event.silent:
                    return [KillWorker(launch_id)]
                # It ends by itself, or comes back (orphan_policy = wait) and is then `HostJoining` again.
                launch.kill_at = min(launch.kill_at, now + self.options.lost_exit_seconds)
        return []

    def _preempted(self, now: float, event: HostPreempted) -> list[Effect]:
        for launch in self._launches.values():
            if launch.incarnation == event.incarnation and launch.slot == (event.slice, event.host):
                launch.preempted = True
                end = now + event.notice_seconds + self.options.lost_exit_seconds
                launch.kill_at = min(launch.kill_at, end)
        return []

    def _exited(self, now: float, launch_id: str, exit_code: int) -> list[Effect]:
        launch = self._launches.pop(launch_id, None)
        if launch is None or launch.unwanted:
            return []
        if launch.slot is None:
            return self._standby_exited(now, launch, exit_code)
        slot = launch.slot
        state = self.slots[slot]
        if not launch.succeeded:
            state.launch_id = None
        slice_index, host_index = slot
        description = describe_exit(exit_code)
        effects: list[Effect] = [ReportExit(slice_index, host_index, launch_id, description)]
        what = f"worker of slice {slice_index} host {host_index} {description}"
        if launch.preempted:
            what += ", as announced"
        if slice_index in self.given_up:
            return effects
        used, limit, name = self._account(launch.preempted)
        if used[slice_index] >= self._budget(limit):
            return [*effects, *self._give_up(slice_index, f"{what} after {used[slice_index]} {name}s", name, limit)]
        used[slice_index] += 1
        count = f"{name} {used[slice_index]} of the slice"
        if limit is not None:
            count += f", of {self._budget(limit):.0f}"
        if launch.succeeded:
            return [*effects, Say(f"{what}; a standby has taken its place ({count})")]
        state.failures = 0 if launch.ready or launch.preempted else state.failures + 1
        # A refusal, or imports that fail, no replacement mends. That the head holds the place for a predecessor whose
        # end it has not heard of (a network that is cut tells nobody) ends with the predecessor's deadline.
        hopeless = (
            exit_code == EXIT_NO_TEMPLATE
            or (exit_code == EXIT_REFUSED and state.failures > 1)
            or (exit_code > 0 and exit_code != EXIT_PLACE_TAKEN and state.failures >= START_FAILURES_LIMIT)
        )
        if hopeless and slot not in self._was_ready:
            return [*effects, CannotStart(launch_id, slot, what)]
        delay = self.options.replacement_delay_seconds + self._backoff(state.failures)
        if self._free_standbys() > 0:
            state.awaits_standby = True
            state.start_at = now + max(delay, self.options.standby_take_over_seconds)
            return [*effects, Say(f"{what}; a standby takes its place ({count})")]
        state.start_at = now + delay
        when = "starting another one" if delay < 0.05 else f"starting another one in {delay:.1f} s"
        effects.append(Say(f"{what}; {when} ({count})"))
        return effects + self.tick(now)

    def _standby_exited(self, now: float, launch: _Launch, exit_code: int) -> list[Effect]:
        lived = now - launch.started
        effects: list[Effect] = []
        # A place that counted on this standby gets a process of its own, now.
        if self._free_standbys() < 0:
            for state in self.slots.values():
                if state.awaits_standby:
                    state.awaits_standby = False
                    state.start_at = now + self.options.replacement_delay_seconds
                    break
        self._standby_failures = self._standby_failures + 1 if lived < self.options.join_timeout_seconds else 0
        if self._standby_failures >= self.options.standby_failure_limit:
            text = f"standby {describe_exit(exit_code)}, {self._standby_failures} in a row: starting no more"
            return [*effects, Say(text), *self.tick(now)]
        delay = self.options.replacement_delay_seconds + self._backoff(self._standby_failures)
        self._standby_start_at.append(now + delay)
        effects.append(Say(f"standby {describe_exit(exit_code)}; starting another one in {delay:.1f} s"))
        return effects + self.tick(now)

    def _account(self, preempted: bool) -> tuple[list[int], int | None, str]:
        """Whose budget a replacement is paid from: what was used per slice, the limit, and what it is called."""
        if preempted:
            return self.preemptions, self.options.max_preemptions, "preemption"
        return self.restarts, self.options.max_slice_restarts, "restart"

    def _free_standbys(self) -> int:
        """Standbys without a place, less the places that wait for one."""
        waiting = sum(launch.slot is None for launch in self._launches.values())
        return waiting - sum(state.awaits_standby for state in self.slots.values())

    def _backoff(self, failures: int) -> float:
        if failures == 0:
            return 0.0
        return min(self.options.backoff_limit_seconds, self.options.backoff_first_seconds * 2 ** (failures - 1))

    def _give_up(self, slice_index: int, what: str, name: str, limit: int | None) -> list[Effect]:
        setting = {"restart": "max_slice_restarts", "preemption": "max_preemptions"}[name]
        reason = f"{what} ({setting} {limit})"
        self.given_up[slice_index] = reason
        effects: list[Effect] = [
            Say(f"{reason}; slice {slice_index} is given up: programs get an error for its devices"),
            GiveUp(slice_index, reason),
        ]
        for slot, state in self.slots.items():
            if slot[0] == slice_index:
                state.start_at, state.awaits_standby = math.inf, False
                if state.launch_id is not None:
                    effects.append(KillWorker(state.launch_id))
        return effects
