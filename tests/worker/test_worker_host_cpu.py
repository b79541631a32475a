"""What tells hosts apart for which different code is compiled."""

import platform

import pytest

from ridgeway.worker.host_cpu import cpu_identity, identity_of_cpuinfo

X86 = """processor\t: {core}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: A Name
stepping\t: 8
microcode\t: 0x{core}
cpu MHz\t\t: 2{core}00.000
cache size\t: 107520 KB
flags\t\t: {flags}
bugs\t\t: {core}
"""
ARM = """processor\t: {core}
BogoMIPS\t: 2{core}0.00
Features\t: {flags}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: {part}
"""


def x86(flags: str, cores: int = 2) -> str:
    return identity_of_cpuinfo("\n".join(X86.format(core=core, flags=flags) for core in range(cores)))


def test_cores_clocks_and_the_order_of_features_do_not_matter() -> None:
    assert x86("fpu avx2 avx512f") == x86("avx512f avx2 fpu", cores=8) != ""


@pytest.mark.parametrize("flags", ["fpu avx2", "fpu avx2 avx512f amx_tile", ""])
def test_features_matter(flags: str) -> None:
    assert x86(flags) != x86("fpu avx2 avx512f")


def test_arm_with_two_kinds_of_cores() -> None:
    one = ARM.format(core=0, flags="fp asimd sve", part="0xd40")
    other = ARM.format(core=1, flags="fp asimd sve", part="0xd41")
    assert identity_of_cpuinfo(f"{one}\n{other}") == identity_of_cpuinfo(f"{other}\n{one}\n{one}")
    assert identity_of_cpuinfo(one) != identity_of_cpuinfo(f"{one}\n{other}")


def test_a_text_that_names_no_cpu() -> None:
    assert identity_of_cpuinfo("") == "" == identity_of_cpuinfo("processor : 0\ncpu MHz : 1\n\nHardware : a board\n")


def test_this_machine_is_told_in_the_same_way_each_time() -> None:
    found = cpu_identity()
    machine, _, digest = found.partition(":")
    assert machine == platform.machine()
    assert len(digest) == 16
    cpu_identity.cache_clear()
    assert cpu_identity() == found
