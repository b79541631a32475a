"""The plan of faults: a function of its seed, within what it is asked for."""

import itertools
from collections import Counter

import pytest

from ridgeway.chaos.plan import AFTER_A_LOSS, NETWORK_KINDS, Fault, Kind, Moment, Shape, moment_of, plan

SHAPE = Shape(3, 2)


def _plan(seed: int, count: int, shape: Shape = SHAPE, kinds: set[Kind] | None = None) -> list[Fault]:
    made = plan(seed, shape, 10.0, 4.0, set(Kind) if kinds is None else kinds, set(Moment))
    return list(itertools.islice(made, count))


def test_a_seed_gives_the_same_faults_and_another_one_others() -> None:
    assert _plan(7, 200) == _plan(7, 200)
    assert _plan(7, 200) != _plan(8, 200)
    # A longer run begins like a shorter one.
    assert _plan(7, 50) == _plan(7, 200)[:50]


def test_every_kind_moment_and_scope_comes_up() -> None:
    faults = _plan(1, 2000)
    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.moment for fault in faults} == set(Moment)
    sizes = Counter(len(fault.hosts) for fault in faults)
    assert set(sizes) == {1, 2, 3, 4, 5, 6}
    assert any(len(f.hosts) == 2 and f.hosts[0][0] == f.hosts[1][0] for f in faults)
    assert {host for fault in faults for host in fault.hosts} == set(SHAPE.hosts)


def test_faults_are_possible() -> None:
    for fault in _plan(3, 2000):
        assert len(set(fault.hosts)) == len(fault.hosts) >= 1
        assert set(fault.hosts) <= set(SHAPE.hosts)
        assert fault.pause_seconds >= 0.0
        assert 0.0 <= fault.offset_seconds <= 1.0
        lasting = fault.kind in NETWORK_KINDS or fault.kind in (
            Kind.PAUSE_EXECUTOR, Kind.PAUSE_WORKER, Kind.SLOW_HOST, Kind.FULL_DISK,
        )  # fmt: skip
        assert (fault.duration_seconds > 0) == lasting, fault
        if fault.moment in AFTER_A_LOSS and fault.number > 1:
            assert fault.pause_seconds == 0.0
        if fault.kind is Kind.CUT_PAIR:
            assert len(fault.hosts) == 2
        assert str(fault.number) in fault.describe() and fault.kind in fault.describe()


def test_pauses_have_the_mean_that_was_asked_for() -> None:
    pauses = [fault.pause_seconds for fault in _plan(5, 4000) if fault.moment not in AFTER_A_LOSS]
    assert 9.0 < sum(pauses) / len(pauses) < 11.0


def test_only_what_was_chosen() -> None:
    made = plan(2, SHAPE, 0.0, 4.0, {Kind.TERMINATE, Kind.KILL_AGENT}, {Moment.STEP})
    faults = list(itertools.islice(made, 100))
    assert {fault.kind for fault in faults} == {Kind.TERMINATE, Kind.KILL_AGENT}
    assert {fault.moment for fault in faults} == {Moment.STEP}
    assert {fault.pause_seconds for fault in faults} == {0.0}


def test_one_host_has_no_pair() -> None:
    assert Kind.CUT_PAIR not in {fault.kind for fault in _plan(1, 500, Shape(1, 1))}
    with pytest.raises(ValueError, match="no fault"):
        _plan(1, 1, Shape(1, 1), {Kind.CUT_PAIR})
    with pytest.raises(ValueError, match="no moment"):
        next(plan(1, SHAPE, 1.0, 1.0, set(Kind), set()))


def test_moments_are_seen_in_events() -> None:
    assert moment_of({"kind": "generation_started"}) is Moment.REFORMING
    assert moment_of({"kind": "host_lost"}) is Moment.RECOVERY
    assert moment_of({"kind": "slice_ready"}) is None
