"""An executor's backlog: full, marked, reached, lost."""

from ridgeway.cluster.backlog import MARK_BYTES, MARK_ORDERS, Backlog


def test_it_is_full_by_bytes_sent_and_bytes_announced() -> None:
    backlog = Backlog(100, 1000)
    backlog.sent(1, 60)
    backlog.announce(40)
    assert not backlog.is_full
    backlog.announce(1)
    assert backlog.is_full
    backlog.announce(-41)
    assert not backlog.is_full


def test_whoever_waits_goes_on_when_a_mark_is_reached() -> None:
    went_on: list[str] = []
    backlog = Backlog(MARK_BYTES, 1000)
    assert not backlog.sent(1, MARK_BYTES - 1)
    assert backlog.sent(1, 1)
    first = backlog.mark()
    assert not backlog.sent(1, 10)
    backlog.when_relieved(lambda: went_on.append("now"))
    assert backlog.is_full and went_on == []
    backlog.reached(*first)
    assert went_on == ["now"] and (backlog.orders, backlog.bytes) == (1, 10)


def test_orders_without_bytes_count_too() -> None:
    backlog = Backlog(1 << 40, 2 * MARK_ORDERS)
    marks = []
    for _ in range(2 * MARK_ORDERS + 1):
        if backlog.sent(1, 0):
            marks.append(backlog.mark())
    assert backlog.is_full and marks == [(MARK_ORDERS, 0)] * 2
    backlog.reached(*marks[0])
    assert not backlog.is_full


def test_nobody_waits_for_a_lost_executor() -> None:
    went_on: list[str] = []
    backlog = Backlog(10, 10)
    backlog.sent(1, 11)
    backlog.when_relieved(lambda: went_on.append("now"))
    assert went_on == []
    backlog.clear()
    assert went_on == ["now"] and not backlog.is_full
