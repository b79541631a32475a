"""Host buffers: bytes and the requests that name them may come in either order; nothing waits for ever."""

import time

import pytest

from ridgeway.protocol.status import Code, Status, StatusError, data_loss
from ridgeway.proxy.host_buffers import HostBufferStore


class Arrivals:
    """What arrived."""

    def __init__(self) -> None:
        self.values: list[bytes | Status] = []

    def __call__(self, value: bytes | Status) -> None:
        self.values.append(value)

    def error(self) -> Status:
        (value,) = self.values
        assert isinstance(value, Status)
        return value


def store(limit_bytes: int = 100, timeout_seconds: float = 1000.0) -> HostBufferStore:
    return HostBufferStore(limit_bytes, timeout_seconds)


# ---- client to devices


def test_bytes_that_came_first_are_taken_once() -> None:
    buffers = store()
    buffers.put(7, b"abc")
    assert buffers.bytes == 3
    assert buffers.take(7) == b"abc"
    assert buffers.take(7) is None
    assert buffers.bytes == 0


def test_bytes_that_come_second_go_to_whoever_waits_and_are_not_kept() -> None:
    buffers = store()
    arrivals = Arrivals()
    assert buffers.take(7) is None
    buffers.when_here(7, arrivals)
    assert arrivals.values == []
    buffers.put(7, b"abc")
    assert arrivals.values == [b"abc"]
    assert buffers.bytes == 0
    assert buffers.take(7) is None


def test_several_may_wait_for_the_same_bytes() -> None:
    buffers = store()
    one, other = Arrivals(), Arrivals()
    buffers.when_here(7, one)
    buffers.when_here(7, other)
    buffers.put(7, b"abc")
    assert one.values == other.values == [b"abc"]


def test_empty_bytes_are_bytes() -> None:
    buffers = store()
    buffers.put(7, b"")
    assert buffers.take(7) == b""
    arrivals = Arrivals()
    buffers.put(8, b"")
    buffers.look_up(8, arrivals)
    assert arrivals.values == [b""]


def test_bytes_that_nobody_will_use_are_dropped_in_either_order() -> None:
    buffers = store()
    buffers.put(7, b"abc")
    buffers.discard(7)
    buffers.discard(8)
    buffers.put(8, b"abc")
    assert buffers.bytes == 0
    assert buffers.take(7) is None
    assert buffers.take(8) is None


# ---- devices to client


def test_a_look_up_gives_the_bytes_and_leaves_them() -> None:
    buffers = store()
    one, other = Arrivals(), Arrivals()
    buffers.put(7, b"abc")
    buffers.look_up(7, one)
    buffers.look_up(7, other)
    assert one.values == other.values == [b"abc"]
    assert buffers.bytes == 3


def test_a_look_up_waits_for_the_copy_that_fills_the_buffer() -> None:
    buffers = store()
    one, other = Arrivals(), Arrivals()
    buffers.look_up(7, one)
    buffers.look_up(7, other)
    assert one.values == []
    buffers.put(7, b"abc")
    assert one.values == other.values == [b"abc"]
    assert buffers.take(7) == b"abc"


def test_a_copy_that_failed_is_told_in_either_order() -> None:
    buffers = store()
    early, late = Arrivals(), Arrivals()
    buffers.look_up(7, early)
    buffers.fail(7, data_loss("slice 1 host 0 was lost"))
    buffers.look_up(7, late)
    assert early.error() == late.error() == data_loss("slice 1 host 0 was lost")
    assert buffers.bytes == 0


def test_a_copy_that_failed_fails_who_would_use_its_bytes_at_once() -> None:
    buffers = store()
    arrivals = Arrivals()
    buffers.fail(7, data_loss("slice 1 host 0 was lost"))
    assert buffers.take(7) is None
    buffers.when_here(7, arrivals)
    assert arrivals.error() == data_loss("slice 1 host 0 was lost")


def test_who_looks_and_who_takes_both_get_the_bytes() -> None:
    buffers = store()
    taker, looker = Arrivals(), Arrivals()
    buffers.when_here(7, taker)
    buffers.look_up(7, looker)
    buffers.put(7, b"abc")
    assert taker.values == looker.values == [b"abc"]


def test_what_the_client_forgets_is_gone_errors_too() -> None:
    buffers = store(timeout_seconds=0.0)
    buffers.put(7, b"abc")
    buffers.fail(8, data_loss("lost"))
    for handle in (7, 8, 9):
        buffers.forget(handle)
    assert buffers.bytes == 0
    for handle in (7, 8, 9):
        arrivals = Arrivals()
        buffers.look_up(handle, arrivals)
        buffers.tick()
        assert arrivals.error().code is Code.DEADLINE_EXCEEDED


# ---- bounds


def test_more_bytes_than_a_session_may_have_are_refused() -> None:
    buffers = store(limit_bytes=10)
    buffers.put(1, bytes(6))
    with pytest.raises(StatusError, match="host_buffer_limit_bytes") as error:
        buffers.put(2, bytes(5))
    assert error.value.status.code is Code.RESOURCE_EXHAUSTED
    assert buffers.take(2) is None
    buffers.put(3, bytes(4))
    assert buffers.take(1) == bytes(6)
    buffers.put(4, bytes(6))
    assert buffers.bytes == 10


def test_bytes_that_somebody_waits_for_do_not_count() -> None:
    buffers = store(limit_bytes=10)
    arrivals = Arrivals()
    buffers.when_here(1, arrivals)
    buffers.put(1, bytes(1000))
    assert arrivals.values == [bytes(1000)]
    assert buffers.bytes == 0


def test_a_handle_used_twice_counts_once() -> None:
    buffers = store(limit_bytes=10)
    for _ in range(5):
        buffers.put(1, bytes(8))
    assert buffers.bytes == 8
    assert buffers.take(1) == bytes(8)
    assert buffers.bytes == 0
    buffers.put(1, bytes(8))
    buffers.fail(1, data_loss("lost"))
    assert buffers.bytes == 0


# ---- waiting


def test_who_waits_too_long_is_told_so() -> None:
    buffers = store(timeout_seconds=0.0)
    waiting, watching = Arrivals(), Arrivals()
    buffers.when_here(7, waiting)
    buffers.look_up(8, watching)
    buffers.tick()
    for handle, arrivals in ((7, waiting), (8, watching)):
        error = arrivals.error()
        assert error.code is Code.DEADLINE_EXCEEDED
        assert f"host buffer {handle}" in error.message
        assert "host_buffer_timeout_seconds" in error.message
    buffers.tick()
    buffers.put(7, b"abc")
    buffers.put(8, b"abc")
    assert len(waiting.values) == len(watching.values) == 1


def test_nobody_is_late_while_other_bytes_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    buffers = store(timeout_seconds=60.0)
    arrivals = Arrivals()
    buffers.when_here(7, arrivals)
    for _ in range(5):
        # Behind gigabytes of others on a slow network.
        now += 50.0
        buffers.gets_on()
        buffers.tick()
    assert arrivals.values == []
    now += 60.0
    buffers.tick()
    assert arrivals.error().code is Code.DEADLINE_EXCEEDED


def test_results_and_what_the_client_sends_are_counted_apart() -> None:
    buffers = store(limit_bytes=10)
    buffers.put_result(1, bytes(100))
    buffers.put(2, bytes(10))
    assert (buffers.bytes, buffers.result_bytes) == (110, 100)
    buffers.forget(1)
    assert (buffers.bytes, buffers.result_bytes) == (10, 0)


def test_who_has_time_left_goes_on_waiting() -> None:
    buffers = store()
    arrivals = Arrivals()
    buffers.when_here(7, arrivals)
    buffers.tick()
    assert arrivals.values == []
    buffers.put(7, b"abc")
    assert arrivals.values == [b"abc"]


def test_the_end_of_the_session_answers_everybody_once_and_drops_everything() -> None:
    buffers = store()
    waiting, watching = Arrivals(), Arrivals()
    buffers.when_here(7, waiting)
    buffers.look_up(8, watching)
    buffers.put(9, b"abc")
    buffers.close()
    buffers.close()
    assert waiting.error().code is watching.error().code is Code.DATA_LOSS
    assert buffers.bytes == 0
    assert buffers.take(9) is None
