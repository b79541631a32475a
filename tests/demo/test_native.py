"""The native runner's handling of processes and options; the whole job takes minutes and is the benchmark's."""

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ridgeway.demo import job, native


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def processes(tmp_path: Path) -> native.Processes:
    options = native.native_options(job.Options(dataset=tmp_path, output=tmp_path))
    built = job.build(options, base_config=tmp_path / "base.yml")
    return native.Processes(built, job.SMALL, tmp_path)


def test_only_the_killed_process_ends_and_none_is_left(processes: native.Processes) -> None:
    with processes:
        processes.start()
        pids = [child.pid for child in processes._children]
        assert processes.running() == [0, 1, 2]
        processes.kill(2)
        deadline = time.monotonic() + 20
        while 2 in processes.running():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # The others are still importing jax, or wait in jax.distributed for the third.
        assert processes.running() == [0, 1]
        assert "process 2 was ended by SIGKILL" in (processes.failed() or "")
    assert not any(exists(pid) for pid in pids)


def test_a_process_that_fails_is_named_with_its_log(processes: native.Processes) -> None:
    processes._job.command[0] = "/bin/false"
    with processes:
        processes.start()
        with pytest.raises(native.NativeError, match=r"waiting for a step: process \d exited with 1; its log is"):
            native._wait("a step", lambda: bool(processes.steps()), processes, time.monotonic() + 20)


def test_deadline_is_an_error(processes: native.Processes) -> None:
    with processes:
        processes.start()
        with pytest.raises(native.NativeError, match="a step: not within the deadline"):
            native._wait("a step", lambda: False, processes, time.monotonic() - 1)


def test_steps_are_read_as_the_log_grows(processes: native.Processes) -> None:
    log = processes.log_path(0)
    line = "completed step: {}, seconds: 0.1, total_weights: 8, loss: 1.5, lm_loss: 1.5\n"
    with log.open("w") as file:
        file.write(line.format(0) + line.format(1)[:30])
        file.flush()
        assert [record.step for record in processes.steps()] == [0]
        file.write(line.format(1)[30:] + line.format(2))
        file.flush()
        assert [record.step for record in processes.steps()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--relaunch"], "--relaunch needs --kill-after-checkpoint"),
        (["--victim", "3"], "there is no process 3; the job has 3"),
        (["--steps", "0"], "steps must be at least 1, not 0"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    common = ["--dataset", str(tmp_path), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(native.main, [*common, *arguments])
    assert result.exit_code != 0
    assert complaint in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.maxtext
def test_an_earlier_run_is_not_continued(tmp_path: Path) -> None:
    marked = tmp_path / "out" / "native" / "checkpoints" / "10"
    marked.mkdir(parents=True)
    (marked / job.COMMIT_MARKER).touch()
    common = ["--dataset", str(tmp_path), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(native.main, common)
    assert result.exit_code == 1
    assert "holds an earlier run; name another --output" in result.output
