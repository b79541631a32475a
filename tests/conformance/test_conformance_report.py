"""The table of JAX's own tests: what counts as passed, granted, excused and neither."""

import json
import os
import subprocess
import sys
from pathlib import Path

from conformance.recorder import read_record
from conformance.report import ClusterRun, FileResult, Tally, render, tally
from conformance.suites import FileRun, Limits, Outcome, run_file, run_sample

POINTER = "BufferError: INVALID_ARGUMENT: Only local arrays are supported"
SEVERAL = "ValueError: `jax.make_mesh` does not support multi-slice topologies. Please use"
DELETED = "AssertionError: False is not true (case.py:729)"


def run(**outcomes: str) -> FileRun:
    """A run in which a test passed, or failed for a reason."""
    return FileRun({
        f"T::{name}": Outcome("passed") if reason == "passed" else Outcome("failed", reason)
        for name, reason in outcomes.items()
    }, 1.0)  # fmt: skip


def result() -> FileResult:
    """Six tests that pass natively and one that does not."""
    native = run(**dict.fromkeys(("a", "b", "c", "d", "e", "test_device_put_donate_pytree"), "passed"), f="assert")
    made = FileResult("array_test", native)
    made.through["2x2x2"] = ClusterRun(run(
        a="passed", b=POINTER, c=SEVERAL, d=SEVERAL, e="wrong", test_device_put_donate_pytree=DELETED, f="passed"
    ))  # fmt: skip
    made.shown_as_one["2x2x2"] = ClusterRun(run(c="passed", d="wrong too"), "executors grew by 300 MiB")
    return made


def test_what_make_mesh_refuses_counts_as_it_went_where_the_slices_show_as_one() -> None:
    assert tally(result(), "2x2x2") == Tally(expected=6, passed=2, as_one=1, granted=1, excused=1, other=2)


def test_without_a_second_run_what_make_mesh_refused_has_not_passed() -> None:
    made = result()
    made.shown_as_one.clear()
    assert tally(made, "2x2x2") == Tally(expected=6, passed=1, as_one=0, granted=1, excused=1, other=3)


def test_a_test_that_was_not_run_is_a_difference() -> None:
    made = FileResult("aot_test", run(a="passed", b="passed"), {"1x1x8": ClusterRun(run(a="passed"))})
    assert tally(made, "1x1x8") == Tally(expected=2, passed=1, other=1)
    assert "not run" in render([made], ["1x1x8"], [])


def test_the_rates_are_told_with_and_without_excuses() -> None:
    text = render([result()], ["2x2x2"], ["About it."])
    assert "of 6 tests that pass natively 2 pass" in text
    assert "(1): 2 of 5, 40.00 %" in text and "(1): 2 of 4, 50.00 %" in text
    assert "| array_test |  | 7 | 6 | 2 (1 as one slice) | 1 | 0 | 1 | 2 | executors grew by 300 MiB |" in text
    assert "`T::e` failed: wrong" in text and "`T::d` failed: wrong too" in text and "`b`" in text


TESTS = """
import os, unittest, pytest

class T(unittest.TestCase):
    def test_helper(self):
        from jax._src import made_up_test_util
        self.assertEqual(made_up_test_util.VALUE, 3)
    @unittest.skip("never")
    def test_skipped(self): pass
    def test_crash(self): os._exit(3)
    def test_good(self): pass
    def test_wrong(self): self.assertTrue(False)
"""


def tree(folder: Path) -> tuple[Path, dict[str, str]]:
    """A source tree of jax with one test file, and the environment of its runs."""
    (folder / "tests").mkdir()
    (folder / "jax" / "_src").mkdir(parents=True)
    (folder / "jax" / "_src" / "made_up_test_util.py").write_text("VALUE = 3\n")
    path = folder / "tests" / "made_up_test.py"
    path.write_text(TESTS)
    return path, {"JAX_PLATFORMS": "cpu"}


def test_a_file_is_run_to_its_end_over_a_crash_and_continued_after_an_interruption(tmp_path: Path) -> None:
    path, environment = tree(tmp_path)
    record = tmp_path / "made_up.jsonl"
    record.write_text(json.dumps({"test": "T::test_good", "outcome": "unfinished", "reason": ""}) + "\n")
    found = run_file(path, environment, record, Limits(60, 120, 0, 1))
    assert found.problem == "" and found.collected == 5
    assert {name.removeprefix("T::test_"): outcome.outcome for name, outcome in found.tests.items()} == {
        "helper": "passed", "skipped": "skipped", "crash": "crashed", "good": "passed", "wrong": "failed",
    }  # fmt: skip
    before = record.read_text()
    assert run_file(path, environment, record, Limits(60, 120, 0, 1)).tests == found.tests
    assert record.read_text() == before  # nothing was run again


def test_skipped_tests_do_not_use_up_a_sample_and_only_what_is_asked_for_is_run(tmp_path: Path) -> None:
    path, environment = tree(tmp_path)
    path.write_text(TESTS.replace("os._exit(3)", "pass"))
    found = run_sample(path, environment, tmp_path / "native.jsonl", Limits(60, 120, 4, 1))
    assert sorted(outcome.outcome for outcome in found.tests.values()) == [
        "failed", "passed", "passed", "passed", "skipped",
    ]  # fmt: skip
    smaller = run_sample(path, environment, tmp_path / "native.jsonl", Limits(60, 120, 1, 1))
    assert len([outcome for outcome in smaller.tests.values() if outcome.outcome != "skipped"]) == 1
    assert smaller.tests.items() < found.tests.items()  # of a larger sample that is on record
    only = tmp_path / "only.jsonl"
    run_file(path, environment, only, Limits(60, 120, 1, 1), ["T::test_good", "T::test_wrong"])
    assert {name: entry["outcome"] for name, entry in read_record(only).items()} == {
        "T::test_good": "passed", "T::test_wrong": "failed",
    }  # fmt: skip


def test_the_command_needs_a_folder_with_the_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "conformance.run", "--jax-tests", str(tmp_path), "--files", "array"],
        capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 2 and "there is no array_test.py" in done.stderr
