#!/usr/bin/env bash
# Train a small Qwen3-shaped model with MaxText, as published, on a cluster of this machine: 3 slices with 2
# devices each. The model is sharded within a slice and replicated over the slices.
#
#   examples/maxtext_job.sh [MAXTEXT_SETTING=VALUE…]
#   OUTPUT=/data/run STEPS=1000 RUN_OPTIONS="--standby 2" examples/maxtext_job.sh per_device_batch_size=2
#
# When a worker dies, MaxText goes back to its last checkpoint and on, in the same process. See for yourself, in
# a second shell, once checkpoints are there:
#
#   ridgeway kill slice=2; ridgeway timeline
#
# Needs, in the environment that is active: pip install -e '.[maxtext]' (make setup does it)
set -euo pipefail

OUTPUT=${OUTPUT:-out/maxtext}
STEPS=${STEPS:-200}
CHECKPOINT_PERIOD=${CHECKPOINT_PERIOD:-20}
RUN_OPTIONS=${RUN_OPTIONS:---standby 1} # of `ridgeway run`
mkdir -p "$OUTPUT"
OUTPUT=$(cd "$OUTPUT" && pwd)

# The text of the Python standard library as ArrayRecord shards, and a tokenizer of 512 pieces for it. For your
# own text or chat messages: --jsonl FILE.
python -m ridgeway.demo.dataset --output "$OUTPUT/data"

base_config=$(python -c 'import importlib.util as u; print(u.find_spec("maxtext").submodule_search_locations[0])')/configs/base.yml

# Without it, the clean-up after a failure asks Google for credentials, for a local folder too.
export DECOUPLE_GCLOUD=TRUE
# MaxText, when XLA_FLAGS is empty, dumps every program under /tmp. This is the flag's default.
export XLA_FLAGS=${XLA_FLAGS:---xla_dump_hlo_as_text=false}
export HF_HUB_OFFLINE=1

settings=(
    # One controller for all slices, which survives the loss of one. After a loss, all slices are waited for; for
    # going on with two of three: elastic_min_slice_count=2
    enable_single_controller=true
    elastic_enabled=true
    elastic_min_slice_count=-1
    hardware=cpu

    # The model: Qwen3's decoder, made small.
    model_name=qwen3-0.6b
    override_model_config=true
    logits_via_embedding=false
    base_num_decoder_layers=2
    base_emb_dim=64
    base_num_query_heads=4
    base_num_kv_heads=2
    head_dim=16
    base_mlp_dim=192
    vocab_size=512
    max_target_length=128
    per_device_batch_size=1
    attention=dot_product # flash is for TPUs

    # Fully sharded within a slice of 2 devices, data parallel over as many slices as there are.
    ici_fsdp_parallelism=2
    dcn_data_parallelism=-1

    # Grain reads the data in the controller; its position is part of the checkpoint.
    dataset_type=grain
    grain_file_type=arrayrecord
    "grain_train_files=$OUTPUT/data/*.array_record"
    grain_worker_count=0
    grain_packing_type=concat_then_split
    use_truncation=false
    num_epoch=1000
    tokenizer_type=sentencepiece
    "tokenizer_path=$OUTPUT/data/tokenizer.model"

    steps="$STEPS"
    learning_rate=3e-3
    learning_rate_schedule_steps=1000
    warmup_steps_fraction=0.01

    run_name=training
    "base_output_directory=$OUTPUT"
    "metrics_file=$OUTPUT/training/metrics.jsonl"
    enable_tensorboard=false
    enable_checkpointing=true
    async_checkpointing=true
    checkpoint_period="$CHECKPOINT_PERIOD"
    jax_cache_dir= # Ridgeway has a cache of compiled programs of its own
)
mkdir -p "$OUTPUT/training"

# shellcheck disable=SC2086  # RUN_OPTIONS is several words
exec ridgeway run --slices 3 --hosts-per-slice 1 --devices-per-host 2 $RUN_OPTIONS -- \
    python -m maxtext.trainers.pre_train.train "$base_config" "${settings[@]}" "$@"
