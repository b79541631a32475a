"""Recoveries as text, JSON and pictures."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import WALL, Stream, resize, resume, start

from ridgeway.timeline.plots import PlotError
from ridgeway.timeline.recovery import find_recoveries
from ridgeway.timeline.report import SCHEMA, WIDTH, plot, render


def mixed() -> Stream:
    stream = start(Stream())
    resume(stream, 100.0)
    resume(stream, 130.0, slice_index=1)
    resize(stream, 160.0)
    stream.add(300.0, "host_lost", slice=0, host=0, code="DATA_LOSS", cause="gone")
    return stream.add(305.0, "slice_ready", slice=0)


def test_the_table_tells_it_all(tmp_path: Path) -> None:
    text = render(mixed().done(), tmp_path / "timeline.txt")
    assert (tmp_path / "timeline.txt").read_text(encoding="utf-8") == text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("Recovery ") == 4
    assert "slice 2 host 0  DATA_LOSS: killed by SIGKILL" in text
    assert "error raised in controller" in text
    assert text.count("unattributed") >= 4
    assert "Recoveries: 3; kill to next step 4.000 s median, 11.480 s at most" in text
    assert "Not counted: 1 with no session concerned" in text


def test_a_long_cause_and_a_strange_one_stay_readable() -> None:
    stream = start(Stream())
    stream.add(100.0, "host_lost", slice=0, host=None, code="INTERNAL", cause="[red]x[/red] " + "y" * 300)
    text = render(stream.done())
    assert "[red]x[/red]" in text
    assert text.count("y") > 300
    assert max(map(len, text.splitlines())) <= WIDTH


def test_without_losses_it_says_so() -> None:
    assert "No loss" in render([])
    assert json.loads(render([], as_json=True)) == {
        "schema": SCHEMA,
        "recoveries": [],
        "goodput": [],
        "suspensions": [],
        "summary": {
            "count": 0, "median_seconds": None, "max_seconds": None, "undisturbed": 0, "repaired": 0,
            "session_ended": 0, "unfinished": 0, "phases": {},
        },
    }  # fmt: skip


def test_the_json_form(tmp_path: Path) -> None:
    text = render(mixed().done(), tmp_path / "timeline.json", as_json=True, killed_at=[WALL + 159.9])
    assert (tmp_path / "timeline.json").read_text() == text
    document = json.loads(text)
    assert document["schema"] == SCHEMA
    assert [recovery["mode"] for recovery in document["recoveries"][:3]] == ["resume", "resume", "resize"]
    for recovery in document["recoveries"]:
        assert sum(phase["seconds"] for phase in recovery["phases"]) == pytest.approx(recovery["seconds"])
        assert recovery.keys() == {
            "number", "session", "losses", "outcome", "mode", "start_time", "seconds", "phases", "milestones",
            "step_program", "compile_hits", "compile_misses", "slices", "kill_known", "unattributed_seconds",
        }  # fmt: skip
        assert all(
            phase.keys() == {"name", "title", "begin_seconds", "seconds", "compiling_seconds", "note"}
            for phase in recovery["phases"]
        )
    summary = document["summary"]
    assert (summary["count"], summary["repaired"]) == (3, 1)
    assert summary["max_seconds"] == pytest.approx(11.6)
    assert summary["phases"]["resize_decided"]["count"] == 1
    assert summary["phases"]["detected"] == {
        "count": 3, "median_seconds": pytest.approx(0.05), "max_seconds": pytest.approx(0.12)
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 60])
@pytest.mark.parametrize("with_steps", [False, True])
def test_the_picture(tmp_path: Path, count: int, with_steps: bool) -> None:
    pytest.importorskip("matplotlib")
    stream = start(Stream())
    steps: list[tuple[float, float]] = []
    for number in range(count):
        resume(stream, 100.0 + 20 * number)
        steps += [(WALL + 104 + 20 * number + step / 2, 10 * number + step) for step in range(20)]
    path = tmp_path / "timeline.png"
    plot(find_recoveries(stream.done()), path, steps if with_steps else None)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 1000 < width < 2500 and 300 < height < 4000
    assert data.rstrip().endswith(b"IEND\xaeB`\x82")


def test_a_picture_of_nothing_or_of_no_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(PlotError, match="no recovery"):
        plot([], tmp_path / "timeline.png")
    stream = Stream().add(1.0, "host_lost", slice=0, host=0)
    plot(find_recoveries(stream.done()), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_events_alone_import_nothing_heavy() -> None:
    """The head imports the log; it must not pay for tables and pictures."""
    program = "import sys, ridgeway.timeline.events; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()).isdisjoint({"rich", "matplotlib", "numpy", "prometheus_client", "jax", "asyncio"})
