"""A controller, or a worker, with another jax than the cluster's: `make versions` names a second Python for this."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Controller, ProgramError

from ridgeway.protocol import messages
from ridgeway.protocol.profile_link import PLANE_PREFIX
from ridgeway.protocol.status import RETRIED_CODES

#: The Python of an environment with another release of jax within the supported range.
OTHER_VARIABLE = "RIDGEWAY_OTHER_PYTHON"
OTHER = os.environ.get(OTHER_VARIABLE, "")

pytestmark = [*harness.MARKS, pytest.mark.skipif(not OTHER, reason=f"{OTHER_VARIABLE} is not set; see make versions")]


@pytest.fixture(scope="module")
def pythons() -> tuple[str, str]:
    """The cluster's Python, and the other one's."""
    ask = "import platform; print(platform.python_version())"
    return platform.python_version(), _ask(ask)


@pytest.fixture(scope="module")
def versions() -> tuple[str, str]:
    """The cluster's jaxlib, and the other one's."""
    theirs = _ask("import importlib.metadata as m; print(m.version('jaxlib'))")
    ours = importlib.metadata.version("jaxlib")
    assert ours != theirs
    return ours, theirs


def _ask(code: str) -> str:
    """What the other Python says."""
    return subprocess.run([OTHER, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.fixture
def other(cluster: Cluster, plugin: str) -> Iterator[Controller]:
    """A program of the other environment, with the plugin."""
    environment = {**cluster.environment(), "PYTHONPATH": plugin}
    with contextlib.closing(Controller(cluster.place, environment, python=OTHER)) as made:
        yield made


def test_a_worker_of_another_version_is_refused_with_both_named(cluster: Cluster, versions: tuple[str, str]) -> None:
    head = f"127.0.0.1:{cluster.record.cluster_port}"
    worker = cluster.place.start(
        [OTHER, "-m", "ridgeway.cli.main", "worker", "--head", head, "--standby"],
        RIDGEWAY_CLUSTER_SECRET=cluster.record.secret,
    )
    assert worker.wait() == 2, worker.describe()
    said = "\n".join([*worker.stdout, *worker.stderr])
    assert all(f"jaxlib {version}" in said or version in said for version in versions), said
    cluster.wait_whole()


PROGRAM = """
mesh = Mesh(np.array(jax.devices()), ("x",))
values = jax.device_put(np.arange(12.0, dtype=np.float32), NamedSharding(mesh, P("x")))
step = jax.jit(lambda v: (jnp.sin(v) @ jnp.cos(v)) + v.sum(), out_shardings=NamedSharding(mesh, P()))
moved = jax.device_put(values, NamedSharding(mesh, P()))
donated = jax.jit(lambda v: v * 2, donate_argnums=0)(values)
key = jax.random.normal(jax.random.key(3), (5,))
rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)
square = jax.device_put(rows.T @ rows + np.eye(3, dtype=np.float32), jax.devices()[-1])
library = [jnp.linalg.cholesky(square), jnp.linalg.inv(square), jnp.linalg.eigvalsh(square), jnp.linalg.qr(square).R,
           jnp.linalg.svd(square, compute_uv=False), jnp.abs(jnp.fft.fft(square)), jax.lax.top_k(square, 2)[0],
           jax.lax.cumsum(square), jax.nn.gelu(square), jax.random.permutation(jax.random.key(1), square)]
result = [float(step(moved)), np.asarray(donated).tolist(), values.is_deleted(), np.asarray(key).tolist(),
          np.asarray(jax.jit(jnp.sort)(moved[::-1])).tolist(), [np.ravel(x).tolist() for x in library]]
"""


def test_a_controller_of_another_version_works_or_is_refused_with_both_named(
    cluster: Cluster, controller: Controller, other: Controller, versions: tuple[str, str]
) -> None:
    expected = controller.run(PROGRAM)
    try:
        found = other.run(PROGRAM)
    except ProgramError as error:
        print(f"VERSIONS refused: {error.text}")
        assert all(version in error.text for version in versions), error
        assert not any(code.name in error.text for code in RETRIED_CODES), error
    else:
        print("VERSIONS works")
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1:3] == expected[1:3] and found[4] == expected[4]
        assert found[3] == pytest.approx(expected[3], rel=1e-5)
        for ours, theirs in zip(expected[5], found[5], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-4)


def test_callbacks_and_profiles_work_between_versions(other: Controller, tmp_path: Path) -> None:
    assert other.run(f"""
heard = []
mesh = Mesh(np.array(jax.devices()), ("x",))
values = jax.device_put(np.arange(12.0, dtype=np.float32), NamedSharding(mesh, P("x")))
with jax.profiler.trace({str(tmp_path)!r}):
    @jax.jit
    def step(v):
        jax.debug.callback(lambda total: heard.append(float(total)), v.sum())
        return jax.pure_callback(lambda a: a * 2, v, v).sum()
    doubled = float(step(values))
    jax.effects_barrier()
result = [doubled, heard]
""") == [132.0, [66.0]]
    [trace] = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    planes = {plane.name for plane in messages.XSpace.FromString(trace.read_bytes()).planes}
    assert {f"{PLANE_PREFIX}proxy", *(f"{PLANE_PREFIX}slice {index} host 0" for index in range(3))} <= planes


def test_colocated_python_says_what_it_needs(
    cluster: Cluster, other: Controller, versions: tuple[str, str], pythons: tuple[str, str]
) -> None:
    try:
        result = other.run("""
from jax.experimental import colocated_python

@colocated_python.colocated_python
def add(v):
    return v + 1

result = np.asarray(add(jax.device_put(np.float32(1), jax.devices()[0]))).item()
""")
    except ProgramError as error:
        assert not any(code.name in error.text for code in RETRIED_CODES), error
        if _minor(pythons[0]) != _minor(pythons[1]):
            assert f"compiled by Python {_minor(pythons[1])}" in error.text and pythons[0] in error.text, error
        said = other.describe()
        assert all(version in said for version in (*versions, *pythons)), said
        assert not cluster.events(0, "python_lost"), error
    else:
        assert result == 2.0
    # Whatever became of that, everything else works.
    assert other.run("result = float(jnp.ones(4).sum())") == 4.0


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
