"""`ridgeway head` and `worker`, the parts of a cluster for any scheduler, and `ridgeway demo`."""

import asyncio
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from ridgeway.cli import options


@click.command(short_help="Run the head alone, for workers elsewhere.")
@options.topology
@options.ports
@click.option(
    "--cluster-host",
    default="127.0.0.1",
    show_default=True,
    metavar="A",
    help="Address that workers connect to; 0.0.0.0 for workers on other hosts.",
)
@click.option(
    "--proxy-host",
    default="127.0.0.1",
    show_default=True,
    metavar="A",
    help="Address that JAX programs connect to. They are not authenticated: keep it to this host.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    metavar="A",
    help="Address that Prometheus connects to, with --metrics-port.",
)
@click.option(
    "--secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="The cluster's secret; made if it does not exist.",
)
@click.option("--cluster", "name", metavar="NAME", help="A name for the cluster.  [default: ridgeway]")
@options.scratch_folder
@options.settings
def head(secret_file: Path | None, **values: Any) -> int:  # fmt: skip
    """Run the head alone: resource manager and proxy server.

    Workers are started by somebody else, with `ridgeway worker`, and connect to it with the same secret: from
    --secret-file, or from the environment variable RIDGEWAY_CLUSTER_SECRET.
    """
    from ridgeway.launch import checks
    from ridgeway.launch.cluster_folder import DEFAULT_NAME, check_name
    from ridgeway.launch.daemon import print_line, serve
    from ridgeway.launch.local import LocalOptions

    shape = options.read_topology(
        values["slices"], values["hosts_per_slice"], values["devices_per_host"], values["topology"]
    )
    name = check_name(values["name"] or DEFAULT_NAME)
    options.check_not_running(name)
    secret = _head_secret(secret_file)
    for kind in ("cluster", "proxy", "metrics"):
        if values[f"{kind}_port"] is not None:
            checks.check_port_free(values[f"{kind}_host"], values[f"{kind}_port"], f"--{kind}-port")
    local = LocalOptions(
        name=name,
        topology=shape,
        cluster_host=values["cluster_host"],
        cluster_port=values["cluster_port"],
        proxy_host=values["proxy_host"],
        proxy_port=values["proxy_port"],
        metrics_host=values["metrics_host"],
        metrics_port=values["metrics_port"],
        settings=values["settings"],
        scratch_folder=values["scratch_folder"],
        with_workers=False,
        secret=secret,
    )

    def ready(record: Any) -> None:
        known = f"--secret-file {secret_file}" if secret_file else "and the same RIDGEWAY_CLUSTER_SECRET"
        print_line(
            f"waiting for {shape.slots} workers: ridgeway worker --head HOST:{record.cluster_port} "
            f"--slice S --host H {known}"
        )
        if values["cluster_host"] in ("127.0.0.1", "localhost", "::1"):
            print_line(f"only workers of this host reach {values['cluster_host']}; for others: --cluster-host 0.0.0.0")

    return asyncio.run(serve(local, print_line, ready))


def _head_secret(path: Path | None) -> str:
    """The secret in a file, or a new one written to it; without a file, the environment's."""
    from ridgeway.transport.authentication import new_secret
    from ridgeway.worker.agent import read_secret

    if path is not None and not path.exists():
        secret = new_secret()
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secret + "\n")
        except OSError as error:
            raise click.UsageError(f"cannot make the secret file {path}: {error.strerror}") from None
        return secret
    try:
        return read_secret(str(path) if path is not None else None)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@click.command(
    add_help_option=False,
    short_help="Run one host's worker.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
)
@options.settings
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(settings: tuple[str, ...], arguments: tuple[str, ...]) -> int:
    """Run one host's worker, for a head on this or another host.

    Options are those of `python -m ridgeway.worker.agent`: see `ridgeway worker --help`.
    """
    for setting in settings:
        name, _, text = setting.partition("=")
        os.environ[f"RIDGEWAY_{name.upper()}"] = text
    from ridgeway.worker import agent

    return agent.main(list(arguments))


@click.command(
    add_help_option=False,
    short_help="Train MaxText, kill a worker, train on.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
)
@click.option("--full", is_flag=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(full: bool, arguments: tuple[str, ...]) -> int:
    """Train MaxText on three slices, kill a worker, and watch the same process train on."""
    try:
        demonstration = importlib.import_module("ridgeway.demo.demo")
    except ImportError as error:
        raise click.ClickException(
            f"the demo needs {error.name}; in Ridgeway's folder: {sys.executable} -m pip install -e '.[maxtext]'"
        ) from None
    return demonstration.main(full, list(arguments))
