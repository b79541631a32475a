"""Colocated Python functions as a host runs them: from a pickle and shards of arrays to shards of arrays.

What is pickled is jax's (`jax.experimental.colocated_python.func`): the function, tree and specs of its arguments,
tree and specs of its results, its devices.  **Unpickling runs code**: this process exists to run what the controller
sends it, as whoever the worker runs as.
"""

import inspect
import platform
import traceback
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python
from jax.experimental.colocated_python import func_backend, serialization

from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.worker import python_code
from ridgeway.worker.device_runtime import Runtime

_METHOD_OF_OBJECT = "MethodCallerAtBackend"
"""jax's class of what calls a method of an object that lives here."""
_OF_A_FIRST_CALL = "lowered_fun"
"""jax's name of the functions that it wraps around the user's for a first call."""
_NOT_THE_USERS = ("ridgeway.worker.python_host", __name__, colocated_python.__name__)
"""Modules whose frames begin every traceback."""
TRACEBACK_CHARACTERS = 2500
MESSAGE_CHARACTERS = 1000

Shards = dict[int, np.ndarray]
"""Device id -> shard."""


class Function:
    """A colocated Python function that can be called any number of times."""

    def __init__(self, name: str, pickled: bytes):
        """Unpickle.

        Raises:
          StatusError: INVALID_ARGUMENT, another version of Python has compiled it.
          BaseException: whatever the unpickled code raises.
        """
        self.name = name
        here = platform.python_version()
        version = python_code.foreign_version(pickled)
        if version is not None:
            raise statuses.invalid_argument(
                f"colocated Python {name!r} was compiled by Python {version}, and this worker has {here}: bytecode "
                "means nothing in another version; run the controller and all workers with the same one"
            ).error()
        try:
            unpickled = serialization._deserialize(pickled)
        except Exception as error:
            error.add_note(
                f"Raised by unpickling {name!r} with Python {here}, jax {jax.__version__}: the modules that it uses, "
                "jax among them, must be on the workers too, in the controller's versions."
            )
            raise
        self._function, self._in_tree, self._in_specs, self._out_tree, self._out_specs, _ = unpickled
        methods = list(_methods(self._function))
        self.objects = frozenset(number for number, _ in methods)
        """ids of the objects it calls methods of"""
        for _, method in methods:
            self.name = method  # jax calls them all "unknown"
        self._result = _result_id(self._function)

    def argument(self, index: int, shards: Shards, runtime: Runtime) -> Any:
        """A `jax.Array` from its shards on this host."""
        spec = self._in_specs[index]
        arrays = [_put(data, device, spec.sharding.memory_kind, runtime) for device, data in shards.items()]
        return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, arrays, dtype=spec.dtype)

    def call(self, arguments: list[Any], runtime: Runtime) -> list[Shards]:
        """The shards on this host of each result.

        Raises:
          WrongResult: it returned something else than its specs say.
          BaseException: what it raises itself.
        """
        self.forget_result()
        args, kwargs = jax.tree_util.tree_unflatten(self._in_tree, arguments)
        result = self._function(*args, **kwargs)
        leaves, tree = jax.tree_util.tree_flatten(result)
        if tree != self._out_tree:
            raise WrongResult(f"it returned {tree}; its output spec says {self._out_tree}")
        return [_shards(index, leaf, self._out_specs[index], runtime) for index, leaf in enumerate(leaves)]


    def forget_result(self) -> None:
        """A first call keeps its result here for a second program to fetch, which is never called if the first call
        failed on another host; when the call is repeated it would be in the way."""
        if self._result is not None:
            store = func_backend.SINGLETON_RESULT_STORE
            with store._lock:
                store._storage.pop(self._result, None)


class WrongResult(TypeError):
    """A function returned something else than its specs say."""


def _put(data: np.ndarray, device: int, memory_kind: str | None, runtime: Runtime) -> Any:
    if data.dtype.char == dtypes.STRING_DTYPE.char:
        return jax.device_put(data, runtime.device(device))
    return runtime.put(data, device, memory_kind)


def _shards(index: int, leaf: Any, spec: Any, runtime: Runtime) -> Shards:
    if not isinstance(leaf, jax.Array):
        raise WrongResult(f"result {index} is a {type(leaf).__name__}; colocated Python returns jax.Arrays")
    if leaf.shape != spec.shape or leaf.dtype != spec.dtype:
        given, wanted = f"{leaf.dtype}{list(leaf.shape)}", f"{spec.dtype}{list(spec.shape)}"
        raise WrongResult(f"result {index} is {given}; its output spec says {wanted}")
    here = {shard.device: shard for shard in leaf.addressable_shards}
    wanted = spec.sharding.addressable_devices_indices_map(spec.shape)
    numbers = {runtime.device(number): number for number in runtime.local}
    found: Shards = {}
    for device, part in wanted.items():
        shard = here.get(device)
        if shard is None or _bounds(shard.index, spec.shape) != _bounds(part, spec.shape):
            raise WrongResult(
                f"result {index} has the sharding {leaf.sharding}, which does not give {device} what "
                f"{spec.sharding} of its output spec says"
            )
        found[numbers[device]] = np.asarray(shard.data)
    return found


def _bounds(index: Any, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [part.indices(size) for part, size in zip(index or (), shape, strict=True)]


def _methods(function: Any) -> Iterable[tuple[int, str]]:
    """Of each method that a function calls of an object here: the object's id, and ``Class.method``. jax keeps them in
    closures."""
    caller = type(function)
    if caller.__name__ == _METHOD_OF_OBJECT:
        made_by = inspect.getclosurevars(caller._first_call).nonlocals
        called_by = inspect.getclosurevars(caller.__call__).nonlocals
        yield made_by["uid"], f"{made_by['cls'].__name__}.{called_by['method_name']}"
    elif inspect.isfunction(function):
        for name, value in inspect.getclosurevars(function).nonlocals.items():
            if name in ("fun", "info"):  # what jax wraps around the user's
                yield from _methods(getattr(value, "fun", value))


def _result_id(function: Any) -> int | None:
    """The id under which a program of a first call keeps its result, if it is one."""
    if not inspect.isfunction(function) or function.__name__ != _OF_A_FIRST_CALL:
        return None
    closure = inspect.getclosurevars(function).nonlocals
    if "info" in closure:
        return closure["uid"]
    return _result_id(closure.get("fun"))


def is_lost_result(error: BaseException) -> bool:
    """Whether it says that the result of a first call, kept here for a second program to fetch, is not here."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return False
    code = frames[-1][0].f_code
    return code.co_filename == func_backend.__file__ and code.co_name == "pop"


def describe_error(error: BaseException, what: str) -> Status:
    """The status of what user code raised, with the user's part of the traceback."""
    if isinstance(error, WrongResult):
        return statuses.invalid_argument(f"{what}: {error}")
    frames = error.__traceback__
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__")).startswith(_NOT_THE_USERS):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if len(text) > TRACEBACK_CHARACTERS:
        half = TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    head = f"{what} raised {type(error).__name__}: {str(error)[:MESSAGE_CHARACTERS]}"
    code = Code.RESOURCE_EXHAUSTED if isinstance(error, MemoryError) else Code.UNKNOWN
    return Status(code, statuses.without_retried_words(f"{head}\n{text}"))
