"""The replacement policy, as a pure state machine."""

import math
import random
import signal

import pytest

from ridgeway.launch import supervision as sv
from ridgeway.launch.supervision import (
    CannotStart,
    GiveUp,
    HostJoining,
    HostLost,
    HostPreempted,
    HostReady,
    KillWorker,
    Options,
    ReportExit,
    Say,
    StandbyLost,
    StandbyReady,
    StartWorker,
    Supervision,
    TookOver,
    WorkerExited,
)

KILLED = -signal.SIGKILL


class Cluster:
    """A policy with a clock, and the simplest head and processes that go with it."""

    def __init__(self, **options):
        self.now = 0.0
        self.policy = Supervision(Options(**{"slices": 2, "hosts_per_slice": 1, **options}))
        self.running: dict[str, tuple[int, int] | None] = {}
        self.incarnations: dict[str, int] = {}
        self.seen: list[sv.Effect] = []
        self.all: list[sv.Effect] = []
        self._incarnation = 0
        self.take(self.policy.begin(0.0))

    def take(self, effects):
        for effect in effects:
            self.seen.append(effect)
            self.all.append(effect)
            match effect:
                case StartWorker(launch_id, slot, _):
                    assert launch_id not in self.running
                    self.running[launch_id] = slot
                case KillWorker(launch_id):
                    if launch_id in self.running:
                        self.exit(launch_id, KILLED)

    def event(self, event):
        self.take(self.policy.handle(event, self.now))

    def exit(self, launch_id, code):
        del self.running[launch_id]
        self.event(WorkerExited(launch_id, code))

    def join(self, launch_id, slot=None, ready=True):
        slot = slot or self.running[launch_id]
        assert slot is not None
        self._incarnation += 1
        self.running[launch_id] = slot
        self.incarnations[launch_id] = self._incarnation
        self.event(HostJoining(*slot, self._incarnation, launch_id))
        if ready:
            self.event(HostReady(*slot, self._incarnation))

    def lose(self, launch_id, silent):
        slot = self.running[launch_id]
        assert slot is not None
        self.event(HostLost(*slot, self.incarnations[launch_id], silent))

    def join_all(self):
        for launch_id, slot in list(self.running.items()):
            if slot is not None and launch_id not in self.incarnations:
                self.join(launch_id)

    def advance(self, seconds):
        end = self.now + seconds
        while (at := self.policy.next_wakeup()) <= end:
            self.now = max(self.now, at)
            self.take(self.policy.tick(self.now))
        self.now = end

    def new(self, kind):
        found = [effect for effect in self.seen if isinstance(effect, kind)]
        self.seen = []
        return found

    def at(self, slot):
        return [launch_id for launch_id, place in self.running.items() if place == slot]

    def standbys(self):
        return [launch_id for launch_id, place in self.running.items() if place is None]


def test_begins_with_a_worker_in_every_slot_and_no_expectation():
    cluster = Cluster(hosts_per_slice=2)
    starts = cluster.new(StartWorker)
    assert [s.slot for s in starts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({s.launch_id for s in starts}) == 4
    assert not any(s.expect for s in starts)


def test_a_killed_worker_is_reported_and_replaced_at_once():
    cluster = Cluster()
    cluster.join_all()
    cluster.seen = []
    [first] = cluster.at((1, 0))
    cluster.exit(first, KILLED)
    [report], [start] = (
        [e for e in cluster.seen if isinstance(e, ReportExit)],
        [e for e in cluster.seen if isinstance(e, StartWorker)],
    )
    assert report == ReportExit(1, 0, first, "killed by SIGKILL")
    assert start.slot == (1, 0) and start.expect and start.launch_id != first
    assert any("slice 1 host 0 killed by SIGKILL" in e.text for e in cluster.new(Say))


def test_the_replacement_delay_is_kept():
    cluster = Cluster(replacement_delay_seconds=5.0)
    cluster.join_all()
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    cluster.advance(4.9)
    assert cluster.at((0, 0)) == []
    cluster.advance(0.2)
    assert len(cluster.at((0, 0))) == 1


def test_a_silent_worker_is_killed_and_replaced():
    cluster = Cluster()
    cluster.join_all()
    [stopped] = cluster.at((0, 0))
    cluster.lose(stopped, silent=True)
    [replacement] = cluster.at((0, 0))
    assert replacement != stopped


def test_a_worker_whose_link_closed_may_end_by_itself_or_come_back():
    cluster = Cluster()
    cluster.join_all()
    [worker] = cluster.at((0, 0))
    cluster.lose(worker, silent=False)
    assert cluster.at((0, 0)) == [worker]
    cluster.join(worker)  # orphan_policy = wait
    cluster.advance(10.0)
    assert cluster.at((0, 0)) == [worker]
    cluster.lose(worker, silent=False)
    cluster.advance(10.0)
    assert cluster.at((0, 0)) != [worker] and len(cluster.at((0, 0))) == 1


def test_a_loss_of_an_earlier_incarnation_kills_nobody():
    cluster = Cluster()
    cluster.join_all()
    [old] = cluster.at((0, 0))
    incarnation = cluster.incarnations[old]
    cluster.exit(old, KILLED)
    cluster.join_all()
    cluster.new(KillWorker)
    cluster.event(HostLost(0, 0, incarnation, silent=True))
    cluster.advance(30.0)
    assert cluster.new(KillWorker) == []


def test_a_worker_that_never_joins_is_killed_and_replaced():
    cluster = Cluster(join_timeout_seconds=20.0)
    [hanging] = cluster.at((0, 0))
    cluster.join(cluster.at((1, 0))[0])
    cluster.advance(21.0)
    assert cluster.at((0, 0)) and cluster.at((0, 0)) != [hanging]


def test_crash_loops_back_off_and_readiness_ends_that():
    cluster = Cluster(max_slice_restarts=None, backoff_first_seconds=1.0, backoff_limit_seconds=4.0)
    cluster.join_all()
    pauses = []
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    for _ in range(5):
        died = cluster.now
        cluster.exit(cluster.at((0, 0))[0], 1)
        cluster.advance(0.0)
        while not cluster.at((0, 0)):
            cluster.advance(cluster.policy.next_wakeup() - cluster.now)
        pauses.append(cluster.now - died)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    cluster.join_all()
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    assert len(cluster.at((0, 0))) == 1


def test_the_budget_is_per_slice_and_then_the_slice_is_given_up():
    cluster = Cluster(hosts_per_slice=2, max_slice_restarts=1)
    cluster.join_all()
    for _ in range(2):
        cluster.exit(cluster.at((0, 1))[0], KILLED)
        cluster.join_all()
    assert cluster.new(GiveUp) == []
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    [give_up] = cluster.new(GiveUp)
    assert give_up.slice == 0 and "max_slice_restarts 1" in give_up.reason
    cluster.advance(100.0)
    assert cluster.at((0, 0)) == [] and cluster.at((0, 1)) == []
    assert len(cluster.at((1, 0))) == 1
    cluster.exit(cluster.at((1, 0))[0], KILLED)
    assert len(cluster.at((1, 0))) == 1


def preempt(cluster, slot):
    [launch_id] = cluster.at(slot)
    cluster.event(HostPreempted(*slot, cluster.incarnations[launch_id], 30.0))
    return launch_id


def test_preemptions_are_not_paid_from_the_budget_for_crashes():
    cluster = Cluster(max_slice_restarts=0, max_preemptions=2)
    for _ in range(2):
        cluster.join_all()
        cluster.exit(preempt(cluster, (0, 0)), 0)
    cluster.join_all()
    assert cluster.new(GiveUp) == []
    assert cluster.policy.preemptions == [2, 0] and cluster.policy.restarts == [0, 0]
    # However it ends: that end was announced.
    cluster.exit(preempt(cluster, (1, 0)), KILLED)
    cluster.join_all()
    assert cluster.new(GiveUp) == []
    cluster.exit(preempt(cluster, (0, 0)), 0)
    [give_up] = cluster.new(GiveUp)
    assert give_up.slice == 0 and "max_preemptions 2" in give_up.reason
    cluster.exit(cluster.at((1, 0))[0], KILLED)
    [give_up] = cluster.new(GiveUp)
    assert give_up.slice == 1 and "max_slice_restarts 0" in give_up.reason


def test_a_preempted_worker_that_stays_is_killed_when_the_notice_is_over():
    cluster = Cluster()
    cluster.join_all()
    launch_id = preempt(cluster, (0, 0))
    cluster.advance(29.0)
    assert launch_id in cluster.running
    cluster.advance(5.0)
    assert launch_id not in cluster.running


def test_zero_restarts_means_none_and_no_limit_means_none():
    cluster = Cluster(max_slice_restarts=0)
    cluster.join_all()
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    assert len(cluster.new(GiveUp)) == 1
    cluster = Cluster(max_slice_restarts=None)
    for _ in range(50):
        cluster.join_all()
        cluster.exit(cluster.at((0, 0))[0], KILLED)
    assert cluster.new(GiveUp) == []
    assert cluster.policy.restart_budget() == math.inf


def test_standbys_start_once_every_slot_was_ready():
    cluster = Cluster(standbys=2)
    assert cluster.standbys() == []
    cluster.join(cluster.at((0, 0))[0])
    cluster.advance(5.0)
    assert cluster.standbys() == []
    cluster.join(cluster.at((1, 0))[0])
    cluster.advance(0.0)
    assert len(cluster.standbys()) == 2


@pytest.mark.parametrize("head_is_faster", [False, True])
def test_a_standby_takes_the_place_and_another_one_follows(head_is_faster):
    cluster = Cluster(standbys=1, replacement_delay_seconds=2.0)
    cluster.join_all()
    cluster.advance(0.0)
    [standby] = cluster.standbys()
    [worker] = cluster.at((1, 0))
    cluster.seen = []
    if head_is_faster:
        cluster.lose(worker, silent=False)
        cluster.join(standby, (1, 0))
        cluster.exit(worker, KILLED)
    else:
        cluster.exit(worker, KILLED)
        cluster.join(standby, (1, 0))
    assert TookOver(standby, (1, 0)) in cluster.seen
    assert ReportExit(1, 0, worker, "killed by SIGKILL") in cluster.seen
    assert not any(isinstance(e, StartWorker) for e in cluster.seen)
    assert cluster.policy.restarts == [0, 1]
    # Its successor leaves the cores to the recovery for a while.
    cluster.advance(cluster.policy.options.standby_refill_delay_seconds - 0.1)
    assert cluster.standbys() == []
    cluster.advance(0.2)
    assert len(cluster.standbys()) == 1
    cluster.advance(60.0)
    assert cluster.at((1, 0)) == [standby]


def test_a_stopped_worker_with_a_standby_is_killed_and_counted_once():
    cluster = Cluster(standbys=1)
    cluster.join_all()
    cluster.advance(0.0)
    [standby] = cluster.standbys()
    [worker] = cluster.at((0, 0))
    cluster.lose(worker, silent=True)
    cluster.join(standby, (0, 0))
    cluster.advance(30.0)
    assert worker not in cluster.running
    assert cluster.at((0, 0)) == [standby]
    assert cluster.policy.restarts == [1, 0]


def test_a_standby_that_is_given_no_place_in_time_is_not_waited_for():
    cluster = Cluster(standbys=1, standby_take_over_seconds=3.0)
    cluster.join_all()
    cluster.advance(0.0)
    [standby] = cluster.standbys()
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    cluster.advance(2.9)
    assert cluster.at((0, 0)) == []
    cluster.advance(0.2)
    [cold] = cluster.at((0, 0))
    assert cold != standby
    # The standby comes first after all: the cold one is one too many and costs nothing.
    cluster.join(standby, (0, 0))
    assert cluster.at((0, 0)) == [standby]
    assert cluster.policy.restarts == [1, 0]


def test_two_deaths_and_one_standby():
    cluster = Cluster(standbys=1)
    cluster.join_all()
    cluster.advance(0.0)
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    assert cluster.at((0, 0)) == []
    cluster.exit(cluster.at((1, 0))[0], KILLED)
    assert len(cluster.at((1, 0))) == 1


def test_a_standby_that_dies_too_leaves_its_place_to_a_new_process():
    cluster = Cluster(standbys=1)
    cluster.join_all()
    cluster.advance(0.0)
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    cluster.exit(cluster.standbys()[0], KILLED)
    assert len(cluster.at((0, 0))) == 1
    assert cluster.standbys() == []
    cluster.join_all()
    cluster.advance(5.0)
    assert len(cluster.standbys()) == 1


def test_a_lost_standby_is_killed_and_replaced():
    cluster = Cluster(standbys=1)
    cluster.join_all()
    cluster.advance(0.0)
    [first] = cluster.standbys()
    cluster.event(StandbyLost(first))
    cluster.advance(5.0)
    assert len(cluster.standbys()) == 1 and cluster.standbys() != [first]


def test_standbys_that_always_fail_are_given_up_and_one_that_was_ready_counts_anew():
    cluster = Cluster(standbys=1, standby_failure_limit=3)
    cluster.join_all()
    cluster.advance(0.0)
    for _ in range(10):
        cluster.event(StandbyReady(cluster.standbys()[0]))
        cluster.exit(cluster.standbys()[0], KILLED)
        cluster.advance(10.0)
    assert len(cluster.standbys()) == 1
    for _ in range(2):
        cluster.exit(cluster.standbys()[0], 1)
        cluster.advance(10.0)
    assert cluster.standbys() == []
    assert any("starting no more" in e.text for e in cluster.new(Say))


def test_a_slice_given_up_takes_no_standby():
    cluster = Cluster(standbys=1, max_slice_restarts=0)
    cluster.join_all()
    cluster.advance(0.0)
    [standby] = cluster.standbys()
    cluster.exit(cluster.at((0, 0))[0], KILLED)
    assert len(cluster.new(GiveUp)) == 1
    cluster.join(standby, (0, 0))
    cluster.advance(20.0)
    assert cluster.at((0, 0)) == []
    assert len(cluster.standbys()) == 1


@pytest.mark.parametrize(("code", "deaths"), [(4, 1), (2, 2), (1, 3)])
def test_a_mistake_that_no_replacement_mends(code, deaths):
    cluster = Cluster()
    cluster.join(cluster.at((1, 0))[0])
    for number in range(deaths):
        assert cluster.new(CannotStart) == []
        cluster.exit(cluster.at((0, 0))[0], code)
        if number + 1 < deaths:
            cluster.advance(5.0)
    [effect] = cluster.new(CannotStart)
    assert effect.slot == (0, 0)
    # A slot that has worked is only ever replaced.
    for _ in range(3):
        cluster.exit(cluster.at((1, 0))[0], code)
        cluster.advance(5.0)
    assert cluster.new(CannotStart) == []


def test_a_place_that_the_head_still_holds_for_a_predecessor_is_tried_until_it_is_free():
    cluster = Cluster()
    slot = (0, 0)
    # Never ready: the first one was cut off while it joined, and the head has not noticed yet.
    cluster.join(cluster.at(slot)[0], ready=False)
    cluster.exit(cluster.at(slot)[0], KILLED)
    for _ in range(6):
        cluster.advance(10.0)
        cluster.exit(cluster.at(slot)[0], 5)
    assert cluster.new(CannotStart) == []
    cluster.advance(10.0)
    cluster.join(cluster.at(slot)[0])
    assert cluster.new(CannotStart) == []


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_every_slice_gets_its_workers_back(seed):
    """Random exits, losses and joins: never two live processes that both want a slot for long, and once the
    faults stop every slot is served and every standby is there."""
    rng = random.Random(seed)
    cluster = Cluster(
        slices=rng.randint(1, 3),
        hosts_per_slice=rng.randint(1, 2),
        standbys=rng.randint(0, 2),
        max_slice_restarts=None,
        replacement_delay_seconds=rng.choice([0.0, 0.5, 4.0]),
    )

    def head(everything):
        """Joins processes as a head would: a standby to a free place, a worker to its own."""
        for launch_id, slot in list(cluster.running.items()):
            joined = launch_id in cluster.incarnations
            if slot is not None and not joined and (everything or rng.random() < 0.5):
                others = [x for x in cluster.at(slot) if x != launch_id and x in cluster.incarnations]
                if others:
                    cluster.exit(launch_id, 5)
                else:
                    cluster.join(launch_id, ready=rng.random() < 0.9 or everything)
        for slot in cluster.policy.slots:
            was_there = any(isinstance(e, TookOver | ReportExit) for e in cluster.all)
            if not cluster.at(slot) and cluster.standbys() and was_there and rng.random() < 0.5:
                cluster.join(rng.choice(cluster.standbys()), slot)

    for _ in range(60):
        cluster.advance(rng.choice([0.0, 0.1, 1.0, 5.0]))
        if cluster.running and rng.random() < 0.6:
            launch_id = rng.choice(sorted(cluster.running))
            fault = rng.random()
            if fault < 0.6:
                # A worker that ends by itself again and again before its slot was ever ready ends the start.
                started = set(cluster.policy.slots) <= cluster.policy._was_ready
                cluster.exit(launch_id, rng.choice([KILLED, 1, 3, -11] if started else [KILLED, -11]))
            elif launch_id in cluster.incarnations:
                cluster.lose(launch_id, silent=fault < 0.8)
        head(everything=False)
    for _ in range(200):
        cluster.advance(1.0)
        head(everything=True)
    for slot in cluster.policy.slots:
        [launch_id] = cluster.at(slot)
        assert launch_id in cluster.incarnations
    if not any("starting no more" in e.text for e in cluster.all if isinstance(e, Say)):
        assert len(cluster.standbys()) == cluster.policy.options.standbys
