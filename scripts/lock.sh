#!/usr/bin/env bash
# Makes requirements/locked.txt from pyproject.toml: one lock, with hashes, for ridgeway[maxtext,dev] on every Python
# from requires-python on (markers where versions differ). Versions already in the lock are kept as long as they fit;
#
#   make lock               after a change of dependencies in pyproject.toml
#   make lock UPGRADE=1     to take the newest versions that fit
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly lock=requirements/locked.txt
readonly resolver='uv==0.13.9'

# shellcheck source=scripts/find_python.sh
. scripts/find_python.sh

find_python || {
    printf 'lock: FAILED: no usable Python 3.12 or newer was found. Looked at:\n%s' "$PYTHON_LOOKED_AT" >&2
    exit 1
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "lock: Python $PYTHON_FOUND_VERSION, $resolver"
"$PYTHON_FOUND" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --no-input "$resolver"

[ ! -f $lock ] || grep -v '^#' $lock >"$work/locked.txt" || true
# Only wheels: an installation compiles nothing. No index, no folder and no header goes into the file, so that it is
# the same wherever it is made.
UV_PYTHON_DOWNLOADS=never "$work/venv/bin/uv" pip compile --quiet --python "$PYTHON_FOUND" \
    --universal --python-version 3.12 --extra maxtext --extra dev --only-binary :all: --generate-hashes \
    --annotation-style line --no-header --no-emit-index-url --no-emit-find-links ${UPGRADE:+--upgrade} \
    pyproject.toml --output-file "$work/locked.txt" >/dev/null

# What must never get in. Accelerator stacks and other frameworks are several GB that nothing here uses.
if grep -nE '^(torch|tensorflow|nvidia-|jax-cuda|jax-rocm|libtpu|triton)' "$work/locked.txt"; then
    echo 'lock: FAILED: the packages above must not be in the lock; find what asks for them ("via" in the lines below each)' >&2
    exit 1
fi
if grep -nE '://|^ *--(index|extra|find|trusted)|^-|(^|[ =])/' "$work/locked.txt"; then
    echo 'lock: FAILED: the lines above name an index or a path on this machine' >&2
    exit 1
fi

{
    echo '# Everything for ridgeway[maxtext,dev] on Python 3.12 and newer. Made by "make lock"; do not edit.'
    cat "$work/locked.txt"
} >$lock
echo "lock: $lock, $(grep -c '^[A-Za-z0-9]' $lock) packages"
