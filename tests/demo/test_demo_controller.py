"""The wrapper that keeps a list of step times, around a small module that logs as MaxText does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeway.demo import controller

pytestmark = pytest.mark.maxtext

ROOT = Path(__file__).parents[2]
MODULE = """
import sys
from absl import logging
logging.set_verbosity(logging.INFO)
for step in (0, 1, 2, 1, 2):
    logging.info("completed step: %d, seconds: 0.%d25, TFLOP/s/device: 0.000, loss: 5.1", step, step)
logging.info("completed nothing")
print("arguments", sys.argv[1:], "name", __name__)
if sys.argv[1] == "fail":
    raise ValueError("as told")
sys.exit(int(sys.argv[1]))
"""


def run(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    (folder / "pretend_train.py").write_text(MODULE)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeway.demo.controller", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=60)
    return process, output


def test_list_holds_every_step_in_order(tmp_path: Path) -> None:
    process, output = run(tmp_path, "pretend_train", "0", "two")
    assert process.returncode == 0, output
    assert "arguments ['0', 'two'] name __main__" in output
    account = controller.parse_account(output)
    assert account.start_pids == [process.pid]
    assert account.end_pid == process.pid
    assert account.same_list
    assert account.entries == [(0, 0.025), (1, 0.125), (2, 0.225), (1, 0.125), (2, 0.225)]
    assert account.length == 5


@pytest.mark.parametrize(("argument", "code"), [("3", 3), ("fail", 1)])
def test_exit_code_is_the_modules_and_the_account_is_given(tmp_path: Path, argument: str, code: int) -> None:
    process, output = run(tmp_path, "pretend_train", argument)
    assert process.returncode == code
    assert controller.parse_account(output).length == 5
    assert ("ValueError: as told" in output) == (argument == "fail")


def test_no_module_is_one_line(tmp_path: Path) -> None:
    process, output = run(tmp_path)
    assert process.returncode == controller.EXIT_USAGE
    assert output == "usage: python -m ridgeway.demo.controller MODULE [ARGUMENT…]\n"


def test_account_of_a_log_without_an_end() -> None:
    log = 'noise\nRIDGEWAY-CONTROLLER {"event": "start", "pid": 7, "list": 1}\nRIDGEWAY-CONTROLLER {"event": '
    assert controller.parse_account(log) == controller.Account([7], None, False, 0, [])


def test_account_of_two_starts_is_not_one_list() -> None:
    lines = [
        'RIDGEWAY-CONTROLLER {"event": "start", "pid": 7, "list": 1}',
        'RIDGEWAY-CONTROLLER {"event": "start", "pid": 8, "list": 2}',
        'RIDGEWAY-CONTROLLER {"event": "end", "pid": 8, "list": 2, "length": 0, "entries": []}',
    ]
    account = controller.parse_account("\n".join(lines))
    assert account.start_pids == [7, 8]
    assert not account.same_list
