"""Streams of events like a head's, written by hand: whole recoveries with known instants."""

from typing import Any

#: Wall time of the monotonic zero.
WALL = 1_800_000_000.0
STEP = "jit_train_step"


class Stream:
    """Events at given seconds; they need not be added in order."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def add(self, at: float, kind: str, **fields: Any) -> "Stream":
        self.events.append({"sequence": 0, "time": WALL + at, "monotonic": at, "kind": kind, **fields})
        return self

    def done(self) -> list[dict[str, Any]]:
        events = sorted(self.events, key=lambda event: event["monotonic"])
        return [{**event, "sequence": number} for number, event in enumerate(events)]


def start(stream: Stream, session: int = 1, at: float = 0.0) -> Stream:
    """A cluster of three slices with a session that steps."""
    stream.add(at, "cluster_started", topology=[3, 1, 2])
    for slice_index in range(3):
        stream.add(at + 1, "host_ready", slice=slice_index, host=0, incarnation=slice_index + 1, seconds=1.0)
        stream.add(at + 1, "slice_ready", slice=slice_index)
    stream.add(at + 2, "session_started", session=session, client="python", protocol=20)
    stream.add(at + 3, "generation_started", generation=1, members=[[0, 0], [1, 0], [2, 0]])
    return stream.add(at + 3.2, "generation_ready", generation=1, members=[[0, 0], [1, 0], [2, 0]], seconds=0.2)


def probes(stream: Stream, at: float, count: int, session: int = 1) -> Stream:
    """A round of pathwaysutils' probes, one for a slice, each with a small array."""
    for number in range(count):
        stream.add(at + 0.001 * number, "program_started", session=session, name="jit__fun", devices=2, arguments=1)
    return stream.add(at + 0.05, "arrays_made", session=session, count=count, bytes=16 * count)


def held(stream: Stream, at: float, until: float, ok: bool, slice_index: int = 2) -> Stream:
    """Work on a slice that is on its way back, kept waiting; it belongs to no session."""
    stream.add(at, "probe_held", slice=slice_index)
    return stream.add(until, "probe_answered", slice=slice_index, held_seconds=until - at, ok=ok)


def resume(stream: Stream, at: float, session: int = 1, slice_index: int = 2) -> Stream:
    """Killed at `at`, all slices back, 4.0 s in all; the generation is made lazily, after re-entry."""
    stream.add(at, "signal_delivered", slice=slice_index, host=None, signal=9)
    # The head deals with a loss first and records the loss itself last.
    stream.add(at + 0.049, "generation_aborted", generation=1, cause="host lost")
    stream.add(at + 0.0491, "step_program", session=session, name=STEP, executions=20, median_seconds=0.1)
    stream.add(
        at + 0.05, "host_lost", slice=slice_index, host=0, incarnation=3, code="DATA_LOSS",
        cause="killed by SIGKILL", executor_only=False,
    )  # fmt: skip
    stream.add(at + 0.05, "slice_lost", slice=slice_index)
    stream.add(at + 0.10, "survivors_aborted", generation=1, seconds=0.05)
    # Dispatched before the program knew; it never completes.
    stream.add(at + 0.20, "program_started", session=session, name=STEP, devices=6, arguments=40)
    stream.add(at + 0.30, "error_raised", session=session, code="DATA_LOSS", message="slice 2", request="fetch")
    held(probes(stream, at + 0.33, 3, session), at + 0.34, at + 0.9, True, slice_index)
    stream.add(at + 0.80, "host_ready", slice=slice_index, host=0, incarnation=9, seconds=0.7)
    stream.add(at + 0.80, "slice_ready", slice=slice_index)
    stream.add(at + 1.60, "compiled", session=session, program="a", name="jit_init", seconds=0.1, cache="hit")
    stream.add(at + 1.70, "generation_started", generation=2, members=[[0, 0], [1, 0], [2, 0]])
    stream.add(at + 2.00, "generation_ready", generation=2, members=[[0, 0], [1, 0], [2, 0]], seconds=0.3)
    stream.add(at + 2.10, "program_started", session=session, name="jit_init", devices=6, arguments=1)
    stream.add(at + 2.20, "program_completed", session=session, name="jit_init", devices=6, seconds=0.1)
    stream.add(at + 2.60, "arrays_made", session=session, count=300, bytes=1 << 20)
    stream.add(at + 3.00, "arrays_made", session=session, count=14, bytes=1 << 10)
    stream.add(at + 3.50, "compiled", session=session, program="b", name=STEP, seconds=0.4, cache="miss")
    stream.add(at + 3.60, "program_started", session=session, name=STEP, devices=6, arguments=40)
    stream.add(at + 4.00, "program_completed", session=session, name=STEP, devices=6, seconds=0.4)
    return stream.add(at + 4.00, "recovery_completed", session=session, seconds=3.95)


def resize(stream: Stream, at: float, session: int = 1) -> Stream:
    """Killed at `at` without anybody saying so, 11.5 s in all, with two slices of three."""
    stream.add(
        at + 0.02, "host_lost", slice=2, host=0, incarnation=3, code="DATA_LOSS", cause="connection closed",
        executor_only=False,
    )  # fmt: skip
    stream.add(at + 0.02, "slice_lost", slice=2)
    stream.add(at + 0.03, "step_program", session=session, name=STEP, executions=9, median_seconds=0.1)
    stream.add(at + 0.04, "survivors_aborted", generation=1, seconds=0.02)
    stream.add(at + 0.20, "error_raised", session=session, code="DATA_LOSS", message="slice 2", request="fetch")
    probes(stream, at + 0.258, 3, session)
    stream.add(at + 1.00, "arrays_made", session=session, count=300, bytes=1 << 20)
    stream.add(at + 1.10, "generation_started", generation=5, members=[[0, 0], [1, 0]])
    stream.add(at + 1.20, "generation_ready", generation=5, members=[[0, 0], [1, 0]], seconds=0.1)
    stream.add(at + 1.30, "compiled", session=session, program="c", name="jit_init", seconds=0.1, cache="hit")
    stream.add(at + 2.20, "arrays_made", session=session, count=300, bytes=1 << 20)
    # pathwaysutils goes on asking for the slice that is down, also when it is back.
    held(probes(stream, at + 10.1, 1, session), at + 10.1, at + 10.2, True)
    stream.add(at + 10.2, "slice_ready", slice=2)
    stream.add(at + 11.2, "compiled", session=session, program="d", name=STEP, seconds=7.7, cache="miss")
    stream.add(at + 11.3, "program_started", session=session, name=STEP, devices=4, arguments=40)
    return stream.add(at + 11.5, "program_completed", session=session, name=STEP, devices=4, seconds=0.2)
