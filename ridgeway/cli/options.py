"""Options that several commands share, and their meaning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEFAULT_PROXY_PORT = 29000
DEFAULT_CLUSTER_PORT = 29001


class RestartLimit(click.ParamType):
    """A count, or `unlimited` (None)."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """-1 stands for no limit: click takes None for "not given"."""
        if value == "unlimited" or isinstance(value, int):
            return -1 if value == "unlimited" else value
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither a count nor 'unlimited'", param, ctx)
        return int(value)


def cluster_name(function: Callable) -> Callable:
    """Which cluster a command is about."""
    return click.option("--cluster", "name", metavar="NAME", help="Which cluster; needed only if several run.")(
        function
    )


def settings(function: Callable) -> Callable:
    """Settings of the runtime."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_check_settings,
        help="Change a setting, as heartbeat_timeout_seconds=5 (repeatable; see `ridgeway doctor --settings`).",
    )(function)


def _check_settings(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    from ridgeway.settings import load_settings

    overrides: dict[str, str] = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator:
            raise click.UsageError(f"--set {value!r} is not NAME=VALUE", context)
        overrides[name.strip()] = text.strip()
    try:
        load_settings(overrides)
    except ValueError as error:
        raise click.UsageError(f"--set: {error}", context) from None
    return tuple(f"{name}={text}" for name, text in overrides.items())


def topology(function: Callable) -> Callable:
    """The cluster's shape."""
    for option in (
        click.option("--topology", metavar="SxHxD", help="The three numbers in one, as 3x1x2."),
        click.option("--devices-per-host", metavar="N", help="Devices of each host.  [default: 1]"),
        click.option("--hosts-per-slice", metavar="N", help="Hosts (worker processes) of a slice.  [default: 1]"),
        click.option("--slices", metavar="N", help="Slices: the units that fail and return.  [default: 1]"),
    ):
        function = option(function)
    return function


def read_topology(slices: str | None, hosts: str | None, devices: str | None, topology: str | None) -> Any:
    """The shape that the options of `topology` name.

    Raises:
      CheckError: not three positive integers, or given twice.
    """
    from ridgeway.launch.checks import CheckError, make_topology, parse_topology

    if topology is None:
        return make_topology(slices or "1", hosts or "1", devices or "1")
    if (slices, hosts, devices) != (None, None, None):
        raise CheckError("--topology says what --slices, --hosts-per-slice and --devices-per-host say; give one")
    return parse_topology(topology)


def ports(function: Callable) -> Callable:
    """Where the head listens."""
    port = click.IntRange(0, 65535)
    for option in (
        click.option(
            "--metrics-port", type=port, default=None, metavar="N",
            help="Serve Prometheus metrics on this port; 0: any free one.  [default: none]",
        ),
        click.option(
            "--cluster-port", type=port, default=DEFAULT_CLUSTER_PORT, show_default=True, metavar="N",
            help="Port for workers and commands; 0: any free one.",
        ),
        click.option(
            "--proxy-port", type=port, default=DEFAULT_PROXY_PORT, show_default=True, metavar="N",
            help="Port for JAX programs; 0: any free one.",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


def scratch_folder(function: Callable) -> Callable:
    """Where the state of preempted workers waits."""
    return click.option(
        "--scratch-folder", type=click.Path(file_okay=False, exists=True, path_type=Path), metavar="PATH",
        help="Where what a preempted worker holds waits for its replacement; all workers share it.  [default: "
        "beside the logs]",
    )(function)  # fmt: skip


def local_cluster(function: Callable) -> Callable:
    """Everything about a cluster of local processes."""
    for option in (
        click.option("--cluster", "name", metavar="NAME", help="A name for the cluster.  [default: ridgeway]"),
        click.option("--allow-overcommit", is_flag=True, help="Start even if memory looks too small."),
        click.option(
            "--start-timeout-seconds", type=click.FloatRange(1.0), default=120.0, show_default=True, metavar="N",
            help="How long the cluster may take to be ready.",
        ),
        click.option(
            "--replacement-delay-seconds", type=click.FloatRange(0.0), default=0.0, show_default=True, metavar="N",
            help="Wait before a dead worker is replaced, as a scheduler would make it.",
        ),
        click.option(
            "--max-slice-restarts", type=RestartLimit(), default=10, show_default=True, metavar="N",
            help="Restarts of a slice (each of all its hosts) before it is given up; or 'unlimited'.",
        ),
        click.option(
            "--max-preemptions", type=RestartLimit(), default="unlimited", show_default=True, metavar="N",
            help="The same for workers whose end was announced (SIGTERM, `ridgeway preempt`).",
        ),
        scratch_folder,
        click.option(
            "--standby", type=click.IntRange(0), default=0, show_default=True, metavar="N",
            help="Workers that wait, ready, to take a dead one's place.",
        ),
    ):  # fmt: skip
        function = option(function)
    return topology(ports(settings(function)))


def read_local_options(values: dict[str, Any], command: tuple[str, ...] | None) -> Any:
    """`LocalOptions` of the options of `local_cluster`, after all the checks.

    Raises:
      CheckError, ClusterError: something would not work.
    """
    from ridgeway.launch import checks
    from ridgeway.launch.cluster_folder import DEFAULT_NAME, check_name
    from ridgeway.launch.local import LocalOptions

    topology = read_topology(
        values["slices"], values["hosts_per_slice"], values["devices_per_host"], values["topology"]
    )
    if command is not None:
        checks.check_command(command)
    name = check_name(values["name"] or DEFAULT_NAME)
    check_not_running(name)
    if values["proxy_port"] == values["cluster_port"] != 0:
        raise checks.CheckError(f"--proxy-port and --cluster-port are both {values['proxy_port']}; they must differ")
    checks.check_port_free("127.0.0.1", values["proxy_port"], "--proxy-port")
    checks.check_port_free("127.0.0.1", values["cluster_port"], "--cluster-port")
    if values["metrics_port"] is not None:
        checks.check_port_free("127.0.0.1", values["metrics_port"], "--metrics-port")
    if not values["allow_overcommit"]:
        checks.check_memory(topology, values["standby"], checks.available_bytes())
    return LocalOptions(
        name=name,
        topology=topology,
        standbys=values["standby"],
        max_slice_restarts=_limit(values["max_slice_restarts"]),
        max_preemptions=_limit(values["max_preemptions"]),
        scratch_folder=values["scratch_folder"],
        replacement_delay_seconds=values["replacement_delay_seconds"],
        proxy_port=values["proxy_port"],
        cluster_port=values["cluster_port"],
        metrics_port=values["metrics_port"],
        settings=values["settings"],
        start_timeout_seconds=values["start_timeout_seconds"],
        command=command,
    )


def _limit(value: int) -> int | None:
    return None if value < 0 else value


def check_not_running(name: str) -> None:
    """Raises:
    ClusterError: a cluster of that name runs. Looked at before the ports, which it would hold too.
    """
    from ridgeway.launch import cluster_folder

    if name in cluster_folder.running_clusters():
        raise cluster_folder.already_running(name)
