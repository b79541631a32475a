"""Python that XLA calls while it partitions a program: the compiler is in the cluster and asks, it is called here.

jax keeps what is called in this process, by the name that stands in the program (see `protocol.compiler_callbacks`):
the objects of `custom_partitioning` in a table of its own, the functions of `jax.debug.inspect_array_sharding` only by
their address, so these are noted here when jax takes it.
"""

import functools
import weakref
from typing import Any

from jax._src import custom_partitioning
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

from ridgeway.client import worker_output
from ridgeway.protocol import callback_link

_INSTALLED = "_ridgeway_notes_functions"

_inspections: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()


def install() -> None:
    """Have jax's lowering of such calls note what is called, and the server know whom to ask."""
    if _INSTALLED in custom_partitioning.__dict__:
        return
    encode = xla_client.encode_inspect_sharding_callback
    lower = custom_partitioning._custom_partitioning_lowering_rule

    @functools.wraps(encode)
    def noted(function: Any) -> bytes:
        key = encode(function)
        _inspections[key] = function
        worker_output.follow_now()
        return key

    @functools.wraps(lower)
    def lowered(*arguments: Any, **parameters: Any) -> Any:
        worker_output.follow_now()
        return lower(*arguments, **parameters)

    setattr(custom_partitioning, _INSTALLED, True)
    xla_client.encode_inspect_sharding_callback = noted
    mlir.register_lowering(custom_partitioning.custom_partitioning_p, lowered)


def answer(question: bytes) -> bytes:
    """Call what a compiler asks for.

    Raises:
      LookupError: it is gone, or never was in this process.
      ValueError: not a question.
      Exception: whatever the user's function raises.
    """
    kind, key, *rest = callback_link.unpack(question)
    if kind == "inspect":
        function = _inspections.get(key)
        if function is None:
            raise LookupError("the function that was to see a sharding is gone")
        function(_sharding(rest[0]))
        found: list[Any] = []
    elif kind == "propagate":
        sharding, shape = rest
        found = [_pack(custom_partitioning._custom_partitioning_propagate_user_sharding(
            _sharding(sharding), xla_client.Shape(shape), key
        ))]  # fmt: skip
    elif kind == "infer":
        shapes, shardings, result_shape = rest
        found = [_pack(custom_partitioning._custom_partitioning_infer_sharding_from_operands(
            _shapes(shapes), _shardings(shardings), xla_client.Shape(result_shape), key
        ))]  # fmt: skip
    elif kind == "partition":
        shapes, shardings, result_shape, result_sharding = rest
        module, wanted, result = custom_partitioning._custom_partitioning_partition(
            _shapes(shapes), _shardings(shardings), xla_client.Shape(result_shape), _sharding(result_sharding), key
        )
        found = [module, [_pack(sharding) for sharding in wanted], _pack(result)]
    else:
        raise ValueError(f"a compiler asks for {kind!r}, which this release does not know")
    return callback_link.pack(["answer", *found])


def _shapes(texts: list[str]) -> list[Any]:
    return [xla_client.Shape(text) for text in texts]


def _shardings(packed: list[bytes | None]) -> list[Any]:
    return [_sharding(one) for one in packed]


def _sharding(packed: bytes | None) -> Any:
    if packed is None:
        return None
    proto = xla_client.OpSharding()
    proto.ParseFromString(packed)
    return xla_client.HloSharding.from_proto(proto)


def _pack(sharding: Any) -> bytes:
    return sharding.to_proto().SerializeToString()
