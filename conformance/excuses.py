"""The few differences from a native backend that are meant, and how they are recognized."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True)
class Excuse:
    """A kind of difference."""

    title: str
    test: str = ""
    """a pattern that the test's name must contain"""
    reason: str = ""
    """a pattern that the failure's text must contain"""


EXCUSES = (
    Excuse(
        "a direct pointer into a device's memory (buffer protocol, dlpack, unsafe pointers): it is another process's",
        reason=r"PjRt-compatible backend only|BufferError|unsafe_buffer_pointer|__array_interface__|dlpack",
    ),
    Excuse(
        "asks for a backend named 'cpu' beside the default one; JAX_PLATFORMS=proxy has none",
        reason=r"Unknown backend:? '?cpu|Available backends are \['proxy'\]",
    ),
    Excuse(
        "calls Python from inside the compiler (inspect_array_sharding, custom_partitioning), which is another process",
        reason=r"calls Python from inside the compiler",
    ),
    Excuse(
        "the stock client does not copy arrays of random keys to the local CPU backend",
        reason=r"CopyArrays only supports devices that are instances of xla::ifrt::proxy::Device",
    ),
    Excuse(
        "jax.make_mesh refuses devices of several slices, on whatever backend",
        reason=r"`jax.make_mesh` does not support multi-slice topologies",
    ),
    Excuse(
        "the stock client answers is_deleted() itself and does not ask the server",
        test=r"test_fully_replicated_donated_array_is_deleted|test_device_put_donate_pytree",
        reason=r"False is not true",
    ),
)


def excuse_for(test: str, reason: str) -> str | None:
    """The title of the excuse that fits a failed test, or None."""
    for excuse in EXCUSES:
        if re.search(excuse.test, test) and re.search(excuse.reason, reason, re.DOTALL):
            return excuse.title
    return None
