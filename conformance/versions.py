"""Command line: the tests on which a release of jax or Python could tell, in environments made for that.

``python -m conformance.versions`` makes an environment for each of the given Pythons and releases of jax, with what the
package itself needs and the test tools, and runs a chosen part of the tests in each; then the two ends of the range
against each other, as controller and cluster.  pip's own settings say which index is asked.
"""

import dataclasses
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
OLDEST = "0.11.0"
TEST_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.120", "setuptools>=77.0.3")
TESTS = (
    "tests/protocol", "tests/worker", "tests/e2e/test_protocol_requests.py", "tests/e2e/test_protocol_devices.py",
    "tests/e2e/test_protocol_callbacks.py", "tests/e2e/test_protocol_profiler.py", "tests/e2e/test_protocol_bytes.py",
    "tests/e2e/test_e2e_losses.py",
)  # fmt: skip
MIXED_TESTS = "tests/e2e/test_versions.py"
OTHER_VARIABLE = "RIDGEWAY_OTHER_PYTHON"
INSTALL_SECONDS = 1800.0
TEST_SECONDS = 3600.0

COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")
VERDICT = re.compile(r"^VERSIONS (.*)$", re.MULTILINE)


@dataclasses.dataclass
class Environment:
    """One that was made."""

    python: str
    """of the environment"""
    python_version: str
    jax: str
    jaxlib: str

    @property
    def title(self) -> str:
        """As the table calls it."""
        return f"Python {self.python_version}, jax {self.jax}, jaxlib {self.jaxlib}"


@dataclasses.dataclass
class Outcome:
    """Of one run of tests."""

    counts: dict[str, int]
    seconds: float
    failed: list[str]
    output: str


def requirements(jax: str) -> list[str]:
    """What the package needs, with a release of jax chosen; empty text: the newest of the declared range."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    chosen = [d for d in declared if not jax or not re.match(r"jax(lib)?\b", d)]
    return [*chosen, *([f"jax=={jax}", f"jaxlib=={jax}"] if jax else []), *TEST_TOOLS]


def make(python: str, jax: str, folder: Path, log: Path) -> Environment:
    """An environment in a folder; one that is there already is used as it is."""
    inside = folder / "bin" / "python"
    if not (folder / "complete").exists():
        with log.open("a") as output:
            subprocess.run([python, "-m", "venv", str(folder)], check=True, stdout=output, stderr=output)
            command = [str(inside), "-m", "pip", "install", "--quiet", *requirements(jax)]
            subprocess.run(command, check=True, stdout=output, stderr=output, timeout=INSTALL_SECONDS)
        (folder / "complete").touch()
    ask = (
        "import platform, importlib.metadata as m;"
        "print(platform.python_version(), m.version('jax'), m.version('jaxlib'))"
    )
    found = subprocess.run([str(inside), "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    return Environment(str(inside), *found)


def run_tests(environment: Environment, tests: tuple[str, ...], log: Path, **variables: str) -> Outcome:
    """Run tests in an environment, without those that need MaxText's extra."""
    command = [
        environment.python, "-m", "pytest", "-q", "-rA", "-m", "not maxtext", "-p", "no:cacheprovider", *tests,
    ]  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True, text=True, timeout=TEST_SECONDS, check=False,
    )  # fmt: skip
    with log.open("a") as output:
        output.write(f"==== {environment.title}: {' '.join(tests)}\n{done.stdout}\n{done.stderr}\n")
    summary = next((line for line in reversed(done.stdout.splitlines()) if COUNTS.search(line)), "")
    counts = {name.rstrip("s") if name.startswith("error") else name: int(n) for n, name in COUNTS.findall(summary)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) and not failed:
        failed = [f"pytest ended with {done.returncode}"]
    return Outcome(counts, time.monotonic() - started, failed, done.stdout)


def _mixed_row(cluster: Environment, controller: Environment, outcome: Outcome) -> str:
    verdict = VERDICT.search(outcome.output)
    said = verdict[1].replace("|", "\\|")[:300] if verdict else "?"
    worker = "refused, both versions named" if not outcome.failed else "failed: " + ", ".join(outcome.failed)
    return f"| {cluster.title} | {controller.title} | {said} | {worker} |"


@click.command(context_settings={"show_default": True})
@click.option("--jax", "releases", multiple=True, default=(OLDEST, ""), help="A release (repeatable); empty: newest.")
@click.option("--python", "pythons", multiple=True, default=("python3.12", "python3.13"), help="A Python (repeatable).")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path("build/versions"))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Where the table goes.")
@click.option("--tests", default=" ".join(TESTS), help="What is run in each, with spaces.")
def main(releases: tuple[str, ...], pythons: tuple[str, ...], work: Path, output: Path | None, tests: str) -> None:
    """Run a chosen part of the tests with the ends of the supported range of jax, and on each Python."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    log = work / "log.txt"
    failed = False
    rows, mixed = [], []
    for python in pythons:
        made = []
        for release in releases:
            name = f"{Path(python).name}-jax-{release or 'newest'}"
            click.echo(f"{name}: environment", err=True)
            made.append(make(python, release, work / name, log))
        for environment in made:
            click.echo(f"{environment.title}: tests", err=True)
            outcome = run_tests(environment, tuple(tests.split()), log)
            failed = failed or bool(outcome.failed)
            counts = ", ".join(f"{count} {name}" for name, count in outcome.counts.items() if name != "deselected")
            rows.append(
                f"| {environment.python_version} | {environment.jax} | {environment.jaxlib} | {counts} | "
                f"{outcome.seconds:.0f} | {', '.join(f'`{name}`' for name in outcome.failed) or 'none'} |"
            )
        for cluster in made:
            for controller in made:
                if controller.jaxlib != cluster.jaxlib:
                    click.echo(f"{controller.title} on {cluster.title}", err=True)
                    outcome = run_tests(cluster, ("-s", MIXED_TESTS), log, **{OTHER_VARIABLE: controller.python})
                    failed = failed or bool(outcome.failed)
                    mixed.append(_mixed_row(cluster, controller, outcome))
    command = " ".join(["python -m conformance.versions", *(f"--jax '{release}'" for release in releases)])
    text = "\n".join([
        "# Releases of jax and Python", "",
        f"Written by `make versions` (`{command}`), {os.cpu_count()} CPUs. Each environment was made for this, with "
        "what `pyproject.toml` declares and no more, so the tests that need MaxText's extra are left out. Run in each: "
        + ", ".join(f"`{name}`" for name in tests.split()) + ".", "",
        "| Python | jax | jaxlib | tests | seconds | failed |", "|---|---|---|---|---:|---|", *rows, "",
        "## Controllers and workers of another release", "",
        "| cluster | the other | as controller | as worker |", "|---|---|---|---|", *mixed, "",
    ])  # fmt: skip
    if output is None:
        click.echo(text)
    else:
        output.write_text(text)
        click.echo(f"written to {output}", err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
