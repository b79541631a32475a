"""The command `ridgeway` as a user's process, in a world of its own."""

import json
import sys
from pathlib import Path
from typing import Any

from places import MarkedPlace, Running, until

__all__ = ["Running", "World", "until"]


class World(MarkedPlace):
    """Where commands run."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.environment["COLUMNS"] = "120"

    def start(self, *arguments: str, **environment: str) -> Running:
        """Start `ridgeway arguments...`."""
        return self.launch([sys.executable, "-m", "ridgeway.cli.main", *arguments], **environment)

    def call(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `ridgeway arguments...`."""
        running = self.start(*arguments, **environment)
        code = running.wait()
        return code, "\n".join(running.stdout), "\n".join(running.stderr)

    def status(self) -> dict[str, Any]:
        """What `ridgeway status --json` says."""
        code, output, errors = self.call("status", "--json")
        assert code == 0, errors
        return json.loads(output)

    def hosts(self) -> list[dict[str, Any]]:
        """All hosts of the status, in order."""
        return [host for piece in self.status()["slices"] for host in piece["hosts"]]
