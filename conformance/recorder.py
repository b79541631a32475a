"""A pytest plugin that writes each test's outcome at once, so that a crash or a hang loses only the test it is in.

Loaded with ``-p conformance.recorder``.  Environment: ``CONFORMANCE_RECORD`` names the file that JSON lines are
appended to; ``CONFORMANCE_SAMPLE``, a count, keeps so many tests, the same ones in every run; ``CONFORMANCE_ONLY``
names a file with the tests to keep, one a line; tests that the record already has an outcome of, or has seen start,
are not run again.
"""

import hashlib
import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REASON_LIMIT = 600
"""Characters of a failure's text that are kept."""


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    """Test -> its last line in a record; a test that only started has the outcome ``unfinished``."""
    found: dict[str, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the process died while it wrote this line
            found[entry["test"]] = entry
    return found


def rank(test: str) -> bytes:
    """By which samples are taken: a small one is the beginning of a large one."""
    return hashlib.sha256(test.rpartition("::")[2].encode()).digest()


def collected_path(record: Path) -> Path:
    """Where it stands how many tests the file of a record has in all."""
    return record.with_suffix(".collected")


class Recorder:
    """Hooks of one pytest process."""

    def __init__(self, path: Path, sample: int, only: frozenset[str] | None):
        self._path = path
        self._sample = sample
        self._only = only
        self._known = read_record(path)
        self._reports: dict[str, dict[str, Any]] = {}

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        collected_path(self._path).write_text(str(len(items)))
        chosen = [item for item in items if self._only is None or _name(item.nodeid) in self._only]
        if self._sample and len(chosen) > self._sample:
            ranked = sorted(chosen, key=lambda item: rank(_name(item.nodeid)))
            kept = set(ranked[: self._sample])
            chosen = [item for item in chosen if item in kept]
        items[:] = [item for item in chosen if _name(item.nodeid) not in self._known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"test": _name(nodeid), "outcome": "unfinished", "reason": ""})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _name(report.nodeid)
        entry = self._reports.setdefault(name, {"test": name, "outcome": "passed", "reason": "", "seconds": 0.0})
        entry["seconds"] += report.duration
        if report.failed:
            entry["outcome"] = "failed"
            entry["reason"] = _reason(report)
        elif report.skipped and entry["outcome"] == "passed":
            entry["outcome"] = "skipped"
            entry["reason"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if report.when == "teardown":
            entry["seconds"] = round(entry["seconds"], 3)
            entry["reason"] = entry["reason"][:REASON_LIMIT]
            self._write(self._reports.pop(name))


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2] or nodeid


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{crash.message} ({Path(crash.path).name}:{crash.lineno})"
    return str(report.longrepr)


class _HelpersOfTests(importlib.abc.MetaPathFinder):
    """Test helpers that jax's source tree has and its wheel has not (``jax._src.hypothesis_test_util``, which
    state_test needs), from the tree that the tests are in.  Last in `sys.meta_path`: what is installed comes first."""

    def __init__(self, tree: Path):
        self._tree = tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system."""
        file = self._tree / f"{fullname.replace('.', '/')}.py"
        if fullname.startswith("jax._src.") and fullname.endswith("_test_util") and file.exists():
            return importlib.util.spec_from_file_location(fullname, file)
        return None


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder if the environment asks for one."""
    path = os.environ.get("CONFORMANCE_RECORD")
    if path:
        sys.meta_path.append(_HelpersOfTests(config.rootpath.parent))
        only = os.environ.get("CONFORMANCE_ONLY")
        names = frozenset(Path(only).read_text().splitlines()) if only else None
        config.pluginmanager.register(Recorder(Path(path), int(os.environ.get("CONFORMANCE_SAMPLE", "0")), names))
