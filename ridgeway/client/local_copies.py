"""Copies between the cluster and the controller's own CPU that jax leaves to jaxlib's clients.

jax itself takes most of them over host memory.  Where source and destination are divided alike (keys of `jax.random`,
two meshes of as many devices) it has the source's client copy, and jaxlib's clients refuse devices of another one: «the
array must be first fetched to the host».  So that is what is done here, with the handler that jax has registered for
arrays tried first: what it can do it does as ever.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import array
from jax._src.interpreters import pxla
from jaxlib import xla_client  # pyright: ignore[reportAttributeAccessIssue]  # jaxlib ships no types

_REFUSED = re.compile(
    r"CopyArrays only supports devices that are instances of xla::ifrt::proxy::Device"
    r"|destination device is owned by a non-PjRt-compatible client"
)
_INSTALLED = "_ridgeway_copies_over_the_host"


def install() -> None:
    """Have jax's handler of arrays that are put somewhere else fall back on host memory."""
    original = pxla.shard_arg_handlers[array.ArrayImpl]
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def shard(xs: Sequence[Any], shardings: Any, layouts: Any, semantics: Sequence[Any]) -> Sequence[Any]:
        try:
            return original(xs, shardings, layouts, semantics)
        except jax.errors.JaxRuntimeError as error:
            if not _REFUSED.search(str(error)):
                raise
            if len(xs) == 1:
                return [_over_the_host(xs[0], shardings[0], semantics[0])]
        # One of several: each by itself.
        return [
            shard([x], [sharding], [layout], [copy])[0]
            for x, sharding, layout, copy in zip(xs, shardings, layouts, semantics, strict=True)
        ]

    setattr(shard, _INSTALLED, True)
    pxla.shard_arg_handlers[array.ArrayImpl] = shard


def _over_the_host(x: Any, sharding: Any, semantics: Any) -> Any:
    reuse = xla_client.ArrayCopySemantics.REUSE_INPUT
    [copied] = pxla.shard_args([sharding], [None], [reuse], [x._value], canonicalize=False)
    if semantics == xla_client.ArrayCopySemantics.DONATE_INPUT:
        x.delete()
    return copied
