"""Arrays in storage, as this package writes them and as others read and damage them."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ridgeway.protocol import dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.locations import parse_location
from ridgeway.protocol.status import Code, StatusError

ts = pytest.importorskip("tensorstore")

from ridgeway.worker.storage import StoredArray, describe  # noqa: E402  # imports it

F32 = dtypes.kind_by_name("F32")
SHAPE, CHUNK = (7, 8), (4, 4)
VALUES = np.arange(56, dtype=np.float32).reshape(SHAPE)
STARTS = [(0, 0), (0, 4), (4, 0), (4, 4)]
KINDS = ["PRED", "S4", "S8", "S64", "U32", "F16", "BF16", "F32", "F64", "C64", "F8E4M3FN"]


def plenty() -> float:
    return 30.0


def stored(
    folder: Path, name: str = "w", kind: int = F32, shape: tuple[int, ...] = SHAPE, chunk: tuple[int, ...] = CHUNK
) -> StoredArray:
    return StoredArray(parse_location(str(folder)), name, kind, shape, chunk)


def write_parts(array: StoredArray, values: np.ndarray = VALUES, write: str = "1", starts: object = None) -> None:
    for row, column in STARTS if starts is None else starts:  # pyright: ignore[reportGeneralTypeIssues]
        array.write(write, (row, column), values[row : row + 4, column : column + 4], plenty)


def write(folder: Path, name: str = "w", values: np.ndarray = VALUES, kind: int = F32) -> None:
    array = stored(folder, name, kind)
    write_parts(array, values)
    array.commit("1", plenty)


def read(folder: Path, name: str = "w", kind: int = F32) -> np.ndarray:
    return stored(folder, name, kind).read((0, 0), SHAPE, plenty)


def refusal(action: Callable[[], object]) -> statuses.Status:
    """The error of an action: one line that no elastic manager takes for a lost slice."""
    with pytest.raises(StatusError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    assert not any(code.name in text for code in statuses.RETRIED_CODES), text
    return caught.value.status


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_tensorstore_alone_reads_what_was_written(tmp_path: Path, kind: str, driver: str) -> None:
    number = dtypes.kind_by_name(kind)
    values = (VALUES % 2).astype(dtypes.dtype_of_kind(number))
    write(tmp_path, values=values, kind=number)
    spec = {"driver": driver, "kvstore": f"file://{tmp_path}/w/", "fill_missing_data_reads": False}
    found = ts.open(spec).result().read().result()
    assert found.dtype == values.dtype and np.array_equal(found, values)
    assert np.array_equal(read(tmp_path, kind=number), values)
    assert sorted(os.listdir(tmp_path / "w")) == [".zarray", "0.0", "0.1", "1.0", "1.1", "zarr.json"]


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 2)])
def test_any_rank(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    array = stored(tmp_path, shape=shape, chunk=tuple(max(1, size) for size in shape))
    array.write("1", (0,) * len(shape), values, plenty)
    array.commit("1", plenty)
    assert np.array_equal(stored(tmp_path, shape=shape, chunk=()).read((0,) * len(shape), shape, plenty), values)


def test_any_part_is_read_in_another_dtype(tmp_path: Path) -> None:
    write(tmp_path)
    found = stored(tmp_path, kind=dtypes.kind_by_name("BF16")).read((1, 3), (5, 4), plenty)
    assert found.dtype.name == "bfloat16" and np.array_equal(found.astype(np.float32), VALUES[1:6, 3:7])


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_what_others_wrote_is_read(tmp_path: Path, driver: str, ocdbt: bool) -> None:
    kvstore = {"driver": "file", "path": f"{tmp_path}/w/"}
    if ocdbt:
        kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "path": "w/"}
    spec = {"driver": driver, "kvstore": kvstore, "store_data_equal_to_fill_value": True}
    made = ts.open(spec, create=True, dtype=ts.float32, shape=SHAPE).result()
    made.write(VALUES).result()
    assert np.array_equal(read(tmp_path), VALUES)


def test_until_it_is_completed_there_is_no_array(tmp_path: Path) -> None:
    array = stored(tmp_path)
    write_parts(array)
    assert os.listdir(tmp_path) == ["w.partial-1"]
    status = refusal(lambda: read(tmp_path))
    assert status.code is Code.FAILED_PRECONDITION and "written completely" in status.message
    for name in ("w", "w.partial-1"):
        for driver in ("zarr", "zarr3"):
            with pytest.raises(ValueError, match="NOT_FOUND"):
                ts.open({"driver": driver, "kvstore": f"file://{tmp_path}/{name}/"}).result()
    array.commit("1", plenty)
    assert os.listdir(tmp_path) == ["w"]


@pytest.mark.parametrize("missing", STARTS)
def test_an_array_with_parts_missing_is_never_completed(tmp_path: Path, missing: tuple[int, int]) -> None:
    array = stored(tmp_path)
    write_parts(array, starts=[start for start in STARTS if start != missing])
    status = refusal(lambda: array.commit("1", plenty))
    assert status.code is Code.FAILED_PRECONDITION
    assert "3 of 4 chunks are there" in status.message and "same storage" in status.message
    refusal(lambda: read(tmp_path))
    array.discard("1")
    assert os.listdir(tmp_path) == []


def test_an_array_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path)
    array = stored(tmp_path, chunk=(7, 8))
    array.write("2", (0, 0), -VALUES, plenty)
    assert np.array_equal(read(tmp_path), VALUES)
    array.commit("2", plenty)
    assert np.array_equal(read(tmp_path), -VALUES)
    assert os.listdir(tmp_path) == ["w"] and "1.1" not in os.listdir(tmp_path / "w")


def test_nothing_else_is_ever_replaced(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "thesis.txt").write_text("mine")
    assert "not an array" in refusal(lambda: write(tmp_path)).message
    write(tmp_path, "v")
    write(tmp_path, "v/inner")
    assert "not an array alone" in refusal(lambda: write(tmp_path, "v")).message
    assert np.array_equal(read(tmp_path, "v/inner"), VALUES)
    assert (tmp_path / "w" / "thesis.txt").read_text() == "mine"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda w: flip(w / "1.0"),
    "truncated": lambda w: os.truncate(w / "1.0", 40),
    "empty": lambda w: os.truncate(w / "1.0", 0),
    "missing": lambda w: (w / "1.0").unlink(),
    "no mark": lambda w: [(w / mark).unlink() for mark in (".zarray", "zarr.json")],
    "bad mark": lambda w: os.truncate(w / ".zarray", 30),
    "other chunks": lambda w: (w / ".zarray").write_text(
        json.dumps(json.loads((w / ".zarray").read_text()) | {"chunks": [8, 8]})
    ),
    "gone": lambda w: shutil.rmtree(w),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_an_error_and_not_another_number(tmp_path: Path, damage: str) -> None:
    write(tmp_path)
    write(tmp_path, "other")
    DAMAGES[damage](tmp_path / "w")
    status = refusal(lambda: read(tmp_path))
    assert status.code is Code.FAILED_PRECONDITION
    assert status.message.startswith(f"Array 'w' in {tmp_path} could not be read: ")
    assert np.array_equal(read(tmp_path, "other"), VALUES)


def test_another_shape_than_asked_for(tmp_path: Path) -> None:
    write(tmp_path)
    status = refusal(lambda: stored(tmp_path, shape=(8, 8)).read((0, 0), (4, 4), plenty))
    assert status.code is Code.INVALID_ARGUMENT and "[7, 8], but [8, 8]" in status.message


def test_a_dtype_that_the_format_has_not(tmp_path: Path) -> None:
    status = refusal(lambda: write(tmp_path, kind=dtypes.kind_by_name("U2")))
    assert status.code is Code.INVALID_ARGUMENT


def test_storage_that_cannot_be_written() -> None:
    # Nobody, not even root, makes folders there.
    status = refusal(lambda: write(Path("/sys/kernel/ridgeway")))
    assert status.code is Code.PERMISSION_DENIED, status
    status = refusal(lambda: write(Path(__file__)))
    assert status.code is Code.FAILED_PRECONDITION and "Not a directory" in status.message


def test_a_file_that_becomes_too_large(tmp_path: Path) -> None:
    code = f"""
import resource, numpy as np
from pathlib import Path
from test_worker_storage import refusal, stored
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
large = np.zeros((100, 100), np.float32)
array = stored(Path({str(tmp_path)!r}), shape=large.shape, chunk=large.shape)
print(refusal(lambda: array.write("1", (0, 0), large, lambda: 30.0)))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("RESOURCE_EXHAUSTED: Array 'w' in "), result.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_and_a_read_only_one(small_disk: Path) -> None:
    write(small_disk)
    large = np.ones((1024, 1024), np.float32)
    array = stored(small_disk, "large", shape=large.shape, chunk=(64, 1024))
    status = refusal(lambda: array.write("1", (0, 0), large, plenty))
    assert status.code is Code.RESOURCE_EXHAUSTED and "No space left on device" in status.message
    array.discard("1")
    assert os.listdir(small_disk) == ["w"]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    status = refusal(lambda: write(small_disk, "v"))
    assert status.code is Code.PERMISSION_DENIED and "Read-only file system" in status.message
    assert f"{small_disk}/v.partial-" in status.message and "\\x" not in status.message
    assert np.array_equal(read(small_disk), VALUES)


def test_a_deadline_is_kept() -> None:
    def over() -> float:
        raise statuses.deadline_exceeded("over").error()

    with pytest.raises(StatusError, match="DEADLINE_EXCEEDED: Array 'w' in /nowhere could not be written: over"):
        stored(Path("/nowhere")).write("1", (0, 0), VALUES[:4, :4], over)


@pytest.mark.parametrize("word", [code.name for code in sorted(statuses.RETRIED_CODES)])
def test_no_error_of_storage_looks_like_a_lost_slice(word: str) -> None:
    status = describe(ValueError(f"{word}: Error reading /a/{word}/b"))
    assert not any(code.name in str(status) for code in statuses.RETRIED_CODES), status


@pytest.mark.parametrize("calls", [2, 3, 4])
def test_being_called_off_waits_for_the_chunk_that_is_being_written(tmp_path: Path, calls: int) -> None:
    """Whatever a stopped write has begun is there when it returns: what is removed then does not come back."""
    large = np.ones((512, 1024), np.float32)
    array = stored(tmp_path, shape=large.shape, chunk=(32, 1024))
    left = iter(range(calls))

    def remaining() -> float:
        if next(left, None) is None:
            raise statuses.data_loss("another executor was lost").error()
        return 30.0

    with pytest.raises(StatusError, match="another executor was lost"):
        array.write("1", (0, 0), large, remaining)
    array.discard("1")
    assert os.listdir(tmp_path) == []
    time.sleep(0.05)
    assert os.listdir(tmp_path) == []
