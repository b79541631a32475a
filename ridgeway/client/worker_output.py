"""What colocated Python prints on workers, printed here; and a warning to a program whose functions mean nothing there.

The stream that brings it needs grpc, whose import takes a tenth of a second, so it is opened when the program imports
jax's colocated Python.
"""

import importlib.abc
import platform
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import jax

_MODULE = "jax.experimental.colocated_python"

_session: int | None = None
_followed: set[int] = set()


def follow_when_needed(session: int, problem: str | None = None) -> None:
    """Print the output of a session from the moment that this program uses colocated Python; and before it a problem
    that it will have there."""
    global _session
    _session = session
    if _MODULE in sys.modules:
        _follow(session, problem)
    else:
        sys.meta_path.insert(0, _Watch(session, problem))


def follow_now() -> None:
    """Open the stream of this process's session if it is not open yet."""
    if _session is not None and _session not in _followed:
        _follow(_session)


def version_problem(python: str, jax_version: str) -> str | None:
    """One line for the user if functions of this process cannot run on a cluster with these versions, else None: they
    are sent as bytecode, which another minor version of Python does not understand, with jax's own objects pickled,
    which another release of jax (0.11.2 for 0.11.0) may not."""
    here = platform.python_version(), jax.__version__
    if _first(2, here[0]) == _first(2, python) and _first(3, here[1]) == _first(3, jax_version):
        return None
    return (
        f"colocated Python needs the workers' versions of Python and jax: this program has Python {here[0]} and jax "
        f"{here[1]}, the cluster has Python {python} and jax {jax_version}; everything else works"
    )


def _first(count: int, version: str) -> list[str]:
    return version.split(".")[:count]


def _follow(session: int, problem: str | None = None) -> None:
    from ridgeway.client import callback_runner

    _followed.add(session)
    if problem is not None:
        print(f"ridgeway: {problem}", file=sys.stderr, flush=True)
    target = jax.config.read("jax_backend_target")
    threading.Thread(target=lambda: callback_runner.runner_for(target).follow(session), daemon=True).start()


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing, but sees what is looked for. It stays: the import system is going through the list."""

    def __init__(self, session: int, problem: str | None):
        self._session = session
        self._problem = problem
        self._seen = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system."""
        if fullname == _MODULE and not self._seen:
            self._seen = True
            _follow(self._session, self._problem)
        return None
