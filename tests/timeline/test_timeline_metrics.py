"""Metrics fed from the event log and read as Prometheus reads them."""

import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ridgeway.timeline.events import EventLog
from ridgeway.timeline.metrics import ENDED_SESSIONS_SHOWN, Metrics


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_events_become_metrics() -> None:
    log = EventLog(None, limit=100)
    metrics = Metrics()
    log.subscribe(metrics.observe)
    stop = metrics.serve(0)
    assert metrics.port is not None
    try:
        before = scrape(metrics.port)
        assert before["ridgeway_generations_total,outcome=ready"] == 0
        assert before["ridgeway_sessions"] == 0
        log.emit("session_started", session=1)
        log.emit("session_started", session=2)
        log.emit("session_ended", session=1)
        log.emit("session_ended", session=1)
        log.emit("host_lost", slice=2, host=0, code="DATA_LOSS")
        log.emit("host_lost", slice=2, host=1, code="DATA_LOSS")
        log.emit("host_lost")
        log.emit("generation_ready", generation=1)
        log.emit("generation_aborted", generation=1)
        log.emit("compiled", seconds=2.5, cache="miss")
        log.emit("compiled", seconds=0.25, cache="hit")
        log.emit("compiled", seconds="long", cache=None)
        log.emit("recovery_completed", session=2, seconds=4.5)
        log.emit("recovery_completed", session=2, seconds=-1)
        after = scrape(metrics.port)
    finally:
        stop()
    assert log.dropped_writes == 0
    assert after["ridgeway_sessions"] == 1
    assert after["ridgeway_sessions_started_total"] == 2
    assert after["ridgeway_losses_total,code=DATA_LOSS,slice=2"] == 2
    assert after["ridgeway_losses_total,code=,slice="] == 1
    assert after["ridgeway_generations_total,outcome=ready"] == 1
    assert after["ridgeway_generations_total,outcome=aborted"] == 1
    assert after["ridgeway_compiled_programs_total,cache=hit"] == 1
    assert after["ridgeway_compiled_programs_total,cache=miss"] == 2
    assert after["ridgeway_compile_seconds_total,cache=miss"] == 2.5
    assert after["ridgeway_recoveries_total"] == 2
    assert after["ridgeway_recovery_seconds_count"] == 1
    assert after["ridgeway_recovery_seconds_sum"] == 4.5
    assert after["ridgeway_recovery_seconds_bucket,le=4.0"] == 0
    assert after["ridgeway_recovery_seconds_bucket,le=5.0"] == 1


def goodput(session: int, stepping: float) -> dict[str, object]:
    return {
        "kind": "goodput", "session": session, "seconds": {"stepping": stepping, "repeating": 2.0, "saving": None},
        "undecided_seconds": 0.5, "steps": 30, "repeated_steps": 4, "array_bytes": 4096,
    }  # fmt: skip


def test_accounts_of_sessions_and_what_is_up_become_gauges() -> None:
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    for kind, fields in (
        ("host_ready", {"slice": 0, "host": 0}), ("host_ready", {"slice": 0, "host": 1}),
        ("host_ready", {"slice": 1, "host": 0}), ("slice_ready", {"slice": 0}), ("slice_ready", {"slice": 1}),
        ("slice_lost", {"slice": 1}), ("host_lost", {"slice": 1, "host": 0, "code": "DATA_LOSS"}),
    ):  # fmt: skip
        metrics.observe({"kind": kind, **fields})
    assert value("ridgeway_executors") == 2
    assert value("ridgeway_slices_up") == 1
    metrics.observe(goodput(1, 10.0))
    metrics.observe(goodput(1, 20.0))
    labels = {"session": "1"}
    assert value("ridgeway_session_seconds", {**labels, "category": "stepping"}) == 20.0
    assert value("ridgeway_session_seconds", {**labels, "category": "repeating"}) == 2.0
    assert value("ridgeway_session_seconds", {**labels, "category": "saving"}) == 0.0
    assert value("ridgeway_session_undecided_seconds", labels) == 0.5
    assert value("ridgeway_session_steps", labels) == 30
    assert value("ridgeway_session_repeated_steps", labels) == 4
    assert value("ridgeway_session_array_bytes", labels) == 4096


def test_gauges_of_sessions_that_ended_long_ago_go_away() -> None:
    metrics = Metrics()
    metrics.observe(goodput(1, 10.0))
    for session in range(1, ENDED_SESSIONS_SHOWN + 2):
        metrics.observe({"kind": "session_ended", "session": session})
        held = metrics.registry.get_sample_value("ridgeway_session_array_bytes", {"session": "1"})
        assert held == (0 if session <= ENDED_SESSIONS_SHOWN else None)
    for name in ("ridgeway_session_steps", "ridgeway_session_array_bytes"):
        assert metrics.registry.get_sample_value(name, {"session": "1"}) is None
    labels = {"session": "1", "category": "stepping"}
    assert metrics.registry.get_sample_value("ridgeway_session_seconds", labels) is None


def test_a_port_in_use_is_an_error_and_stop_frees_it() -> None:
    first = Metrics()
    stop = first.serve(0)
    assert first.port is not None
    with pytest.raises(OSError):
        Metrics().serve(first.port)
    stop()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", first.port))


def test_two_clusters_in_one_process_do_not_mix() -> None:
    one, other = Metrics(), Metrics()
    one.observe({"kind": "recovery_completed", "seconds": 1})
    assert one.registry.get_sample_value("ridgeway_recoveries_total") == 1
    assert other.registry.get_sample_value("ridgeway_recoveries_total") == 0


def test_the_document_names_the_metrics_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "goodput.md").read_text(encoding="utf-8")
    table = text.partition("## Prometheus")[2]
    named = {name for row in table.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row)}
    served = {family.name: family.type for family in Metrics().registry.collect()}
    there = {f"{name.removeprefix('ridgeway_')}{'_total' * (kind == 'counter')}" for name, kind in served.items()}
    assert named == there
