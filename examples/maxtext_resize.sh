#!/usr/bin/env bash
# The job of maxtext_job.sh with replica-resize: when a slice is lost MaxText goes on with the two that are left, from
# the last checkpoint, and takes the third in again, from the last checkpoint, once it is back. Never with fewer than two.
#
#   examples/maxtext_resize.sh [MAXTEXT_SETTING=VALUE…]
#   ridgeway kill slice=2; ridgeway events --follow      # in a second shell
#
# The replacement of a lost worker is held back for REPLACEMENT_DELAY_SECONDS, as a scheduler without a free machine
# would. Without a delay it is there so soon that MaxText is made to wait for it: probes are held while a replacement
# is on its way, at most probe_hold_seconds (RUN_OPTIONS="--set probe_hold_seconds=0": never).
#
# The batch is per device (per_device_batch_size), so two slices train on two thirds of it. The first resize of a job
# compiles its programs for four devices; Ridgeway's cache has them from then on, for any two slices and later runs.
set -euo pipefail

export RUN_OPTIONS="--replacement-delay-seconds ${REPLACEMENT_DELAY_SECONDS:-60} ${RUN_OPTIONS:-}"
exec "$(dirname "$0")/maxtext_job.sh" elastic_min_slice_count=2 elastic_max_retries=100 "$@"
