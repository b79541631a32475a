"""Runs Python programs that need a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import ridgeway

PROGRAM_SECONDS = 120


def run_python(*arguments: str, **environment: str) -> str:
    """Run this Python with `arguments`, able to import ridgeway; its output, or a failed assertion."""
    source = str(Path(ridgeway.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": source, **environment},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
