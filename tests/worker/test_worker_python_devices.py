"""The devices that colocated Python sees, and ids under which jax pickles them. Each case in a process of its own,
since a process has one default backend."""

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, sys
import jax, numpy as np
from ridgeway.worker import python_devices
slot, slots, each = map(int, sys.argv[1:])
runtime = python_devices.make_runtime(slot, slots, each)
python_devices.make_default(runtime)
from jax.experimental.colocated_python import serialization

mesh = jax.sharding.Mesh(np.array([runtime.device(n) for n in sorted(runtime.numbers)]), "x")
sharding = jax.NamedSharding(mesh, jax.P("x"))
single = jax.sharding.SingleDeviceSharding(runtime.device(min(runtime.local)))
pickled = serialization._serialize([mesh, sharding, single, sharding._internal_device_list])
back = serialization._deserialize(pickled)
array = jax.make_array_from_callback((2 * len(runtime.numbers),), sharding, lambda i: np.arange(100)[i])
local = jax.sharding.Mesh(jax.local_devices(), "y")
total = jax.jit(lambda a: a.sum())(jax.device_put(np.arange(2 * each), jax.NamedSharding(local, jax.P("y"))))
print(json.dumps({
    "here": [jax.process_index(), jax.process_count(), jax.device_count(), jax.local_device_count()],
    "local": sorted(runtime.local),
    "same": back == [mesh, sharding, single, sharding._internal_device_list],
    "shards": [np.asarray(shard.data).tolist() for shard in array.addressable_shards],
    "total": int(total),
    "texts": [repr(runtime.device(n)) for n in sorted(runtime.numbers)],
}))
"""

OTHER_HOST = """
import sys
import jax, numpy as np
from ridgeway.worker import python_devices
runtime = python_devices.make_runtime(int(sys.argv[1]), 3, 2)
python_devices.make_default(runtime)
from jax.experimental.colocated_python import serialization
if sys.argv[2] == "-":
    devices = [runtime.device(n) for n in (5, 0, 2)]
    print(serialization._serialize(jax.sharding.Mesh(np.array(devices), "x")).hex())
else:
    mesh = serialization._deserialize(bytes.fromhex(sys.argv[2]))
    numbers = {runtime.device(n): n for n in runtime.numbers}
    print([numbers[d] for d in mesh.devices])
"""


def run(program: str, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("slot", "slots", "each"), [(0, 1, 2), (0, 3, 2), (2, 3, 2)])
def test_a_host_sees_all_devices_and_has_its_own(slot: int, slots: int, each: int) -> None:
    found = json.loads(run(PROGRAM, slot, slots, each))
    mine = list(range(slot * each, slot * each + each))
    assert found["here"] == [slot, slots, slots * each, each]
    assert found["local"] == mine
    assert found["same"]
    assert found["shards"] == [[2 * n, 2 * n + 1] for n in mine]
    assert found["total"] == sum(range(2 * each))
    if slot > 0:
        assert [f"PjRtIFRTDeviceId={n}]" in text for n, text in enumerate(found["texts"])] == [True] * slots * each


def test_hosts_pickle_devices_under_the_same_ids() -> None:
    assert run(OTHER_HOST, 2, run(OTHER_HOST, 1, "-")) == "[5, 0, 2]"
