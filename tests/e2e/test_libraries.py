"""Libraries that people use beside jax, through a cluster as natively."""

import re
import sys
from pathlib import Path
from typing import Any

import e2e_harness as harness
import pytest
from e2e_harness import ROOT, Cluster, Controller, Place

pytestmark = [*harness.MARKS, pytest.mark.maxtext]

#: pathwaysutils' own tests, as its wheel has them, but for those of Google's cloud.
PATHWAYSUTILS_TESTS = (
    "plugin_executable_test", "reshard_test", "experimental/reshard_test", "persistence_test",
    "mock_fault_injection_test", "profiling_test", "proxy_backend_test", "initialize_test", "lru_cache_test",
    "debug/timing_test", "debug/watchdog_test",
)  # fmt: skip

#: The backend is made first: some of these tests set jax_platforms to "cpu", which nobody looks at any more then.
RUN_TESTS = """
import pathlib, sys
import jax
print("BACKEND", jax.devices()[0].client.runtime_type, len(jax.devices()))
import pathwaysutils
import pytest
folder = pathlib.Path(pathwaysutils.__file__).parent / "test"
sys.exit(pytest.main(["-q", "-rA", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", str(folder),
                      "--import-mode=importlib", *(str(folder / f"{name}.py") for name in sys.argv[1:])]))
"""

OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED) (?:\[\d+\] )?(\S+)", re.MULTILINE)


def outcomes(run: harness.Running) -> dict[str, str]:
    """Outcome of each test."""
    assert run.wait(300) in (0, 1), run.describe()
    return {name.rpartition("/test/")[2]: outcome for outcome, name in OUTCOME.findall(run.output)}


def test_pathwaysutils_own_tests_pass_as_natively_and_those_that_need_a_backend_too(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = [sys.executable, "-c", RUN_TESTS, *PATHWAYSUTILS_TESTS]
    natively = place.start(command, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4")
    # Some share eight rows out over all devices.
    with harness.cluster_in(tmp_path_factory.mktemp("four"), "2x1x2") as four:
        through = four.start(*command)
        here, native = outcomes(through), outcomes(natively)
        four.wait_sessions(0)
    assert "BACKEND proxy/pathways 4" in through.output and "BACKEND proxy" not in natively.output
    passed = {name for name, outcome in native.items() if outcome == "PASSED"}
    assert len(passed) > 50, native
    assert {name: here.get(name) for name in passed if here.get(name) != "PASSED"} == {}, through.describe()
    needs_backend = [name for name in here if name.startswith("plugin_executable_test")]
    assert needs_backend and all(here[name] == "PASSED" for name in needs_backend), through.describe()


LOSS = re.compile(r"^step (\d+) loss (\S+) right (\S+)$", re.MULTILINE)


def test_a_flax_example_gives_the_same_losses_as_natively(cluster: Cluster, place: Place) -> None:
    command = [sys.executable, str(ROOT / "examples" / "flax_classifier.py")]
    natively = place.start(command, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="6")
    through = cluster.start(*command)
    found: list[list[Any]] = []
    for run in (natively, through):
        assert run.wait(180) == 0, run.describe()
        found.append(LOSS.findall(run.output))
    native, here = found
    assert len(native) == 6 and [step for step, _, _ in native] == [step for step, _, _ in here]
    assert [float(loss) for _, loss, _ in here] == pytest.approx([float(loss) for _, loss, _ in native], rel=1e-4)
    assert float(here[-1][1]) < float(here[0][1]) / 2
    cluster.wait_sessions(0)


def test_orbax_array_handlers_on_sharded_arrays(cluster: Cluster, controller: Controller, tmp_path: Path) -> None:
    assert controller.run(f"""
import asyncio
import orbax.checkpoint as ocp
from etils import epath

def on(devices, shape, names, *spec):
    return NamedSharding(Mesh(np.array(devices).reshape(shape), names), P(*spec))

devices = jax.devices()
grid = (3, 2), ("slice", "device")
shardings = {{
    "split over both": on(devices, *grid, ("slice", "device")),
    "two axes": on(devices, *grid, "slice", "device"),
    "replicated over slices": on(devices, *grid, None, "device"),
    "everywhere": on(devices, *grid),
    "one slice": on(devices_of(1), (2,), ("x",), "x"),
    "one device": jax.sharding.SingleDeviceSharding(devices[5]),
    "other order": on(devices[::-1], *grid, "device"),
}}
kinds = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.bool_, jnp.float8_e4m3fn, jnp.uint16]
values = {{
    name: (np.arange(48).reshape(12, 4) % 7).astype(kind) for name, kind in zip(shardings, kinds, strict=True)
}}
tree = {{name: jax.device_put(value, shardings[name]) for name, value in values.items()}}
folder = epath.Path({str(tmp_path)!r}) / "checkpoint"
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, tree)
    checkpointer.wait_until_finished()
    turned = dict(zip(shardings, [*list(shardings.values())[1:], shardings["everywhere"]], strict=True))
    found = []
    for wanted in (shardings, turned):
        target = {{
            name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=wanted[name]) for name, v in values.items()
        }}
        restored = checkpointer.restore(folder, target)
        found += [
            [name, restored[name].dtype == value.dtype, restored[name].sharding == wanted[name],
             np.array_equal(np.asarray(restored[name]).astype(np.float32), value.astype(np.float32))]
            for name, value in values.items()
        ]

# The handler by itself, on one array.
handler = ocp.type_handlers.ArrayHandler()
one = (epath.Path({str(tmp_path)!r}) / "one")
one.mkdir()
info = ocp.type_handlers.ParamInfo(name="weights", path=one / "weights", parent_dir=one, is_ocdbt_checkpoint=False)

async def round_trip():
    for future in await handler.serialize([tree["two axes"]], [info]):
        future.result()
    arguments = ocp.ArrayRestoreArgs(sharding=shardings["other order"], global_shape=(12, 4))
    return await handler.deserialize([info], [arguments])

[back] = asyncio.run(round_trip())
found.append(["handler", back.dtype == jnp.bfloat16, back.sharding == shardings["other order"],
              np.array_equal(np.asarray(back), values["two axes"])])
result = [entry for entry in found if not all(entry[1:])] or len(found)
""") == 15
