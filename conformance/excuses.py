"""The few differences from a native backend that are meant, and how they are recognized."""

import dataclasses
import enum
import re


class Kind(enum.Enum):
    """Why a difference is meant."""

    GRANTED = "granted"
    """what devices in another process cannot have: pointers into the program's memory"""
    INAPPLICABLE = "not applicable"
    """a test of jax's own cache of compiled programs, for which the stock client has no bytes"""
    EXCUSED = "excused"
    """anything else that no server can put right"""


@dataclasses.dataclass(frozen=True, slots=True)
class Excuse:
    """A kind of difference."""

    title: str
    kind: Kind
    test: str = ""
    """a pattern that the test's name must contain"""
    reason: str = ""
    """a pattern that the failure's text must contain"""


EXCUSES = (
    Excuse(
        "a direct pointer into a device's memory (buffer protocol, dlpack, unsafe pointers): it is another process's",
        Kind.GRANTED,
        reason=r"PjRt-compatible backend only|BufferError|unsafe_buffer_pointer|__array_interface__|dlpack",
    ),
    Excuse(
        "jax's own persistent compilation cache keeps executables' bytes, which the stock client refuses to give "
        "without asking the server; Ridgeway's is on the head",
        Kind.INAPPLICABLE,
        test=r"^CompilationCacheTest::",
        # What it logs of that is one warning more than a test wants to see.
        reason=r"IFRT service executable does not support `Serialize`|WarningMessage object.* of 2, expected 1",
    ),
    Excuse(
        "the stock client answers is_deleted() by what it did itself with this very array, and never asks the server",
        Kind.EXCUSED,
        test=r"test_fully_replicated_donated_array_is_deleted|test_device_put_donate_pytree",
        reason=r"False is not true",
    ),
)

SEVERAL_SLICES = r"`jax.make_mesh` does not support multi-slice topologies"
"""jax's own refusal, on whatever backend; such tests run once more where the slices are shown as one."""


def excuse_for(test: str, reason: str) -> Excuse | None:
    """The excuse that fits a failed test, or None."""
    for excuse in EXCUSES:
        if re.search(excuse.test, test) and re.search(excuse.reason, reason, re.DOTALL):
            return excuse
    return None


def refuses_several_slices(reason: str) -> bool:
    """Whether a test failed since `jax.make_mesh` refuses devices of several slices."""
    return re.search(SEVERAL_SLICES, reason) is not None
