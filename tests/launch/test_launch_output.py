"""A log on a full disk ends nothing."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import fixture_children
import pytest
from fixture_head import AgentUnderTest, FixtureHead

from ridgeway.launch import child_processes
from ridgeway.settings import Settings

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def exit_code(*command: str) -> int:
    with FULL.open("wb", buffering=0) as full:
        return subprocess.run([sys.executable, *command], stdout=full, stderr=full, timeout=60, check=False).returncode


def test_what_cannot_be_printed_is_dropped() -> None:
    code = """
import os, sys
from ridgeway import processes
processes.never_fail_at_output()
print("x", flush=True)
sys.stderr.write("x" * 100_000 + chr(10))
pid = os.fork()
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(line_buffering=True, write_through=False)
    print("y", file=stream, flush=True)
os._exit(7 if pid == 0 or os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7 else 8)
"""
    assert exit_code("-c", code) == 7


def test_a_worker_goes_on_when_its_log_is_full() -> None:
    async def test(log: int) -> None:
        async with FixtureHead(Settings()) as head, AgentUnderTest(head.port, log=log):
            agent = await head.next_agent()
            # By now it has said that it joined.
            for number, code in ((fixture_children.EXITS_WITH_7, 7), (fixture_children.RAISES, 1)):
                agent.link.send(["start_executor", number])
                assert await agent.next("process_exited") == ["process_exited", "executor", number, code]

    with FULL.open("wb", buffering=0) as full:
        asyncio.run(test(full.fileno()))


def test_a_child_starts_without_a_log_if_there_can_be_none(tmp_path: Path) -> None:
    (tmp_path / "not a folder").touch()
    with child_processes._log_file(tmp_path / "not a folder" / "worker.log") as file:
        assert file.name == os.devnull
