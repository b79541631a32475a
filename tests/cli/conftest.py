"""Fixtures of the command's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_harness import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A world of its own; what a failed test leaves in it is killed."""
    made = World(tmp_path)
    try:
        yield made
    finally:
        made.end()
