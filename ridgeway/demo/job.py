"""The demonstration job: unmodified MaxText on a small Qwen3-shaped model, and how to read what it prints.

Everything here is a function of its arguments, except the two that look at the disk: ``maxtext_base_config``
and ``committed_steps``.
"""

import importlib.util
import itertools
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from ridgeway.demo.dataset import TOKENIZER_NAME

# MaxText, when XLA_FLAGS is empty, sets it to dump every program under /tmp. This is the flag's default.
HARMLESS_XLA_FLAGS = "--xla_dump_hlo_as_text=false"
# Orbax writes this file last, also on local disks (0.12.3 and later).
COMMIT_MARKER = "commit_success.txt"


class JobError(Exception):
    """The job cannot be described; the message is one line that says which option is wrong."""


@dataclass(frozen=True)
class Shape:
    """A topology and the model that is trained on it.

    The model is data parallel between slices and fully sharded within one, so ``embedding`` must be a
    multiple of the number of devices in a slice. The vocabulary is that of the data set.
    """

    name: str
    slices: int
    hosts_per_slice: int
    devices_per_host: int
    layers: int
    embedding: int
    query_heads: int
    key_value_heads: int
    head: int
    feed_forward: int
    sequence: int

    @property
    def devices_per_slice(self) -> int:
        """Devices in one slice."""
        return self.hosts_per_slice * self.devices_per_host

    @property
    def devices(self) -> int:
        """Devices in all slices."""
        return self.slices * self.devices_per_slice


# fmt: off
SMALL = Shape("small", slices=3, hosts_per_slice=1, devices_per_host=2, layers=2, embedding=64,
              query_heads=4, key_value_heads=2, head=16, feed_forward=192, sequence=128)
FULL = Shape("full", slices=3, hosts_per_slice=4, devices_per_host=4, layers=1, embedding=64,
             query_heads=4, key_value_heads=2, head=16, feed_forward=128, sequence=32)
# fmt: on


@dataclass(frozen=True)
class Options:
    """What a user may choose about the job.

    Attributes:
        dataset: folder made by ``ridgeway.demo.dataset``.
        output: folder for checkpoints and metrics.
        shape: topology and model.
        steps: number of training steps; the first is step 0.
        checkpoint_period: a checkpoint is saved at every step divisible by it (also at step 0).
        run_name: MaxText continues from the checkpoints of an earlier run of the same name.
        elastic: recover in the process when a slice is lost; needs ``JAX_PLATFORMS=proxy``.
        elastic_min_slice_count: -1 waits for all slices after a loss (pause and resume); a smaller number
            goes on with as many slices (resize).
        elastic_max_retries: attempts before MaxText gives up, growing back after a resize included.
        elastic_timeout_seconds: how long each attempt waits for the slices.
        vocabulary_size: size of the model's embedding, at least the number of tokenizer pieces.
        checkpoints_to_keep: older ones are deleted; None keeps all.
        overrides: further MaxText settings, ``name`` to value; they win.
    """

    dataset: Path
    output: Path
    shape: Shape = SMALL
    steps: int = 60
    checkpoint_period: int = 10
    run_name: str = "demo"
    elastic: bool = True
    elastic_min_slice_count: int = -1
    elastic_max_retries: int = 10
    elastic_timeout_seconds: int = 300
    vocabulary_size: int = 512
    checkpoints_to_keep: int | None = None
    overrides: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Job:
    """A command ready to run.

    Attributes:
        command: argument list, beginning with the Python interpreter.
        environment: variables to add to the caller's; which devices jax uses is not among them.
        checkpoint_directory: where the numbered checkpoint folders appear.
        metrics_file: JSON lines, one a step, losses at full precision; see ``parse_metrics``.
    """

    command: list[str]
    environment: dict[str, str]
    checkpoint_directory: Path
    metrics_file: Path


def maxtext_base_config() -> Path:
    """The path of MaxText's ``base.yml``, found without importing MaxText (that takes seconds).

    Raises:
        JobError: MaxText is not installed.
    """
    spec = importlib.util.find_spec("maxtext")
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / "configs" / "base.yml"
        if path.is_file():
            return path
    raise JobError("MaxText is not installed; in Ridgeway's folder: pip install -e '.[maxtext]'")


def _check(options: Options) -> None:
    shape = options.shape
    at_least_one = ("steps", "checkpoint_period", "vocabulary_size")
    for name in (*at_least_one, "elastic_max_retries", "elastic_timeout_seconds"):
        if getattr(options, name) < 1:
            raise JobError(f"{name} must be at least 1, not {getattr(options, name)}")
    if options.checkpoints_to_keep is not None and options.checkpoints_to_keep < 1:
        raise JobError(f"checkpoints_to_keep must be at least 1, not {options.checkpoints_to_keep}")
    minimum = options.elastic_min_slice_count
    if minimum != -1 and not 1 <= minimum <= shape.slices:
        raise JobError(f"elastic_min_slice_count must be -1 or from 1 to {shape.slices}, not {minimum}")
    if not re.fullmatch(r"[A-Za-z][\w.-]*", options.run_name):
        raise JobError(f"run_name must be a letter, then letters, digits, '.', '_' or '-': {options.run_name!r}")
    if shape.embedding % shape.devices_per_slice:
        raise JobError(
            f"the embedding ({shape.embedding}) is no multiple of a slice's {shape.devices_per_slice} devices"
        )


def build(options: Options, *, python: str = sys.executable, base_config: Path | None = None) -> Job:
    """The MaxText command for a job through the proxy, or natively when ``options.elastic`` is false.

    Args:
        options: the job.
        python: interpreter that has MaxText.
        base_config: MaxText's ``base.yml``; found by itself when None.

    Raises:
        JobError: an option is out of range, or MaxText is not installed.
    """
    _check(options)
    shape = options.shape
    dataset, output = options.dataset.absolute(), options.output.absolute()
    metrics_file = output / options.run_name / "metrics.jsonl"
    schedule_steps = max(options.steps, 1000)
    settings: dict[str, object] = {
        # Qwen3's decoder and its query and key normalisation; the sizes below replace the preset's. The
        # output projection is separate from the embedding, as it is from Qwen3-8B up.
        "model_name": "qwen3-0.6b",
        "override_model_config": "true",
        "logits_via_embedding": "false",
        "base_num_decoder_layers": shape.layers,
        "base_emb_dim": shape.embedding,
        "base_num_query_heads": shape.query_heads,
        "base_num_kv_heads": shape.key_value_heads,
        "head_dim": shape.head,
        "base_mlp_dim": shape.feed_forward,
        "vocab_size": options.vocabulary_size,
        "max_target_length": shape.sequence,
        "attention": "dot_product",
        "hardware": "cpu",
        "enable_single_controller": "true",
        "ici_fsdp_parallelism": shape.devices_per_slice,
        # One process feeds all slices; -1 is as many as are up, so that a smaller mesh works after a resize.
        "dcn_data_parallelism": -1,
        "per_device_batch_size": 1,
        "dataset_type": "grain",
        "grain_file_type": "arrayrecord",
        "grain_train_files": dataset / "*.array_record",
        # In the process: Grain's worker processes would have to be restarted at every recovery.
        "grain_worker_count": 0,
        # Unlike the default packing this does not depend on the batch size, which a resize changes.
        "grain_packing_type": "concat_then_split",
        "use_truncation": "false",
        "num_epoch": 1000,
        "tokenizer_type": "sentencepiece",
        "tokenizer_path": dataset / TOKENIZER_NAME,
        "run_name": options.run_name,
        "base_output_directory": output,
        "steps": options.steps,
        "learning_rate": "3e-3",
        # Independent of the number of steps, so that runs of different length have the same first steps.
        "learning_rate_schedule_steps": schedule_steps,
        "warmup_steps_fraction": f"{10 / schedule_steps:.6f}",
        "enable_checkpointing": "true",
        "async_checkpointing": "true",
        "checkpoint_period": options.checkpoint_period,
        "metrics_file": metrics_file,
        "enable_tensorboard": "false",
        "jax_cache_dir": "",
    }
    if options.checkpoints_to_keep is not None:
        settings["max_num_checkpoints_to_keep"] = options.checkpoints_to_keep
    if options.elastic:
        settings |= {
            "elastic_enabled": "true",
            "elastic_min_slice_count": options.elastic_min_slice_count,
            "elastic_max_retries": options.elastic_max_retries,
            "elastic_timeout_seconds": options.elastic_timeout_seconds,
        }
    settings |= options.overrides or {}
    config = base_config or maxtext_base_config()
    arguments = [f"{name}={value}" for name, value in settings.items()]
    return Job(
        command=[python, "-m", "maxtext.trainers.pre_train.train", str(config), *arguments],
        environment={
            # Without it the clean-up after a failure asks Google for credentials, for a local folder too.
            "DECOUPLE_GCLOUD": "TRUE",
            "XLA_FLAGS": HARMLESS_XLA_FLAGS,
            # The tokenizer is a local file; nothing is to be looked up.
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        },
        checkpoint_directory=output / options.run_name / "checkpoints",
        metrics_file=metrics_file,
    )


def committed_steps(checkpoint_directory: Path) -> list[int]:
    """The steps whose checkpoint is complete (has Orbax's commit marker), in ascending order."""
    markers = checkpoint_directory.glob(f"*/{COMMIT_MARKER}")
    return sorted(int(marker.parent.name) for marker in markers if marker.parent.name.isdigit())


@dataclass(frozen=True)
class StepRecord:
    """One step as MaxText reported it.

    Attributes:
        step: the step's number, from 0.
        loss: to three decimals in a log, at full precision in a metrics file.
        seconds: MaxText's own step time. It measures dispatch, so it can be far below the real time.
        logged_at: local time of the log line; None in a metrics file. MaxText prints a step's line while the
            next step runs.
        live_slices: number of slices in use, when the run is elastic.
        total_weights: number of tokens that counted.
    """

    step: int
    loss: float
    seconds: float
    logged_at: datetime | None = None
    live_slices: int | None = None
    total_weights: float | None = None


_STEP_LINE = re.compile(
    r"(?:[IWEF](?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d\.\d+) [^\n]*?)?"
    r"completed step: (?P<step>\d+), seconds: (?P<seconds>[\d.]+)"
    r"(?:, live slice count: (?P<slices>\d+))?"
    r"[^\n]*?(?:, total_weights: (?P<weights>[\d.]+))?, loss: (?P<loss>[-+.\w]+)"
)


def parse_steps(log_text: str, year: int | None = None) -> list[StepRecord]:
    """The steps in a MaxText log, in the order printed; a step that was repeated is there twice.

    Args:
        log_text: the log, or any part of it.
        year: the year of its first line, which absl's time stamps leave out; this year when None.
    """
    records: list[StepRecord] = []
    latest = datetime(year or datetime.now().year, 1, 1)
    for match in _STEP_LINE.finditer(log_text):
        logged_at = None
        if match["clock"]:
            stamp = f"{latest.year}-{match['month']}-{match['day']} {match['clock']}"
            logged_at = datetime.fromisoformat(stamp)
            if logged_at < latest - timedelta(days=180):
                logged_at = logged_at.replace(year=latest.year + 1)
            latest = logged_at
        records.append(
            StepRecord(
                step=int(match["step"]),
                loss=float(match["loss"]),
                seconds=float(match["seconds"]),
                logged_at=logged_at,
                live_slices=int(match["slices"]) if match["slices"] else None,
                total_weights=float(match["weights"]) if match["weights"] else None,
            )
        )
    return records


def parse_metrics(text: str) -> list[StepRecord]:
    """The steps in MaxText's ``metrics_file``, losses at full precision.

    A half-written last line is left out. MaxText appends to the file, but empties it whenever step 0 is done.
    """
    records = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
            records.append(
                StepRecord(
                    step=int(value["step"]),
                    loss=float(value["learning/loss"]),
                    seconds=float(value["perf/step_time_seconds"]),
                    total_weights=value.get("learning/total_weights"),
                )
            )
        except (ValueError, KeyError, TypeError):
            continue
    return records


@dataclass(frozen=True)
class Rewind:
    """The step counter going back: training was taken up again from a checkpoint.

    Attributes:
        index: position, in the list of records, of the first step after it.
        last_step: last step reported before.
        next_step: first step reported after; the restored checkpoint is that of the step before it.
        seconds: time between the two log lines, or None when a record has no time.
    """

    index: int
    last_step: int
    next_step: int
    seconds: float | None

    @property
    def repeated_steps(self) -> int:
        """How many reported steps had to be done again."""
        return self.last_step - self.next_step + 1


def find_rewinds(records: Sequence[StepRecord]) -> list[Rewind]:
    """Every place where the step counter does not grow."""
    rewinds = []
    for index, (before, after) in enumerate(itertools.pairwise(records), start=1):
        if after.step <= before.step:
            seconds = None
            if before.logged_at and after.logged_at:
                seconds = (after.logged_at - before.logged_at).total_seconds()
            rewinds.append(Rewind(index, before.step, after.step, seconds))
    return rewinds


def step_intervals_seconds(records: Sequence[StepRecord]) -> list[float]:
    """Seconds between consecutive log lines of consecutive steps: the real step times.

    An interval with a recovery in it is left out; one with a checkpoint in it is not.
    """
    return [
        (after.logged_at - before.logged_at).total_seconds()
        for before, after in itertools.pairwise(records)
        if before.logged_at and after.logged_at and after.step == before.step + 1
    ]


def median_step_seconds(records: Sequence[StepRecord]) -> float | None:
    """The median of ``step_intervals_seconds``, or None when there is none."""
    intervals = step_intervals_seconds(records)
    return statistics.median(intervals) if intervals else None
