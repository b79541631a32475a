"""Colocated Python: code of this program that runs on the workers' hosts, beside the devices.

Each host reads its own part of the data, in an object that lives there; the parts form one global batch, which never
passes through this process. When a worker is lost its object is lost with it, and says so; the program makes new ones.

    ridgeway run --slices 2 --hosts-per-slice 1 --devices-per-host 2 -- python examples/colocated_python.py

With ``--steps 1000 --pause-seconds 0.1`` there is time for ``ridgeway kill slice=1`` in a second shell. Modules that
the code imports must be installed on the workers, too.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS_EACH, COLUMNS = 4, 8


@colocated_python.colocated_python_class
class Reader:
    """Reads one host's part of the data: an endless count, as it were."""

    def __init__(self, start: int):
        self.step = start
        print(f"reader in process {os.getpid()}, host {jax.process_index()} of {jax.process_count()}", flush=True)

    def next(self, like: jax.Array) -> jax.Array:
        """The next batch, f32[rows, columns], sharded as ``like`` is; each host makes the shards of its devices."""
        self.step += 1
        shards = []
        for shard in like.addressable_shards:
            first = shard.index[0].start or 0
            rows = np.arange(first, first + ROWS_EACH, dtype=np.float32)[:, None] + np.zeros(COLUMNS, np.float32)
            shards.append(jax.device_put(rows * self.step, shard.device))
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


@jax.jit
def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What uses the data on the devices."""
    loss = jnp.mean(batch @ weights)
    return weights * 0.99, loss


def main() -> None:
    """Take ``--steps`` steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pause-seconds", type=float, default=0.0, help="after each step")
    options = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = NamedSharding(mesh, P("data"))
    # The devices of this mesh are the CPUs beside the accelerators: on a cluster of CPUs, the same ones.
    host_rows = NamedSharding(colocated_python.colocated_cpu_devices(mesh), P("data"))
    shape = (ROWS_EACH * mesh.size, COLUMNS)
    step = 0
    while step < options.steps:
        try:
            like = jax.device_put(np.zeros(shape, np.float32), host_rows)
            weights = jax.device_put(np.full((COLUMNS, 1), 0.99**step, np.float32), NamedSharding(mesh, P()))
            reader = Reader(step)
            while step < options.steps:
                batch = jax.device_put(reader.next(like), rows)
                weights, loss = train_step(weights, batch)
                print(f"step {step} loss {float(loss):.4f}", flush=True)
                step += 1
                time.sleep(options.pause_seconds)
        except jax.errors.JaxRuntimeError as error:
            if "DATA_LOSS" not in str(error):
                raise
            print(f"lost, going on from step {step}: {error}", flush=True)
            time.sleep(1.0)


if __name__ == "__main__":
    main()
