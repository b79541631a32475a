"""What `membership` keeps of each agent and executor, and the deadlines that it applies."""

import dataclasses
import enum


class HostState(enum.Enum):
    """State of a host slot as shown to people."""

    ABSENT = "absent"
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    SUSPENDED = "suspended"
    RESTORING = "restoring"


@dataclasses.dataclass(slots=True)
class Executor:
    """One executor process as membership sees it."""

    number: int
    agent: int
    started: float
    connected: bool = False
    heard: float = 0.0
    dispatched: int = 0
    completed: int = 0
    outstanding: bool = False
    behind: bool = False
    progressed: float = 0.0


@dataclasses.dataclass(slots=True)
class Agent:
    """One agent as membership sees it."""

    number: int
    slot: int | None
    joined: float
    heard: float
    launch_id: str
    suspect: bool = False
    draining: bool = False
    executor: Executor | None = None
    replacing: bool = False
    """Its active executor was lost, which was counted, and the next one is not ready yet."""
    compiler: int | None = None
    compiler_connected: bool = False
    early_deaths: int = 0
    """Processes in a row that ended before they had joined."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The deadlines that membership applies, in seconds."""

    heartbeat_timeout_seconds: float
    suspect_after_seconds: float
    executor_start_timeout_seconds: float
    progress_deadline_seconds: float
    suspend_timeout_seconds: float = 300.0
