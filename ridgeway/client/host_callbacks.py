"""Host callbacks from programs on a cluster's workers, run here.

For CPU devices jax lowers a callback to a call of ``xla_ffi_python_cpu_callback`` with the number of a Python function
that is given to the compiler beside the program; the IFRT proxy client cannot send such a function.  The other kind of
callback it can announce: one made by ``make_python_callback_from_host_send_and_recv``.  So the program stays as jax
lowers it and only the function is exchanged, for a name by which the server has it run (see `callback_runner`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src import core, dtypes

from ridgeway.client import callback_runner

_RUNTIME_PREFIX = "proxy/"
_INSTALLED = "_ridgeway_exchanges_functions"


def install() -> None:
    """Make jax's lowering of callbacks exchange the functions for clients of the proxy."""
    original = jax_callback.emit_python_callback
    if _INSTALLED in jax_callback.__dict__:
        return

    @functools.wraps(original)
    def emit_python_callback(
        ctx: Any, callback: Any, token: Any, operands: Sequence[Any], operand_avals: Sequence[Any],
        result_avals: Sequence[Any], **options: Any,
    ) -> Any:  # fmt: skip
        functions = ctx.module_context.host_callbacks
        index = len(functions)
        emitted = original(ctx, callback, token, operands, operand_avals, result_avals, **options)
        backend = ctx.module_context.get_backend(optional=True)
        if len(functions) == index + 1 and backend is not None and backend.runtime_type.startswith(_RUNTIME_PREFIX):
            functions[index] = _exchange(ctx, backend, functions[index], bool(token), operand_avals, result_avals)
        return emitted

    setattr(jax_callback, _INSTALLED, True)
    jax_callback.emit_python_callback = emit_python_callback


def _exchange(
    ctx: Any, backend: Any, function: Callable[..., Any], has_token: bool, operand_avals: Sequence[Any],
    result_avals: Sequence[Any],
) -> Any:  # fmt: skip
    """What announces the same function to the proxy client. Tokens stay on the worker."""
    operand_dtypes = [_dtype(aval) for aval in operand_avals]

    def run(shapes: list[list[int]], data: bytes) -> bytes:
        arguments, offset = [], 0
        for shape, dtype in zip(shapes, operand_dtypes, strict=True):
            count = math.prod(shape)
            arguments.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
            offset += count * dtype.itemsize
        values = function(None, *arguments)[1:] if has_token else function(*arguments)
        return b"".join(np.asarray(value).tobytes() for value in values)

    name = callback_runner.runner_for(jax.config.read("jax_backend_target")).add(run)
    new_channel = ctx.module_context.new_channel
    return backend.make_python_callback_from_host_send_and_recv(
        run,  # never called by the client; but it keeps it as long as the program lives
        [
            *(jax_callback._aval_to_xla_shape(core.ShapedArray((n,), np.dtype(np.bool_))) for n in name),
            *(jax_callback._aval_to_xla_shape(aval) for aval in operand_avals),
        ],
        [jax_callback._aval_to_xla_shape(aval) for aval in result_avals],
        [new_channel() for _ in range(len(name) + len(operand_avals))],
        [new_channel() for _ in result_avals],
        lambda _: b"",  # not sent
    )


def _dtype(aval: Any) -> np.dtype:
    physical: Any = core.physical_aval(aval)
    return np.dtype(np.bool_ if physical.dtype == dtypes.float0 else physical.dtype)
