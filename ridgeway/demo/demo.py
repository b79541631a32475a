"""Train MaxText on a cluster of this machine, SIGKILL a worker, and prove that the same process trained on.

Unmodified MaxText trains a small Qwen3-shaped model on the text of the Python standard library, on three
slices. A worker of slice 2 is killed once two checkpoints are committed. Training pauses, the slice comes
back, the last checkpoint is restored, training goes on. Then every piece of evidence is shown and checked:
the exit code is 0 only if all of it is there.

\b
What is left in the output folder:
  controller.log   what MaxText printed, from the first step to the last, in one log
  timeline.json    the recovery, phase by phase (also timeline.txt and timeline.png)
  evidence.json    every check with what was seen
  events.jsonl     what the head recorded
  training/        MaxText's checkpoints and metrics
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from ridgeway.demo import job as jobs
from ridgeway.demo.demonstration import CLUSTER_NAME, FULL_PLAN, SMALL_PLAN, DemoError, Demonstration, Options
from ridgeway.launch import checks
from ridgeway.launch.cluster_folder import ClusterError, check_name, running_clusters
from ridgeway.launch.foreground import SIGNALS, until_signal
from ridgeway.timeline import report

DEFAULT_OUTPUT = Path("out") / "demo"
#: Marks a folder as made by the demonstration, so that the next one may replace what is in it.
MARK_FILE = "ridgeway-demo.json"


def prepare_output(output: Path) -> None:
    """Make the folder, or empty it of an earlier demonstration.

    Raises:
        DemoError: it holds something else, or cannot be written.
    """
    try:
        if output.exists() and not output.is_dir():
            raise DemoError(f"{output} is not a folder; name another --output")
        if output.is_dir() and any(output.iterdir()):
            if not (output / MARK_FILE).is_file():
                raise DemoError(f"{output} holds files that are not of a demonstration; name another --output")
            for path in output.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != MARK_FILE:
                    path.unlink()
        output.mkdir(parents=True, exist_ok=True)
        (output / MARK_FILE).write_text(json.dumps({"started": time.time(), "pid": os.getpid()}) + "\n", "utf-8")
    except OSError as error:
        raise DemoError(f"cannot write {output}: {error.strerror or error}; name another --output") from None


def make_console() -> Console:
    """Standard output, wide enough for the tables also where it is a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, report.WIDTH + 10))


def check_options(options: Options) -> None:
    """Raises:
    DemoError: an option does not fit the topology, or a cluster of the name runs.
    """
    shape = options.plan.shape
    if not 0 <= options.kill_slice < shape.slices:
        raise DemoError(f"there is no slice {options.kill_slice}; --kill-slice is 0 to {shape.slices - 1}")
    if options.kill_host is not None and not 0 <= options.kill_host < shape.hosts_per_slice:
        raise DemoError(
            f"slice {options.kill_slice} has no host {options.kill_host}; "
            f"--kill-host is 0 to {shape.hosts_per_slice - 1}"
        )
    if check_name(options.cluster) in running_clusters():
        raise DemoError(
            f"a cluster named {options.cluster!r} runs already, maybe of another demonstration; stop it with "
            f"`ridgeway down --cluster {options.cluster}` or give this one another name with --cluster"
        )


async def run(options: Options, console: Console) -> int:
    """The demonstration; returns its exit code: 0 when all evidence is there, 1 when some is missing, 128 + n
    when signal n ended it.

    Raises:
        DemoError, jobs.JobError, checks.CheckError, ClusterError: it could not run or did not get to the end.
    """
    check_options(options)
    prepare_output(options.output)
    signals: asyncio.Queue[int] = asyncio.Queue(maxsize=100)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, lambda n=number: None if signals.full() else signals.put_nowait(n))
    work = asyncio.ensure_future(Demonstration(options, console).run())
    interrupted = await until_signal(work, signals)
    if interrupted is not None:
        console.print(f"ended by {signal.Signals(interrupted).name}; nothing is left running")
        return 128 + interrupted
    missing = [check for check in work.result() if not check.passed]
    if not missing:
        console.print("[bold green]A worker died; the program did not.[/bold green] All evidence is there.")
        return 0
    console.print(f"[bold red]{len(missing)} of the pieces of evidence are missing:[/bold red]")
    for check in missing:
        console.print(f"  {escape(check.subject)}: {escape(check.text)}", soft_wrap=True)
    return 1


@click.command(name="ridgeway demo", help=__doc__)
@click.option("--full", is_flag=True, help="48 devices in 12 workers: 3 slices x 4 hosts x 4 devices.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help=f"Folder to write.  [default: {DEFAULT_OUTPUT}]"
)
@click.option(
    "--jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Train on the text of this file."
)
@click.option(
    "--standby", type=click.IntRange(0), default=1, show_default=True, metavar="N",
    help="Workers that wait, ready, to take a dead one's place; 0 shows a cold replacement.",
)  # fmt: skip
@click.option(
    "--kill-slice", type=click.IntRange(0), default=2, show_default=True, metavar="S", help="Whose worker is killed."
)
@click.option(
    "--kill-host", type=click.IntRange(0), metavar="H", help="Which of its workers.  [default: chosen by the seed]"
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Chooses when and which worker is killed."
)
@click.option("--cluster", default=CLUSTER_NAME, show_default=True, metavar="NAME", help="Name of the cluster.")
def command(
    full: bool,
    output: Path | None,
    jsonl: Path | None,
    standby: int,
    kill_slice: int,
    kill_host: int | None,
    seed: int,
    cluster: str,
) -> int:
    options = Options(
        plan=FULL_PLAN if full else SMALL_PLAN,
        output=output or DEFAULT_OUTPUT,
        jsonl=jsonl,
        standby=standby,
        kill_slice=kill_slice,
        kill_host=kill_host,
        seed=seed,
        cluster=cluster,
    )
    try:
        return asyncio.run(run(options, make_console()))
    except (DemoError, jobs.JobError, checks.CheckError, ClusterError) as error:
        raise click.ClickException(str(error)) from None


def main(full: bool, arguments: Sequence[str] = ()) -> int:
    """`ridgeway demo`; returns the exit code.

    Args:
        full: the large shape; ``--full`` among the arguments means the same.
        arguments: the rest of the command line; ``--help`` lists what there is.

    Raises:
        click.ClickException: a mistake of the user's, or the demonstration did not get to its end.
    """
    everything = [*(["--full"] if full else []), *arguments]
    result = command.main(everything, prog_name="ridgeway demo", standalone_mode=False)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(False, sys.argv[1:]))
    except click.ClickException as problem:
        problem.show()
        sys.exit(1)
