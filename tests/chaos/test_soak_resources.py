"""What the soak takes for growth."""

import pytest

from benchmarks.soak_resources import SETTLED_AFTER, SLACK, Sample, comparable, trends

WHOLE, PART = 6, 4
FAULTS = 60


def _samples(threads: list[float], devices: list[int]) -> list[Sample]:
    return [
        Sample(fault, float(fault), on, {"head": [{"memory": 1e8, "threads": count, "sockets": 1.0, "files": 1.0}]})
        for fault, (count, on) in enumerate(zip(threads, devices, strict=True), start=1)
    ]


def _grown(samples: list[Sample]) -> set[str]:
    return {trend.metric for trend in trends(samples) if not trend.flat}


@pytest.mark.parametrize("per_fault", [0.0, 1.0])
def test_a_thread_more_after_each_fault_is_growth(per_fault: float) -> None:
    samples = _samples([20.0 + per_fault * n for n in range(FAULTS)], [WHOLE] * FAULTS)
    assert _grown(samples) == ({"threads"} if per_fault else set())


def test_what_grows_before_the_run_in_is_over_does_not_count() -> None:
    samples = _samples([float(min(n, SETTLED_AFTER - 1)) for n in range(FAULTS)], [WHOLE] * FAULTS)
    assert _grown(samples) == set()


def test_a_mesh_that_is_whole_again_is_no_growth_and_growth_on_the_whole_mesh_is_found_between_smaller_ones() -> None:
    devices = [PART if n < FAULTS // 2 and n % 3 else WHOLE for n in range(FAULTS)]
    steady = [10.0 if on == PART else 60.0 for on in devices]
    assert _grown(_samples(steady, devices)) == set()
    growing = [count + (n if on == WHOLE else 0.0) for n, (count, on) in enumerate(zip(steady, devices, strict=True))]
    assert _grown(_samples(growing, devices)) == {"threads"}
    assert {taken.devices for taken in comparable(_samples(steady, devices))} == {WHOLE}


def test_a_little_more_is_within_the_slack_and_a_little_beyond_it_is_not() -> None:
    half = FAULTS // 2
    for more, grown in ((SLACK["threads"], set()), (SLACK["threads"] + 1.0, {"threads"})):
        samples = _samples([0.0] * half + [more] * (FAULTS - half), [WHOLE] * FAULTS)
        assert _grown(samples) == grown


def test_too_few_samples_give_no_verdict() -> None:
    assert trends(_samples([1.0] * SETTLED_AFTER, [WHOLE] * SETTLED_AFTER)) == []
