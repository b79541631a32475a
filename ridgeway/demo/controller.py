"""Run a module as ``python -m MODULE ARGUMENTS…`` would, and keep a plain list of its step times.

The module is not changed: a logging handler of ours listens to what MaxText logs, in the same process, and
appends to a list that lives outside the module. Recovery from a lost slice re-runs MaxText's whole training
function, but not this process, so the list still holds every entry at the end.

Two lines go to standard output, one when the process starts and one when it ends::

    RIDGEWAY-CONTROLLER {"event": "start", "pid": …, "list": …}
    RIDGEWAY-CONTROLLER {"event": "end", "pid": …, "list": …, "length": …, "entries": [[step, seconds], …]}

``list`` is the identity (address) of the list object. What is not taken from the log but from the list itself
is only in the second line.
"""

import json
import logging
import os
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "RIDGEWAY-CONTROLLER "
EXIT_USAGE = 2

_STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+)")


@dataclass(frozen=True)
class Account:
    """What the controller said about itself.

    Attributes:
        start_pids: process id in each start line; a controller that was started once has one.
        end_pid: process id in the end line; None when there is none.
        same_list: the list at the end is the object that was made at the start.
        length: entries in the list at the end.
        entries: step number and MaxText's own step time in seconds, in order.
    """

    start_pids: list[int]
    end_pid: int | None
    same_list: bool
    length: int
    entries: list[tuple[int, float]]


def parse_account(log_text: str) -> Account:
    """What the controller's two lines in a log say; other lines are passed over."""
    starts: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    for line in log_text.splitlines():
        _, found, text = line.partition(PREFIX)
        if not found:
            continue
        try:
            value = json.loads(text)
            (starts if value["event"] == "start" else ends).append(value)
        except (ValueError, KeyError, TypeError):
            continue
    pids = [int(value["pid"]) for value in starts]
    if not ends:
        return Account(pids, None, False, 0, [])
    end = ends[-1]
    return Account(
        start_pids=pids,
        end_pid=int(end["pid"]),
        same_list=bool(starts) and starts[0]["list"] == end["list"],
        length=int(end["length"]),
        entries=[(int(step), float(seconds)) for step, seconds in end["entries"]],
    )


class _StepTimes(logging.Handler):
    """Appends ``(step, seconds)`` to a list for every step that MaxText logs."""

    def __init__(self, step_times: list[tuple[int, float]]) -> None:
        super().__init__(logging.INFO)
        self._step_times = step_times

    def emit(self, record: logging.LogRecord) -> None:
        """Look at one log record."""
        match = _STEP.search(record.getMessage())
        if match:
            self._step_times.append((int(match[1]), float(match[2])))


def _say(**fields: Any) -> None:
    # One write, begun on a new line: C++ code of the same process writes to the same log.
    sys.stdout.write(f"\n{PREFIX}{json.dumps(fields)}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Run the module; returns only when it does not exit by itself."""
    if not arguments:
        sys.stderr.write("usage: python -m ridgeway.demo.controller MODULE [ARGUMENT…]\n")
        return EXIT_USAGE
    step_times: list[tuple[int, float]] = []
    _say(event="start", pid=os.getpid(), list=id(step_times))
    # absl replaces the logger class before it makes its logger, so the handler must come after its import.
    from absl import logging as absl_logging

    absl_logging.get_absl_logger().addHandler(_StepTimes(step_times))
    sys.argv = [*arguments]
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    finally:
        _say(event="end", pid=os.getpid(), list=id(step_times), length=len(step_times), entries=step_times)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
