"""`ridgeway events`, `timeline` and `logs`: of the running cluster, or of the last one."""

import difflib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ridgeway.cli import options
from ridgeway.timeline.kinds import KINDS

POLL_SECONDS = 0.2
EVENT_FILE = "events.jsonl"
READ_BYTES = 1 << 16


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events in a file.

    Raises:
      ClusterError: there is no event file.
    """
    from ridgeway.launch.cluster_folder import ClusterError
    from ridgeway.timeline import events as event_file

    try:
        return event_file.read_events(path)
    except OSError as error:
        raise ClusterError(
            f"cannot read the events in {path}: {error.strerror} (a cluster whose head never served has none)"
        ) from None


def format_event(event: dict[str, Any]) -> str:
    """``12:30:01.250     17 host_lost  slice=2 host=0 ...``."""
    clock = event.get("time", 0.0)
    stamp = time.strftime("%H:%M:%S", time.localtime(clock)) + f".{int(clock % 1 * 1000):03d}"
    fields = " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in event.items()
        if name not in ("time", "monotonic", "kind", "sequence")
    )
    return f"{stamp} {event.get('sequence', 0):6d} {event.get('kind', '?'):20s} {fields}".rstrip()


def check_kinds(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds as they are.

    Raises:
      click.BadParameter: there is no such kind.
    """
    for value in values:
        if value not in KINDS:
            near = difflib.get_close_matches(value, KINDS, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise click.BadParameter(f"there are no events of kind {value!r}{hint}; known: {', '.join(KINDS)}")
    return values


@click.command(epilog="Kinds:\n\n\b\n" + "\n".join(f"{kind:22s}{what}" for kind, what in KINDS.items()))
@options.cluster_name
@click.option("--follow", "-f", is_flag=True, help="Go on with those to come, until the cluster ends.")
@click.option("--since", type=click.IntRange(0), default=0, metavar="N", help="From this sequence number on.")
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND", callback=check_kinds,
    help="Only events of this kind (repeatable); they are listed below.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def events(name: str | None, follow: bool, since: int, kinds: tuple[str, ...], as_json: bool) -> int:
    """Show what has happened in a cluster."""
    from ridgeway.launch import cluster_folder, control

    def show(event: dict[str, Any]) -> None:
        if event.get("sequence", 0) >= since and (not kinds or event.get("kind") in kinds):
            print(json.dumps(event) if as_json else format_event(event), flush=follow)

    if not follow:
        for event in read_events(cluster_folder.latest_logs(name) / EVENT_FILE):
            show(event)
        return 0
    with control.connect(cluster_folder.find(name)) as client:
        for event in client.follow(since):
            show(event)
    return 0


@click.command(short_help="Show where the time of recoveries and sessions went.")
@options.cluster_name
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write it there as well."
)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw it there as well.")
@click.option(
    "--events", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="An event file to read instead of a cluster's.",
)  # fmt: skip
def timeline(name: str | None, as_json: bool, output: Path | None, png: Path | None, file: Path | None) -> int:
    """Show where the time of each recovery went, from the loss to the next step, and that of each session."""
    from ridgeway.launch import cluster_folder
    from ridgeway.timeline import report

    found = read_events(file if file is not None else cluster_folder.latest_logs(name) / EVENT_FILE)
    try:
        print(report.render(found, output, as_json), end="")
    except OSError as error:
        raise click.UsageError(f"cannot write --output {output}: {error.strerror}") from None
    if png is not None:
        _draw(found, png)
    return 0


def _draw(events: list[dict[str, Any]], png: Path) -> None:
    from ridgeway.launch.daemon import print_line
    from ridgeway.timeline import plots, recovery

    recoveries = recovery.find_recoveries(events)
    if not recoveries:
        print_line(f"there was no recovery, so {png} was not drawn")
        return
    try:
        plots.plot(recoveries, png)
    except (plots.PlotError, OSError) as error:
        raise click.ClickException(f"cannot draw {png}: {error}") from None


@click.command(short_help="Show the logs of the head and the workers.")
@options.cluster_name
@click.option("--slice", "slice_index", type=click.IntRange(0), metavar="S", help="The workers of this slice.")
@click.option("--host", type=click.IntRange(0), metavar="H", help="With --slice: of this host.")
@click.option("--head", is_flag=True, help="The head.")
@click.option(
    "--lines", type=click.IntRange(0), default=200, show_default=True, metavar="N", help="Last lines; 0: all."
)
@click.option("--follow", "-f", is_flag=True, help="Go on with those to come, until the cluster ends.")
def logs(name: str | None, slice_index: int | None, host: int | None, head: bool, lines: int, follow: bool) -> int:
    """Show the logs of the head and the workers (of all, if none is chosen)."""
    from ridgeway.launch import cluster_folder

    if host is not None and slice_index is None:
        raise click.UsageError("--host needs --slice: which slice's host?")
    if head and slice_index is not None:
        raise click.UsageError("--head and --slice name different logs; give one")
    folder = cluster_folder.latest_logs(name)

    def selected() -> list[Path]:
        if head:
            return [folder / "head.log"]
        if slice_index is None:
            return sorted(path for path in folder.glob("*.log") if not path.is_symlink())
        hosts = f"{host}" if host is not None else "*"
        numbers = {
            int(path.name.split("-")[2].split(".")[0]) for path in folder.glob(f"worker-{slice_index}-{hosts}.*log")
        }
        return [path for number in sorted(numbers) for path in cluster_folder.worker_logs(folder, slice_index, number)]

    paths = selected()
    if not paths or not paths[0].exists():
        what = "head" if head else f"slice {slice_index}" + (f" host {host}" if host is not None else "")
        raise cluster_folder.ClusterError(f"there is no log of {what} in {folder}")
    offsets: dict[Path, int] = {}
    for path in paths:
        if len(paths) > 1:
            print(f"==> {path.name} <==")
        data = path.read_bytes()
        offsets[path] = len(data)
        text = data.decode(errors="replace").splitlines()
        for line in text[-lines:] if lines else text:
            print(line)
    sys.stdout.flush()
    if follow:
        for text in _follow(selected, offsets, folder):
            sys.stdout.write(text)
            sys.stdout.flush()
    return 0


def _follow(selected: Any, offsets: dict[Path, int], folder: Path) -> Iterator[str]:
    """What is added to the logs, new logs included, until no cluster writes them any more."""
    from ridgeway.launch import cluster_folder

    last: Path | None = None
    cluster = cluster_folder.runtime_root() / folder.parent.name
    while True:
        over = not cluster_folder.is_running(cluster)
        for path in selected():
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                while data := file.read(READ_BYTES):
                    offsets[path] = file.tell()
                    if path != last:
                        yield f"==> {path.name} <==\n"
                        last = path
                    yield data.decode(errors="replace")
        if over:
            return
        time.sleep(POLL_SECONDS)
