"""What happens to an agent (events) and what it does then (effects), as `ridgeway.worker.agent_core` decides it."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is, as its command line and its machine say. `hello` makes the message of it."""

    head_host: str
    head_port: int
    secret: str = dataclasses.field(repr=False)
    slice: int | None
    host: int | None
    standby: bool
    address: str
    launch_id: str
    pid: int
    hostname: str
    versions: dict[str, str]


# ---- events


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""


@dataclasses.dataclass(frozen=True, slots=True)
class Started(Event):
    """The agent process has begun."""


@dataclasses.dataclass(frozen=True, slots=True)
class Welcomed(Event):
    """The head accepted this agent."""

    welcome: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Refused(Event):
    """The head will not have this agent: trying again is of no use, unless its place is only ``taken``."""

    message: str
    taken: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class NotAuthenticated(Event):
    """What answers at the head's address has another secret, or is no head."""

    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectFailed(Event):
    """The head could not be reached this time."""

    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class MessageReceived(Event):
    """A message of the head."""

    message: list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class LinkLost(Event):
    """The link to the head ended."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateReady(Event):
    """The template has imported everything."""

    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateDied(Event):
    """The template process ended; `tail` is the end of what it wrote to stderr."""

    exit_code: int
    tail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Forked(Event):
    """The template made a child."""

    role: str
    number: int
    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class ForkFailed(Event):
    """The template could not make a child."""

    role: str
    number: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Succeeded(Event):
    """Another process has taken the place of a child's, under its number."""

    role: str
    number: int
    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChildExited(Event):
    """A child ended."""

    role: str
    number: int
    exit_code: int
    running: list[list[str]] = dataclasses.field(default_factory=list)
    """program and name of each execution that was under way"""


@dataclasses.dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """Ctrl-C: end now."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PreemptionAnnounced(Event):
    """SIGTERM: this host will soon be taken away."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""

    acknowledged_seconds: float | None = None
    """How long ago the head's host last acknowledged something that was sent over the link; None if that is not known.
    """


# ---- effects


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """Something for the shell to do, in the order given."""


@dataclasses.dataclass(frozen=True, slots=True)
class StartTemplate(Effect):
    """Start a template process."""


@dataclasses.dataclass(frozen=True, slots=True)
class KillTemplate(Effect):
    """SIGKILL the template; its children end with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SignalTemplate(Effect):
    """Send a signal to the template itself."""

    signal_number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Connect(Effect):
    """Try to reach the head after a pause."""

    delay_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class CloseLink(Effect):
    """Close the link to the head."""


@dataclasses.dataclass(frozen=True, slots=True)
class Send(Effect):
    """Send a message to the head."""

    message: list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Fork(Effect):
    """Have the template make a child."""

    role: str
    number: int
    arguments: dict[str, Any] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class SignalChild(Effect):
    """Send a signal to a child."""

    pid: int
    signal_number: int


@dataclasses.dataclass(frozen=True, slots=True)
class SignalSelf(Effect):
    """Send a signal to the agent."""

    signal_number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Say(Effect):
    """Write a line to the log."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Exit(Effect):
    """End the agent; children and template are killed."""

    code: int
