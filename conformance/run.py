"""Command line: run JAX's test files natively and through clusters, and write the table."""

import contextlib
import dataclasses
import importlib.metadata
import os
import signal
import sys
import tempfile
from pathlib import Path

import click

from conformance.cluster import Cluster, cluster
from conformance.report import ClusterRun, FileResult, render
from conformance.suites import FileRun, Limits, is_complete, recorded, run_file, run_sample

NATIVE_DEVICES = 8
MEMORY_GROWTH_NOTED_BYTES = 256 << 20
AS_ONE_SLICE = ("--set", "slices_shown=one")

DEFAULT_FILES = (
    "array", "api", "pjit", "pmap", "shard_map", "multi_device", "memories", "layout", "aot", "export", "jax_jit",
    "random", "lax", "lax_numpy", "lax_control_flow", "python_callback", "debugging_primitives", "debug_nans",
    "checkify", "state", "mutable_array", "dtypes", "fft", "linalg", "garbage_collection_guard", "transfer_guard",
    "colocated_python", "string_array", "profiler", "pickle", "xla_bridge", "compilation_cache",
)  # fmt: skip


PROTOCOL_FILES = frozenset({
    "array", "api", "pjit", "shard_map", "pmap", "multi_device", "python_callback", "memories", "layout", "aot",
    "export", "mutable_array", "debugging_primitives",
})  # fmt: skip
"""Those that exercise the protocol most; `--protocol-sample` is about them."""


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A test file and how much of it is run."""

    path: Path
    limits: Limits


def _record(folder: Path, kind: str, name: str) -> Path:
    target = folder / kind
    target.mkdir(parents=True, exist_ok=True)
    return target / f"{name}.jsonl"


def _native(file: File, folder: Path) -> FileRun:
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={NATIVE_DEVICES}",
        "JAX_BACKEND_TARGET": "",
    }
    return run_sample(file.path, environment, _record(folder, "native", file.path.stem), file.limits)


def _through_all(
    files: list[File], tests: list[list[str]], topology: str, options: tuple[str, ...], folder: Path
) -> list[ClusterRun]:
    """Those tests of each file through one cluster, which is not started if everything is in the records."""
    kind = "-".join([topology, *(option for option in options if not option.startswith("--"))])
    found: list[ClusterRun] = []
    with contextlib.ExitStack() as stack:
        made: Cluster | None = None
        for file, only in zip(files, tests, strict=True):
            record = _record(folder, kind, file.path.stem)
            if is_complete(record, file.limits, only):
                run = recorded(record)
            else:
                made = made or stack.enter_context(cluster(topology, *options))
                _say(f"{file.path.stem} through {kind}")
                run = _run_through(file, only, record, made)
            left = _left_behind_path(record)
            lines = left.read_text().splitlines() if left.exists() else []
            found.append(ClusterRun(run, ", ".join(lines)))
    return found


def _left_behind_path(record: Path) -> Path:
    return record.with_suffix(".left")


def _run_through(file: File, only: list[str], record: Path, made: Cluster) -> FileRun:
    """Run a file's tests; what they leave behind is noted beside the record."""
    before, memory_before = made.executors(), made.memory_bytes()
    found = run_file(file.path, made.environment, record, file.limits, only)
    notes = [f"session {s['session']} with {s['arrays']} arrays" for s in made.settle()]
    replaced = [place for place, pid in made.executors().items() if before.get(place) != pid]
    notes += [f"executor of {place} was replaced" for place in replaced]
    memory_after = made.memory_bytes()
    growth = memory_after - memory_before
    if growth > MEMORY_GROWTH_NOTED_BYTES:
        # Programs are kept a while for the next one who compiles them: what a second run adds is what was lost.
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            run_file(file.path, made.environment, Path(folder) / record.name, file.limits, only)
        made.settle()
        again = made.memory_bytes() - memory_after
        notes.append(f"executors grew by {growth >> 20} MiB, when it was run again by {max(again, 0) >> 20} MiB")
    with _left_behind_path(record).open("a") as output:
        output.writelines(f"{note}\n" for note in notes)
    return found


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
@click.option(
    "--protocol-sample", type=click.IntRange(min=0), default=None,
    help=f"The same for the files that exercise the protocol most: {', '.join(sorted(PROTOCOL_FILES))}.",
)
@click.option("--cases", type=click.IntRange(min=1), default=5, help="Generated cases of a parameterized test.")
@click.option("--test-seconds", type=float, default=300.0, help="Deadline of one test.")
@click.option("--file-seconds", type=float, default=3600.0, help="Deadline of one file.")
@click.option("--about-tests", default="", help="A sentence for the table: what the tests are, if of another version.")
@click.option("--select", default="", help="As pytest's -k.")
def main(
    jax_tests: Path, files: str, topologies: tuple[str, ...], output: Path | None, records: Path | None, sample: int,
    protocol_sample: int | None, cases: int, test_seconds: float, file_seconds: float, about_tests: str, select: str,
) -> None:  # fmt: skip
    """Run JAX's own tests natively, with 8 CPU devices, and through Ridgeway."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the cluster goes down with this
    chosen = [
        File(
            jax_tests.resolve() / f"{name}_test.py",
            Limits(
                test_seconds, file_seconds,
                sample if protocol_sample is None or name not in PROTOCOL_FILES else protocol_sample, cases, select,
            ),
        )
        for name in files.split(",") if name
    ]  # fmt: skip
    for file in chosen:
        if not file.path.exists():
            raise click.UsageError(f"there is no {file.path.name} in {jax_tests}")
    with contextlib.ExitStack() as stack:
        folder = records or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conformance-")))
        results = []
        for file in chosen:
            _say(f"{file.path.stem} natively")
            results.append(FileResult(file.path.stem, _native(file, folder)))
        for topology in topologies:
            expected = [result.expected() for result in results]
            for result, run in zip(results, _through_all(chosen, expected, topology, (), folder), strict=True):
                result.through[topology] = run
            # Those that jax refuses for the number of slices, once more where it is not told of it.
            refused = [result.refused(topology) for result in results]
            for result, run in zip(
                results, _through_all(chosen, refused, topology, AS_ONE_SLICE, folder), strict=True
            ):
                if result.refused(topology):
                    result.shown_as_one[topology] = run
    command = ["python -m conformance.run --jax-tests JAX_TESTS", *(f"--topology {name}" for name in topologies)]
    command += [f"--sample {sample}"] if sample else []
    command += [] if protocol_sample is None else [f"--protocol-sample {protocol_sample}"]
    command += [] if files == ",".join(DEFAULT_FILES) else [f"--files {files}"]
    text = render(results, list(topologies), _about(" ".join(command), chosen, cases, about_tests))
    if output is None:
        click.echo(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
        _say(f"written to {output}")


def _about(command: str, files: list[File], cases: int, about_tests: str) -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    samples = sorted({file.limits.sample for file in files})
    cut = " or ".join(f"{sample}" if sample else "all" for sample in samples)
    if len(samples) > 1:
        cut += " (the larger number of files that exercise the protocol most)"
    python = ".".join(map(str, sys.version_info[:3]))
    lines = [
        f"Written by `make conformance` (`{command}`): {versions}, Python {python}, {os.cpu_count()} CPUs. Of each "
        f"file at most {cut} tests that are not skipped natively, chosen by a hash of their names (always the same; "
        f"{cases} generated cases of a parameterized test). A test counts if it passes natively with {NATIVE_DEVICES} "
        "devices; only those are run through clusters. A program that names the backend 'cpu' gets the controller's "
        "own CPU beside the cluster. Beside whether tests pass it is looked at what each file leaves in the cluster: "
        "sessions, another process in an executor's place, more than "
        f"{MEMORY_GROWTH_NOTED_BYTES >> 20} MiB of memory.",
        "",
        "*Granted* is what cannot be otherwise when devices belong to other processes: direct pointers into a device's "
        "memory. (Tests that assert that the backend is the local CPU one would be too; none does.) Not applicable "
        "(*n/a*) are tests of jax's own persistent compilation cache, since the stock client gives no bytes "
        "of executables. *Excused* are those of the other kinds that `conformance/excuses.py` names; *other* ought not "
        "to be. Each is listed below.",
    ]
    return [*lines, *([] if not about_tests else ["", about_tests])]


if __name__ == "__main__":
    main()
