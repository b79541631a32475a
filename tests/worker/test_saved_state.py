"""What an executor holds, written and read back."""

import math
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.worker import saved_state
from ridgeway.worker.buffers import BufferStore, Group, HostShard, PromisedShard, shard_group
from ridgeway.worker.failures import GenerationFailure
from ridgeway.worker.promises import Promise
from ridgeway.worker.saved_state import StateError

DTYPES = (
    np.bool_, np.int8, np.uint16, np.int32, np.int64, np.float16, np.float32, np.float64, np.complex64, np.complex128,
    ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.float8_e4m3fn,
    ml_dtypes.float4_e2m1fn,
)  # fmt: skip
FAR = math.inf


def nothing() -> None:
    pass


def saved(folder: Path, groups: dict[int, Group]) -> saved_state.Saved:
    return saved_state.save(groups, folder, 3, FAR, nothing)


def example() -> dict[int, Group]:
    numbers = np.arange(12).reshape(3, 4)
    groups = {
        10 + index: shard_group({0: HostShard((numbers % 2).astype(dtype), "device")})
        for index, dtype in enumerate(DTYPES)
    }
    groups[1] = shard_group({0: HostShard(np.float32(2.5).reshape(()), None), 1: HostShard(np.zeros((0, 3)), "device")})
    groups[2] = shard_group({0: HostShard(np.asfortranarray(numbers), "pinned_host")}, memory_kind="pinned_host")
    groups[3] = shard_group({
        0: Status(Code.DATA_LOSS, "slice 2 was lost"),
        1: GenerationFailure(Code.ABORTED, "collective failed", 7),
    })  # fmt: skip
    return groups


def plain(groups: dict[int, Group]) -> dict[tuple[int, int], Any]:
    found: dict[tuple[int, int], Any] = {}
    for number, group in groups.items():
        assert group.shards is not None
        for device, shard in group.shards.items():
            if isinstance(shard, HostShard):
                shard = (shard.memory_kind, shard.data.dtype, shard.data.shape, shard.data.tobytes())
            found[number, device] = shard
    return found


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    groups = example()
    written = saved(tmp_path / "state", groups)
    assert written.groups == len(groups)
    found = saved_state.load(tmp_path / "state", 3, written.mark, nothing)
    assert plain(found) == plain(groups)
    assert [number for number, group in found.items() if group.in_host_memory] == [2]
    failure = found[3].shards[1]  # type: ignore[index]
    assert isinstance(failure, GenerationFailure) and failure.generation == 7
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()] == [0o600, 0o600]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_replicas_that_share_memory_are_written_once(tmp_path: Path) -> None:
    shard = HostShard(np.ones(1000, np.uint8), "device")
    other = shard.with_memory_kind("pinned_host")
    written = saved(tmp_path / "state", {1: shard_group({0: shard, 1: shard}), 2: shard_group({0: other})})
    assert written.bytes == 1000
    found = saved_state.load(tmp_path / "state", 3, written.mark, nothing)
    one, two = found[1].shards, found[2].shards
    assert one is not None and two is not None
    assert one[0].data is one[1].data is two[0].data
    assert (one[0].memory_kind, two[0].memory_kind) == ("device", "pinned_host")


def test_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_state, "CHUNK_BYTES", 7)
    groups = {
        number: shard_group({0: HostShard(np.arange(number * 5, dtype=np.uint8), None)}) for number in range(1, 30)
    }
    written = saved(tmp_path / "state", groups)
    assert plain(saved_state.load(tmp_path / "state", 3, written.mark, nothing)) == plain(groups)


@pytest.mark.parametrize("damage", ["a bit", "shorter", "no state", "no index", "another index", "mark", "slot"])
def test_what_is_not_the_state_that_was_saved_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "state"
    written = saved(folder, example())
    mark, slot = written.mark, 3
    state, index = folder / saved_state.STATE_FILE, folder / saved_state.INDEX_FILE
    content = bytearray(state.read_bytes())
    match damage:
        case "a bit":
            content[len(content) // 2] ^= 1
            state.write_bytes(content)
        case "shorter":
            state.write_bytes(content[:-1])
        case "no state":
            state.unlink()
        case "no index":
            index.unlink()
        case "another index":
            index.write_bytes(index.read_bytes().replace(b"slice 2", b"slice 1"))
        case "mark":
            mark = mark[::-1]
        case "slot":
            slot = 2
    with pytest.raises(StateError, match=str(tmp_path)):
        saved_state.load(folder, slot, mark, nothing)


def test_a_missing_scratch_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=rf"no folder {tmp_path}/nowhere .*--scratch-folder"):
        saved(tmp_path / "nowhere" / "state", example())


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 10

    monkeypatch.setattr(saved_state.os, "statvfs", lambda path: Full)
    with pytest.raises(StateError, match=r"do not fit .* 10 free"):
        saved(tmp_path / "state", example())
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_the_notice_ends_the_writing(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="notice was over"):
        saved_state.save(example(), tmp_path / "state", 3, time.monotonic() - 1.0, nothing)


def test_promises_are_kept_before_they_are_saved() -> None:
    store = BufferStore(1.0)
    promises = [Promise(), Promise()]
    for number, promise in enumerate(promises):
        store.set(number, shard_group({0: PromisedShard(promise, lambda data: data * 2, "device")}))
    assert store.promised == 2
    promises[0].resolve(np.arange(3))
    promises[1].resolve(statuses.data_loss("it never came"))
    assert store.promised == 0
    store.keep_in_host_memory()
    assert plain(store.groups) == {
        (0, 0): ("device", np.arange(3).dtype, (3,), (np.arange(3) * 2).tobytes()),
        (1, 0): statuses.data_loss("it never came"),
    }
