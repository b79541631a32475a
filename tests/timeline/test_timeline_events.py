"""The event log: order, memory, the file and what can go wrong with it."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from ridgeway.timeline.events import EventLog, read_events


def test_events_are_numbered_kept_and_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "events.jsonl"
    log = EventLog(path, limit=3)
    emitted = [log.emit("host_lost", slice=number, cause="köln") for number in range(5)]
    assert [event["sequence"] for event in emitted] == [0, 1, 2, 3, 4]
    assert read_events(path) == emitted
    assert log.since(0, 100) == (emitted[2:], 5)
    assert log.since(3, 1) == (emitted[3:4], 4)
    assert log.since(4, 100) == (emitted[4:], 5)
    assert log.since(5, 100) == ([], 5)
    assert log.since(99, 100) == ([], 5)
    assert log.since(-7, 2) == (emitted[2:4], 4)
    assert log.since(0, 0) == ([], 2)
    assert log.next_sequence == 5
    clocks = [(event["time"], event["monotonic"]) for event in emitted]
    assert clocks == sorted(clocks)


def test_every_line_is_in_the_file_before_emit_returns(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", limit=10)
    for number in range(3):
        log.emit("tick", number=number)
        assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == number + 1


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl", limit=10)
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_line_cut_off_by_an_earlier_process_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"old","sequence":0}\n{"kind":"cut","seq')
    EventLog(path, limit=10).emit("new")
    assert [event["kind"] for event in read_events(path)] == ["old", "new"]


@pytest.mark.parametrize("cut", range(1, 30))
def test_reading_tolerates_a_last_line_of_any_length(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, limit=10)
    log.emit("first")
    log.emit("second", cause="ü" * 5)
    path.write_bytes(path.read_bytes()[:-cut])
    kinds = [event["kind"] for event in read_events(path)]
    # Only the newline is missing with the shortest cut: the line itself is whole.
    assert kinds == (["first", "second"] if cut == 1 else ["first"])


def test_reading_leaves_out_what_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'[1]\n7\n\n{"sequence":1}\n\xff\xfe\n{"kind":3}\n{"kind":"real"}\n')
    assert read_events(path) == [{"kind": "real"}]
    with pytest.raises(FileNotFoundError):
        read_events(tmp_path / "absent")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_counted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(Path("/dev/full"), limit=10)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            log.emit("tick")
    assert log.dropped_writes == 4
    assert len(log.since(0, 10)[0]) == 4
    assert len(caplog.records) == 1
    assert "/dev/full" in caplog.text and "No space left" in caplog.text


def test_a_file_that_cannot_be_opened_does_not_stop_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "events.jsonl", limit=10)
    log.emit("tick")
    log.emit("tick")
    assert log.dropped_writes == 2
    assert len(caplog.records) == 1


def test_a_line_that_was_written_in_part_is_ended_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the middle of a line and is cleared again."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path, limit=10)
    log.emit("first")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
    log.emit("cut")
    monkeypatch.undo()
    log.emit("last")
    assert log.dropped_writes == 1
    assert [event["kind"] for event in read_events(path)] == ["first", "last"]


def test_values_without_a_form_in_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, limit=10)
    nested: list[object] = []
    nested.append(nested)
    event = log.emit(
        "odd", path=Path("x"), numbers=(1, 2.5), infinite=float("inf"), names={2: {b"k"}}, nested=nested, none=None
    )
    assert event["path"] == "x"
    assert list(event["numbers"]) == [1, 2.5]
    assert event["infinite"] is None
    assert event["names"] == {"2": ["b'k'"]}
    # What is in memory, on its way to clients, is what is in the file.
    assert json.loads(json.dumps(event)) == read_events(path)[0]


def test_names_that_every_event_has_are_refused() -> None:
    log = EventLog(None, limit=1)
    with pytest.raises(ValueError, match="reserved field names: time"):
        log.emit("tick", time=3)
    assert log.next_sequence == 0
    with pytest.raises(ValueError, match="at least 1"):
        EventLog(None, limit=0)


def test_subscribers_see_the_same_order_also_when_one_emits() -> None:
    log = EventLog(None, limit=10)
    seen: list[tuple[str, int]] = []

    def first(event: dict) -> None:
        seen.append(("first", event["sequence"]))
        if event["kind"] == "cause":
            log.emit("effect")

    log.subscribe(first)
    end = log.subscribe(lambda event: seen.append(("second", event["sequence"])))
    log.emit("cause")
    assert seen == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
    end()
    end()
    log.emit("tick")
    assert seen[4:] == [("first", 2)]


def test_a_failing_subscriber_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(None, limit=10)
    seen: list[int] = []

    def broken(event: dict) -> None:
        raise RuntimeError("subscriber is broken")

    log.subscribe(broken)
    log.subscribe(lambda event: seen.append(event["sequence"]))
    log.emit("tick")
    log.emit("tick")
    assert seen == [0, 1]
    assert caplog.text.count("RuntimeError: subscriber is broken") == 1


def test_an_interrupt_in_a_subscriber_reaches_the_emitter_and_later_events_flow() -> None:
    log = EventLog(None, limit=10)
    seen: list[int] = []

    def interrupted(event: dict) -> None:
        seen.append(event["sequence"])
        if event["sequence"] == 0:
            raise KeyboardInterrupt

    log.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.emit("tick")
    log.emit("tick")
    assert seen == [0, 1]


def test_many_threads_emit_one_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, limit=1000)
    seen: list[int] = []
    log.subscribe(lambda event: seen.append(event["sequence"]))
    threads = [threading.Thread(target=lambda: [log.emit("tick") for _ in range(50)], daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == list(range(400))
    assert [event["sequence"] for event in read_events(path)] == list(range(400))


def test_after_close_only_the_file_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, limit=10)
    log.emit("written")
    log.close()
    log.close()
    log.emit("kept")
    assert [event["kind"] for event in read_events(path)] == ["written"]
    assert len(log.since(0, 10)[0]) == 2
    assert log.dropped_writes == 0
