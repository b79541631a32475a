"""Python that XLA calls while it partitions a program, in a compiler: it is asked of the controller (see
`protocol.compiler_callbacks`).  The third place with semi-private jaxlib calls in `ridgeway.worker`:

* ``register_custom_call_partitioner``: under a name of our own, since jax's is taken by jax itself, which looks for the
  objects in this process.
* ``encode_inspect_sharding_callback``: a call that XLA makes by address gets the address of a function here.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

from jaxlib import xla_client  # pyright: ignore[reportAttributeAccessIssue]  # jaxlib ships no types
from jaxlib.mlir import ir

from ridgeway.protocol import callback_link, compiler_callbacks

Ask = Callable[[bytes], bytes]
"""From a packed question to the packed answer; raises if the controller cannot say."""


def nobody(question: bytes) -> bytes:
    """An `Ask` where there is no controller."""
    raise RuntimeError("this program calls Python from inside the compiler, and there is no controller to ask")


_OUR_PARTITIONING = "RidgewayPartitioning"
_SEPARATOR = b":"

_numbers = itertools.count(1)
_asks: dict[bytes, Ask] = {}
"""Whom the running compilations ask, by their numbers."""


class Questions:
    """Has a module's calls of Python ask the controller, for as long as it is compiled."""

    def __init__(self, ask: Ask):
        self._number = str(next(_numbers)).encode()
        self._controller = ask
        self.failure: str | None = None
        """why the controller could not answer; XLA's error wraps it in this process's own frames"""
        self._inspections: list[Callable[[Any], None]] = []

    def _ask(self, question: bytes) -> bytes:
        try:
            return self._controller(question)
        except Exception as error:
            self.failure = str(error) or repr(error)
            raise

    def __enter__(self) -> "Questions":
        _register()
        _asks[self._number] = self._ask
        return self

    def __exit__(self, *_: object) -> None:
        del _asks[self._number]
        self._inspections.clear()

    def redirect(self, module: Any) -> None:
        """Change the module's calls of this kind; MLIR's context must be current."""

        def look(operation: Any) -> Any:
            attributes = operation.attributes
            target = ir.StringAttr(attributes["call_target_name"]).value if "call_target_name" in attributes else None
            if target in compiler_callbacks.MAKERS:
                key = ir.StringAttr(attributes["backend_config"]).value_bytes
                if target == compiler_callbacks.PARTITION:
                    attributes["call_target_name"] = ir.StringAttr.get(_OUR_PARTITIONING)
                    changed = self._number + _SEPARATOR + key
                else:
                    changed = self._inspection(key)
                attributes["backend_config"] = ir.StringAttr.get(changed)
            return ir.WalkResult.ADVANCE

        module.operation.walk(look)

    def _inspection(self, key: bytes) -> bytes:
        def inspect(sharding: Any) -> None:
            _answer(self._ask, "inspect", key, _pack_sharding(sharding))

        self._inspections.append(inspect)  # XLA has only its address
        return xla_client.encode_inspect_sharding_callback(inspect)


@functools.cache
def _register() -> None:
    xla_client.register_custom_call_partitioner(
        _OUR_PARTITIONING, _propagate, _partition, _infer, can_side_effecting_have_replicated_sharding=True
    )


def _answer(ask: Ask, kind: str, key: bytes, *rest: Any) -> list[Any]:
    return callback_link.unpack(ask(callback_link.pack([kind, key, *rest])))[1:]


def _asked(name: bytes | str, kind: str, *rest: Any) -> list[Any]:
    number, _, key = (name.encode() if isinstance(name, str) else name).partition(_SEPARATOR)
    return _answer(_asks[number], kind, key, *rest)


def _propagate(sharding: Any, shape: Any, name: bytes) -> Any:
    [found] = _asked(name, "propagate", _pack_sharding(sharding), _pack_shape(shape))
    return _sharding(found)


def _infer(shapes: Any, shardings: Any, result_shape: Any, name: bytes) -> Any:
    [found] = _asked(name, "infer", *_pack_all(shapes, shardings), _pack_shape(result_shape))
    return _sharding(found)


def _partition(shapes: Any, shardings: Any, result_shape: Any, result_sharding: Any, name: bytes) -> Any:
    module, wanted, result = _asked(
        name, "partition", *_pack_all(shapes, shardings), _pack_shape(result_shape), _pack_sharding(result_sharding)
    )
    return module, [_sharding(found) for found in wanted], _sharding(result)


def _pack_all(shapes: Any, shardings: Any) -> tuple[list[str], list[bytes | None]]:
    return [_pack_shape(shape) for shape in shapes], [_pack_sharding(sharding) for sharding in shardings]


def _pack_shape(shape: Any) -> str:
    return str(shape)


def _pack_sharding(sharding: Any) -> bytes | None:
    return None if sharding is None else sharding.to_proto().SerializeToString()


def _sharding(packed: bytes) -> Any:
    proto = xla_client.OpSharding()
    proto.ParseFromString(packed)
    return xla_client.HloSharding.from_proto(proto)
