"""A controller, or a worker, with another jax than the cluster's: `make versions` names a second Python for this."""

import contextlib
import importlib.metadata
import os
import subprocess

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Controller, ProgramError

from ridgeway.protocol.status import RETRIED_CODES

#: The Python of an environment with another release of jax within the supported range.
OTHER_VARIABLE = "RIDGEWAY_OTHER_PYTHON"
OTHER = os.environ.get(OTHER_VARIABLE, "")

pytestmark = [*harness.MARKS, pytest.mark.skipif(not OTHER, reason=f"{OTHER_VARIABLE} is not set; see make versions")]


@pytest.fixture(scope="module")
def versions() -> tuple[str, str]:
    """The cluster's jaxlib, and the other one's."""
    ask = "import importlib.metadata as m; print(m.version('jaxlib'))"
    theirs = subprocess.run([OTHER, "-c", ask], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    ours = importlib.metadata.version("jaxlib")
    assert ours != theirs
    return ours, theirs


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
result = [float(step(moved)), np.asarray(donated).tolist(), values.is_deleted(), np.asarray(key).tolist(),
          np.asarray(jax.jit(jnp.sort)(moved[::-1])).tolist()]
"""


def test_a_controller_of_another_version_works_or_is_refused_with_both_named(
    cluster: Cluster, versions: tuple[str, str]
) -> None:
    with contextlib.closing(Controller(cluster.place, cluster.environment())) as same:
        expected = same.run(PROGRAM)
    with contextlib.closing(Controller(cluster.place, cluster.environment(), python=OTHER)) as other:
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
    cluster.wait_sessions(0)
    cluster.wait_whole()
