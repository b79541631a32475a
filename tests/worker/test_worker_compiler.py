"""A compiler that has nothing to do holds nothing."""

import subprocess
import sys

from ridgeway.worker.compiler import Activity

PROGRAM = """
import os, time
import jax, jax.export, numpy as np
from jaxlib import xla_client
from ridgeway.worker import compilation

program = jax.export.export(jax.jit(lambda x: x + 1))(jax.ShapeDtypeStruct((4,), np.float32)).mlir_module_serialized
options = xla_client.CompileOptions().SerializeAsString()

def threads():
    return len(os.listdir("/proc/self/task"))

def released(held):
    compilation.release_clients()
    end = time.monotonic() + 60.0
    while threads() >= held and time.monotonic() < end:
        time.sleep(0.05)
    return threads()

counts = []
for _ in range(2):
    metadata, serialized = compilation.compile_program(program, options, 1, 1)
    assert serialized
    held = threads()
    counts += [held, released(held)]
# What XLA starts once in a process stays; of the clients nothing does.
assert counts[1] < counts[0] and counts[3] < counts[2] and counts[2:] == counts[:2], counts
print("released")
"""


def test_released_clients_take_their_threads_along_and_are_made_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "released\n", done.stdout + done.stderr


def test_a_compiler_is_idle_only_when_every_compilation_has_ended() -> None:
    activity = Activity()
    with activity.compiling():
        with activity.compiling():
            assert activity.idle_seconds() == 0.0
        assert activity.idle_seconds() == 0.0
    first = activity.idle_seconds()
    assert first >= 0.0
    while activity.idle_seconds() == first:
        pass
    assert activity.idle_seconds() > first
