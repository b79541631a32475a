"""What `membership` decides, for its shell to carry out."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """Why an executor and all that it held is gone: the first cause that every later error names."""

    deadline: bool
    """True: it fell silent or made no progress (DEADLINE_EXCEEDED); False: it is known to be gone (DATA_LOSS)."""
    description: str


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """Something for the shell to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse(Effect):
    """Answer a joining agent with a refusal; it prints the message and exits."""

    agent: int
    message: str
    taken: bool = False
    """Somebody has the place, which may change: it is not a mistake of the one who asks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome(Effect):
    """Accept an agent, at a slot or (None) as a standby."""

    agent: int
    slot: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class AssignSlot(Effect):
    """Give a standby agent its place."""

    agent: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class StartProcess(Effect):
    """Have an agent start an executor or a compiler."""

    agent: int
    role: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class KillProcess(Effect):
    """Have an agent kill an executor or a compiler."""

    agent: int
    number: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ActivateExecutor(Effect):
    """An executor now owns its slot's devices."""

    executor: int
    slot: int
    incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoseExecutor(Effect):
    """The executor that owned a slot's devices is gone, with everything it held."""

    executor: int
    slot: int
    loss: Loss


@dataclasses.dataclass(frozen=True, slots=True)
class CloseExecutor(Effect):
    """Close the link of an executor that owned nothing: it, or its agent, is lost."""

    executor: int
    loss: Loss


@dataclasses.dataclass(frozen=True, slots=True)
class SuspendExecutor(Effect):
    """Have the executor that owns a slot's devices save all that it holds, after what it was ordered before; nothing
    new is sent to it."""

    executor: int
    slot: int
    notice_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class SuspendedExecutor(Effect):
    """Its state is saved: from here on its process is nobody, and what it held waits for a replacement."""

    executor: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreExecutor(Effect):
    """Have a replacement's executor read the saved state of a slot."""

    executor: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class ResumeExecutor(Effect):
    """A replacement has the state of ``owner``, and is that one from now on."""

    owner: int
    executor: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseAgent(Effect):
    """Tell an agent to stop, and forget it: it leaves as announced."""

    agent: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CloseAgent(Effect):
    """Close an agent's link: it is lost, or must not go on."""

    agent: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Emit(Effect):
    """Record an event."""

    kind: str
    fields: dict
