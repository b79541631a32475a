"""The ``proxy`` backend as the plugin registers it, around the one that jax or pathwaysutils have registered."""

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax._src import xla_bridge

from ridgeway.client import worker_output

CREDENTIALS_VARIABLE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
#: How long the look at who listens may take; jaxlib's own attempts follow whatever comes of it.
LOOK_TIMEOUT_SECONDS = 2.0


def register() -> None:
    """Register the backend; called before jax makes its backends."""
    known = xla_bridge._backend_factories.get("proxy")
    connect = _connect if known is None else known.factory  # jax registers one itself since 0.12
    xla_bridge.register_backend_factory("proxy", lambda: _make(connect), priority=-1)


def _make(connect: Callable[[], Any]) -> Any:
    # jaxlib's client knows only Google's credentials and none, and with the former fails outside Google's cloud.
    os.environ.setdefault(CREDENTIALS_VARIABLE, "true")
    if (problem := nobody_there(jax.config.read("jax_backend_target") or "")) is not None:
        print(f"ridgeway: {problem}", file=sys.stderr, flush=True)
    client = connect()
    # jax hands the arguments of a callback over on a local CPU device, as there is one beside every accelerator that
    # it chooses by itself. This runs where jax makes its backends, of which `proxy` stays the default.
    if "cpu" not in (jax.config.jax_platforms or "").split(","):
        xla_bridge._backends["cpu"] = xla_bridge._init_backend("cpu")
    # A server that is not Ridgeway's does not say it.
    session = getattr(client, "ridgeway_session", None)
    if session is not None:
        problem = worker_output.version_problem(client.ridgeway_python, client.ridgeway_jax)
        worker_output.follow_when_needed(session, problem)
    return client


def nobody_there(target: str) -> str | None:
    """One line for the user if nothing accepts connections at a target (``grpc://HOST:PORT``), else None.

    jaxlib's client tries for two minutes and says only that its credentials are insecure, once a second.
    """
    host, _, port = target.removeprefix("grpc://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        return None  # an address of another form: jaxlib's to judge
    try:
        socket.create_connection((host.strip("[]"), int(port)), LOOK_TIMEOUT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return (
            f"nothing answers at {target} ({reason}), and jax tries for two minutes; start a cluster there "
            "(`ridgeway up`), or correct JAX_BACKEND_TARGET"
        )
    return None


def _connect() -> Any:
    from jax.extend.backend import ifrt_proxy

    target = jax.config.read("jax_backend_target")
    if not target:
        raise RuntimeError(
            "JAX_PLATFORMS=proxy needs the address of a Ridgeway cluster in JAX_BACKEND_TARGET, as "
            "grpc://127.0.0.1:29000; `ridgeway run` and `ridgeway up` set it."
        )
    return ifrt_proxy.get_client(target, ifrt_proxy.ClientConnectionOptions())
