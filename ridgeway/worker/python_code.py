"""Which Python compiled the functions in a pickle. Pure.

A pickle of a function holds its bytecode, whose numbers mean something else in every minor version of Python: running
it in another one ends the process by a signal, or computes something else, often while it is still being unpickled.
Nothing in a pickle says the version; but all code begins with one of a few sequences, which tell the versions apart.
"""

import opcode
import pickletools
import sys
from collections.abc import Iterator

OWN = ".".join(map(str, sys.version_info[:2]))
_NAMES = ("RESUME", "COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR", "POP_TOP")
"""What code may begin with: any of the others, then RESUME."""
_NUMBERS: dict[str, dict[int, str]] = {
    "3.12": dict(zip((151, 149, 135, 75, 1), _NAMES, strict=True)),
    "3.13": dict(zip((149, 62, 94, 35, 32), _NAMES, strict=True)),
    OWN: {opcode.opmap[name]: name for name in _NAMES},
}
"""Version -> number of each in its bytecode (CPython's ``opcode_ids.h``)."""
UNKNOWN = "another version"
_INTEGERS_BEFORE_CODE = 6
"""Arguments of ``types.CodeType`` before the bytecode: four counts of variables, the stack's size, flags."""
_PICKLE = b"\x80"
"""A pickle begins with its protocol."""


def _begins_as_in(version: str, code: bytes) -> bool:
    for number, argument in zip(code[::2], code[1::2], strict=True):
        name = _NUMBERS[version].get(number)
        if name == "RESUME":
            return argument == 0  # any other is inside a function
        if name is None or (name == "COPY_FREE_VARS" and argument == 0):
            return False
    return False


def version_of(code: bytes) -> str:
    """The minor version of Python ("3.12") that compiled some bytecode (``code.co_code``), else `UNKNOWN`."""
    versions = [OWN, *(version for version in _NUMBERS if version != OWN)]
    return next((version for version in versions if _begins_as_in(version, code)), UNKNOWN)


def _codes(pickled: bytes) -> Iterator[bytes]:
    """The bytecode of each code object in a pickle, and in pickles that it holds as bytes."""
    integers = 0
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "MEMOIZE":
            continue
        if isinstance(argument, bytes):
            if integers == _INTEGERS_BEFORE_CODE:
                yield argument
            elif argument.startswith(_PICKLE) and argument.endswith(b"."):
                try:
                    yield from _codes(argument)
                except ValueError:
                    pass  # other bytes that look alike
        if operation.name == "MARK":
            integers = 0
        elif isinstance(argument, int) and operation.name in ("BININT", "BININT1", "BININT2", "LONG1"):
            integers += 1
        else:
            integers = -1


def foreign_version(pickled: bytes) -> str | None:
    """The version of Python that compiled something in a pickle, if it is not this one's; else None."""
    try:
        return next((version for code in _codes(pickled) if (version := version_of(code)) != OWN), None)
    except ValueError:
        return None  # not a pickle: for whoever reads it to say
