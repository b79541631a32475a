"""Running one of JAX's test files to its end, over crashes and hangs."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from conformance.recorder import read_record

KILL_GRACE_SECONDS = 10.0
MAXIMUM_RESTARTS = 40
"""So many crashes or hangs of one file are enough to know."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How one test ended: ``passed``, ``failed``, ``skipped``, ``crashed`` (the process ended in it) or ``hung``."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class FileRun:
    """One file in one environment."""

    tests: dict[str, Outcome]
    seconds: float
    problem: str = ""
    """why the file as a whole could not be run, or was not run to its end"""

    def count(self, outcome: str) -> int:
        """Tests that ended so."""
        return sum(test.outcome == outcome for test in self.tests.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one file."""

    test_seconds: float
    file_seconds: float
    sample: int
    cases: int
    select: str = ""


def run_file(path: Path, environment: Mapping[str, str], record: Path, limits: Limits) -> FileRun:
    """Run a test file, again after each crash or hang without the tests that are done."""
    started = time.monotonic()
    problem = ""
    for _ in range(MAXIMUM_RESTARTS):
        left = limits.file_seconds - (time.monotonic() - started)
        if left <= 0:
            problem = f"not finished within {limits.file_seconds:.0f} s"
            break
        before = len(read_record(record))
        code, output = _run_once(path, environment, record, limits, left)
        interrupted = _settle_unfinished(record, code)
        after = len(read_record(record))
        if code in (0, 1, 5) and not interrupted:  # pytest's: all passed, some failed, nothing (left) to run
            break
        if after == before:
            problem = f"pytest ended with {code}: {_last_line(output)}"
            break
    else:
        problem = f"gave up after {MAXIMUM_RESTARTS} crashes or hangs"
    tests = {
        name: Outcome(entry["outcome"], entry["reason"], entry.get("seconds", 0.0))
        for name, entry in read_record(record).items()
    }
    return FileRun(tests, time.monotonic() - started, problem)


def _run_once(
    path: Path, environment: Mapping[str, str], record: Path, limits: Limits, seconds: float
) -> tuple[int | None, str]:
    """One pytest process; returns its exit code, None if it had to be killed, and its output."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "conformance.recorder", "-p", "no:cacheprovider", "-o", "addopts=",
        "--rootdir", str(path.parent), "--timeout", str(limits.test_seconds), "--timeout-method", "thread",
        "--tb", "short", "-W", "ignore", str(path),
    ]  # fmt: skip
    if limits.select:
        command += ["-k", limits.select]
    child_environment = {
        **os.environ, **environment,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        "CONFORMANCE_RECORD": str(record), "CONFORMANCE_SAMPLE": str(limits.sample),
        "JAX_NUM_GENERATED_CASES": str(limits.cases), "JAX_SKIP_SLOW_TESTS": "1", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    log = record.with_suffix(".log")
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=path.parent, env=child_environment, stdout=file, stderr=file)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(KILL_GRACE_SECONDS)
    return code, log.read_text(errors="replace")


def _settle_unfinished(record: Path, code: int | None) -> bool:
    """What the process was in when it ended has crashed, or hung; whether there is such a test."""
    interrupted = False
    for name, entry in read_record(record).items():
        if entry["outcome"] == "unfinished":
            hung = code is None or code == 1
            reason = "no end within its time" if hung else f"the process ended with {code}"
            settled = {"test": name, "outcome": "hung" if hung else "crashed", "reason": reason}
            with record.open("a") as file:
                file.write(json.dumps(settled) + "\n")
            interrupted = True
    return interrupted


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(no output)"
