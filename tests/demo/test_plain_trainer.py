"""The plain trainer run natively: it learns, and a run that was cut in two gives the losses of one that was not."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.maxtext

TRAINER = Path(__file__).parents[2] / "examples" / "plain_trainer.py"


def run(checkpoints: Path, *arguments: str, devices: int = 4) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, str(TRAINER), "--checkpoints", str(checkpoints), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)}


def test_losses_after_a_restart_equal_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "--steps", "16", "--checkpoint-period", "5")
    assert whole.returncode == 0, whole.stderr
    undisturbed = losses(whole.stdout)
    assert list(undisturbed) == list(range(16))
    assert float(undisturbed[15]) < float(undisturbed[0]) - 1
    start, end = re.findall(r"^(?:start|end) pid (\d+)", whole.stdout, re.MULTILINE)
    assert start == end
    assert "16 step times kept" in whole.stdout

    # What is left when a run dies between the checkpoints of steps 5 and 10.
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (10, 15):
        shutil.rmtree(tmp_path / "cut" / str(step))
    second = run(tmp_path / "cut", "--steps", "16", "--checkpoint-period", "5")
    assert "restored step 5 on 4 devices" in second.stdout
    assert losses(second.stdout) == {step: undisturbed[step] for step in range(6, 16)}


def test_devices_that_do_not_divide_are_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "none", devices=3)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("cannot share 48 rows out over 3 devices")
    assert "Traceback" not in result.stderr
