"""Running one of JAX's test files to its end, over crashes and hangs."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from conformance.recorder import collected_path, rank, read_record

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
    collected: int = 0
    """tests that the file has in all; 0: not known"""

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


def run_sample(path: Path, environment: Mapping[str, str], record: Path, limits: Limits) -> FileRun:
    """As `run_file`, with as many tests as it takes to have ``limits.sample`` that are not skipped, and no more."""
    found = run_file(path, environment, record, limits)
    asked = limits.sample
    while limits.sample and not found.problem and len(found.tests) >= asked:
        missing = limits.sample - (len(found.tests) - found.count("skipped"))
        if missing <= 0:
            break
        asked = len(found.tests) + missing
        found = run_file(path, environment, record, dataclasses.replace(limits, sample=asked))
    return _cut(found, limits.sample) if limits.sample else found


def _cut(run: FileRun, sample: int) -> FileRun:
    """What of a record belongs to the sample, if an earlier run took a larger one."""
    kept: dict[str, Outcome] = {}
    left = sample
    for name in sorted(run.tests, key=rank):
        if not left:
            break
        kept[name] = run.tests[name]
        left -= run.tests[name].outcome != "skipped"
    return dataclasses.replace(run, tests=kept)


def is_complete(record: Path, limits: Limits, only: Collection[str] | None = None) -> bool:
    """Whether a record has all outcomes already."""
    known = {name for name, entry in read_record(record).items() if entry["outcome"] != "unfinished"}
    if only is not None:
        return set(only) <= known
    collected = _collected(record)
    return 0 < min(limits.sample or collected, collected) <= len(known) and not limits.select


def run_file(
    path: Path, environment: Mapping[str, str], record: Path, limits: Limits, only: Collection[str] | None = None
) -> FileRun:
    """Run a test file (or ``only`` some tests of it), again after each crash or hang without what is done."""
    if is_complete(record, limits, only):
        return recorded(record)
    chosen = None
    if only is not None:
        chosen = record.with_suffix(".only")
        chosen.write_text("\n".join(sorted(only)))
    _forget_unfinished(record)
    started = time.monotonic()
    problem = ""
    for _ in range(MAXIMUM_RESTARTS):
        left = limits.file_seconds - (time.monotonic() - started)
        if left <= 0:
            problem = f"not finished within {limits.file_seconds:.0f} s"
            break
        before = len(read_record(record))
        code, output = _run_once(path, environment, record, limits, left, chosen)
        interrupted = _settle_unfinished(record, code)
        after = len(read_record(record))
        if code in (0, 1, 5) and not interrupted:  # pytest's: all passed, some failed, nothing (left) to run
            break
        if after == before:
            problem = f"pytest ended with {code}: {_last_line(output)}"
            break
    else:
        problem = f"gave up after {MAXIMUM_RESTARTS} crashes or hangs"
    return recorded(record, time.monotonic() - started, problem)


def recorded(record: Path, seconds: float = 0.0, problem: str = "") -> FileRun:
    """What a record says, without running anything."""
    tests = {
        name: Outcome(entry["outcome"], entry["reason"], entry.get("seconds", 0.0))
        for name, entry in read_record(record).items()
    }
    return FileRun(tests, seconds, problem, _collected(record))


def _collected(record: Path) -> int:
    path = collected_path(record)
    return int(path.read_text()) if path.exists() else 0


def _run_once(
    path: Path, environment: Mapping[str, str], record: Path, limits: Limits, seconds: float, only: Path | None
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
        "CONFORMANCE_RECORD": str(record), "CONFORMANCE_SAMPLE": str(0 if only else limits.sample),
        "CONFORMANCE_ONLY": str(only or ""),
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


def _forget_unfinished(record: Path) -> None:
    """What an earlier run was in when it was interrupted is run again."""
    found = read_record(record).values()
    if any(entry["outcome"] == "unfinished" for entry in found):
        kept = [json.dumps(entry) + "\n" for entry in found if entry["outcome"] != "unfinished"]
        record.write_text("".join(kept))


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
