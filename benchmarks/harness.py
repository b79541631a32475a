"""What the benchmarks share: a cluster for the time of a block, the data, the machine, results as JSON."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ridgeway.demo import dataset
from ridgeway.demo import job as jobs
from ridgeway.demo.demonstration import data_folder
from ridgeway.demo.training import TrainingError
from ridgeway.launch import checks
from ridgeway.launch.child_processes import kill_group, spawn, terminate, wait_all
from ridgeway.launch.cluster_folder import ClusterError
from ridgeway.launch.foreground import SIGNALS, until_signal
from ridgeway.launch.local import LaunchError, LocalCluster, LocalOptions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
#: More than the native runner takes to end its processes after SIGTERM.
STOP_SECONDS = 10.0
#: Characters of a table's line where the output is no terminal.
WIDTH = 110


class BenchmarkError(Exception):
    """The benchmark cannot go on; the message is one line."""


_ERRORS = (
    BenchmarkError, TrainingError, LaunchError, ClusterError, jobs.JobError, dataset.DatasetError, checks.CheckError,
)  # fmt: skip


class Say:
    """Progress on standard error, with the seconds since the start."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._started:7.1f} s  {text}", markup=False, soft_wrap=True)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a benchmark; Ctrl-C and SIGTERM end it in order, and a failure is one line.

    Raises:
        click.ClickException: it failed.
        SystemExit: a signal ended it.
    """

    async def until_done() -> int | None:
        signals: asyncio.Queue[int] = asyncio.Queue(maxsize=100)
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, lambda n=number: None if signals.full() else signals.put_nowait(n))
        return await until_signal(work(), signals)

    try:
        interrupted = asyncio.run(until_done())
    except _ERRORS as error:
        raise click.ClickException(str(error)) from None
    if interrupted is not None:
        sys.exit(128 + interrupted)


@contextlib.contextmanager
def work_folder(chosen: Path | None) -> Iterator[Path]:
    """A folder for logs and checkpoints: the one chosen, which stays, or a temporary one, which is removed when
    all went well."""
    if chosen is not None:
        if chosen.exists() and any(chosen.iterdir()):
            raise BenchmarkError(f"{chosen} is not empty; name another --work")
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.absolute()
        return
    made = Path(tempfile.mkdtemp(prefix="ridgeway-benchmark-"))
    try:
        yield made
    except BaseException:
        print(f"logs and checkpoints are left in {made}", file=sys.stderr)
        raise
    shutil.rmtree(made)


@contextlib.asynccontextmanager
async def cluster(
    name: str, shape: jobs.Shape, standbys: int, say: Callable[[str], None]
) -> AsyncIterator[LocalCluster]:
    """A cluster that is up in the block and down after it, with ports of its own and no limit of restarts."""
    topology = checks.make_topology(shape.slices, shape.hosts_per_slice, shape.devices_per_host)
    options = LocalOptions(
        name=name,
        topology=topology,
        standbys=standbys,
        max_slice_restarts=None,
        proxy_port=0,
        cluster_port=0,
        command=("benchmark", name),
    )
    made = LocalCluster(options, lambda text: say(f"cluster: {text}"))
    reason = "the benchmark did not get to its end"
    try:
        await made.start()
        yield made
        reason = "the benchmark is over"
    finally:
        await made.stop(reason)


async def output_of(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> str:
    """Standard output of a program that ends well; standard error goes to the log.

    Raises:
        BenchmarkError: it failed or took too long. It has ended, as when this is cancelled.
    """
    process = await spawn(command, environment, log, stdout_pipe=True)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        raise BenchmarkError(f"{command[-1]} took more than {seconds:g} s; see {log}") from None
    finally:
        terminate(process)
        await wait_all([process], STOP_SECONDS)
        kill_group(process)
        await wait_all([process], STOP_SECONDS)
    if process.returncode:
        raise BenchmarkError(f"{' '.join(command[:3])} ended with code {process.returncode}; see {log}")
    return output.decode()


async def native_job(options: jobs.Options, log: Path, seconds: float, *flags: str) -> dict[str, Any]:
    """The report of `ridgeway.demo.native`.

    Raises:
        BenchmarkError: it failed; the log says why.
    """
    command = [
        sys.executable, "-m", "ridgeway.demo.native",
        "--dataset", str(options.dataset),
        "--output", str(options.output / f"native-{options.run_name}"),
        "--steps", str(options.steps),
        "--checkpoint-period", str(options.checkpoint_period),
        *flags,
    ]  # fmt: skip
    return json.loads(await output_of(command, os.environ, log, seconds))


async def prepared_data(say: Callable[[str], None]) -> Path:
    """The demonstration's data set."""
    made = await asyncio.to_thread(dataset.build, data_folder(None))
    say(f"data set in {made.directory}")
    return made.directory


def machine() -> dict[str, Any]:
    """Where a result was measured."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass  # Not Linux.
    packages = ("jax", "jaxlib", "maxtext", "pathwaysutils", "orbax-checkpoint", "grpcio")
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, extremes and all values (seconds), rounded to so many digits."""
    if not values:
        return {"count": 0, "median": None, "minimum": None, "maximum": None, "all": []}
    return {
        "count": len(values),
        "median": round(statistics.median(values), digits),
        "minimum": round(min(values), digits),
        "maximum": round(max(values), digits),
        "all": [round(value, digits) for value in values],
    }


def write(result: dict[str, Any], output: Path) -> None:
    """The result as JSON.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise BenchmarkError(f"cannot write {output}: {error.strerror or error}") from None


def console() -> Console:
    """Standard output, wide enough for the tables also where it is a file."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=WIDTH)


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table."""
    return "–" if value is None else f"{value:.{digits}f}"
