"""What the head records of a session's programs, seen through the real account."""

import time
from types import SimpleNamespace
from typing import Any, cast

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.cluster.topology import Topology
from ridgeway.protocol.status import Code, Status, data_loss
from ridgeway.proxy.executables import Executable
from ridgeway.proxy.recovery_observer import RecoveryObserver
from ridgeway.proxy.session import Session

F32 = 11
STATE = [[[64, 64], F32]] * 4


class Watched:
    """An observer with one session, and the events that it emits."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        holds = SimpleNamespace(told=lambda now: None)
        manager = SimpleNamespace(topology=Topology(2, 1, 1), holds=holds, clock=time.monotonic)
        self.observer = RecoveryObserver(
            cast(ResourceManager, manager), lambda kind, **fields: self.events.append((kind, fields)), 0.0
        )
        self.session = cast(Session, SimpleNamespace(number=7, started=time.monotonic(), array_bytes=123))

    def execute(self, name: str, arguments: list[Any], results: list[Any], devices: tuple[int, ...] = (0, 1)) -> bool:
        metadata = {"inputs": arguments, "outputs": results}
        executable = SimpleNamespace(
            name=name, arguments=len(arguments), devices=devices, program=f"{name}@{devices}",
            compiled=SimpleNamespace(metadata=metadata),
        )  # fmt: skip
        return self.observer.executing(self.session, cast(Executable, executable))

    def step(self) -> bool:
        return self.execute("jit_step", [*STATE, [[8], F32]], [*STATE, [[], F32]])

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]


def test_an_account_is_recorded_when_it_has_changed_and_at_the_end() -> None:
    watched = Watched()
    observer, session = watched.observer, watched.session
    observer.tick([session])
    assert observer.account(session) is None
    observer.on_event({"kind": "slice_ready", "slice": 0})
    observer.on_event({"kind": "slice_ready", "slice": 1})
    compiled = observer.compiling(session)
    observer.on_event({"kind": "compiled", "session": 7, "name": "jit_step", "cache": "miss"})
    compiled()
    watched.execute("jit_init", [], STATE)
    for _ in range(20):
        watched.execute("jit_small", [[[], F32]], [[[], F32]])
        watched.step()
    observer.tick([session])
    (first,) = watched.of("goodput")
    assert (first["session"], first["step_program"], first["array_bytes"]) == (7, "jit_step", 123)
    assert (first["steps"], first["compile_misses"], first["saves"]) == (19, 1, 0)
    observer.tick([session])
    assert len(watched.of("goodput")) == 1, "nothing had changed"

    # All of the state goes to the host; a loss that is fetched is none of it.
    observer.fetching(session, 4, lambda status: None)(None)
    assert observer.account(session)["saves"] == 0  # type: ignore[index]
    for _ in STATE:
        observer.fetching(session, 64 * 64 * 4, lambda status: None)(None)
    watched.step()
    observer.session_ended(session)
    last = watched.of("goodput")[-1]
    assert (last["steps"], last["saves"], last["undecided_seconds"]) == (21, 1, 0.0)
    assert abs(sum(last["seconds"].values()) - last["wall_seconds"]) < 1e-3
    assert observer.account(session) is None


def test_a_fetch_that_fails_is_passed_on_and_saves_nothing() -> None:
    watched = Watched()
    for _ in range(3):
        watched.step()
    told: list[Status | None] = []
    lost = data_loss("slice 1 host 0 was lost: killed")
    for _ in range(8):
        watched.observer.fetching(watched.session, 1 << 20, told.append)(lost)
    assert told == [lost] * 8
    account = watched.observer.account(watched.session)
    assert account is not None and account["saves"] == 0


def test_a_recovery_is_in_the_account() -> None:
    watched = Watched()
    observer, session = watched.observer, watched.session
    for _ in range(10):
        assert not watched.step()
    lost = cast(ExecutorLink, SimpleNamespace(lost=Status(Code.DATA_LOSS, "slice 1 host 0 was lost: killed")))
    observer.lost([session], lost)
    assert watched.of("step_program")[0]["name"] == "jit_step"
    observer.error_raised(session, data_loss("slice 1 host 0 was lost: killed"), "check_value_ready")
    watched.execute("jit__fun", [[[], F32]], [[[], F32]], (1,))
    observer.arrays_made(session, 4, 4 * 64 * 64 * 4)
    started = time.monotonic()
    assert watched.step()
    executable = cast(Executable, SimpleNamespace(name="jit_step", devices=(0, 1)))
    observer.executed(session, executable, started, None)
    assert len(watched.of("recovery_completed")) == 1
    for _ in range(20):
        assert not watched.step()
    observer.session_ended(session)
    last = watched.of("goodput")[-1]
    # Nothing had been saved: all that was done before is done again, but for the step that was under way.
    assert (last["recoveries"], last["repeated_steps"], last["steps"]) == (1, 9, 9 + 21)
    assert last["seconds"]["repeating"] > 0 and last["undecided_seconds"] == 0.0
