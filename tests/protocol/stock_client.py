"""A program for a stock jax client: puts arrays of all types, layouts and shardings, and fetches them again.

Prints one line for each array that did not come back as it went, then the number of arrays.
"""

import jax
import ml_dtypes
import numpy as np
from jax.extend import backend
from jax.extend.backend import ifrt_proxy
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

checked = 0


def check(label: str, array: np.ndarray, sharding: Sharding) -> None:
    global checked
    checked += 1
    back = np.asarray(jax.device_put(array, sharding))
    if back.dtype != array.dtype or back.shape != array.shape or back.tobytes() != array.tobytes():
        print(f"WRONG {label}: {array!r} came back as {back!r}")


jax.config.update("jax_enable_x64", True)
if jax.__version_info__ < (0, 12):
    # Older releases carry the client, but have no backend of that name until somebody registers it.
    backend.register_backend_factory(
        "proxy",
        lambda: ifrt_proxy.get_client(jax.config.read("jax_backend_target"), ifrt_proxy.ClientConnectionOptions()),
        priority=-1,
    )
devices = jax.devices()
one = SingleDeviceSharding(devices[1])

names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
scalars = [np.dtype(name) for name in names.split()]
scalars += [
    np.dtype(getattr(ml_dtypes, name)) for name in dir(ml_dtypes) if name.startswith(("int", "uint", "float", "bf"))
]
for dtype in scalars:
    base = (np.arange(120).reshape(5, 8, 3) % 2).astype(dtype)
    check(f"{dtype} row-major", base, one)
    check(f"{dtype} transposed", base.T, one)
    check(f"{dtype} strided", base[::2, 1::3], one)
    check(f"{dtype} one element", base[1:2, 2:3, 1:2], one)
    check(f"{dtype} scalar", base[0, 0, 1].reshape(()), one)
    check(f"{dtype} empty", base[:0], one)

strings = np.array([["a", "bé"], ["", "x" * 300]], dtype=np.dtypes.StringDType())
text = np.asarray(jax.device_put(strings, devices[0]))
checked += 1
if text.tolist() != strings.tolist():
    print(f"WRONG strings: {text!r}")

grid = np.arange(128, dtype=np.int32).reshape(16, 8)
orders = [list(range(8)), [3, 1, 0, 2, 7, 6, 5, 4]]
for order in orders:
    mesh = Mesh(np.array(devices)[order].reshape(2, 2, 2), ("x", "y", "z"))
    for spec in (
        PartitionSpec(),
        PartitionSpec("x"),
        PartitionSpec(None, "z"),
        PartitionSpec("z", "x"),
        PartitionSpec(("z", "x"), "y"),
        PartitionSpec(("y", "z", "x")),
    ):
        check(f"{order} {spec}", grid, NamedSharding(mesh, spec))
        check(f"{order} {spec} transposed", grid.T, NamedSharding(mesh, spec))
        made = jax.make_array_from_callback(grid.shape, NamedSharding(mesh, spec), lambda index: grid[index])
        checked += 1
        if not np.array_equal(np.asarray(made), grid):
            print(f"WRONG assembled {order} {spec}")

print(checked)
