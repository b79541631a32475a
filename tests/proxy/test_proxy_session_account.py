"""The account of a session: histories with known instants, and histories by chance whose seconds must add up."""

import random
from typing import Any

import pytest

from ridgeway.proxy import session_account
from ridgeway.proxy.session_account import Busy, SessionAccount

MEGABYTE = 1 << 20
SLICES = (0, 1, 2)


class Session:
    """An account and a clock that a test moves."""

    def __init__(self) -> None:
        self.account = SessionAccount(0.0)
        self.account.slices_down(0.0, ())
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def compile(self, seconds: float, hit: bool = False) -> None:
        self.account.compile_began(self.now)
        self.wait(seconds)
        self.account.compiled(self.now, hit, probe=False)
        self.account.compile_ended(self.now)

    def begin(self, step_seconds: float = 0.1, name: str = "step") -> None:
        """Its first two steps, by which the step program is known."""
        first = self.account.mark(self.now)
        self.wait(step_seconds)
        self.account.step_program_found(self.now, name, MEGABYTE, SLICES, first)
        self.account.step(self.now)

    def steps(self, count: int, seconds: float = 0.1) -> None:
        for _ in range(count):
            self.wait(seconds)
            self.account.step(self.now)

    def save(self, seconds: float, size: int = MEGABYTE) -> None:
        self.account.copy_began(self.now)
        self.wait(seconds)
        self.account.copy_ended(self.now, size)

    def recover(self, waiting: float = 2.0, restoring: float = 1.0) -> None:
        """From an error to the end of the next step, which takes 0.1 s."""
        account = self.account
        account.put(self.now, 8)
        account.probe(self.now)
        self.wait(waiting)
        account.put(self.now, MEGABYTE)
        self.wait(restoring)
        started = self.now
        account.step(started)
        self.wait(0.1)
        account.recovered(self.now, started)
        account.step(self.now)

    def end(self) -> dict[str, Any]:
        self.account.end(self.now)
        report = self.account.report(self.now)
        assert report["undecided_seconds"] == 0.0
        assert sum(report["seconds"].values()) == pytest.approx(self.now, abs=1e-3)
        return report

    def spent(self) -> dict[str, float]:
        """What it was spent on, without what took no time."""
        return {name: seconds for name, seconds in self.end()["seconds"].items() if seconds > 0}


def test_a_session_without_a_step_is_unattributed_but_for_compiling() -> None:
    session = Session()
    session.wait(3.0)
    session.compile(2.0)
    session.compile(0.5, hit=True)
    session.wait(1.0)
    report = session.end()
    assert report["seconds"]["compiling"] == 2.5
    assert report["seconds"]["unattributed"] == 4.0
    assert (report["compile_hits"], report["compile_misses"]) == (1, 1)
    assert report["steps"] == 0


def test_what_comes_before_the_first_step() -> None:
    session = Session()
    session.account.slices_down(0.0, {1})
    session.wait(2.0)
    session.account.slices_down(session.now, ())
    session.wait(3.0)
    for _ in range(11):
        session.account.put(session.now, MEGABYTE // 10)
        session.wait(0.1)
    session.compile(4.0)
    session.begin()
    session.steps(20)
    spent = session.spent()
    assert spent == {
        "waiting_for_hardware": pytest.approx(2.0), "unattributed": pytest.approx(3.1),
        "restoring": pytest.approx(1.0), "compiling": pytest.approx(4.0), "stepping": pytest.approx(2.1),
    }  # fmt: skip


def test_steady_steps_are_stepping() -> None:
    session = Session()
    session.begin()
    session.steps(500)
    report = session.end()
    assert report["seconds"]["stepping"] == pytest.approx(50.1)
    assert report["steps"] == 502
    assert report["repeated_steps"] == 0
    assert report["step_seconds"] == pytest.approx(0.1, rel=0.02)


def test_unsteady_steps_are_stepping_too() -> None:
    session = Session()
    chance = random.Random(1)
    session.begin()
    for _ in range(300):
        session.steps(1, chance.uniform(0.08, 0.13))
    assert list(session.spent()) == ["stepping"]


def test_a_save_costs_what_it_adds_to_a_step() -> None:
    session = Session()
    session.begin()
    session.steps(50)
    session.save(1.5)
    session.steps(50)
    report = session.end()
    assert report["seconds"]["saving"] == pytest.approx(1.5, abs=0.02)
    assert report["seconds"]["stepping"] == pytest.approx(10.1, abs=0.02)
    assert report["saves"] == 1


def test_a_copy_that_steps_run_beside_costs_nothing() -> None:
    session = Session()
    session.begin()
    session.steps(50)
    session.account.copy_began(session.now)
    session.steps(20)
    session.account.copy_ended(session.now, MEGABYTE)
    session.steps(50)
    report = session.end()
    assert report["seconds"]["saving"] == 0.0
    assert report["saves"] == 1


def test_a_pause_of_the_program_is_unattributed_and_an_evaluation_is_stepping() -> None:
    session = Session()
    session.begin()
    session.steps(50)
    session.wait(7.0)
    session.steps(50)
    session.account.wait_began(session.now)
    session.wait(5.0)
    session.account.wait_ended(session.now)
    session.steps(50)
    spent = session.spent()
    assert spent["unattributed"] == pytest.approx(7.0, abs=0.05)
    assert spent["stepping"] == pytest.approx(20.1, abs=0.05)


def test_steps_dispatched_ahead_and_waited_for_are_stepping() -> None:
    session = Session()
    session.begin(0.001)
    for _ in range(20):
        session.steps(30, 0.001)
        session.account.wait_began(session.now)
        session.wait(3.0)
        session.account.wait_ended(session.now)
    # In these a save waits for the steps that were dispatched ahead: only what it adds is its own.
    session.steps(30, 0.001)
    session.save(3.0 + 0.7)
    session.steps(30, 0.001)
    spent = session.spent()
    assert spent["saving"] == pytest.approx(0.7, abs=0.4)
    assert spent.get("unattributed", 0.0) == pytest.approx(0.0, abs=0.05)


def test_a_slice_that_is_suspended_pauses_the_session() -> None:
    session = Session()
    session.begin()
    session.steps(50)
    session.account.slices_down(session.now, {2})
    session.account.wait_began(session.now)
    session.wait(6.0)
    session.account.wait_ended(session.now)
    session.account.slices_down(session.now, ())
    session.steps(50)
    assert session.spent()["waiting_for_hardware"] == pytest.approx(6.0, abs=0.02)


def test_a_slice_that_the_session_does_not_use_may_be_down() -> None:
    session = Session()
    session.begin()
    session.steps(50)
    session.account.runs_on(session.now, (0, 1))
    session.account.slices_down(session.now, {2})
    session.wait(3.0)
    session.steps(50)
    spent = session.spent()
    assert "waiting_for_hardware" not in spent
    assert spent["unattributed"] == pytest.approx(3.0, abs=0.02)


# ---- losses


def test_a_recovery() -> None:
    session = Session()
    session.begin()
    session.steps(30)
    session.save(0.0)
    session.steps(20)
    session.wait(0.05)
    session.account.lost(session.now, silent=False)
    session.wait(0.3)
    session.account.error(session.now)
    session.recover(waiting=2.0, restoring=1.0)
    session.steps(100)
    report = session.end()
    seconds = report["seconds"]
    assert seconds["waiting_for_hardware"] == pytest.approx(2.3)
    assert seconds["restoring"] == pytest.approx(1.0)
    # The step under way at the loss was not done, so it is not repeated; 19 of those after the save were done.
    assert report["repeated_steps"] == 19
    assert seconds["repeating"] == pytest.approx(1.9)
    assert report["recoveries"] == 1
    assert "unattributed" not in session.spent()


def test_a_silent_host_was_waited_for_from_when_its_step_should_have_been_done() -> None:
    session = Session()
    session.begin()
    session.steps(50)
    session.account.wait_began(session.now)
    session.wait(10.0)
    session.account.lost(session.now, silent=True)
    session.account.wait_ended(session.now)
    session.account.error(session.now)
    session.recover()
    session.steps(50)
    spent = session.spent()
    assert spent["waiting_for_hardware"] == pytest.approx(9.9 + 2.0, abs=0.02)


def test_a_loss_that_a_session_does_not_notice_changes_nothing() -> None:
    session = Session()
    session.begin()
    session.steps(50)
    session.account.lost(session.now, silent=False)
    session.steps(60)
    session.account.undisturbed()
    session.steps(50)
    assert session.spent() == {"stepping": pytest.approx(16.1)}


def test_steps_dispatched_after_a_loss_do_not_count() -> None:
    session = Session()
    session.begin()
    session.steps(50)
    session.account.lost(session.now, silent=False)
    session.steps(20)
    session.account.error(session.now)
    session.recover(waiting=1.0)
    session.steps(3)
    report = session.end()
    assert report["seconds"]["waiting_for_hardware"] == pytest.approx(3.0)
    assert report["steps"] == 51 + 5


def test_without_a_save_everything_is_repeated() -> None:
    session = Session()
    session.begin()
    session.steps(29)
    session.account.lost(session.now, silent=False)
    session.account.error(session.now)
    session.recover()
    session.steps(100)
    assert session.end()["repeated_steps"] == 30


def test_saves_may_follow_each_other_quickly() -> None:
    session = Session()
    session.begin()
    for _ in range(4):
        session.steps(3)
        for _ in range(4):
            session.save(0.01, MEGABYTE // 4)
    session.steps(5)
    session.account.lost(session.now, silent=False)
    session.account.error(session.now)
    session.recover()
    session.steps(100)
    report = session.end()
    assert report["saves"] == 4
    assert report["repeated_steps"] == 4


def test_a_save_after_the_first_step_counts_too() -> None:
    session = Session()
    first = session.account.mark(session.now)
    session.wait(0.1)
    session.save(0.5)
    session.account.step_program_found(session.now, "step", MEGABYTE, SLICES, first)
    session.account.step(session.now)
    session.steps(9)
    session.account.lost(session.now, silent=False)
    session.account.error(session.now)
    session.recover()
    session.steps(100)
    report = session.end()
    assert report["saves"] == 1
    assert report["repeated_steps"] == 9
    assert report["seconds"]["saving"] == pytest.approx(0.5, abs=0.01)


def test_state_that_workers_read_from_storage_is_restored() -> None:
    session = Session()
    session.wait(1.0)
    session.account.read_began(session.now)
    session.wait(4.0)
    session.account.read_ended(session.now, MEGABYTE)
    session.begin()
    session.steps(20)
    seconds = session.end()["seconds"]
    assert seconds["restoring"] == pytest.approx(4.0)
    assert seconds["unattributed"] == pytest.approx(1.0)


def test_part_of_a_state_is_no_save() -> None:
    session = Session()
    session.begin()
    session.steps(10)
    session.save(0.0)
    session.steps(10)
    session.save(0.0, MEGABYTE // 3)
    session.wait(session_account.COPY_GAP_SECONDS)
    session.steps(10)
    session.account.lost(session.now, silent=False)
    session.account.error(session.now)
    session.recover()
    session.steps(100)
    report = session.end()
    assert report["saves"] == 1
    assert report["repeated_steps"] == 19


def test_a_loss_during_a_recovery_and_one_while_steps_are_repeated() -> None:
    session = Session()
    session.begin()
    session.steps(10)
    session.save(0.0)
    session.steps(20)
    session.account.lost(session.now, silent=False)
    session.account.error(session.now)
    # It comes as far as restoring, then another slice goes.
    session.account.probe(session.now)
    session.wait(1.0)
    session.account.put(session.now, MEGABYTE)
    session.wait(0.5)
    session.account.lost(session.now, silent=False)
    session.account.error(session.now)
    session.recover()
    session.steps(8)
    session.account.lost(session.now, silent=False)
    session.account.error(session.now)
    session.recover()
    session.steps(100)
    report = session.end()
    assert report["seconds"]["waiting_for_hardware"] == pytest.approx(1.0 + 2.0 + 2.0)
    assert report["seconds"]["restoring"] == pytest.approx(0.5 + 1.0 + 1.0)
    assert report["repeated_steps"] == 9 + 19
    assert report["recoveries"] == 2


def test_a_thread_that_goes_on_probing_does_not_undo_the_entry() -> None:
    session = Session()
    account = session.account
    session.begin()
    session.steps(10)
    account.lost(session.now, silent=False)
    account.error(session.now)
    # Dispatched by the attempt that failed.
    account.program(session.now)
    session.wait(1.0)
    account.probe(session.now)
    session.wait(1.0)
    account.program(session.now)
    session.wait(1.0)
    account.probe(session.now)
    session.wait(1.0)
    account.step(session.now)
    account.recovered(session.now + 0.1, session.now)
    session.steps(10)
    seconds = session.end()["seconds"]
    assert seconds["waiting_for_hardware"] == pytest.approx(2.0)
    assert seconds["restoring"] == pytest.approx(2.0)


def test_waiting_is_told_while_it_lasts() -> None:
    session = Session()
    session.begin()
    session.steps(10)
    session.account.lost(session.now, silent=False)
    session.account.error(session.now)
    session.account.probe(session.now)
    session.wait(60.0)
    session.account.tick(session.now)
    assert session.account.seconds()["waiting_for_hardware"] == pytest.approx(60.0)
    assert session.account.undecided(session.now) == 0.0


# ---- which program the step is


def test_what_recurs_before_the_step_program_belongs_to_the_start() -> None:
    session = Session()
    session.begin(name="jit_add")
    session.steps(100)
    session.save(0.5)
    session.begin(name="jit_step")
    session.steps(50)
    report = session.end()
    assert report["step_program"] == "jit_step"
    assert report["steps"] == 52
    assert report["saves"] == 0
    assert report["seconds"]["stepping"] == pytest.approx(5.2, abs=0.11)
    assert report["seconds"]["unattributed"] == pytest.approx(10.1, abs=0.11)


def test_a_long_phase_with_another_program_stays_what_it_was() -> None:
    session = Session()
    session.begin(name="jit_pretrain")
    session.steps(2000)
    session.wait(20.0)
    session.begin(name="jit_finetune")
    session.steps(50)
    report = session.end()
    assert report["step_program"] == "jit_finetune"
    assert report["seconds"]["stepping"] == pytest.approx(205.0, abs=0.5)
    assert report["seconds"]["unattributed"] == pytest.approx(20.0, abs=0.5)


# ---- always


def test_busy_counts_overlapping_times_once() -> None:
    busy = Busy()
    busy.begin(1.0)
    busy.begin(2.0)
    busy.end(3.0)
    assert busy.total(4.0) == 3.0
    busy.end(5.0)
    busy.end(6.0)
    assert busy.total(9.0) == 4.0


@pytest.mark.parametrize("seed", range(200), ids=lambda seed: f"seed={seed}")
def test_seconds_add_up_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    session = Session()
    account = session.account
    names = ["a", "b"]
    last_step = 0.0
    for _ in range(400):
        session.wait(chance.choice((0.0, 0.001, 0.1, 0.1, 0.1, 3.0, 40.0)))
        now = session.now
        match chance.randrange(22):
            case 0 | 1 | 2 | 3 | 4 | 5 if account.step_program is not None:
                account.step(now)
                last_step = now
            case 6 if names:
                first = account.mark(now)
                session.wait(0.1)
                account.step_program_found(session.now, names.pop(), MEGABYTE, SLICES, first)
                account.step(session.now)
                last_step = session.now
            case 7:
                account.compile_began(now)
            case 8:
                account.compile_ended(now)
            case 9:
                account.copy_began(now)
            case 10:
                account.copy_ended(now, chance.choice((0, MEGABYTE)))
            case 11:
                account.put(now, chance.choice((8, MEGABYTE)))
            case 12:
                account.slices_down(now, chance.sample(SLICES, chance.randint(0, 2)))
            case 13:
                account.lost(now, chance.random() < 0.3)
            case 14:
                account.error(now)
            case 15:
                account.recovered(now, last_step)
            case 16:
                account.undisturbed()
            case 17:
                account.probe(now)
            case 18:
                account.program(now)
            case 19:
                account.tick(now)
            case 20:
                account.read_began(now)
            case 21:
                account.read_ended(now, MEGABYTE)
        seconds = account.seconds()
        assert sum(seconds.values()) + account.undecided(session.now) == pytest.approx(session.now, abs=1e-6)
        assert min(seconds.values()) >= 0.0
        assert account.undecided(session.now) >= -1e-9
    account.end(session.now)
    assert account.undecided(session.now + 5.0) == 0.0
    assert sum(account.seconds().values()) == pytest.approx(session.now, abs=1e-6)
