"""Command line: run JAX's test files natively and through clusters, and write the table."""

import contextlib
import importlib.metadata
import os
import signal
import sys
import tempfile
from pathlib import Path

import click

from conformance.cluster import Cluster, cluster
from conformance.report import ClusterRun, FileResult, render
from conformance.suites import FileRun, Limits, run_file

NATIVE_DEVICES = 8
MEMORY_GROWTH_NOTED_BYTES = 256 << 20

DEFAULT_FILES = (
    "array", "api", "pjit", "pmap", "shard_map", "multi_device", "memories", "layout", "aot", "export", "jax_jit",
    "random", "lax", "lax_numpy", "lax_control_flow", "python_callback", "debugging_primitives", "debug_nans",
    "checkify", "state", "mutable_array", "dtypes", "fft", "linalg", "garbage_collection_guard", "transfer_guard",
    "colocated_python", "string_array", "profiler", "pickle", "xla_bridge", "compilation_cache",
)  # fmt: skip


def _record(folder: Path, kind: str, name: str) -> Path:
    target = folder / kind
    target.mkdir(parents=True, exist_ok=True)
    return target / f"{name}.jsonl"


def _native(path: Path, folder: Path, limits: Limits) -> FileRun:
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={NATIVE_DEVICES}",
        "JAX_BACKEND_TARGET": "",
    }
    return run_file(path, environment, _record(folder, "native", path.stem), limits)


def _through(path: Path, made: Cluster, folder: Path, limits: Limits) -> ClusterRun:
    before, memory_before = made.executors(), made.memory_bytes()
    found = run_file(path, made.environment, _record(folder, made.topology, path.stem), limits)
    sessions = made.settle()
    notes = [f"session {s['session']} with {s['arrays']} arrays" for s in sessions]
    replaced = [place for place, pid in made.executors().items() if before.get(place) != pid]
    notes += [f"executor of {place} was replaced" for place in replaced]
    growth = made.memory_bytes() - memory_before
    if growth > MEMORY_GROWTH_NOTED_BYTES:
        notes.append(f"executors grew by {growth >> 20} MiB")
    return ClusterRun(found, ", ".join(notes))


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.command(context_settings={"show_default": True})
@click.option(
    "--jax-tests",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="The folder with JAX's test files, of the version that is installed.",
)
@click.option("--files", default=",".join(DEFAULT_FILES), help="Test files, without _test.py, with commas.")
@click.option("--topology", "topologies", multiple=True, default=("1x1x8",), help="A cluster to use (repeatable).")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Where the table goes.")
@click.option(
    "--records",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Keep every test's outcome here; a later run with the same folder runs only what is missing.",
)
@click.option(
    "--sample", type=click.IntRange(min=0), default=0, help="At most so many tests of a file, always the same; 0: all."
)
@click.option("--cases", type=click.IntRange(min=1), default=5, help="Generated cases of a parameterized test.")
@click.option("--test-seconds", type=float, default=300.0, help="Deadline of one test.")
@click.option("--file-seconds", type=float, default=3600.0, help="Deadline of one file.")
@click.option("--about-tests", default="", help="A sentence for the table: what the tests are, if of another version.")
@click.option("--select", default="", help="As pytest's -k.")
def main(
    jax_tests: Path, files: str, topologies: tuple[str, ...], output: Path | None, records: Path | None, sample: int,
    cases: int, test_seconds: float, file_seconds: float, about_tests: str, select: str,
) -> None:  # fmt: skip
    """Run JAX's own tests natively, with 8 CPU devices, and through Ridgeway."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the cluster goes down with this
    limits = Limits(test_seconds, file_seconds, sample, cases, select)
    paths = [jax_tests.resolve() / f"{name}_test.py" for name in files.split(",") if name]
    for path in paths:
        if not path.exists():
            raise click.UsageError(f"there is no {path.name} in {jax_tests}")
    with contextlib.ExitStack() as stack:
        folder = records or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conformance-")))
        results = [FileResult(path.stem, _native(path, folder, limits), {}) for path in _told(paths, "natively")]
        for topology in topologies:
            with cluster(topology) as made:
                for path, result in zip(_told(paths, f"through {topology}"), results, strict=True):
                    result.through[topology] = _through(path, made, folder, limits)
    text = render(results, list(topologies), _about(limits, about_tests))
    if output is None:
        click.echo(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
        _say(f"written to {output}")


def _told(paths: list[Path], how: str):
    for path in paths:
        _say(f"{path.stem} {how}")
        yield path


def _about(limits: Limits, about_tests: str) -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    cut = f"at most {limits.sample} tests of each file" if limits.sample else "all tests of each file"
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        f"Written by `make conformance`: {versions}, Python {python}, {os.cpu_count()} CPUs; {cut}, {limits.cases} "
        f"generated cases, {NATIVE_DEVICES} devices natively. A test counts if it passes natively. «Excused» are the "
        "kinds of difference that `conformance/excuses.py` names; «other» are differences that ought not to be. "
        "A program that names the backend 'cpu' gets the controller's own CPU beside the cluster.",
        *([] if not about_tests else ["", about_tests]),
    ]


if __name__ == "__main__":
    main()
