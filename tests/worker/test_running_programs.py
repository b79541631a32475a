"""What an executor runs can be read when it has died."""

import os
import signal

from ridgeway.worker.running_programs import SLOTS, RunningPrograms


def test_the_oldest_ends_first_and_each_is_named_once() -> None:
    running = RunningPrograms()
    assert running.read() == []
    for program in ("a", "b", "a", "c"):
        running.begin(program, f"jit_{program}")
    assert running.read() == [("a", "jit_a"), ("b", "jit_b"), ("c", "jit_c")]
    running.end()
    assert running.read() == [("b", "jit_b"), ("a", "jit_a"), ("c", "jit_c")]
    for _ in range(3):
        running.end()
    assert running.read() == []


def test_of_many_the_newest_are_kept_and_long_names_are_cut() -> None:
    running = RunningPrograms()
    for number in range(SLOTS + 5):
        running.begin(f"p{number}", "n" * 1000)
    found = running.read()
    assert [program for program, _ in found] == [f"p{number}" for number in range(5, SLOTS + 5)]
    assert all(100 < len(name) < 300 and set(name) == {"n"} for _, name in found)


def test_the_parent_reads_what_a_child_that_died_was_running() -> None:
    running = RunningPrograms()
    pid = os.fork()
    if pid == 0:
        running.begin("good", "jit_good")
        running.end()
        running.begin("bad", "jit_bad")
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert running.read() == [("bad", "jit_bad")]
    running.close()
