"""Host buffers by file: only this session's own, and each once."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from ridgeway.protocol.status import Code, StatusError
from ridgeway.proxy.large_transfers import FOLDER_VARIABLE, LargeTransfers, folder_from


def read(transfers: LargeTransfers, session: int, handle: int, size: int, began: float = 0.0) -> bytes:
    return asyncio.run(transfers.read(session, handle, size, began))


def error_of(transfers: LargeTransfers, session: int, handle: int, size: int, began: float = 0.0) -> Code:
    with pytest.raises(StatusError) as caught:
        read(transfers, session, handle, size, began)
    return caught.value.status.code


def test_a_buffer_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "lt_7").write_bytes(b"four")
    transfers = LargeTransfers(str(tmp_path), {1}.__contains__)
    assert read(transfers, 1, 7, 4) == b"four"
    assert list(tmp_path.iterdir()) == []
    assert error_of(transfers, 1, 7, 4) is Code.INVALID_ARGUMENT


def test_a_file_of_another_size_or_a_link_is_not_taken(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"four")
    transfers = LargeTransfers(str(tmp_path), {1}.__contains__)
    (tmp_path / "lt_1").write_bytes(b"fives")
    (tmp_path / "lt_2").symlink_to(secret)
    assert error_of(transfers, 1, 1, 4) is error_of(transfers, 1, 2, 4) is Code.INVALID_ARGUMENT


def test_what_an_earlier_client_left_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    left = tmp_path / "lt_1"
    left.write_bytes(b"four")
    os.utime(left, (time.time() - 100, time.time() - 100))
    assert error_of(LargeTransfers(str(tmp_path), {1}.__contains__), 1, 1, 4, time.time() - 50) is Code.INVALID_ARGUMENT
    assert not left.exists()


def test_one_session_at_a_time(tmp_path: Path) -> None:
    sessions = {1, 2}
    transfers = LargeTransfers(str(tmp_path), sessions.__contains__)
    for handle in (1, 2, 3):
        (tmp_path / f"lt_{handle}").write_bytes(b"four")
    assert read(transfers, 1, 1, 4) == b"four"
    assert error_of(transfers, 2, 2, 4) is Code.FAILED_PRECONDITION
    assert not (tmp_path / "lt_2").exists()
    sessions.remove(1)
    assert read(transfers, 2, 3, 4) == b"four"


def test_nothing_is_read_without_a_folder(tmp_path: Path) -> None:
    assert folder_from("", {}) == ""
    assert folder_from("", {FOLDER_VARIABLE: "/shared"}) == "/shared"
    assert folder_from("/mine", {FOLDER_VARIABLE: "/shared"}) == "/mine"
    assert error_of(LargeTransfers("", {1}.__contains__), 1, 1, 4) is Code.FAILED_PRECONDITION
