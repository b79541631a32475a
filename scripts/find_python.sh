# Finds a Python for the project. To be sourced by bash, not run.
#
# find_python sets PYTHON_FOUND (path of the interpreter) and PYTHON_FOUND_VERSION (such as 3.12.1), or returns 1
# with every interpreter it looked at, and why each was no use, in PYTHON_LOOKED_AT (one a line).
#
# PYTHON, when set, is the caller's choice: it is used or refused, never replaced by another. Otherwise 3.12 is
# preferred, then 3.13, then anything newer (the lock resolves for it, but the tests run on 3.12 and 3.13).
# With an argument (find_python 3.13) only that version will do.

PYTHON_FOUND=
PYTHON_FOUND_VERSION=
PYTHON_LOOKED_AT=

# Prints "VERSION PATH" for a usable interpreter, else "! REASON". Runs on Python 2.7 as well, so that an old
# `python` is named instead of failing with a syntax error.
_probe_python() {
    local said
    if ! said=$("$1" -I -c '
import sys
version = "%d.%d.%d" % tuple(sys.version_info[:3])
def refuse(reason):
    print("! " + version + ", " + reason)
    sys.exit(0)
if sys.version_info < (3, 12):
    refuse("too old")
if sys.implementation.name != "cpython":
    refuse("not CPython")
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    refuse("a free-threaded build, for which some packages have no wheels")
try:
    import ensurepip, venv
except ImportError:
    refuse("without venv and ensurepip (on Debian and Ubuntu: apt install python%d.%d-venv)" % sys.version_info[:2])
try:
    import ssl, zlib
except ImportError:
    refuse("built without ssl or zlib, so pip cannot work")
print(version + " " + sys.executable)
' 2>/dev/null); then
        # pyenv and asdf leave stubs on PATH for versions that are not switched on; -I is unknown to Python 2.
        said=$("$1" -c 'import sys; print("! %d.%d.%d, too old" % tuple(sys.version_info[:3]))' 2>/dev/null) ||
            said='! does not run (a stub for a version that is not switched on?)'
    fi
    printf '%s\n' "$said"
}

_looked_at() {
    PYTHON_LOOKED_AT="$PYTHON_LOOKED_AT    $1: $2"$'\n'
}

_python_candidates() {
    local name path pyenv
    for name in python3.12 python3.13 python3 python3.14 python; do
        # type -P finds a program on PATH only, not a function or an alias.
        path=$(type -P "$name") && printf '%s\n' "$path"
    done
    pyenv=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}
    for path in "$pyenv"/versions/3.1[2-9]*/bin/python3 \
        /usr/local/bin/python3.1[2-9] /usr/bin/python3.1[2-9] /opt/homebrew/bin/python3.1[2-9] \
        /opt/python*/bin/python3.1[2-9] /opt/python/*/bin/python3.1[2-9] /opt/*/bin/python3.1[2-9] \
        "${HOME:-/nonexistent}"/.local/bin/python3.1[2-9] \
        "${HOME:-/nonexistent}"/.local/share/uv/python/*/bin/python3.1[2-9]; do
        [ -x "$path" ] && printf '%s\n' "$path"
    done
    return 0
}

find_python() {
    local candidate said version path rank best=99 seen=' ' wanted=${1:-}
    PYTHON_FOUND= PYTHON_FOUND_VERSION= PYTHON_LOOKED_AT=

    if [ -n "${PYTHON:-}" ]; then
        if ! type -P "$PYTHON" >/dev/null; then
            _looked_at "$PYTHON" 'no such program (from the variable PYTHON)'
            return 1
        fi
        said=$(_probe_python "$PYTHON")
        if [ "${said#!}" != "$said" ]; then
            _looked_at "$PYTHON" "${said#! } (from the variable PYTHON)"
            return 1
        fi
        PYTHON_FOUND_VERSION=${said%% *} PYTHON_FOUND=${said#* }
        return 0
    fi

    while IFS= read -r candidate; do
        case $seen in *" $candidate "*) continue ;; esac
        seen="$seen$candidate "
        said=$(_probe_python "$candidate")
        if [ "${said#!}" != "$said" ]; then
            _looked_at "$candidate" "${said#! }"
            continue
        fi
        version=${said%% *} path=${said#* }
        case $version in
            "${wanted:-$version}" | "$wanted".*) ;;
            *)
                _looked_at "$candidate" "$version, not $wanted"
                continue
                ;;
        esac
        case $version in
            3.12.*) rank=1 ;;
            3.13.*) rank=2 ;;
            *) rank=3 ;;
        esac
        if [ "$rank" -lt "$best" ]; then
            best=$rank PYTHON_FOUND=$path PYTHON_FOUND_VERSION=$version
        fi
        [ "$best" -eq 1 ] && break
    done < <(_python_candidates)
    [ -n "$PYTHON_FOUND" ]
}
