"""Command line: the tests on which a release of jax or Python could tell, in environments made for that.

``python -m conformance.versions`` makes an environment for each of the given Pythons and releases of jax, with Ridgeway
as pip installs it and the test tools, and runs a chosen part of the tests in each; then the environments against each
other, as controller and cluster.  ``--smoke`` is what continuous integration has time for: the oldest release alone, on
the newest Python there is, few tests, and against the environment that runs this.  pip's own settings say which index
is asked.
"""

import dataclasses
import hashlib
import itertools
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
OLDEST = "0.11.0"
PYTHONS = ("3.12", "3.13")
TEST_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.120", "setuptools>=77.0.3")
TESTS = (
    "tests/protocol", "tests/worker/test_device_runtime.py", "tests/worker/test_worker_python_devices.py",
    "tests/e2e/test_protocol_requests.py", "tests/e2e/test_protocol_callbacks.py",
    "tests/e2e/test_protocol_profiler.py", "tests/e2e/test_e2e_losses.py",
)  # fmt: skip
SMOKE_TESTS = (
    "tests/protocol/test_protocol_descriptors.py", "tests/protocol/test_protocol_stock_client.py",
    "tests/worker/test_device_runtime.py",
    "tests/e2e/test_protocol_profiler.py::test_one_trace_shows_controller_proxy_and_workers",
    "tests/e2e/test_protocol_requests.py",
)  # fmt: skip
MIXED_TESTS = "tests/e2e/test_versions.py"
OTHER_VARIABLE = "RIDGEWAY_OTHER_PYTHON"
INSTALL_SECONDS = 900.0
ELSEWHERE = (
    "PYTHONHOME", "PYTHONPATH", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV",
)  # fmt: skip
TEST_SECONDS = 3600.0
SHOWN_LINES = 15

COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")
VERDICT = re.compile(r"\bVERSIONS (works|refused: .*)")
UNREACHABLE = re.compile(
    r"connection (?:broken|error|refused|reset)|name resolution|timed out|max retries|network is unreachable", re.I
)
NOT_THERE = re.compile(r"no matching distribution", re.I)


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


def find_python(version: str) -> str | None:
    """The path of a Python: as `make setup` finds one of a version («3.13»), or the given path of a program."""
    if not re.fullmatch(r"3\.\d+", version):
        return version
    script = '. "$0"/find_python.sh && find_python "$1" && printf %s "$PYTHON_FOUND"'
    # A PYTHON that is set, for make, would be taken instead.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    found = subprocess.run(
        ["bash", "-c", script, str(ROOT / "scripts"), version], env=environment, capture_output=True, text=True
    )
    return found.stdout or None


def _for_pip() -> dict[str, str]:
    """As `scripts/setup.sh`: without what would send an installation elsewhere."""
    return {name: value for name, value in os.environ.items() if name not in ELSEWHERE}


def describe(python: str) -> Environment:
    """What an environment has."""
    ask = (
        "import platform, importlib.metadata as m;"
        "print(platform.python_version(), m.version('jax'), m.version('jaxlib'))"
    )
    found = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    return Environment(python, *found)


def make(python: str, jax: str, folder: Path, log: Path) -> Environment:
    """An environment in a folder, with a release of jax (empty text: the newest of the declared range); one that is
    there already is used as it is, unless what the project declares has changed.

    Raises:
      click.ClickException: it cannot be made; says why and what to do.
    """
    inside = folder / "bin" / "python"
    wanted = [*([f"jax=={jax}", f"jaxlib=={jax}"] if jax else []), *TEST_TOOLS, "--editable", str(ROOT)]
    declared = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    key = f"{declared.hexdigest()} {' '.join(wanted)}\n"
    complete = folder / "complete"
    if not complete.exists() or complete.read_text() != key:
        _run_logged(folder.name, [python, "-m", "venv", "--clear", str(folder)], log)
        _run_logged(folder.name, [str(inside), "-m", "pip", "install", "--progress-bar=off", *wanted], log)
        _run_logged(folder.name, [str(inside), "-m", "pip", "check"], log)
        complete.write_text(key)
    return describe(str(inside))


def _run_logged(name: str, command: list[str], log: Path) -> None:
    problem, output = "", ""
    try:
        done = subprocess.run(
            command, env=_for_pip(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=INSTALL_SECONDS, check=False,
        )  # fmt: skip
        output = done.stdout
        if done.returncode:
            problem = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        problem = f"nothing after {INSTALL_SECONDS:.0f} s"
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{output}\n")
    if problem:
        shown = "\n".join(f"    {line}" for line in output.splitlines()[-SHOWN_LINES:])
        what = f"no environment {name}: {' '.join(command[2:4])} ended with {problem}"
        raise click.ClickException(f"{what}; {advice(output)} Its end, the rest is in {log}:\n{shown}")


def advice(output: str) -> str:
    """What to do about a failure of pip, from what it said."""
    if UNREACHABLE.search(output):
        return "the package index could not be reached: check the network, or pip's settings (pip config list)."
    if NOT_THERE.search(output):
        return "the package index that pip's settings name (pip config list) does not have it, or was not reached."
    return "see what it said."


def run_tests(environment: Environment, tests: Iterable[str], log: Path, **variables: str) -> Outcome:
    """Run tests in an environment, without those that need MaxText's extra."""
    command = [
        environment.python, "-m", "pytest", "-v", "-rA", "-m", "not maxtext", "-p", "no:cacheprovider", *tests,
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
    if done.returncode and not failed:
        failed = [f"pytest ended with {done.returncode}"]
    return Outcome(counts, time.monotonic() - started, failed, done.stdout + done.stderr)


def _counts(outcome: Outcome) -> str:
    return ", ".join(f"{count} {name}" for name, count in outcome.counts.items() if name != "deselected")


def run_mixed(cluster: Environment, controller: Environment, log: Path) -> tuple[Outcome, str]:
    """A controller and a worker of one environment on the cluster of another; and what became of the controller."""
    outcome = run_tests(cluster, ("-s", MIXED_TESTS), log, **{OTHER_VARIABLE: controller.python})
    if not outcome.failed and not outcome.counts.get("passed"):
        outcome.failed = ["no test ran"]
    verdict = VERDICT.search(outcome.output)
    return outcome, verdict[1] if verdict else "?"


def _pairs(made: Sequence[Environment], oldest_and_newest: bool) -> Iterator[tuple[Environment, Environment]]:
    """Cluster and controller, of different releases: with one Python first, then the two ends across Pythons."""
    pairs = itertools.permutations(made, 2)
    for cluster, controller in sorted(pairs, key=lambda pair: pair[0].python_version != pair[1].python_version):
        if controller.jaxlib == cluster.jaxlib:
            continue
        if controller.python_version == cluster.python_version or oldest_and_newest:
            yield cluster, controller


@dataclasses.dataclass
class Report:
    """What the table says."""

    tests: tuple[str, ...]
    rows: list[str] = dataclasses.field(default_factory=list)
    mixed: list[str] = dataclasses.field(default_factory=list)
    failed: bool = False

    def add(self, environment: Environment, outcome: Outcome) -> None:
        """One environment's own tests."""
        self.failed = self.failed or bool(outcome.failed)
        self.rows.append(
            f"| {environment.python_version} | {environment.jax} | {environment.jaxlib} | {_counts(outcome)} | "
            f"{outcome.seconds:.0f} | {', '.join(f'`{name}`' for name in outcome.failed) or 'none'} |"
        )

    def add_mixed(self, cluster: Environment, controller: Environment, outcome: Outcome, verdict: str) -> None:
        """Two environments."""
        self.failed = self.failed or bool(outcome.failed)
        said = verdict.replace("|", "\\|")[:300]
        worker = "refused, both versions named" if not outcome.failed else "failed: " + ", ".join(outcome.failed)
        self.mixed.append(f"| {cluster.title} | {controller.title} | {said} | {worker} |")

    def text(self, command: str) -> str:
        """All of it."""
        return "\n".join([
            "# Releases of jax and Python", "",
            f"Written by `{command}`, {platform.system()}, {os.cpu_count()} CPUs. Each environment was made for this "
            "by `pip install` of this project with the release of jax, so the tests that need MaxText's extra are "
            f"left out. Run in each: {', '.join(f'`{name}`' for name in self.tests)}.", "",
            "| Python | jax | jaxlib | tests | seconds | failed |", "|---|---|---|---|---:|---|", *self.rows, "",
            *([] if not self.mixed else [
                "## Controllers and workers of another release", "",
                f"`{MIXED_TESTS}`: a program of the other environment uses the cluster, a worker of it wants to join.",
                "",
                "| cluster | the other | as controller | as worker |", "|---|---|---|---|", *self.mixed, "",
            ]),
        ])  # fmt: skip


def _tell_failures(outcome: Outcome, what: str) -> None:
    if outcome.failed:
        click.echo(f"{outcome.output}\n{what}: FAILED {' '.join(outcome.failed)}", err=True)


def smoke(pythons: Sequence[str], work: Path, log: Path) -> bool:
    """The oldest release on the last of the Pythons that is there, alone and against this environment; whether all is
    well.

    Raises:
      click.ClickException: there is none, or no environment can be made.
    """
    found = [(version, python) for version in reversed(pythons) if (python := find_python(version)) is not None]
    if not found:
        raise click.ClickException(f"no Python {' or '.join(pythons)} was found; install one, or name one by --python")
    version, python = found[0]
    started = time.monotonic()
    oldest = make(python, OLDEST, work / f"python{version}-jax-{OLDEST}", log)
    click.echo(f"versions: {oldest.title}: made in {time.monotonic() - started:.0f} s")
    outcome = run_tests(oldest, SMOKE_TESTS, log)
    _tell_failures(outcome, oldest.title)
    click.echo(f"versions: {oldest.title}: {_counts(outcome)} in {outcome.seconds:.0f} s")
    here = describe(sys.executable)
    good = not outcome.failed
    for cluster, controller in itertools.permutations((here, oldest)):
        if cluster.jaxlib != controller.jaxlib:
            outcome, verdict = run_mixed(cluster, controller, log)
            what = f"{controller.title} on a cluster of {cluster.title}"
            _tell_failures(outcome, what)
            click.echo(f"versions: {what}: as controller: {verdict}; {_counts(outcome)} in {outcome.seconds:.0f} s")
            good = good and not outcome.failed
    return good


@click.command(context_settings={"show_default": True})
@click.option("--jax", "releases", multiple=True, default=(OLDEST, ""), help="A release (repeatable); empty: newest.")
@click.option("--python", "pythons", multiple=True, default=PYTHONS, help="A version, or a program (repeatable).")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=Path("build/versions"))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Where the table goes.")
@click.option("--tests", default=" ".join(TESTS), help="What is run in each, with spaces.")
@click.option("--mixed/--alone", default=True, help="Also each release as the controller of each other's cluster.")
@click.option("--smoke", "only_smoke", is_flag=True, help="Only the oldest release, on the last Python that is there.")
def main(
    releases: tuple[str, ...], pythons: tuple[str, ...], work: Path, output: Path | None, tests: str, mixed: bool,
    only_smoke: bool,
) -> None:
    """Run a chosen part of the tests with the ends of the supported range of jax, and on each Python."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    log = work / "log.txt"
    if only_smoke:
        sys.exit(0 if smoke(pythons, work, log) else 1)
    report = Report(tuple(tests.split()))
    made = []
    for version, release in itertools.product(pythons, releases):
        python = find_python(version)
        if python is None:
            raise click.ClickException(f"no Python {version} was found; install one, or leave it out by --python")
        name = f"python{version if python != version else Path(version).name}-jax-{release or 'newest'}"
        click.echo(f"{name}: environment", err=True)
        made.append(make(python, release, work / name, log))
    words = [*(f"--jax '{release}'" for release in releases), *(f"--python {Path(name).name}" for name in pythons)]
    if report.tests != TESTS:
        words.append(f"--tests '{tests}'")
    words += [] if mixed else ["--alone"]
    command = " ".join(["python -m conformance.versions", *words])

    def write(end: str = "") -> None:
        if output is not None:
            output.write_text(report.text(command) + end)

    unfinished = "\nUnfinished: this is what there was so far.\n"
    for environment in made:
        write(unfinished)
        click.echo(f"{environment.title}: tests", err=True)
        report.add(environment, outcome := run_tests(environment, report.tests, log))
        click.echo(f"{environment.title}: {_counts(outcome)} in {outcome.seconds:.0f} s", err=True)
    for cluster, controller in _pairs(made, oldest_and_newest=len(releases) == 2) if mixed else ():
        write(unfinished)
        click.echo(f"{controller.title} on {cluster.title}", err=True)
        report.add_mixed(cluster, controller, *run_mixed(cluster, controller, log))
    write()
    click.echo(report.text(command) if output is None else f"written to {output}", err=output is not None)
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
