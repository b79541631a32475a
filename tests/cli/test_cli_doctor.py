"""What `ridgeway doctor` finds."""

import importlib.metadata
from pathlib import Path

import pytest
from cli_harness import World

from ridgeway.cli import doctor

PROXY = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": "grpc://127.0.0.1:29000"}
CREDENTIALS = {"IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true"}


def test_python() -> None:
    assert doctor.check_python((3, 12, 1)).level == doctor.OK
    assert doctor.check_python((3, 11, 9)).level == doctor.PROBLEM


@pytest.mark.parametrize(
    ("jax", "jaxlib", "level"),
    [
        ("0.12.0.1", "0.12.0.1", doctor.OK),
        ("0.11.0", "0.11.0", doctor.OK),
        ("0.12.0", "0.11.0", doctor.PROBLEM),
        ("0.10.2", "0.10.2", doctor.PROBLEM),
        ("0.13.0", "0.13.0", doctor.PROBLEM),
        (None, "0.12.0", doctor.PROBLEM),
    ],
)
def test_jax(jax: str | None, jaxlib: str, level: str) -> None:
    def installed(name: str) -> str:
        version = {"jax": jax, "jaxlib": jaxlib}[name]
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    finding = doctor.check_jax(installed)
    assert finding.level == level
    if level == doctor.PROBLEM:
        assert "pip install" in finding.text


def test_environment() -> None:
    assert doctor.check_environment({}).level == doctor.OK
    assert doctor.check_environment({"JAX_PLATFORMS": "cpu"}).level == doctor.OK
    for value, level in ((None, doctor.NOTE), ("false", doctor.PROBLEM), ("", doctor.PROBLEM)):
        given = {} if value is None else {"IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": value}
        missing = doctor.check_environment({**PROXY, **given})
        assert missing.level == level
        assert "export IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true" in missing.text
    assert doctor.check_environment({**PROXY, **CREDENTIALS}).level == doctor.OK
    both = {**PROXY, **CREDENTIALS, "JAX_PLATFORMS": "proxy,cpu"}
    assert doctor.check_environment(both).level == doctor.OK
    target = doctor.check_environment({"JAX_PLATFORMS": "proxy", **CREDENTIALS})
    assert target.level == doctor.PROBLEM and "JAX_BACKEND_TARGET" in target.text


def test_target() -> None:
    asked: list[tuple[str, int]] = []

    def answers(host: str, port: int) -> None:
        asked.append((host, port))

    def refuses(host: str, port: int) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    assert doctor.check_target({}, refuses) is None
    assert doctor.check_target({**PROXY, "JAX_PLATFORMS": "cpu"}, refuses) is None
    found = doctor.check_target(PROXY, answers)
    assert found is not None and found.level == doctor.OK
    doctor.check_target({**PROXY, "JAX_BACKEND_TARGET": "grpc://[::1]:7"}, answers)
    assert asked == [("127.0.0.1", 29000), ("::1", 7)]
    nobody = doctor.check_target(PROXY, refuses)
    assert nobody is not None and nobody.level == doctor.PROBLEM
    assert "Connection refused" in nobody.text and "`ridgeway up`" in nobody.text
    wrong = doctor.check_target({**PROXY, "JAX_BACKEND_TARGET": "grpc://head"}, answers)
    assert wrong is not None and wrong.level == doctor.PROBLEM and "grpc://HOST:PORT" in wrong.text


def test_cache(tmp_path: Path) -> None:
    good = doctor.check_cache(tmp_path / "not" / "there", 1 << 20)
    assert good.level == doctor.OK and str(tmp_path / "not" / "there") in good.text
    full = doctor.check_cache(tmp_path, 1 << 60)
    assert full.level == doctor.NOTE and "are free there" in full.text
    (tmp_path / "file").write_text("in the way")
    blocked = doctor.check_cache(tmp_path / "file" / "cache", 1 << 20)
    assert blocked.level == doctor.NOTE and "XDG_CACHE_HOME" in blocked.text


def test_memory() -> None:
    levels = [doctor.check_memory(gib << 28).level for gib in (0, 3, 400)]
    assert levels == [doctor.PROBLEM, doctor.NOTE, doctor.OK]


def test_the_command(world: World) -> None:
    code, output, _ = world.call("doctor", **PROXY, IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS="false")
    assert code == 1 and "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS" in output
    code, output, _ = world.call("doctor", "--settings", RIDGEWAY_PROBE_HOLD_SECONDS="2.5")
    assert code == 0 and "probe_hold_seconds=2.5" in output.splitlines()
    code, _, errors = world.call("doctor", "--settings", RIDGEWAY_PROBE_HOLD_SECONDS="soon")
    assert code == 2 and "probe_hold_seconds = 'soon' is not a float" in errors
