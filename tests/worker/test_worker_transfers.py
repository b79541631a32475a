"""An executor's transfer port goes on after it ran out of descriptors."""

import subprocess
import sys

import pytest

pytest.importorskip("resource")

PROGRAM = """
import os, resource, socket, time
import numpy as np
from ridgeway.worker.promises import PromiseTable
from ridgeway.worker.transfers import TransferClient, TransferServer

promises = PromiseTable()
server = TransferServer("127.0.0.1", "secret", promises, 5.0)
client = TransferClient("secret", 10.0)
with socket.socket() as stranger:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (stranger.fileno() + 1, hard))
    stranger.connect(("127.0.0.1", server.port))
    time.sleep(0.5)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    client.push("127.0.0.1", server.port, 7, np.arange(4.0), lambda error: print("failed", error, flush=True))
    print(promises.claim(7, None).wait(20.0).tolist(), flush=True)
os._exit(0)
"""


def test_transfers_go_on_after_a_time_without_descriptors() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=90, check=False)
    assert "could not be accepted" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("[0.0, 1.0, 2.0, 3.0]\n"), done.stdout + done.stderr
