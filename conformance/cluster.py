"""A cluster for the tests, by the same commands that a user types."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COMMAND_SECONDS = 180.0
SETTLE_SECONDS = 15.0
"""How long a closed session may take to be gone."""


@dataclasses.dataclass(slots=True)
class Cluster:
    """A cluster that is up."""

    name: str
    topology: str
    environment: dict[str, str]
    """what a JAX program needs to connect"""

    def status(self) -> dict[str, Any]:
        """`ridgeway status --json`."""
        return json.loads(_ridgeway("status", "--json", "--cluster", self.name))

    def executors(self) -> dict[str, int]:
        """Place -> process id of the executor there."""
        return {
            f"slice {host['slice']} host {host['host']}": host["executor_pid"]
            for entry in self.status()["slices"]
            for host in entry["hosts"]
        }

    def memory_bytes(self) -> int:
        """Resident memory of all executors."""
        return sum(host["memory_bytes"] or 0 for entry in self.status()["slices"] for host in entry["hosts"])

    def settle(self) -> list[dict[str, Any]]:
        """The sessions that are still there after all clients have gone; none is right."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (sessions := self.status()["sessions"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return sessions


@contextmanager
def cluster(topology: str, *options: str) -> Iterator[Cluster]:
    """A cluster of ``slices x hosts x devices`` on free ports, down again at the end; ``options`` are more of
    `ridgeway up`'s.

    Raises:
      RuntimeError: it did not come up; the text says why.
    """
    name = f"conformance-{topology}-{os.getpid()}"
    output = _ridgeway(
        "up", "--topology", topology, "--cluster", name, "--proxy-port", "0", "--cluster-port", "0",
        "--max-slice-restarts", "unlimited", "--allow-overcommit", *options,
    )  # fmt: skip
    exported = [line.removeprefix("export ") for line in output.splitlines() if line.startswith("export ")]
    environment = {key: value.strip("'\"") for key, _, value in (line.partition("=") for line in exported)}
    try:
        yield Cluster(name, topology, environment)
    finally:
        _ridgeway("down", "--cluster", name)


def _ridgeway(*arguments: str) -> str:
    command = [sys.executable, "-m", "ridgeway.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"ridgeway {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
