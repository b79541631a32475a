"""Host arrays with negative or zero strides (``x[::-1]``, ``np.broadcast_to``) on their way to the cluster.

jaxlib's proxy client refuses them before the server hears of it («Negative or zero strides are not fully supported»),
so they are copied to plain ones where jax hands them to its clients.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

_INSTALLED = "_ridgeway_straightens_arrays"
_RUNTIME_PREFIX = "proxy/"


def install() -> None:
    """Have jax's entrance for host arrays straighten what the proxy client refuses."""
    original = xla_client.batched_device_put
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def put(aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], *rest: Any, **named: Any) -> Any:
        if any(map(_is_crooked, xs)) and devices[0].client.runtime_type.startswith(_RUNTIME_PREFIX):
            xs = _straightened(xs)
        return original(aval, sharding, xs, devices, *rest, **named)

    setattr(put, _INSTALLED, True)
    xla_client.batched_device_put = put


def _is_crooked(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0 and min(x.strides) <= 0


def _straightened(xs: Sequence[Any]) -> list[Any]:
    """A replicated array is the same one for each device, and is copied once."""
    copies = {id(x): np.ascontiguousarray(x) for x in xs if _is_crooked(x)}
    return [copies.get(id(x), x) for x in xs]
