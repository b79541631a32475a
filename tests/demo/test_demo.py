"""`ridgeway demo`: its options, what it refuses, that it leaves nothing behind, and the whole of it once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from places import child_set_up
from rich.console import Console

from ridgeway.cli import main as cli
from ridgeway.demo import demo, demonstration
from ridgeway.demo.training import LogReader

pytestmark = pytest.mark.maxtext

ROOT = Path(__file__).parents[2]
STEP = (
    "I1129 19:45:07.122539 1400 metric_logger.py:265] completed step: {}, seconds: 0.6, total_weights: 7, loss: 4.6\n"
)
ATTEMPT = "I1129 19:45:07.721382 1400 manager.py:374] Elastic attempt {}\n"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Folders of its own for clusters and logs; the user's cache."""
    for name in ("run", "state"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return dict(os.environ)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kill-slice", "3"], "there is no slice 3; --kill-slice is 0 to 2"),
        (["--kill-host", "1"], "slice 2 has no host 1; --kill-host is 0 to 0"),
        (["--full", "--kill-host", "4"], "slice 2 has no host 4; --kill-host is 0 to 3"),
        (["--standby", "-1"], "-1 is not in the range"),
        (["--jsonl", "nowhere.jsonl"], "does not exist"),
        (["--cluster", "a/b"], "cluster name 'a/b' is not made of letters"),
        (["--nonsense"], "No such option"),
    ],
)
def test_mistakes_are_one_line(
    environment: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    code = cli.main(["demo", "--output", str(tmp_path / "out"), *arguments])
    output = capsys.readouterr()
    assert code == cli.EXIT_MISTAKE
    assert complaint in output.err
    assert len(output.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_folder_of_somebody_else_is_left_alone(environment: dict[str, str], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(demo.DemoError, match="holds files that are not of a demonstration"):
        demo.prepare_output(mine)
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert os.listdir(mine) == ["thesis.txt"]


def test_an_earlier_demonstration_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    demo.prepare_output(output)
    (output / "training" / "checkpoints").mkdir(parents=True)
    (output / "controller.log").touch()
    demo.prepare_output(output)
    assert os.listdir(output) == [demo.MARK_FILE]


def test_plans_leave_room_for_the_kill_and_for_what_follows() -> None:
    for plan in (demonstration.SMALL_PLAN, demonstration.FULL_PLAN):
        latest = demonstration.CHECKPOINTS_BEFORE_KILL * plan.checkpoint_period + plan.checkpoint_period
        assert plan.steps > latest + demonstration.STEPS_AROUND_CHECKPOINT
        assert plan.checkpoint_period > 2 * demonstration.STEPS_AROUND_CHECKPOINT
        shape = plan.shape
        assert (shape.slices, shape.devices) in ((3, 6), (3, 48))


def test_log_reader_sees_attempts_between_steps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reader = LogReader(log)
    assert reader.read() == []
    log.write_text(ATTEMPT.format(1) + STEP.format(0) + STEP.format(1)[:40])
    assert [record.step for record in reader.read()] == [0]
    with log.open("a") as file:
        file.write(STEP.format(1)[40:] + "manager.py:402] Elastic attempt 1 failed.\n" + ATTEMPT.format(2))
        file.write(STEP.format(1) + STEP.format(2))
    assert [record.step for record in reader.read()] == [1, 1, 2]
    assert reader.attempts == [0, 2]
    assert [record.step for record in reader.records] == [0, 1, 1, 2]


def start(environment: dict[str, str], output: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ridgeway.cli.main", "demo", "--output", str(output), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=child_set_up(),
    )  # fmt: skip


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_everything(environment: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    process = start(environment, tmp_path / "out")
    assert process.stdout is not None
    # The controller is starting: cluster, standby and controller are all there.
    for line in process.stdout:
        if "controller pid" in line:
            break
    else:
        raise AssertionError("it ended before the controller was started")
    children = descendants(process)
    assert len(children) > 5
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(60) == 128 + number, rest
    assert f"ended by {number.name}; nothing is left running" in rest
    assert "Traceback" not in rest
    deadline = time.monotonic() + 20
    while left := [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert list((tmp_path / "run").glob("ridgeway-*/*")) == []


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_whole_demonstration(environment: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start(environment, output)
    text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    assert "All evidence is there." in text
    assert "MISSING" not in text
    evidence = json.loads((output / "evidence.json").read_text())
    assert len(evidence["checks"]) == 10
    assert all(check["passed"] for check in evidence["checks"])
    assert evidence["kill"]["slice"] == 2
    timeline = json.loads((output / "timeline.json").read_text())
    assert timeline["summary"]["count"] == 1
    (recovery,) = timeline["recoveries"]
    assert (recovery["outcome"], recovery["mode"], recovery["slices"]) == ("completed", "resume", [2])
    assert (output / "timeline.png").read_bytes().startswith(b"\x89PNG")
    # One log, in which the step counter goes back.
    log = (output / "controller.log").read_text(errors="replace")
    assert len(re.findall(r'RIDGEWAY-CONTROLLER {"event": "start"', log)) == 1
    assert f'"pid": {evidence["controller_pid"]}' in log
    assert list((tmp_path / "run").glob("ridgeway-*/*")) == []


def test_console_is_wide_enough_for_the_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    made = demo.make_console()
    assert isinstance(made, Console)
    assert made.width >= 100
