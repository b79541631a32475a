"""The demonstration's judgement: all evidence of a good run is accepted, and each lie or gap is found."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from ridgeway.demo import evidence
from ridgeway.demo import job as jobs
from ridgeway.demo.controller import Account
from ridgeway.demo.training import Kill
from ridgeway.timeline.phases import Phase
from ridgeway.timeline.recovery import Milestone, Recovery

KILL_TIME = 1_700_000_000.0
STEPS = 40
# Steps 0 to 25, killed, 21 to 39.
LOGGED = [*range(26), *range(21, STEPS)]


def records() -> list[jobs.StepRecord]:
    begin = datetime(2026, 1, 1)
    return [
        jobs.StepRecord(step, 7.0 - step / 10, 0.01 * step, begin + timedelta(seconds=index))
        for index, step in enumerate(LOGGED)
    ]


def status(changes: dict[tuple[int, int], dict[str, Any]] | None = None, session: int = 1) -> dict[str, Any]:
    slices = []
    for index in range(3):
        host = {
            "slice": index, "host": 0, "state": "ready", "incarnation": index, "pid": 100 + index,
            "executor_pid": 200 + index, "restarts": 0,
        }  # fmt: skip
        slices.append({"slice": index, "state": "up", "hosts": [host | (changes or {}).get((index, 0), {})]})
    return {"slices": slices, "sessions": [{"session": session}]}


def recovery(**changes: Any) -> Recovery:
    phases = (Phase("detected", 0.0, 0.1, 0.0, ""), Phase("first_step_done", 0.1, 3.9, 0.0, ""))
    made = Recovery(
        number=1, session=1, losses=(), outcome="completed", mode="resume", start_time=KILL_TIME, seconds=4.0,
        phases=phases, milestones=(Milestone("killed", KILL_TIME, 0.0, "given"),), step_program="jit_train_step",
        compile_hits=3, compile_misses=0,
    )  # fmt: skip
    return replace(made, **changes)


REPLACED = {(2, 0): {"pid": 300, "incarnation": 9, "executor_pid": 301, "restarts": 1}}
LOST = {
    "kind": "host_lost", "slice": 2, "host": 0, "time": KILL_TIME + 0.05, "monotonic": 50.05,
    "cause": "connection to its agent closed",
}  # fmt: skip


def seen(**changes: Any) -> evidence.Observed:
    entries = [(record.step, record.seconds) for record in records()]
    good = evidence.Observed(
        steps=STEPS,
        records=records(),
        metrics=records(),
        committed=[0, 10, 20, 30, 39],
        kill=Kill(2, 0, 102, KILL_TIME, 50.0, 26, 1, [0, 10, 20]),
        controller_pid=42,
        exit_code=0,
        account=Account([42], 42, True, len(entries), entries),
        before=status(),
        after=status(REPLACED),
        events=[LOST],
        recoveries=[recovery()],
        left_running=[],
    )
    return replace(good, **changes)


def failed(observed: evidence.Observed) -> list[str]:
    return [check.text for check in evidence.judge(observed) if not check.passed]


def test_good_run_has_all_evidence() -> None:
    checks = evidence.judge(seen())
    assert [check.text for check in checks if not check.passed] == []
    texts = {check.subject: check.text for check in checks}
    assert len(texts) == len(checks) == 10
    joined = "\n".join(texts.values())
    for part in (
        "step 25, then step 21; checkpoint 20",
        "pid 42 at the start and at the end",
        "len(step_times) = 45: 26 from before the kill, 19 since",
        "noticed after 0.050 s",
        "4.00 s in 2 phases, 0.00 s unattributed",
        "14 new steps to step 39",
    ):
        assert part in joined


def one_loss_differs() -> list[jobs.StepRecord]:
    changed = records()
    # Step 24, the second time.
    changed[29] = replace(changed[29], loss=changed[29].loss + 1e-9)
    return changed


def recycled() -> dict[str, Any]:
    return status(REPLACED | {(0, 0): {"executor_pid": 999, "restarts": 1}})


def test_a_renewed_executor_is_no_crash() -> None:
    after = status(REPLACED | {(0, 0): {"executor_pid": 999}})
    assert failed(seen(after=after)) == []
    texts = [check.text for check in evidence.judge(seen(after=after))]
    assert any("the executor of slice 0 host 0 was renewed" in text for text in texts)
    assert not any("crashed" in text for text in texts)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"records": records()[:26]}, "it went back 0 times, not once"),
        ({"committed": [0, 10, 30, 39]}, "after step 20, which is no committed checkpoint"),
        ({"kill": replace(seen().kill, committed=[0, 10, 20, 25])}, "step 20 was restored although 25 was committed"),
        ({"metrics": one_loss_differs()}, "step 24: first 4.6"),
        ({"metrics": records()[:26]}, "0 returns of the step counter"),
        ({"controller_pid": 41}, "started as 41, began as 42, ended as 42"),
        ({"account": replace(seen().account, start_pids=[42, 43])}, "the controller started 2 times"),
        ({"account": Account([42], None, False, 0, [])}, "ended as None"),
        ({"after": status(REPLACED, session=2)}, "sessions [1] before the kill and [2] after"),
        ({"account": replace(seen().account, same_list=False)}, "not the list made at the start"),
        ({"account": replace(seen().account, entries=seen().account.entries[1:])}, "45 steps were logged"),
        ({"after": status(REPLACED | {(1, 0): {"pid": 7}})}, "slice 1 host 0 was pid 101 and is pid 7"),
        ({"after": status(REPLACED | {(1, 0): {"incarnation": 7}})}, "slice 1 host 0 was pid 101"),
        ({"after": status(REPLACED | {(1, 0): {"restarts": 2}})}, "the status counts 2 restarts"),
        ({"events": []}, "no host_lost event"),
        ({"events": [LOST | {"time": KILL_TIME - 1}]}, "no host_lost event"),
        ({"after": status()}, "its place is ready, pid 102"),
        ({"after": status({(2, 0): {"pid": None, "state": "lost"}})}, "its place is lost, pid None"),
        ({"committed": [0, 10, 20]}, "no checkpoint after step 25 was committed"),
        ({"exit_code": -9}, "the controller ended with code -9"),
        ({"steps": 41}, "the last step in the log is 39, not 40"),
        ({"recoveries": []}, "0 recoveries, not one"),
        ({"recoveries": [recovery(outcome="unfinished")]}, "the recovery is unfinished"),
        ({"recoveries": [recovery(milestones=())]}, "does not begin with the kill"),
        ({"recoveries": [recovery(seconds=5.0)]}, "the phases sum to 4.000 s, not 5.000 s"),
        ({"left_running": [77]}, "processes [77] are still there"),
    ],
)
def test_what_is_missing_is_said(changes: dict[str, Any], text: str) -> None:
    found = failed(seen(**changes))
    assert found
    assert any(text in line for line in found), found


def test_a_recycled_executor_of_a_survivor_is_told_not_hidden() -> None:
    checks = evidence.judge(seen(after=recycled()))
    assert failed(seen(after=recycled())) == []
    assert any("the executor of slice 0 host 0 had crashed" in check.text for check in checks)


def test_few_new_steps_are_not_enough() -> None:
    short = records()[: 26 + 8]
    entries = [(record.step, record.seconds) for record in short]
    observed = seen(
        steps=29, records=short, metrics=short, account=Account([42], 42, True, len(entries), entries),
        committed=[0, 10, 20, 28],
    )  # fmt: skip
    assert failed(observed) == ["only 3 new steps were left after the recovery"]


LOG = """\
I1129 19:45:06.613465 1400 metric_logger.py:265] completed step: 24, seconds: 0.287, live slice count: 3, \
TFLOP/s/device: 0.000, Tokens/s/device: 346.961, total_weights: 762, loss: 5.213, lm_loss: 5.213
I1129 19:45:07.122539 1400 metric_logger.py:265] completed step: 25, seconds: 0.607, live slice count: 3, \
TFLOP/s/device: 0.000, Tokens/s/device: 346.961, total_weights: 762, loss: 4.640, lm_loss: 4.640
E1129 19:45:07.700627 1400 manager.py:411] Elastic event detected
Traceback (most recent call last):
  File "train.py", line 1, in train
jax.errors.JaxRuntimeError: DATA_LOSS: slice 2 host 0 (executor 8) was lost: connection to its agent closed
jax.errors.JaxRuntimeError: DATA_LOSS: slice 2 host 0 (executor 8) was lost: connection to its agent closed
I1129 19:45:07.721382 1400 manager.py:374] Elastic attempt 2
I1129 19:45:08.000000 1400 other.py:1] something else
I1129 19:45:08.439232 1400 checkpointing.py:705] restoring from this run's directory step 20
I1129 19:45:11.123227 1400 metric_logger.py:265] completed step: 21, seconds: 0.054, live slice count: 3, \
TFLOP/s/device: 0.001, Tokens/s/device: 1488.770, total_weights: 762, loss: 5.094, lm_loss: 5.094
"""


def test_excerpt_shows_the_turn_and_marks_what_is_left_out() -> None:
    (rewind,) = jobs.find_rewinds(jobs.parse_steps(LOG))
    assert evidence.excerpt(LOG, rewind, around=1) == [
        "19:45:07.122539 completed step: 25, seconds: 0.607, live slice count: 3, loss: 4.640",
        "19:45:07.700627 Elastic event detected",
        "…",
        "jax.errors.JaxRuntimeError: DATA_LOSS: slice 2 host 0 (executor 8) was lost: connection to its agent closed",
        "…",
        "19:45:07.721382 Elastic attempt 2",
        "…",
        "19:45:08.439232 restoring from this run's directory step 20",
        "19:45:11.123227 completed step: 21, seconds: 0.054, live slice count: 3, loss: 5.094",
    ]
