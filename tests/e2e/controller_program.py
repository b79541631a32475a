"""A JAX program that does what its standard input says, so that a test can look at the cluster between two steps.

Each line of input is a JSON object with ``code``, which is executed; what it assigns to ``result`` is the answer.
An exception is the answer too, and the program goes on: it is the controller that must outlive its workers.
Code may call ``say(value)`` while it runs, to tell the test how far it is.

Lines of output: ``{"said": value}``, then ``{"result": value}`` or ``{"error": type, "text": message}``.
"""

import json
import os
import sys
from typing import Any

# What the program or its libraries print must not mix with the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

if "ENABLE_PATHWAYS_PERSISTENCE" in os.environ:
    # Registers Orbax's handler, and must come before the first use of a device.
    import pathwaysutils

    pathwaysutils.initialize()


def answer(message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def say(value: Any) -> None:
    """Tell the test something in the middle of a piece of code."""
    answer({"said": value})


def devices_of(*slices: int) -> list[Any]:
    """The devices of some slices, in order."""
    return [device for device in jax.devices() if device.slice_index in slices]


ROWS_EACH, COLUMNS = 4, 256


def plain(count: int) -> np.ndarray:
    """f32[4 * count, 256]: what `sharded` puts on so many devices."""
    return (np.arange(ROWS_EACH * count * COLUMNS) % 97).astype(np.float32).reshape(-1, COLUMNS)


def sharded(devices: list[Any]) -> jax.Array:
    """f32[4 * devices, 256] of known values, four rows of it on each device."""
    return jax.device_put(plain(len(devices)), NamedSharding(Mesh(np.array(devices), ("x",)), P("x")))


@jax.jit
def mix(values: jax.Array, turns: int) -> jax.Array:
    """``turns`` all-reduces one after the other over all devices of ``values``, each of about a millisecond.

    Every row moves to the mean of all; the total stays.  XLA for CPUs runs programs of less than a thousand
    operations in the thread that starts them; this one is large enough to run beside it, as real ones do.
    """

    def turn(_: int, v: jax.Array) -> jax.Array:
        return v * 0.5 + jnp.sum(v, axis=0, keepdims=True) / v.shape[0] * 0.5

    return jax.lax.fori_loop(0, turns, turn, values)


namespace = {
    "jax": jax, "jnp": jnp, "np": np, "Mesh": Mesh, "NamedSharding": NamedSharding, "P": P, "say": say,
    "devices_of": devices_of, "plain": plain, "sharded": sharded, "mix": mix, "os": os,
}  # fmt: skip


def connect() -> None:
    """Make the backend, which jax knows by itself only since 0.12: before, the plugin or pathwaysutils registers it or,
    as here, the program."""
    try:
        jax.devices()
    except RuntimeError as error:
        if "not in the list of known backends" not in str(error):
            raise
        from jax.extend import backend
        from jax.extend.backend import ifrt_proxy

        target = jax.config.read("jax_backend_target")
        options = ifrt_proxy.ClientConnectionOptions()
        backend.register_backend_factory("proxy", lambda: ifrt_proxy.get_client(target, options), priority=-1)
        jax.devices()


def main() -> None:
    connect()
    answer({"result": os.getpid()})
    for line in sys.stdin:
        namespace["result"] = None
        try:
            exec(json.loads(line)["code"], namespace)
            answer({"result": namespace["result"]})
        except Exception as error:
            answer({"error": f"{type(error).__module__}.{type(error).__qualname__}", "text": str(error)})


if __name__ == "__main__":
    main()
