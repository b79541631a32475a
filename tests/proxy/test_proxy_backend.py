"""What the plugin says before jaxlib's client connects, and of versions."""

import platform
import socket

import jax
import pytest

from ridgeway.client.backend import nobody_there
from ridgeway.client.worker_output import version_problem


def test_a_server_that_listens_is_nothing_to_speak_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert nobody_there(f"grpc://127.0.0.1:{server.getsockname()[1]}") is None


def test_an_address_where_nobody_listens_is_named() -> None:
    with socket.socket() as bound:  # bound, not listening: refuses, and nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        target = f"grpc://127.0.0.1:{bound.getsockname()[1]}"
        text = nobody_there(target)
    assert text is not None and target in text and "ridgeway up" in text and "\n" not in text


@pytest.mark.parametrize("target", ["", "local", "grpc://host", "grpc://:29000", "grpc-with-credentials:///x"])
def test_other_forms_are_left_to_jaxlib(target: str) -> None:
    assert nobody_there(target) is None


def test_versions_with_which_colocated_python_cannot_work_are_named() -> None:
    python, release = platform.python_version(), jax.__version__
    minor = ".".join(python.split(".")[:2])
    assert version_problem(python, release) is version_problem(f"{minor}.99", f"{release}.post1") is None
    for other in ((f"{minor}9.0", release), (python, "0.10.9"), (python, f"{release.rsplit('.', 1)[0]}9.1")):
        text = version_problem(*other)
        assert text is not None and all(version in text for version in (python, release, *other)), text
