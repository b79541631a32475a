"""`ridgeway run`, `up` and `down`."""

import asyncio
import sys
from typing import Any

import click

from ridgeway.cli import options

EXIT_INTERRUPTED = 130


@click.command(context_settings={"allow_interspersed_args": False})
@options.local_cluster
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(command: tuple[str, ...], **values: Any) -> int:
    """Bring a cluster up, run COMMAND on it, take it down.

    COMMAND runs with JAX_PLATFORMS=proxy and the address of the cluster in its environment; its exit code is
    this command's.

    \b
    ridgeway run --slices 3 --devices-per-host 2 -- python train.py
    """
    from ridgeway.launch import foreground
    from ridgeway.launch.daemon import print_line

    local = options.read_local_options(values, command)
    return asyncio.run(foreground.run(local, command, print_line))


@click.command()
@options.local_cluster
def up(**values: Any) -> int:
    """Bring a cluster up that stays; print what to export.

    The last three lines, on stdout, are for the shell: eval "$(ridgeway up --slices 3)".
    """
    from ridgeway.launch.daemon import Interrupted, print_line, start_detached
    from ridgeway.launch.environment import export_lines

    local = options.read_local_options(values, None)
    try:
        record = start_detached(local, print_line)
    except Interrupted as error:
        print_line(str(error))
        return EXIT_INTERRUPTED
    print_line(f"stop it with `ridgeway down{'' if values['name'] is None else ' --cluster ' + record.name}`")
    for line in export_lines("127.0.0.1", record.proxy_port):
        print(line)
    sys.stdout.flush()
    return 0


@click.command()
@options.cluster_name
def down(name: str | None) -> int:
    """Stop a cluster and wait until nothing of it is left.

    A cluster that `ridgeway run` has up is stopped too; its command is asked to end first.
    """
    from ridgeway.launch import cluster_folder
    from ridgeway.launch.daemon import print_line, stop_cluster

    chosen = cluster_folder.choose(name)
    print_line(f"stopping cluster {chosen!r}")
    stop_cluster(chosen, print_line)
    print_line(f"cluster {chosen!r} is down")
    return 0
