"""`jax.profiler` over the cluster: controller, proxy and workers in one folder."""

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Controller

from ridgeway.protocol import messages
from ridgeway.protocol.profile_link import PLANE_PREFIX
from ridgeway.protocol.status import RETRIED_CODES

pytestmark = harness.MARKS

CONTROLLER_PLANE = "/host:CPU"
PROXY_PLANE = PLANE_PREFIX + "proxy"
WORK = "float(mix(sharded(jax.devices()), 30).sum())"


@pytest.fixture
def program(cluster: Cluster, plugin: str) -> Iterator[Controller]:
    """A program with the plugin, connected to the cluster of three slices."""
    with contextlib.closing(Controller(cluster.place, {**cluster.environment(), "PYTHONPATH": plugin})) as made:
        yield made


def planes_in(folder: Path, name: str = "*") -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Of the only trace there: plane -> event -> (begin, end) of each, nanoseconds from the profile's start."""
    [path] = folder.glob(f"plugins/profile/*/{name}.xplane.pb")
    return planes_of(path)


def planes_of(path: Path) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """`planes_in` of one file."""
    planes: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for plane in messages.XSpace.FromString(path.read_bytes()).planes:
        events = planes.setdefault(plane.name, {})
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns + event.offset_ps // 1000
                name = plane.event_metadata[event.metadata_id].name
                events.setdefault(name, []).append((begin, begin + event.duration_ps // 1000))
    return planes


def slice_plane(index: int) -> str:
    """The plane of a slice's only worker."""
    return f"{PLANE_PREFIX}slice {index} host 0"


def test_one_trace_shows_controller_proxy_and_workers(program: Controller, tmp_path: Path) -> None:
    program.run(f"""
{WORK}
with jax.profiler.trace({str(tmp_path)!r}):
    with jax.profiler.TraceAnnotation("in the controller"):
        {WORK}
""")
    planes = planes_in(tmp_path)
    [(begin, end)] = planes[CONTROLLER_PLANE]["in the controller"]
    executed = planes[PROXY_PLANE]["loaded_executable_execute"]
    assert any(begin <= first and last <= end for first, last in executed), (begin, end, executed)
    for index in range(3):
        events = planes[slice_plane(index)]
        inside = [name for name, spans in events.items() if any(begin <= a and b <= end for a, b in spans)]
        assert any("all-reduce" in name for name in inside), sorted(events)
    [viewed] = tmp_path.glob("plugins/profile/*/*.trace.json.gz")
    shown = json.loads(gzip.decompress(viewed.read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in shown if event.get("name") == "process_name"}
    assert {PROXY_PLANE, *map(slice_plane, range(3))} <= names


def test_a_slice_that_is_lost_in_the_middle_is_missing_up_to_there(
    cluster: Cluster, program: Controller, tmp_path: Path
) -> None:
    program.run(f"""
{WORK}
jax.profiler.start_trace({str(tmp_path)!r})
{WORK}
""")
    lost = cluster.kill_executor(1)
    harness.until(lambda: cluster.host(1).executor_pid != lost.executor_pid)
    cluster.wait_whole()
    program.run(f"""
{WORK}
jax.profiler.stop_trace()
""")
    planes = planes_in(tmp_path)
    assert {slice_plane(0), slice_plane(1), slice_plane(2), CONTROLLER_PLANE} <= set(planes)
    proxy = planes[PROXY_PLANE]
    [(gone, _)] = next(spans for name, spans in proxy.items() if name.startswith("host_lost: slice 1"))
    again = [a for spans in planes[slice_plane(1)].values() for a, _ in spans]
    assert again and min(again) > gone  # what the executor did that was lost went with it; this is the one after it
    [stopped] = cluster.events(0, "profile_stopped")[-1:]
    assert any("slice 1 host 0" in problem and "before it was lost" in problem for problem in stopped["problems"])


def test_a_second_profile_at_once_takes_no_workers_and_disturbs_nothing(
    cluster: Cluster, program: Controller, plugin: str, tmp_path: Path
) -> None:
    environment = {**cluster.environment(), "PYTHONPATH": plugin}
    with contextlib.closing(Controller(cluster.place, environment)) as second:
        program.run(f"jax.profiler.start_trace({str(tmp_path / 'first')!r})")
        second.run(f"""
with jax.profiler.trace({str(tmp_path / "second")!r}):
    float(jnp.ones(3).sum())
""")
        program.run(f"{WORK}\njax.profiler.stop_trace()")
    assert set(planes_in(tmp_path / "second")) & {PROXY_PLANE, slice_plane(0)} == set()
    assert {PROXY_PLANE, slice_plane(0)} <= set(planes_in(tmp_path / "first"))


def test_a_program_that_ends_in_the_middle_leaves_nothing_recording(
    cluster: Cluster, plugin: str, tmp_path: Path
) -> None:
    environment = {**cluster.environment(), "PYTHONPATH": plugin}
    with contextlib.closing(Controller(cluster.place, environment)) as made:
        made.run(f"jax.profiler.start_trace({str(tmp_path / 'never')!r})")
        made.process.kill()
    cluster.wait_sessions(0)
    with contextlib.closing(Controller(cluster.place, environment)) as following:
        following.run(f"with jax.profiler.trace({str(tmp_path / 'next')!r}):\n    {WORK}")
    assert {PROXY_PLANE, *map(slice_plane, range(3))} <= set(planes_in(tmp_path / "next"))


@pytest.mark.maxtext
def test_pathwaysutils_own_request_writes_a_file_for_each_process(
    cluster: Cluster, controller: Controller, tmp_path: Path
) -> None:
    request = {"traceLocation": str(tmp_path), "maxNumHosts": 2, "includeResourceManagers": True}
    controller.run(f"""
from pathwaysutils import profiling
{WORK}
profiling._start_pathways_trace_from_profile_request({request!r})
{WORK}
profiling._profile_state.call_profile_executable()
""")
    found = {path.name: planes_of(path) for path in tmp_path.glob("plugins/profile/*/*.xplane.pb")}
    assert set(found) == {f"{name}.xplane.pb" for name in ("proxy", "slice_0_host_0", "slice_1_host_0")}
    assert "loaded_executable_execute" in found["proxy.xplane.pb"]["/host:CPU"]
    assert any("all-reduce" in name for name in found["slice_1_host_0.xplane.pb"]["/host:CPU"])
    error = controller.error_of(f"""
profiling._profile_state.reset()
profiling._start_pathways_trace_from_profile_request({{**{request!r}, "traceLocation": "/proc/none"}})
""")
    assert "INVALID_ARGUMENT" in error and "/proc/none" in error
    assert not any(code.name in error for code in RETRIED_CODES)
