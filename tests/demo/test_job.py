"""The MaxText command line, and reading MaxText's log. The log lines are those of a real run with a real kill."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from ridgeway.demo import job
from ridgeway.demo.native import native_options

OPTIONS = job.Options(dataset=Path("/data/set"), output=Path("/out"))
CONFIG = Path("/maxtext/base.yml")

# MaxText 0.2.5 through a proxy on 3 slices; a worker was killed during step 26, step 20 was the last committed.
ELASTIC_LOG = """\
I1129 19:25:57.183329 140025866713984 metric_logger.py:265] completed step: 23, seconds: 0.369, \
live slice count: 3, TFLOP/s/device: 0.000, Tokens/s/device: 346.961, total_weights: 762, loss: 4.915, \
lm_loss: 4.915, perplexity: 136.272
I1129 19:25:57.596734 140025866713984 metric_logger.py:265] completed step: 24, seconds: 0.353, \
live slice count: 3, TFLOP/s/device: 0.000, Tokens/s/device: 362.112, total_weights: 762, loss: 5.213, \
lm_loss: 5.213, perplexity: 183.660
I1129 19:25:57.977295 140025866713984 metric_logger.py:265] completed step: 25, seconds: 0.350, \
live slice count: 3, TFLOP/s/device: 0.000, Tokens/s/device: 365.969, total_weights: 762, loss: 4.640, \
lm_loss: 4.640, perplexity: 103.508
E1129 19:25:58.086177 140025866713984 manager.py:411] Elastic event detected
Traceback (most recent call last):
jax.errors.JaxRuntimeError: DATA_LOSS: worker 2 is gone
I1129 19:25:59.054261 140025866713984 checkpointing.py:705] restoring from this run's directory step 20
I1129 19:26:02.620203 140025866713984 metric_logger.py:265] completed step: 21, seconds: 0.086, \
live slice count: 3, TFLOP/s/device: 0.001, Tokens/s/device: 1488.770, total_weights: 762, loss: 5.094, \
lm_loss: 5.094, perplexity: 163.119
I1129 19:26:02.982593 140025866713984 metric_logger.py:265] completed step: 22, seconds: 0.077, \
live slice count: 3, TFLOP/s/device: 0.001, Tokens/s/device: 1659.923, total_weights: 762, loss: 5.001, \
lm_loss: 5.001, perplexity: 148.623
"""
# The same version natively: there is no slice count.
NATIVE_LOG = """\
I1231 23:59:59.962977 140190501931904 metric_logger.py:265] completed step: 0, seconds: 0.090, \
TFLOP/s/device: 0.001, Tokens/s/device: 1428.269, total_weights: 762, loss: 6.610, lm_loss: 6.610, \
perplexity: 742.724
I0101 00:00:00.011861 140190501931904 metric_logger.py:265] completed step: 1, seconds: 0.821, \
TFLOP/s/device: 0.000, Tokens/s/device: 155.848, total_weights: 762, loss: 6.765, lm_loss: 6.765, \
perplexity: 866.677
"""
METRICS = (
    '{"learning/loss": 5.094478607177734, "learning/total_weights": 762.0, "perf/step_time_seconds": 0.37, '
    '"step": 21.0, "run_name": "demo"}\n'
    '{"learning/loss": 5.001410961151123, "learning/total_weights": 762.0, "perf/step_time_seconds": 0.36, '
    '"step": 22.0, "run_name": "demo"}\n'
    '{"learning/loss": 4.91464996'
)


def settings(command: list[str]) -> dict[str, str]:
    assert command[:3] == ["python3", "-m", "maxtext.trainers.pre_train.train"]
    assert command[3] == str(CONFIG)
    pairs = [argument.split("=", 1) for argument in command[4:]]
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), "MaxText takes each setting once"
    return {name: value for name, value in pairs}


def build(options: job.Options) -> tuple[job.Job, dict[str, str]]:
    built = job.build(options, python="python3", base_config=CONFIG)
    return built, settings(built.command)


def test_small_job_through_the_proxy() -> None:
    built, found = build(replace(OPTIONS, steps=40, checkpoint_period=5, run_name="r1"))
    expected = {
        "model_name": "qwen3-0.6b",
        "override_model_config": "true",
        "enable_single_controller": "true",
        "elastic_enabled": "true",
        "elastic_min_slice_count": "-1",
        "steps": "40",
        "checkpoint_period": "5",
        "async_checkpointing": "true",
        "ici_fsdp_parallelism": "2",
        "grain_train_files": "/data/set/*.array_record",
        "tokenizer_path": "/data/set/tokenizer.model",
        "base_output_directory": "/out",
        "run_name": "r1",
        "jax_cache_dir": "",
    }
    assert expected.items() <= found.items()
    assert built.checkpoint_directory == Path("/out/r1/checkpoints")
    assert built.metrics_file == Path("/out/r1/metrics.jsonl") == Path(found["metrics_file"])
    assert built.environment["DECOUPLE_GCLOUD"] == "TRUE"
    assert built.environment["XLA_FLAGS"]
    assert not any(name.startswith("JAX_") for name in built.environment)


def test_full_shape_has_48_devices() -> None:
    _, found = build(replace(OPTIONS, shape=job.FULL, elastic_min_slice_count=2))
    assert (job.FULL.devices, job.FULL.slices * job.FULL.hosts_per_slice) == (48, 12)
    assert found["ici_fsdp_parallelism"] == "16"
    assert found["elastic_min_slice_count"] == "2"


def test_learning_rate_does_not_depend_on_the_number_of_steps() -> None:
    names = ("learning_rate", "learning_rate_schedule_steps", "warmup_steps_fraction")
    short, long = (build(replace(OPTIONS, steps=steps))[1] for steps in (20, 900))
    assert [short[name] for name in names] == [long[name] for name in names]


def test_overrides_win_and_native_is_not_elastic() -> None:
    _, found = build(native_options(replace(OPTIONS, overrides={"learning_rate": "1"}, checkpoints_to_keep=2)))
    assert found["learning_rate"] == "1"
    assert found["max_num_checkpoints_to_keep"] == "2"
    assert found["enable_single_controller"] == "false"
    assert (found["ici_data_parallelism"], found["dcn_data_parallelism"]) == ("3", "1")
    assert not any(name.startswith("elastic") for name in found)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"checkpoint_period": 0},
        {"elastic_min_slice_count": 0},
        {"elastic_min_slice_count": 4},
        {"elastic_max_retries": 0},
        {"checkpoints_to_keep": 0},
        {"run_name": "7"},
        {"run_name": "a/b"},
        {"shape": replace(job.SMALL, devices_per_host=7)},
    ],
)
def test_bad_options_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(job.JobError) as caught:
        build(replace(OPTIONS, **bad))  # pyright: ignore[reportArgumentType]
    name = next(iter(bad)).replace("shape", "embedding")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.maxtext
def test_maxtext_knows_every_setting() -> None:
    """MaxText's own base.yml holds the name of every setting that may be given."""
    config = job.maxtext_base_config()
    known = {line.split(":", 1)[0] for line in config.read_text("utf-8").splitlines()}
    # The elastic settings have no line in base.yml; types.py defines them.
    types = (config.parent / "types.py").read_text("utf-8")
    for options in (replace(OPTIONS, checkpoints_to_keep=2), native_options(OPTIONS)):
        for name in build(options)[1]:
            assert name in known or f"  {name}: " in types, name


def test_parse_steps_of_an_elastic_run() -> None:
    records = job.parse_steps(ELASTIC_LOG, year=2025)
    assert [record.step for record in records] == [23, 24, 25, 21, 22]
    assert [record.loss for record in records] == [4.915, 5.213, 4.640, 5.094, 5.001]
    assert records[0] == job.StepRecord(23, 4.915, 0.369, datetime(2025, 11, 29, 19, 25, 57, 183329), 3, 762.0)


def test_rewind_is_found_and_timed() -> None:
    records = job.parse_steps(ELASTIC_LOG, year=2025)
    (rewind,) = job.find_rewinds(records)
    assert (rewind.index, rewind.last_step, rewind.next_step, rewind.repeated_steps) == (3, 25, 21, 5)
    assert rewind.seconds == pytest.approx(4.642908)
    assert job.find_rewinds(records[:3]) == []


def test_step_intervals_leave_the_recovery_out() -> None:
    records = job.parse_steps(ELASTIC_LOG, year=2025)
    assert job.step_intervals_seconds(records) == pytest.approx([0.413405, 0.380561, 0.36239])
    assert job.median_step_seconds(records) == pytest.approx(0.380561)
    assert job.median_step_seconds(records[:1]) is None


def test_native_log_over_new_year() -> None:
    first, second = job.parse_steps(NATIVE_LOG, year=2025)
    assert (first.live_slices, first.total_weights) == (None, 762.0)
    assert second.logged_at == datetime(2026, 1, 1, 0, 0, 0, 11861)
    assert job.step_intervals_seconds([first, second]) == pytest.approx([0.048884])


def test_parse_steps_takes_lines_without_a_time_and_skips_the_rest() -> None:
    text = "noise\ncompleted step: 3, seconds: 0.1, total_weights: 8, loss: nan, lm_loss: nan\ncompleted step: 4, sec"
    (record,) = job.parse_steps(text)
    assert (record.step, record.logged_at) == (3, None)
    assert record.loss != record.loss


def test_parse_metrics_has_full_precision_and_skips_a_half_line() -> None:
    records = job.parse_metrics(METRICS)
    assert [(record.step, record.loss) for record in records] == [(21, 5.094478607177734), (22, 5.001410961151123)]


def test_committed_steps_need_the_marker(tmp_path: Path) -> None:
    for name in ("0", "10", "9", "20", "30.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    for name in ("0", "10", "9", "30.orbax-checkpoint-tmp"):
        (tmp_path / name / job.COMMIT_MARKER).touch()
    assert job.committed_steps(tmp_path) == [0, 9, 10]
    assert job.committed_steps(tmp_path / "missing") == []
