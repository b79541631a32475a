import tomllib
from pathlib import Path

import pytest

from ridgeway.protocol import messages, versions
from ridgeway.protocol.status import Code, StatusError
from ridgeway.protocol.versions import ProxyVersion


@pytest.mark.parametrize(
    ("lowest", "highest", "chosen"),
    [
        ((16, 2), (25, 6), (25, 6)),
        ((1, 1), (16, 2), (16, 2)),
        ((20, 4), (40, 9), (25, 6)),
        ((25, 6), (26, 7), (25, 6)),
        ((10, 6), (18, 6), (18, 6)),
    ],
)
def test_the_highest_common_version_is_chosen(
    lowest: tuple[int, int], highest: tuple[int, int], chosen: tuple[int, int]
) -> None:
    assert versions.negotiate(ProxyVersion(*lowest), ProxyVersion(*highest)) == ProxyVersion(*chosen)


@pytest.mark.parametrize(
    ("lowest", "highest"), [((1, 2), (15, 6)), ((26, 2), (30, 6)), ((16, 7), (25, 9)), ((16, 1), (25, 1))]
)
def test_no_common_version_names_both_windows(lowest: tuple[int, int], highest: tuple[int, int]) -> None:
    with pytest.raises(StatusError) as caught:
        versions.negotiate(ProxyVersion(*lowest), ProxyVersion(*highest))
    assert caught.value.status.code is Code.FAILED_PRECONDITION
    message = caught.value.status.message
    assert f"protocol {lowest[0]}..{highest[0]} and serialization {lowest[1]}..{highest[1]}" in message
    assert "protocol 16..25 and serialization 2..6" in message
    assert versions.SUPPORTED_JAX in message


def test_an_empty_window_is_the_clients_mistake() -> None:
    with pytest.raises(StatusError) as caught:
        versions.negotiate(ProxyVersion(20, 2), ProxyVersion(19, 6))
    assert caught.value.status.code is Code.INVALID_ARGUMENT


def test_versions_survive_the_wire() -> None:
    response = messages.GrpcGetVersionResponse()
    versions.fill_version_proto(response.version, ProxyVersion(17, 3))
    read = messages.GrpcGetVersionResponse.FromString(response.SerializeToString())
    assert versions.version_from_proto(read.version) == ProxyVersion(17, 3)


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.10.2", False),
        ("0.11.0", True),
        ("0.12.0.1", True),
        ("0.12.1.dev20260101", True),
        ("0.12rc1", True),
        ("0.13.0", False),
        ("1.0.0", False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_the_supported_range(version: str, supported: bool) -> None:
    assert versions.is_supported_jax(version) is supported


def test_what_pip_installs_is_the_supported_range() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lowest = ".".join(map(str, versions.MIN_JAX_VERSION))
    limit = ".".join(map(str, versions.JAX_VERSION_LIMIT)).removesuffix(".0")
    declared = [entry for entry in project["dependencies"] if entry.startswith("jax")]
    assert declared == [f"jax>={lowest},<{limit}", f"jaxlib>={lowest},<{limit}"]
    assert f"{lowest} to " in versions.SUPPORTED_JAX
