"""What colocated Python prints on workers, printed here.

The stream that brings it needs grpc, whose import takes a tenth of a second, so it is opened when the program imports
jax's colocated Python.
"""

import importlib.abc
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import jax

_MODULE = "jax.experimental.colocated_python"

_session: int | None = None
_followed: set[int] = set()


def follow_when_needed(session: int) -> None:
    """Print the output of a session from the moment that this program uses colocated Python."""
    global _session
    _session = session
    if _MODULE in sys.modules:
        _follow(session)
    else:
        sys.meta_path.insert(0, _Watch(session))


def follow_now() -> None:
    """Open the stream of this process's session if it is not open yet."""
    if _session is not None and _session not in _followed:
        _follow(_session)


def _follow(session: int) -> None:
    from ridgeway.client import callback_runner

    _followed.add(session)
    target = jax.config.read("jax_backend_target")
    threading.Thread(target=lambda: callback_runner.runner_for(target).follow(session), daemon=True).start()


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing, but sees what is looked for. It stays: the import system is going through the list."""

    def __init__(self, session: int):
        self._session = session
        self._seen = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system."""
        if fullname == _MODULE and not self._seen:
            self._seen = True
            _follow(self._session)
        return None
