"""A program that makes XLA crash is named, and is not run for ever."""

import contextlib
from collections.abc import Iterator

import e2e_harness as harness
import psutil
import pytest
from e2e_harness import Cluster

from ridgeway.protocol.status import RETRIED_CODES

pytestmark = harness.MARKS

#: A call of a Python function by a number that this program has none for: XLA takes it for an address.
CRASHING = """
def crashes(x):
    target = "xla_ffi_python_cpu_callback"
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, index=np.uint64(1 << 40))

crashing = jax.jit(crashes)
"""

#: XLA's own TopK, called with one operand where it insists on more: it ends the process that compiles it.
CRASHING_COMPILERS = """
def crashes_compilers(x):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("TopK", result, custom_call_api_version=1)(x)

np.asarray(jax.jit(crashes_compilers)(jnp.ones(4)))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two slices of one device; what is lost at once is told apart after less than the usual time."""
    folder = tmp_path_factory.mktemp("crashes")
    with harness.cluster_in(
        folder, "2x1x1", "--max-slice-restarts", "unlimited", "--set", "membership_settle_seconds=0.3"
    ) as made:
        yield made


def test_a_program_that_crashes_its_executor_is_named_and_then_refused(small: Cluster) -> None:
    with contextlib.closing(small.controller()) as program:
        program.run(CRASHING)
        program.run("kept = jax.device_put(np.arange(4.0, dtype=np.float32), devices_of(0)[0])")
        errors: list[str] = []
        # Crashes in quick succession count as one, so it takes some tries more than the limit.
        while "INVALID_ARGUMENT" not in (
            error := program.error_of("""
np.asarray(crashing(jax.device_put(np.ones(4, np.float32), devices_of(1)[0])))
""")
        ):
            errors.append(error)
            assert len(errors) < 100, errors
            small.wait_whole()
        assert len(errors) >= 3
        for lost in errors:
            assert "DATA_LOSS" in lost and "killed by SIGSEGV while it ran jit_crashes)" in lost, errors
        assert "jit_crashes" in error and not any(code.name in error for code in RETRIED_CODES), error
        small.wait_event(0, "program_refused", program="jit_crashes", crashes=3)
        executors = {slot: host.executor_pid for slot, host in small.wait_whole().items()}
        assert "INVALID_ARGUMENT" in program.error_of("""
np.asarray(crashing(jax.device_put(np.ones(4, np.float32), devices_of(1)[0])))
""")
        # Everything else goes on, on both slices.
        assert program.run("""
result = [float(kept.sum()), float(jax.device_put(np.float32(2), devices_of(1)[0]) + 1)]
""") == [6.0, 3.0]
        assert {slot: host.executor_pid for slot, host in small.hosts().items()} == executors
    small.wait_sessions(0)


def test_who_is_killed_while_it_runs_a_program_is_no_crash_of_it(small: Cluster) -> None:
    with contextlib.closing(small.controller()) as program:
        for _ in range(4):
            executor = psutil.Process(small.wait_whole()[1, 0].executor_pid)
            program.run("""
values = jax.device_put(np.ones((64, 64), np.float32), devices_of(1)[0])
mix(values, 1).block_until_ready()
""")
            before = sum(executor.cpu_times()[:2])
            program.run("running = mix(values, 30_000_000)")
            harness.until(lambda executor=executor, before=before: sum(executor.cpu_times()[:2]) > before + 0.3)
            lost = small.kill_executor(1).executor_pid
            error = program.error_of("np.asarray(running)")
            assert "DATA_LOSS" in error and "killed by SIGKILL while it ran jit_mix" in error, error
            harness.until(lambda lost=lost: small.host(1).executor_pid != lost)
            small.wait_whole()
        assert program.run("""
result = float(mix(jax.device_put(np.ones((64, 64), np.float32), devices_of(1)[0]), 3).sum())
""") == 4096.0
    small.wait_sessions(0)


def test_a_program_that_crashes_compilers_is_refused(small: Cluster) -> None:
    executors = {slot: host.executor_pid for slot, host in small.wait_whole().items()}
    with contextlib.closing(small.controller()) as program:
        since = small.now()
        error = program.error_of(CRASHING_COMPILERS)
        assert "UNIMPLEMENTED" in error and "makes XLA crash" in error, error
        assert not any(code.name in error for code in RETRIED_CODES), error
        assert len(small.events(since, "compiler_lost")) == 3
        assert program.run("result = float(jax.jit(lambda x: x * 3)(jnp.float32(2)))") == 6.0
    assert {slot: host.executor_pid for slot, host in small.hosts().items()} == executors
    small.wait_sessions(0)
