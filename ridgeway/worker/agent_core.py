"""What the agent does on which event: a pure state machine, event in, effects out.

The agent holds one link to the head and one template process; the template's children are the executors and
compilers that the head orders.  No clock, socket or process is touched in here; `ridgeway.worker.agent` is
the shell that does.
"""

import collections
import dataclasses
import math
import signal
from typing import Any

from ridgeway.processes import describe_exit, signal_name
from ridgeway.settings import Settings
from ridgeway.worker.agent_events import (
    ChildExited,
    CloseLink,
    Connect,
    ConnectFailed,
    Effect,
    Event,
    Exit,
    Fork,
    Forked,
    ForkFailed,
    Identity,
    KillTemplate,
    LinkLost,
    MessageReceived,
    NotAuthenticated,
    PreemptionAnnounced,
    Refused,
    Say,
    Send,
    SignalChild,
    SignalSelf,
    SignalTemplate,
    Started,
    StartTemplate,
    StopRequested,
    Succeeded,
    TemplateDied,
    TemplateReady,
    Tick,
    Welcomed,
)

#: Seconds between two attempts to reach a head.
RECONNECT_DELAY_SECONDS = 0.5
#: A template that dies this often within the window below is not started again.
TEMPLATE_DEATH_LIMIT = 3
TEMPLATE_DEATH_WINDOW_SECONDS = 30.0
#: Reported for a process that could not even be forked (EX_OSERR of sysexits.h).
FORK_FAILED_CODE = 71

EXIT_STOPPED = 0
EXIT_REFUSED = 2
EXIT_ORPHANED = 3
EXIT_NO_TEMPLATE = 4
EXIT_PLACE_TAKEN = 5

CHILD_ROLES = ("executor", "compiler", "python")

#: How long a Python process whose session is over may take to end by itself.
PYTHON_END_SECONDS = 10.0


@dataclasses.dataclass(slots=True)
class Child:
    """An executor, compiler or Python process."""

    agent: int
    """Incarnation under which it was ordered: its end is told to that head only."""
    pid: int | None = None
    kill: bool = False
    """SIGKILL it as soon as its pid is known."""
    kill_at: float | None = None
    """SIGKILL it then."""


class AgentCore:
    """All of the agent's decisions.

    Args:
      identity: who it is.
      settings: its own until the head sends the cluster's.
      connect_timeout_seconds: how long it tries to reach a head that it has never reached.
      now: seconds of a monotonic clock, as in every `handle`.
    """

    def __init__(self, identity: Identity, settings: Settings, connect_timeout_seconds: float, now: float):
        self.identity = identity
        self.settings = settings
        self.slice = identity.slice
        self.host = identity.host
        self.agent: int | None = None
        """Incarnation; None while there is no link."""
        self.children: dict[tuple[str, int], Child] = {}
        self._connect_timeout = connect_timeout_seconds
        self._give_up_at = now + connect_timeout_seconds
        self._give_up_reason = ""
        self._welcome: dict[str, Any] = {}
        self._was_welcome = False
        self._template_started: float | None = None
        self._template_seconds: float | None = None
        self._template_deaths: collections.deque[float] = collections.deque(maxlen=TEMPLATE_DEATH_LIMIT)
        self._heard = now
        self._head_pauses = False
        """it says nothing, but its host does"""
        self._last_tick = now
        self._next_heartbeat = now
        self._ending = False
        self._leave_at = math.inf
        """when the notice of a preemption is over"""

    def hello(self) -> dict[str, Any]:
        """The fields of this agent's hello; an assigned standby asks for its place again."""
        identity = self.identity
        return {
            "role": "agent",
            "slice": self.slice,
            "host": self.host,
            "standby": identity.standby and self.slice is None,
            "pid": identity.pid,
            "hostname": identity.hostname,
            "versions": dict(identity.versions),
            "address": identity.address,
            "launch_id": identity.launch_id,
        }

    @property
    def place(self) -> str:
        """``slice 2 host 0``, or ``standby``, for messages."""
        return "standby" if self.slice is None else f"slice {self.slice} host {self.host}"

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event. After an `Exit` nothing more comes."""
        if self._ending:
            return []
        match event:
            case Started():
                return [self._start_template(now), Connect(0.0)]
            case Welcomed(welcome):
                return self._welcomed(welcome, now)
            case Refused(message, taken):
                return self._exit(EXIT_PLACE_TAKEN if taken else EXIT_REFUSED, message)
            case NotAuthenticated(message) if not self._was_welcome:
                return self._exit(EXIT_REFUSED, f"{message}; give this worker the secret of that cluster")
            case ConnectFailed(message) | NotAuthenticated(message):
                return self._connect_failed(message, now)
            case MessageReceived(message):
                effects = self._head_is_back(now)
                self._heard = now
                return effects + self._obey(message, now)
            case LinkLost(reason):
                if self.agent is None:
                    return []
                return self._orphaned(f"the link to the head closed ({reason})", now)
            case TemplateReady(seconds):
                self._template_seconds = seconds
                return [Send(["template_ready", seconds])] if self.agent is not None else []
            case TemplateDied(exit_code, tail):
                return self._template_died(exit_code, tail, now)
            case Forked(role, number, pid):
                return self._forked(role, number, pid)
            case Succeeded(role, number, pid):
                return self._succeeded(role, number, pid)
            case ForkFailed(role, number, message):
                return [
                    Say(f"cannot start {role} {number}: {message}"),
                    *self._child_ended(role, number, FORK_FAILED_CODE),
                ]
            case ChildExited(role, number, exit_code, running):
                return [
                    Say(f"{role} {number} {describe_exit(exit_code)}"),
                    *self._child_ended(role, number, exit_code, running),
                ]
            case StopRequested(reason):
                return self._exit(EXIT_STOPPED, f"stopping: {reason}")
            case PreemptionAnnounced(reason):
                return self._preempted(reason, now)
            case Tick(acknowledged_seconds):
                return self._tick(now, acknowledged_seconds)
        raise AssertionError(f"unknown event {event!r}")

    # ---- the link

    def _welcomed(self, welcome: dict[str, Any], now: float) -> list[Effect]:
        self._was_welcome = True
        self._welcome = welcome
        self.agent = welcome["agent"]
        self.slice, self.host = welcome["slice"], welcome["host"]
        known = {field.name for field in dataclasses.fields(Settings)}
        settings = welcome["settings"]
        self.settings = Settings(**{name: value for name, value in settings.items() if name in known})
        self._heard = self._next_heartbeat = now
        place = f"{self.place}, incarnation {self.agent}"
        effects: list[Effect] = [Say(f"joined cluster {welcome['cluster']} as {place}")]
        if self._template_seconds is not None:
            effects.append(Send(["template_ready", self._template_seconds]))
        return effects

    def _connect_failed(self, message: str, now: float) -> list[Effect]:
        if now < self._give_up_at:
            return [Connect(RECONNECT_DELAY_SECONDS)]
        head = f"{self.identity.head_host}:{self.identity.head_port}"
        if not self._was_welcome:
            return self._exit(
                EXIT_REFUSED,
                f"no head answers at {head} after {self._connect_timeout:g} s ({message}); start it with "
                "`ridgeway head`, or correct --head",
            )
        return self._exit(
            EXIT_ORPHANED,
            f"{self._give_up_reason}; no head came back to {head} within "
            f"{self.settings.orphan_timeout_seconds:g} s (orphan_timeout_seconds)",
        )

    def _orphaned(self, reason: str, now: float) -> list[Effect]:
        """The head is gone: whatever the children compute would be a zombie's work."""
        self.agent = None
        self._head_pauses = False
        if self._leave_at < math.inf:
            return self._exit(EXIT_STOPPED, f"{reason}, and this host is preempted")
        if self.settings.orphan_policy != "wait":
            return self._exit(EXIT_ORPHANED, f"{reason}; ending, as orphan_policy = exit says")
        self._give_up_at = now + self.settings.orphan_timeout_seconds
        self._give_up_reason = reason
        return [
            *self._signal_children(signal.SIGKILL),
            CloseLink(),
            Say(
                f"{reason}; its processes are killed, waiting {self.settings.orphan_timeout_seconds:g} s "
                "for a head to come back (orphan_policy = wait)"
            ),
            Connect(RECONNECT_DELAY_SECONDS),
        ]

    def _preempted(self, reason: str, now: float) -> list[Effect]:
        """Whoever ends this process with notice gives the head the time to have its state saved; the head says when it
        may go. Without a head or a place there is nothing to save."""
        if self.agent is None or self.slice is None:
            return self._exit(EXIT_STOPPED, f"stopping: {reason}")
        if self._leave_at < math.inf:
            return [Say(f"{reason} again; {max(0.0, self._leave_at - now):.1f} s of the notice are left")]
        notice = self.settings.preemption_notice_seconds
        self._leave_at = now + notice
        return [
            Say(f"{reason}: leaving within {notice:g} s (preemption_notice_seconds), once the state is saved"),
            Send(["preempted", notice, reason]),
        ]

    def _obey(self, message: list[Any], now: float) -> list[Effect]:
        if self.agent is None:
            return []
        match message:
            case ["heartbeat", *_]:
                return []
            case ["start_executor", int(number), *_]:
                return self._start_child("executor", number)
            case ["start_compiler", int(number), *_]:
                return self._start_child("compiler", number)
            case ["start_python", int(number), dict(about), *_]:
                return self._start_child("python", number, {**about, "place": self.place})
            case ["kill_executor", int(number), str(reason), *_]:
                return self._kill_child("executor", number, reason)
            case ["kill_python", int(number), str(reason), *_]:
                return self._kill_child("python", number, reason)
            case ["end_python", int(number), *_]:
                child = self.children.get(("python", number))
                if child is not None:
                    child.kill_at = now + PYTHON_END_SECONDS
                return []
            case ["assign", int(slice_index), int(host_index), *_]:
                self.slice, self.host = slice_index, host_index
                return [Say(f"this standby is now {self.place}")]
            case ["deliver_signal", str(target), int(number), *_]:
                return self._deliver_signal(target, number)
            case ["stop", str(reason), *_]:
                return self._exit(EXIT_STOPPED, f"stopped by the head: {reason}")
        return [Say(f"ignored an unknown message of the head: {message[0]!r} with {len(message) - 1} fields")]

    # ---- children

    def _start_child(self, role: str, number: int, about: dict[str, Any] | None = None) -> list[Effect]:
        if (role, number) in self.children:
            return [Say(f"ignored a second order to start {role} {number}")]
        assert self.agent is not None
        self.children[role, number] = Child(self.agent)
        identity = self.identity
        arguments = {
            "head_host": identity.head_host,
            "head_port": identity.head_port,
            "secret": identity.secret,
            "head": self._welcome.get("head"),
            "agent": self.agent,
            role: number,
            "devices_per_host": self._welcome["devices_per_host"],
            "settings": self.settings.to_dict(),
            "address": identity.address,
            "log_prefix": f"{role} {number} ({self.place})",
            **(about or {}),
        }
        return [Fork(role, number, arguments)]

    def _forked(self, role: str, number: int, pid: int) -> list[Effect]:
        child = self.children.get((role, number))
        if child is None:
            return _kill(role, pid)
        child.pid = pid
        effects: list[Effect] = [Say(f"started {role} {number} (pid {pid})")]
        if child.kill:
            effects += _kill(role, pid)
        return effects

    def _succeeded(self, role: str, number: int, pid: int) -> list[Effect]:
        child = self.children.get((role, number))
        if child is None:
            return _kill(role, pid)
        child.pid = pid
        effects: list[Effect] = [Say(f"{role} {number} goes on as pid {pid}")]
        if child.kill:
            effects += _kill(role, pid)
        return effects

    def _kill_child(self, role: str, number: int, reason: str) -> list[Effect]:
        child = self.children.get((role, number))
        if child is None:
            return []
        child.kill = True
        effects: list[Effect] = [Say(f"killing {role} {number}: {reason}")]
        if child.pid is not None:
            effects += _kill(role, child.pid)
        return effects

    def _child_ended(
        self, role: str, number: int, exit_code: int, running: list[list[str]] | None = None
    ) -> list[Effect]:
        child = self.children.pop((role, number), None)
        if child is None:
            return []
        # What the user's code has started there has nobody left.
        effects: list[Effect] = [SignalChild(-child.pid, signal.SIGKILL)] if role == "python" and child.pid else []
        if child.agent == self.agent:
            effects.append(Send(["process_exited", role, number, exit_code, *([running] if running else [])]))
        return effects

    def _signal_children(self, number: int, roles: tuple[str, ...] = CHILD_ROLES) -> list[Effect]:
        effects: list[Effect] = []
        for (role, _), child in self.children.items():
            if role not in roles:
                continue
            if child.pid is not None:
                effects += _kill(role, child.pid) if number == signal.SIGKILL else [SignalChild(child.pid, number)]
            elif number == signal.SIGKILL:
                child.kill = True
        return effects

    def _deliver_signal(self, target: str, number: int) -> list[Effect]:
        name = signal_name(number)
        if target == "executor":
            return [
                Say(f"{name} for the executor, as the head asks"),
                *self._signal_children(number, ("executor",)),
            ]
        if target == "worker" and number == signal.SIGTERM:
            # As a scheduler sends it: to the process that it started.
            return [Say(f"{name} for this worker, as the head asks"), SignalSelf(number)]
        if target == "worker":
            return [
                Say(f"{name} for this worker, as the head asks"),
                *self._signal_children(number),
                SignalTemplate(number),
                SignalSelf(number),
            ]
        return [Say(f"ignored {name} for an unknown target {target!r}")]

    # ---- the template

    def _start_template(self, now: float) -> Effect:
        self._template_started = now
        self._template_seconds = None
        return StartTemplate()

    def _template_died(self, exit_code: int, tail: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for (role, number), child in list(self.children.items()):
            # The kernel ends it too, as its parent has died; this makes sure where the kernel does not.
            if child.pid is not None:
                effects.append(SignalChild(child.pid, signal.SIGKILL))
            effects += self._child_ended(role, number, -signal.SIGKILL)
        self._template_deaths.append(now)
        description = f"the template process {describe_exit(exit_code)}"
        if (
            len(self._template_deaths) == TEMPLATE_DEATH_LIMIT
            and now - self._template_deaths[0] <= TEMPLATE_DEATH_WINDOW_SECONDS
        ):
            said = f"; its last words: {tail}" if tail else ""
            return effects + self._exit(
                EXIT_NO_TEMPLATE,
                f"{description}, {TEMPLATE_DEATH_LIMIT} times within {TEMPLATE_DEATH_WINDOW_SECONDS:g} s{said}",
            )
        return [*effects, Say(f"{description}; starting another one"), self._start_template(now)]

    # ---- time

    def _head_is_back(self, now: float) -> list[Effect]:
        if not self._head_pauses:
            return []
        self._head_pauses = False
        return [Say(f"the head is back after {now - self._heard:.1f} s")]

    def _head_is_silent(self, silent: float, acknowledged_seconds: float | None) -> list[Effect]:
        """Nothing was heard of the head for `heartbeat_timeout_seconds`. The kernel knows whether its host acknowledges
        what it is sent: if so its process was stopped, or is starved, and may go on; if not, it or the network is gone.
        """
        settings = self.settings
        answers = acknowledged_seconds is not None and acknowledged_seconds < settings.suspect_after_seconds
        what = f"the head has been silent for {silent:.1f} s"
        if not answers or silent >= max(settings.head_pause_seconds, settings.heartbeat_timeout_seconds):
            setting = "head_pause_seconds" if answers else "heartbeat_timeout_seconds"
            return self._orphaned(f"{what} ({setting})", self._heard + silent)
        if self._head_pauses:
            return []
        self._head_pauses = True
        return [
            Say(
                f"{what}, but its host answers: waiting for it up to {settings.head_pause_seconds:g} s "
                "(head_pause_seconds)"
            )
        ]

    def _tick(self, now: float, acknowledged_seconds: float | None) -> list[Effect]:
        effects = self._end_pythons(now)
        settings = self.settings
        slept = now - self._last_tick
        self._last_tick = now
        if slept > settings.heartbeat_timeout_seconds / 2:
            # Stopped itself (SIGSTOP, a suspended machine), it cannot know whether the head was silent.
            effects.append(Say(f"this process was stopped for {slept:.1f} s"))
            self._heard = now
            if self._template_started is not None:
                self._template_started += slept
        if now >= self._leave_at:
            return [*effects, *self._exit(EXIT_STOPPED, "the notice of the preemption is over")]
        if self.agent is not None:
            silent = now - self._heard
            if silent >= settings.heartbeat_timeout_seconds:
                effects += self._head_is_silent(silent, acknowledged_seconds)
                if self.agent is None:
                    return effects
            if now >= self._next_heartbeat:
                self._next_heartbeat = now + settings.heartbeat_interval_seconds
                effects.append(Send(["heartbeat"]))
        if (
            self._template_started is not None
            and self._template_seconds is None
            and now - self._template_started >= settings.executor_start_timeout_seconds
        ):
            self._template_started = None
            effects += [
                Say(
                    f"the template process is not ready after {settings.executor_start_timeout_seconds:g} s "
                    "(executor_start_timeout_seconds); killing it"
                ),
                KillTemplate(),
            ]
        return effects

    def _end_pythons(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for (role, number), child in self.children.items():
            if child.kill_at is not None and now >= child.kill_at:
                child.kill_at = None
                effects += self._kill_child(role, number, "its session is over and it does not end")
        return effects

    def _exit(self, code: int, reason: str) -> list[Effect]:
        self._ending = True
        return [Say(reason), *self._signal_children(signal.SIGKILL), Exit(code)]


def _kill(role: str, pid: int) -> list[Effect]:
    """A Python process leads a group, with all that the user's code has started."""
    effects: list[Effect] = [SignalChild(pid, signal.SIGKILL)]
    if role == "python":
        effects.append(SignalChild(-pid, signal.SIGKILL))
    return effects
