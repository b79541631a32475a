"""The persistent compile cache on a real folder: what is not whole and ours is ignored, and nothing breaks it."""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeway.proxy.compile_cache import CompileCache

LIMIT_BYTES = 1 << 20
METADATA = {"name": "step", "inputs": [[[2, 3], 11]], "donated": [0], "text": None, "blob": b"\x00\xff"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "programs"


def entry(folder: Path, key: str) -> Path:
    (path,) = folder.glob(f"{key}*")
    return path


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


# ---- keeping


def test_a_program_is_found_again_also_by_another_process(folder: Path) -> None:
    cache = CompileCache(folder, LIMIT_BYTES)
    assert cache.load("k1") is None
    cache.store("k1", METADATA, b"serialized")
    assert CompileCache(folder, LIMIT_BYTES).load("k1") == (METADATA, b"serialized")
    assert cache.load("k1") == (METADATA, b"serialized")
    assert (cache.hits, cache.misses, cache.problem) == (1, 1, None)


def test_an_empty_executable_and_a_large_one_are_kept_as_they_are(folder: Path) -> None:
    cache = CompileCache(folder, 64 << 20)
    large = bytes(range(256)) * (1 << 14)
    cache.store("empty", {}, b"")
    cache.store("large", METADATA, large)
    assert cache.load("empty") == ({}, b"")
    assert cache.load("large") == (METADATA, large)


def test_a_program_stored_twice_is_there_once(folder: Path) -> None:
    cache = CompileCache(folder, LIMIT_BYTES)
    cache.store("k1", METADATA, b"old")
    cache.store("k1", METADATA, b"new")
    assert cache.load("k1") == (METADATA, b"new")
    assert len(list(folder.iterdir())) == 1


def test_only_its_owner_can_read_it(folder: Path) -> None:
    cache = CompileCache(folder, LIMIT_BYTES)
    cache.store("k1", METADATA, b"serialized")
    assert folder.stat().st_mode & 0o077 == 0
    assert entry(folder, "k1").stat().st_mode & 0o077 == 0


def test_several_processes_may_store_the_same_program_at_once(folder: Path) -> None:
    caches = [CompileCache(folder, LIMIT_BYTES) for _ in range(4)]
    payloads = [bytes([number]) * 5000 for number in range(4)]

    found: list[bytes] = []

    def work(number: int) -> None:
        for _ in range(20):
            caches[number].store("k1", METADATA, payloads[number])
            program = caches[number].load("k1")
            found.append(b"" if program is None else program[1])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert set(found) <= set(payloads)
    assert [cache.problem for cache in caches] == [None] * 4
    assert [path.name.startswith("k1") for path in folder.iterdir()] == [True]


# ---- what is not whole, or not ours


DAMAGES = {
    "empty": lambda data: b"",
    "only the magic": lambda data: data[:19],
    "cut in the checksum": lambda data: data[:30],
    "cut in the metadata": lambda data: data[:60],
    "cut at the end": lambda data: data[:-1],
    "longer": lambda data: data + b"\x00",
    "a flipped bit at the end": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a flipped bit in the middle": lambda data: data[:70] + bytes([data[70] ^ 16]) + data[71:],
    "another magic": lambda data: b"RIDGEWAY-PROGRAM-0\n" + data[19:],
    "zeros": lambda data: bytes(len(data)),
    "another program's file": lambda data: b"\x7fELF" + data,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_or_foreign_file_is_ignored_and_replaced(folder: Path, damage) -> None:
    cache = CompileCache(folder, LIMIT_BYTES)
    cache.store("k1", METADATA, b"serialized")
    path = entry(folder, "k1")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load("k1") is None
    assert not path.exists()
    cache.store("k1", METADATA, b"compiled anew")
    assert cache.load("k1") == (METADATA, b"compiled anew")


@pytest.mark.parametrize("rest", [b"", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xc1\xc1", b"\x01\x00\x00\x00\x07code"])
def test_a_file_with_a_right_checksum_over_nonsense_is_ignored(folder: Path, rest: bytes) -> None:
    cache = CompileCache(folder, LIMIT_BYTES)
    cache.store("k1", METADATA, b"serialized")
    entry(folder, "k1").write_bytes(b"RIDGEWAY-PROGRAM-1\n" + hashlib.sha256(rest).digest() + rest)
    assert cache.load("k1") is None


def test_a_folder_in_a_files_place_is_ignored(folder: Path) -> None:
    cache = CompileCache(folder, LIMIT_BYTES)
    cache.store("k1", METADATA, b"serialized")
    path = entry(folder, "k1")
    path.unlink()
    path.mkdir()
    assert cache.load("k1") is None
    cache.store("k1", METADATA, b"serialized")
    assert cache.problem is not None
    assert cache.load("k1") is None


def test_what_a_process_that_died_had_half_written_is_cleared_away(folder: Path) -> None:
    cache = CompileCache(folder, LIMIT_BYTES)
    leftover = folder / ".partial-abandoned"
    leftover.write_bytes(bytes(1000))
    age(leftover, 2 * 86_400)
    being_written = folder / ".partial-fresh"
    being_written.write_bytes(bytes(1000))
    cache.store("k1", METADATA, b"serialized")
    assert not leftover.exists()
    assert being_written.exists()


# ---- bounds


def test_the_least_recently_used_programs_go_first(folder: Path) -> None:
    cache = CompileCache(folder, 3500)
    for number, key in enumerate(("a", "b", "c")):
        cache.store(key, {}, bytes(1000))
        age(entry(folder, key), 100 - number)
    assert cache.load("a") is not None  # used now, so no longer the oldest
    cache.store("d", {}, bytes(1000))
    assert cache.load("b") is None
    assert [cache.load(key) is not None for key in ("a", "c", "d")] == [True, True, True]
    assert cache.total_bytes() <= 3500


def test_several_writers_keep_the_limit_together(folder: Path) -> None:
    caches = [CompileCache(folder, 20_000) for _ in range(4)]

    def work(number: int) -> None:
        for turn in range(25):
            caches[number].store(f"k{number}-{turn}", METADATA, bytes(3000))
            caches[number].load(f"k{(number + 1) % 4}-{turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [cache.problem for cache in caches] == [None] * 4
    assert 0 < caches[0].total_bytes() <= 20_000
    assert all(path.suffix == ".program" for path in folder.iterdir())


def test_a_program_over_the_whole_limit_is_not_kept(folder: Path) -> None:
    cache = CompileCache(folder, 500)
    cache.store("k1", {}, bytes(1000))
    assert cache.total_bytes() == 0
    assert cache.load("k1") is None


def test_files_that_are_none_of_ours_are_neither_counted_nor_removed(folder: Path) -> None:
    cache = CompileCache(folder, 1500)
    other = folder / "README"
    other.write_bytes(bytes(5000))
    age(other, 1000)
    for key in ("a", "b", "c"):
        cache.store(key, {}, bytes(1000))
    assert other.exists()
    assert cache.total_bytes() <= 1500


# ---- folders that cannot be used


def test_without_a_folder_nothing_is_kept_and_nothing_fails() -> None:
    cache = CompileCache(None, LIMIT_BYTES)
    cache.store("k1", METADATA, b"serialized")
    assert cache.load("k1") is None
    assert (cache.hits, cache.misses, cache.problem, cache.total_bytes()) == (0, 1, None, 0)


def test_a_folder_that_cannot_be_made_is_told_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CompileCache(tmp_path / "file" / "cache", LIMIT_BYTES)
    assert cache.problem is not None
    assert str(tmp_path / "file" / "cache") in cache.problem
    cache.store("k1", METADATA, b"serialized")
    assert cache.load("k1") is None


def test_a_folder_that_vanishes_is_told_and_nothing_fails(folder: Path) -> None:
    cache = CompileCache(folder, LIMIT_BYTES)
    folder.rmdir()
    assert cache.load("k1") is None
    cache.store("k1", METADATA, b"serialized")
    assert cache.problem is not None
    assert cache.load("k1") is None


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that also an unprivileged process can reach."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


READ_ONLY_PROGRAM = """
import os, sys
from pathlib import Path
from ridgeway.proxy.compile_cache import CompileCache
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
folder = Path(sys.argv[1])
cache = CompileCache(folder, 1 << 20)
found = cache.load("whole")
assert found == ({"name": "f"}, b"serialized"), found
assert cache.load("damaged") is None
assert (folder / "damaged.program").exists()
cache.store("new", {}, b"x")
assert cache.load("new") is None
print(cache.problem)
"""


def test_a_read_only_folder_is_read_and_told_and_nothing_fails(shared_folder: Path) -> None:
    folder = shared_folder / "cache"
    cache = CompileCache(folder, LIMIT_BYTES)
    cache.store("whole", {"name": "f"}, b"serialized")
    cache.store("damaged", {"name": "g"}, b"serialized")
    (folder / "damaged.program").write_bytes(b"RIDGEWAY-PROGRAM-1\nand then nothing")
    for path in folder.iterdir():
        os.chmod(path, 0o444)
    os.chmod(folder, 0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY_PROGRAM, str(folder)], capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}, check=False,
        )  # fmt: skip
    finally:
        os.chmod(folder, 0o755)
    if "PermissionError" in done.stderr and "import" in done.stderr:
        pytest.skip("an unprivileged process cannot read this checkout")
    assert done.returncode == 0, done.stderr
    assert str(folder) in done.stdout
