"""Which crashes are a program's fault."""

import signal

import pytest

from ridgeway.cluster.program_crashes import EXPLANATION_SECONDS, ProgramCrashes, program_of
from ridgeway.protocol.status import RETRIED_CODES, Code

LIMIT, WINDOW, SETTLE = 3, 100.0, 2.0
BAD, GOOD, OTHER = ("bad", "jit_bad"), ("good", "jit_good"), ("other", "jit_other")


@pytest.fixture
def crashes() -> ProgramCrashes:
    return ProgramCrashes(LIMIT, WINDOW, SETTLE)


def crash(crashes: ProgramCrashes, now: float, *ends: tuple[int, list[tuple[str, str]]]) -> list[tuple[str, int]]:
    """Executors are lost together at ``now``: how each ended, and what it was running."""
    for executor, (code, running) in enumerate(ends):
        crashes.lost(now, executor)
        crashes.exited(executor, code, running)
    assert crashes.tick(now + SETTLE / 2) == []
    return crashes.tick(now + SETTLE)


def test_a_program_that_crashes_again_and_again_is_refused_as_a_mistake(crashes: ProgramCrashes) -> None:
    segfault = (-signal.SIGSEGV, [BAD])
    assert crash(crashes, 0.0, segfault) == crash(crashes, 10.0, segfault) == []
    assert crashes.refused == {}
    assert crash(crashes, 20.0, segfault) == [("jit_bad", 3)]
    refusal = crashes.refused["bad"]
    assert refusal.code is Code.INVALID_ARGUMENT and "jit_bad" in refusal.message
    assert not any(code.name in str(refusal) for code in RETRIED_CODES)


def test_a_refusal_ends_with_the_window(crashes: ProgramCrashes) -> None:
    for now in (0.0, 10.0, 20.0):
        crash(crashes, now, (-signal.SIGABRT, [BAD]))
    crashes.tick(20.0 + SETTLE + WINDOW - 1)
    assert "bad" in crashes.refused
    crashes.tick(20.0 + SETTLE + WINDOW)
    assert crashes.refused == {}


def test_the_end_of_a_process_may_be_known_before_its_loss(crashes: ProgramCrashes) -> None:
    for executor in range(3):
        crashes.exited(executor, -signal.SIGSEGV, [BAD])
        crashes.lost(10.0 * executor, executor)
        crashes.tick(10.0 * executor + SETTLE)
    assert set(crashes.refused) == {"bad"}


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGTERM, 3, 70])
def test_who_is_killed_or_exits_is_no_crash(crashes: ProgramCrashes, code: int) -> None:
    for now in (0.0, 10.0, 20.0, 30.0):
        assert crash(crashes, now, (code, [BAD])) == []


def test_a_crash_beside_another_loss_is_taken_for_its_consequence(crashes: ProgramCrashes) -> None:
    for now in (0.0, 10.0, 20.0, 30.0):
        assert crash(crashes, now, (-signal.SIGABRT, [BAD]), (-signal.SIGKILL, [BAD])) == []


def test_a_loss_that_nobody_explains_is_no_crash(crashes: ProgramCrashes) -> None:
    for now in (0.0, 10.0, 20.0):
        crashes.lost(now, 1)
        crashes.lost(now, 2)
        crashes.exited(2, -signal.SIGSEGV, [BAD])
        assert crashes.tick(now + SETTLE) == []
    assert crashes.tick(20.0 + EXPLANATION_SECONDS) == []
    assert crashes.refused == {}


def test_a_program_that_crashes_in_quick_succession_is_refused_too(crashes: ProgramCrashes) -> None:
    found = []
    for executor in range(100):
        now = executor * SETTLE / 10
        crashes.lost(now, executor)
        crashes.exited(executor, -signal.SIGSEGV, [BAD])
        found += crashes.tick(now)
    assert found == [("jit_bad", 3)]


def test_an_explanation_may_come_late(crashes: ProgramCrashes) -> None:
    for executor in range(3):
        crashes.lost(10.0 * executor, executor)
        assert crashes.tick(10.0 * executor + SETTLE) == []
    for executor in range(3):
        crashes.exited(executor, -signal.SIGSEGV, [BAD])
    assert crashes.tick(20.0 + SETTLE) == [("jit_bad", 3)]


def test_members_that_crash_together_count_once_and_blame_what_they_share(crashes: ProgramCrashes) -> None:
    ends = [(-signal.SIGSEGV, [GOOD, BAD]), (-signal.SIGABRT, [BAD, OTHER])]
    assert [crash(crashes, now, *ends) for now in (0.0, 10.0, 20.0)] == [[], [], [("jit_bad", 3)]]
    assert set(crashes.refused) == {"bad"}


def test_programs_that_run_at_once_share_the_blame(crashes: ProgramCrashes) -> None:
    found = [crash(crashes, 10.0 * n, (-signal.SIGSEGV, [BAD, (f"other {n}", "jit_other")])) for n in range(6)]
    assert found == [[], [], [], [], [], [("jit_bad", 6)]]
    assert set(crashes.refused) == {"bad"}


def test_the_key_of_a_program_is_in_the_name_of_its_execution() -> None:
    assert program_of("0123abcd@ef#7,8") == "0123abcd"
