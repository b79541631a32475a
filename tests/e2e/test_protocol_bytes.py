"""Bytes between hosts go from worker to worker: what is moved leaves the head's memory as it is."""

import e2e_harness as harness
from e2e_harness import Cluster, Controller

from ridgeway import processes

pytestmark = harness.MARKS

ARRAY_BYTES = 96 << 20
#: What the head may need for anything else meanwhile.
ALLOWED_BYTES = 16 << 20


def test_a_reshard_between_slices_leaves_the_heads_memory_flat(cluster: Cluster, controller: Controller) -> None:
    controller.run(f"""
def on(devices, *spec):
    return NamedSharding(Mesh(np.array(devices), ("x",)), P(*spec))

def moved(count):
    array = jax.jit(lambda: jnp.arange(count, dtype=jnp.float32), out_shardings=on(devices_of(0), "x"))()
    array = jax.device_put(array, on(devices_of(1), "x"))  # as many devices: a copy
    # To another number of devices jax's device_put takes the array to the host; this is what pathwaysutils does.
    for target in (on(jax.devices()[::-1], "x"), on(devices_of(2, 0), "x"), on(devices_of(1))):
        [array] = _pathways._transfer_to_shardings([array], [target], False)
    array.block_until_ready()
    return [float(array[n]) for n in (0, 6, count - 1)]

from jaxlib import _pathways
moved(6 * 1024)
size = {ARRAY_BYTES} // 4
""")
    head = cluster.status()["head"]["pid"]
    assert processes.reset_peak_memory(head)
    before = processes.memory_bytes(head)
    last = float(ARRAY_BYTES // 4 - 1)
    assert controller.run("result = moved(size)")[:2] == [0.0, 6.0]
    grown = processes.peak_memory_bytes(head) - before
    assert grown < ALLOWED_BYTES, f"the head grew by {grown} bytes while {last + 1:.0f} numbers were moved"
    # That the measure would show it: the same bytes through the head.
    controller.run("np.asarray(jax.device_put(np.zeros(size, np.float32), jax.devices()[0]))")
    assert processes.peak_memory_bytes(head) - before > ARRAY_BYTES / 2
