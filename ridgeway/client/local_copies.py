"""Copies between the cluster and the controller's own CPU that jax leaves to jaxlib's clients.

jax itself takes most of them over host memory.  Where source and destination are divided alike (keys of `jax.random`,
two meshes of as many devices), and for arguments of programs (``with jax.default_device(jax.devices("cpu")[0]): state =
init()``, used on the cluster afterwards), it has one of the clients copy, and those refuse each other's arrays in words
that differ by release: «the array must be first fetched to the host», «Unsupported array type».  So that is done here
with whatever goes to devices of another client; all else is for the handler that jax has registered for arrays.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax._src import array
from jax._src.interpreters import pxla
from jaxlib import xla_client  # pyright: ignore[reportAttributeAccessIssue]  # jaxlib ships no types

_INSTALLED = "_ridgeway_copies_over_the_host"


def install() -> None:
    """Have arrays that are put on devices of another client go over host memory."""
    original = pxla.shard_arg_handlers[array.ArrayImpl]
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def shard(xs: Sequence[Any], shardings: Any, layouts: Any, semantics: Sequence[Any]) -> Sequence[Any]:
        pairs = enumerate(zip(xs, shardings, strict=True))
        others = [i for i, (x, target) in pairs if _client(x.sharding) != _client(target)]
        if not others:
            return original(xs, shardings, layouts, semantics)
        results: list[Any] = [None] * len(xs)
        for i in others:
            results[i] = _over_the_host(xs[i], shardings[i], semantics[i])
        rest = [i for i in range(len(xs)) if results[i] is None]
        if rest:
            columns = ([column[i] for i in rest] for column in (xs, shardings, layouts, semantics))
            for i, result in zip(rest, original(*columns), strict=True):
                results[i] = result
        return results

    setattr(shard, _INSTALLED, True)
    pxla.shard_arg_handlers[array.ArrayImpl] = shard


def _client(sharding: Any) -> Any:
    """The client that a sharding's devices belong to."""
    return next(iter(sharding.device_set)).client


def _over_the_host(x: Any, sharding: Any, semantics: Any) -> Any:
    reuse = xla_client.ArrayCopySemantics.REUSE_INPUT
    [copied] = pxla.shard_args([sharding], [None], [reuse], [x._value], canonicalize=False)
    if semantics == xla_client.ArrayCopySemantics.DONATE_INPUT:
        x.delete()
    return copied
