#!/usr/bin/env bash
# Makes .venv: finds a Python, installs requirements/locked.txt (hashes checked), then the project itself, editable.
#
#   scripts/setup.sh                        or: make setup
#   PYTHON=python3.13 scripts/setup.sh      with a Python of your choice
#
# Does nothing, in well under a second, when .venv is current. What "current" means is in .venv/.setup-stamp: the
# Python, this folder's path (a virtual environment cannot be moved), and hashes of the lock and of pyproject.toml.
# A run that was interrupted leaves .venv/.setup-unfinished behind, and the next one starts .venv from scratch.
# Two runs at once: the second waits for the first, then finds its work done.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
readonly root
readonly venv=.venv lock=requirements/locked.txt log=build/setup.log
readonly stamp=$venv/.setup-stamp unfinished=$venv/.setup-unfinished
readonly lock_wait_seconds=1800 progress_interval_seconds=5
# The environment takes 1.7 GB, pip's cache and temporary files 1.2 GB more on a first installation.
readonly disk_needed_mib=3072

# Any of these, left over in a user's shell, sends the installation somewhere else.
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV

# shellcheck source=scripts/find_python.sh
. scripts/find_python.sh

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: FAILED: %s\n' "$*" >&2
    exit 1
}

hash_of() {
    if command -v sha256sum >/dev/null; then
        sha256sum
    elif command -v shasum >/dev/null; then
        shasum -a 256
    else
        cksum
    fi <"$1" | cut -d ' ' -f 1
}

# The version of .venv's own interpreter; fails when there is none or it no longer runs.
venv_version() {
    [ -x $venv/bin/python ] &&
        $venv/bin/python -I -S -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null
}

# The part of the stamp on which the installed packages depend, and the part for the project itself.
packages_key() { printf 'packages %s %s %s' "$1" "$(hash_of $lock)" "$root"; }
project_key() { printf 'project %s' "$(hash_of pyproject.toml)"; }

stamp_has() { [ -f $stamp ] && grep -qxF -- "$1" $stamp; }

is_current() {
    local version
    [ ! -e $unfinished ] && [ -x $venv/bin/ridgeway ] && version=$(venv_version) || return 1
    stamp_has "$(packages_key "$version")" && stamp_has "$(project_key)" || return 1
    if [ -n "${PYTHON:-}" ]; then
        find_python && [ "$PYTHON_FOUND_VERSION" = "$version" ] || return 1
    fi
    say "$venv is up to date (Python $version)"
}

no_python() {
    {
        if [ -n "${PYTHON:-}" ]; then
            printf 'setup: FAILED: the Python you named cannot be used:\n%s' "$PYTHON_LOOKED_AT"
            printf '  Unset PYTHON to let this script search, or name a Python 3.12 or 3.13.\n'
        else
            printf 'setup: FAILED: no usable Python 3.12 or newer was found. Looked at:\n'
            printf '%s' "${PYTHON_LOOKED_AT:-    nothing called python on PATH, in pyenv, /usr/local/bin or /opt$'\n'}"
            printf '  Install Python 3.12 or 3.13 (with venv), or name one: PYTHON=/path/to/python3.12 make setup\n'
        fi
    } >&2
    exit 1
}

check_disk() {
    local free_mib
    # An old environment makes room for the new one, and then pip's cache is filled as well.
    [ ! -d $venv/lib ] || return 0
    free_mib=$(df -Pk . 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }')
    if [ -n "$free_mib" ] && [ "$free_mib" -lt $disk_needed_mib ]; then
        fail "only $free_mib MiB are free in $root; the installation needs about $disk_needed_mib MiB. Free some space and run it again."
    fi
}

child=
# Each command runs in a process group of its own (set -m), so that pip's and venv's own children end with it:
# left alive they would go on writing into an environment that the next run is replacing.
stop_child() {
    local attempt
    [ -n "$child" ] || return 0
    kill -TERM -- "-$child" 2>/dev/null || true
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        kill -0 -- "-$child" 2>/dev/null || break
        sleep 0.5
        [ "$attempt" -lt 6 ] || kill -KILL -- "-$child" 2>/dev/null || true
    done
    wait "$child" 2>/dev/null || true
    child=
}
trap 'stop_child' EXIT
trap 'say "interrupted; run it again and it will be put right" >&2; exit 130' INT
trap 'exit 143' TERM HUP

# Runs a command with its output in the log. The first argument is a function that prints how far it is.
logged() {
    local progress=$1 status=0 waited=0 said='' line
    shift
    printf '\n$ %s\n' "$*" >>$log
    set -m
    "$@" >>$log 2>&1 </dev/null &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        waited=$((waited + 1))
        if [ $((waited % progress_interval_seconds)) -eq 0 ]; then
            line=$($progress)
            [ -n "$line" ] && [ "$line" != "$said" ] && say "  $line (${SECONDS} s)"
            said=$line
        fi
    done
    wait "$child" || status=$?
    child=
    return $status
}

no_progress() { :; }

packages_progress() {
    local total fetched installed
    total=$(grep -c '^[A-Za-z0-9]' $lock)
    if grep -q '^Installing collected packages' $log; then
        installed=$(find $venv/lib -maxdepth 4 -name '*.dist-info' | wc -l)
        printf 'unpacked %d of about %d packages' "$installed" "$total"
    else
        fetched=$(grep -cE '^(Collecting|Requirement already satisfied)' $log || true)
        printf 'fetched %d of about %d packages' "$fetched" "$total"
    fi
}

pip_failed() {
    {
        printf 'setup: FAILED: %s. The end of %s:\n' "$1" "$root/$log"
        grep -v '^WARNING: Location' $log | tail -n 15 | sed 's/^/    /'
        if grep -q 'No space left on device' $log; then
            printf '  The disk is full (%s, or the folder for temporary files). Free some space and run it again.\n' "$root"
        elif grep -qE 'Connection|Temporary failure in name resolution|timed out|Max retries' $log; then
            printf '  The package index could not be reached. Check the network, or pip'\''s settings (pip config list).\n'
        elif grep -q 'No matching distribution' $log; then
            printf '  Either the package index could not be reached, or it has no wheel of that package for Python %s on this machine (Python 3.12 is the safest choice).\n' "$(venv_version)"
        elif grep -q 'THESE PACKAGES DO NOT MATCH THE HASHES' $log; then
            printf '  A downloaded file is not the one that was locked. Try "pip cache purge"; if it stays so, do not install it.\n'
        fi
    } >&2
    exit 1
}

build() {
    local version=''
    # Looked up again for an existing .venv only when the caller asks for a Python: otherwise what is there is kept.
    if [ ! -e $unfinished ] && version=$(venv_version) && $venv/bin/python -I -c 'import pip' 2>/dev/null; then
        if [ -n "${PYTHON:-}" ]; then
            find_python || no_python
            [ "$PYTHON_FOUND_VERSION" = "$version" ] || version=''
        fi
        case $version in
            '' | [0-2].* | 3.[0-9].* | 3.1[01].*) version='' ;;
        esac
        # A folder that was moved or copied has scripts that point to the old place.
        if [ -n "$version" ] && [ -f $stamp ] && ! grep -q "^packages .* $root\$" $stamp; then
            say "this folder was moved or copied; making $venv anew"
            version=''
        fi
    else
        version=''
    fi

    if [ -z "$version" ]; then
        [ -n "$PYTHON_FOUND" ] || find_python || no_python
        version=$PYTHON_FOUND_VERSION
        check_disk
        case $version in
            3.12.* | 3.13.*) ;;
            *) say "note: Python $version is newer than those the tests run on (3.12 and 3.13)" ;;
        esac
        if [ -e $venv ]; then
            [ ! -e $unfinished ] || say "$venv is half-made (an earlier run failed or was interrupted)"
            say "removing the old $venv"
            # Renamed first: were this interrupted, a partly deleted .venv could pass for a whole one.
            mv $venv $venv.old.$$
            rm -rf $venv.old.*
        fi
        say "Python $version ($PYTHON_FOUND)"
        mkdir $venv || fail "cannot write in $root"
        touch $unfinished
        say "creating $venv"
        logged no_progress "$PYTHON_FOUND" -m venv $venv || pip_failed "could not create $venv"
        [ -x $venv/bin/pip ] || fail "$PYTHON_FOUND made a virtual environment without pip. Name another: PYTHON=/path/to/python3.12 make setup"
    elif ! stamp_has "$(packages_key "$version")"; then
        say "bringing $venv up to date (Python $version)"
        touch $unfinished
    fi

    if ! stamp_has "$(packages_key "$version")"; then
        say "installing the packages in $lock (about 1.7 GB; log: $log)"
        logged packages_progress $venv/bin/python -m pip install --no-input --progress-bar off \
            --require-hashes --only-binary :all: -r $lock || pip_failed 'pip could not install the locked packages'
    fi
    # Into the stamp only when whole: an interruption from here on costs no second installation of the packages.
    packages_key "$version" >$stamp.new
    printf '\n' >>$stamp.new
    mv $stamp.new $stamp
    rm -f $unfinished

    say 'installing ridgeway itself (editable)'
    logged no_progress $venv/bin/python -m pip install --no-input --progress-bar off \
        --no-deps --no-build-isolation --editable . || pip_failed 'pip could not install this folder'
    logged no_progress $venv/bin/python -m pip check || pip_failed 'the installed packages do not fit together'
    { project_key && printf '\n'; } >>$stamp
    say "done in ${SECONDS} s: $venv/bin/ridgeway (Python $version)"
}

[ -f $lock ] || fail "$lock is missing. Take it from the repository, or make it: make lock"

if is_current; then
    exit 0
fi

# Kept open until the script ends; where flock is missing (macOS) two runs at once are the user's to avoid.
if command -v flock >/dev/null; then
    exec 9>.setup.lock || fail "cannot write in $root"
    if ! flock -n 9; then
        say 'another set-up of this folder is running; waiting for it'
        flock -w $lock_wait_seconds 9 ||
            fail "another set-up of this folder has not ended within $lock_wait_seconds s. End it (or see who holds $root/.setup.lock) and run this again."
        if is_current; then
            exit 0
        fi
    fi
fi

mkdir -p build || fail "cannot write in $root"
: >$log
build
