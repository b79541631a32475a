"""Which CPU a host has, as far as compiled code depends on it: XLA compiles for the features of its own machine."""

import functools
import hashlib
import platform
import subprocess
from pathlib import Path

#: What names a CPU in /proc/cpuinfo: on x86 (as LLVM tells models apart, then its features), then on ARM and RISC-V.
_FIELDS = frozenset({
    "vendor_id", "cpu family", "model", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
    "isa", "uarch", "mvendorid", "marchid",
})  # fmt: skip
_SYSCTL_NAMES = ("machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features", "hw.optional")
_SYSCTL_TIMEOUT_SECONDS = 5.0
_DIGITS = 16


def identity_of_cpuinfo(text: str) -> str:
    """A digest of the kinds of CPU that a /proc/cpuinfo tells of: the same on machines for which the same code is
    compiled, whatever their number of cores, clock and order of features. Empty if the text names no CPU."""
    kinds: set[str] = set()
    for block in text.split("\n\n"):
        lines = [line.partition(":") for line in block.splitlines()]
        named = [(name.strip(), " ".join(sorted(value.split()))) for name, _, value in lines]
        known = sorted((name, value) for name, value in named if name in _FIELDS)
        if known:
            kinds.add(repr(known))
    return _digest("\n".join(sorted(kinds))) if kinds else ""


@functools.cache
def cpu_identity() -> str:
    """``x86_64:0123456789abcdef``: machine type and a digest of the CPU's kind and features. Two hosts with the same
    one run each other's compiled code."""
    return f"{platform.machine()}:{_features()}"


def _features() -> str:
    try:
        found = identity_of_cpuinfo(Path("/proc/cpuinfo").read_text(errors="replace"))
        if found:
            return found
    except OSError:
        pass  # not Linux
    try:
        done = subprocess.run(
            ["sysctl", *_SYSCTL_NAMES], capture_output=True, text=True, timeout=_SYSCTL_TIMEOUT_SECONDS, check=False
        )
        told = done.stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    return _digest("\n".join(sorted(told.splitlines())) or platform.processor())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
