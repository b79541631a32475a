"""`ridgeway doctor`: is this machine fit for it, and if not, what is to be done."""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ridgeway.cli import options

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"
OLDEST_PYTHON = (3, 12)
CONNECT_TIMEOUT_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: str
    subject: str
    text: str


def check_python(version: tuple[int, ...]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version[:3]))
    if version[:2] < OLDEST_PYTHON:
        return Finding(PROBLEM, "python", f"{text} is too old: Ridgeway needs 3.12 or newer")
    return Finding(OK, "python", f"{text} ({sys.executable})")


def check_jax(installed: Callable[[str], str]) -> Finding:
    """jax and jaxlib: there, in the range, and alike."""
    from ridgeway.protocol.versions import SUPPORTED_JAX, is_supported_jax

    versions = {}
    for name in ("jax", "jaxlib"):
        try:
            versions[name] = installed(name)
        except importlib.metadata.PackageNotFoundError:
            return Finding(PROBLEM, "jax", f"{name} is not installed: pip install 'jax>=0.11,<0.13'")
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    for name, version in versions.items():
        if not is_supported_jax(version):
            return Finding(PROBLEM, "jax", f"{text}: {name} is outside {SUPPORTED_JAX}; pip install 'jax>=0.11,<0.13'")
    if versions["jax"].split(".")[:2] != versions["jaxlib"].split(".")[:2]:
        return Finding(PROBLEM, "jax", f"{text}: not of one release; pip install --upgrade jax jaxlib")
    return Finding(OK, "jax", text)


def check_environment(environment: Mapping[str, str]) -> Finding:
    """Whether a JAX program started from this shell would reach a proxy, if it is to."""
    from ridgeway.launch.environment import CREDENTIALS_VARIABLE

    platforms = [name.strip() for name in environment.get("JAX_PLATFORMS", "").split(",")]
    if "proxy" not in platforms:
        return Finding(OK, "environment", "JAX_PLATFORMS does not ask for the proxy; `ridgeway run` sets it")
    target = environment.get("JAX_BACKEND_TARGET", "")
    if not target.startswith("grpc://"):
        return Finding(
            PROBLEM,
            "environment",
            f"JAX_PLATFORMS has proxy but JAX_BACKEND_TARGET is {target!r}: "
            "export JAX_BACKEND_TARGET=grpc://127.0.0.1:29000",
        )
    credentials = environment.get(CREDENTIALS_VARIABLE)
    if credentials is None:
        return Finding(
            NOTE,
            "environment",
            f"JAX programs of this shell connect to {target}, but those of a Python without Ridgeway cannot: "
            f"export {CREDENTIALS_VARIABLE}=true",
        )
    if credentials != "true":
        return Finding(
            PROBLEM,
            "environment",
            f"{CREDENTIALS_VARIABLE} is {credentials!r}, so jax's client cannot connect: "
            f"export {CREDENTIALS_VARIABLE}=true",
        )
    return Finding(OK, "environment", f"JAX programs of this shell connect to {target}")


def check_target(environment: Mapping[str, str], connect: Callable[[str, int], None]) -> Finding | None:
    """Whether anything listens where a JAX program of this shell would connect to; None if it would connect nowhere.

    Args:
      connect: makes a connection to a host and port and closes it.
    """
    target = environment.get("JAX_BACKEND_TARGET", "")
    platforms = [name.strip() for name in environment.get("JAX_PLATFORMS", "").split(",")]
    if "proxy" not in platforms or not target.startswith("grpc://"):
        return None
    host, _, port = target.removeprefix("grpc://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        return Finding(
            PROBLEM, "proxy", f"JAX_BACKEND_TARGET is {target!r}, not grpc://HOST:PORT: jax's client cannot connect"
        )
    try:
        connect(host.strip("[]"), int(port))
    except OSError as error:
        return Finding(
            PROBLEM, "proxy", f"nothing answers at {target} ({error.strerror or error}): start a cluster with "
            "`ridgeway up`, or correct JAX_BACKEND_TARGET",
        )  # fmt: skip
    return Finding(OK, "proxy", f"something listens at {target}")


def _connect(host: str, port: int) -> None:
    socket.create_connection((host, port), CONNECT_TIMEOUT_SECONDS).close()


def check_cache(folder: Path, limit_bytes: int) -> Finding:
    """The compile cache."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding(
            NOTE, "compiled", f"cannot write to {existing}, so programs are compiled anew in each run; "
            "set XDG_CACHE_HOME to a folder of yours",
        )  # fmt: skip
    limit, free = limit_bytes / (1 << 30), shutil.disk_usage(existing).free / (1 << 30)
    text = f"compiled programs are kept in {folder}, up to {limit:.1f} GiB (compile_cache_limit_bytes)"
    if free < limit:
        return Finding(NOTE, "compiled", f"{text}, but only {free:.1f} GiB are free there")
    return Finding(OK, "compiled", text)


def check_ports(running: list[str]) -> list[Finding]:
    """The default ports."""
    from ridgeway.launch.checks import CheckError, check_port_free

    findings = []
    for port, option in (
        (options.DEFAULT_PROXY_PORT, "--proxy-port"),
        (options.DEFAULT_CLUSTER_PORT, "--cluster-port"),
    ):
        try:
            check_port_free("127.0.0.1", port, option)
        except CheckError as error:
            level, why = (NOTE, f" (maybe by a cluster of yours: {', '.join(running)})") if running else (PROBLEM, "")
            findings.append(Finding(level, "ports", f"{error}{why}"))
        else:
            findings.append(Finding(OK, "ports", f"{port} is free"))
    return findings


def check_memory(available: int) -> Finding:
    """How large a cluster this machine has room for."""
    from ridgeway.cluster.topology import Topology
    from ridgeway.launch.checks import cluster_bytes

    gib = available / (1 << 30)
    smallest, demo = cluster_bytes(Topology(1, 1, 1), 0), cluster_bytes(Topology(3, 1, 2), 1)
    if available < smallest:
        return Finding(PROBLEM, "memory", f"{gib:.1f} GiB available: not enough for one worker; free some")
    if available < demo:
        return Finding(NOTE, "memory", f"{gib:.1f} GiB available: too little for 3x1x2 with a standby")
    return Finding(OK, "memory", f"{gib:.1f} GiB available")


def check_kernel(system: str) -> Finding:
    """Whether processes can be tied to their parents' lives."""
    if system == "Linux":
        return Finding(OK, "system", f"Linux {platform.release()}")
    return Finding(
        NOTE, "system", f"{system}: after a SIGKILL of `ridgeway run` itself its workers end by their links only"
    )


def check_namespaces() -> Finding:
    """Needed only by the tests with several hosts."""
    if shutil.which("ip") is None:
        return Finding(NOTE, "namespaces", "no `ip` command: tests with several hosts are skipped (apt: iproute2)")
    if os.geteuid() != 0:
        return Finding(NOTE, "namespaces", "not root: tests with several hosts are skipped")
    return Finding(OK, "namespaces", "tests with several hosts can make them")


def check_folders() -> Finding:
    """Where clusters are found and where they log."""
    from ridgeway.launch import cluster_folder

    try:
        root = cluster_folder.runtime_root()
    except cluster_folder.ClusterError as error:
        return Finding(PROBLEM, "folders", str(error))
    state = cluster_folder.state_root()
    existing = next(path for path in (state, *state.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding(PROBLEM, "folders", f"cannot write to {existing} for logs; set XDG_STATE_HOME")
    free = shutil.disk_usage(existing).free / (1 << 30)
    text = f"clusters in {root}, logs in {state} ({free:.1f} GiB free)"
    return Finding(NOTE if free < 1 else OK, "folders", text)


@click.command(short_help="Check this machine and this shell.")
@click.option("--settings", "list_settings", is_flag=True, help="List every setting with its value and stop.")
def doctor(list_settings: bool) -> int:
    """Check this machine and this shell; exit code 1 if something would not work."""
    from ridgeway.launch import checks, cluster_folder, local
    from ridgeway.settings import Settings, load_settings

    if list_settings:
        return _list_settings()
    try:
        running = cluster_folder.running_clusters()
    except cluster_folder.ClusterError:
        running = []
    problems = []
    try:
        settings = load_settings()
    except ValueError as error:
        settings = Settings()
        problems = [Finding(PROBLEM, "settings", f"environment: {error}; correct or unset that RIDGEWAY_ variable")]
    findings = [
        *problems,
        check_python(sys.version_info[:3]),
        check_jax(importlib.metadata.version),
        check_environment(os.environ),
        *([target] if (target := check_target(os.environ, _connect)) is not None else []),
        *check_ports(running),
        check_memory(checks.available_bytes()),
        check_kernel(platform.system()),
        check_folders(),
        check_cache(local.cache_folder(), settings.compile_cache_limit_bytes),
        check_namespaces(),
    ]
    _show(findings)
    return 1 if any(finding.level == PROBLEM for finding in findings) else 0


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    styles = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}
    for finding in findings:
        line = Text(f"{finding.level:8s}", style=styles[finding.level])
        line.append(f"{finding.subject:12s} {finding.text}", style="default")
        console.print(line, soft_wrap=True)


def _list_settings() -> int:
    from ridgeway.settings import load_settings

    try:
        values: dict[str, Any] = load_settings().to_dict()
    except ValueError as error:
        raise click.UsageError(f"environment: {error}") from None
    for name, value in values.items():
        print(f"{name}={value}")
    return 0
