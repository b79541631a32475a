"""What `make versions` does around the tests: finding Pythons, saying what is wrong with pip, the table."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from conformance import versions
from conformance.versions import Environment, Outcome, Report

THIS = "{}.{}".format(*sys.version_info)


def test_a_python_is_found_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "no-such-program")  # for make, not for this
    found = versions.find_python(THIS)
    assert found is not None
    said = subprocess.run([found, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
    assert said.stdout.split() == THIS.split(".")
    assert versions.find_python("3.99") is None
    assert versions.find_python("some/python3.12") == "some/python3.12"


def test_an_index_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.txt"
    for name, value in (
        ("PIP_CONFIG_FILE", "/dev/null"), ("PIP_RETRIES", "1"), ("PIP_EXTRA_INDEX_URL", ""), ("PIP_FIND_LINKS", ""),
        ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"), ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(tmp_path), "jax==0.11.0"]
    with pytest.raises(click.ClickException) as caught:
        versions._run_logged("oldest", command, log)
    text = caught.value.message
    assert "no environment oldest" in text and "index could not be reached" in text and str(log) in text
    assert "jax==0.11.0" in log.read_text()


def environment(python: str, jax: str) -> Environment:
    return Environment(f"/{python}/{jax}", python, jax, jax)


def test_each_cluster_meets_each_other_release() -> None:
    made = [environment(python, jax) for python in ("3.12.1", "3.13.0") for jax in ("0.11.0", "0.12.0")]
    pairs = list(versions._pairs(made, oldest_and_newest=True))
    assert len(pairs) == 8 and all(a.jaxlib != b.jaxlib for a, b in pairs)
    assert len(list(versions._pairs(made, oldest_and_newest=False))) == 4


def test_a_failure_is_in_the_table_and_in_the_verdict() -> None:
    report = Report(("tests/protocol",))
    oldest, newest = environment("3.12.1", "0.11.0"), environment("3.13.0", "0.12.0")
    report.add(oldest, Outcome({"passed": 7, "deselected": 2}, 3.2, [], ""))
    report.add_mixed(newest, oldest, Outcome({"passed": 4}, 1.0, [], ""), "works")
    assert not report.failed
    assert "| 3.12.1 | 0.11.0 | 0.11.0 | 7 passed | 3 | none |" in report.text("make")
    assert "| works | refused, both versions named |" in report.text("make")
    report.add(newest, Outcome({"failed": 1}, 3.2, ["tests/protocol::test"], ""))
    assert report.failed and "`tests/protocol::test`" in report.text("make")
