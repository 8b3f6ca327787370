#!/usr/bin/env bash
# Sets up .venv with what the project needs: once, and again only when that has changed.
#
# Needs Python 3.11 or later and git. Run it, or source it: the other scripts do, and then find
# the interpreter in $python. It leaves nothing outside the project's folder.
#
#   COHERENT_RAY_PYTHON=/path/to/python3   the Python to build on
#   COHERENT_RAY_TORCH_INDEX=ADDRESS       take torch from this package index (a CPU or CUDA build)

set -euo pipefail

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$project/.venv
python=$venv/bin/python
made_for=$venv/made-for
stamp=$venv/set-up-with

say() { printf 'set-up: %s\n' "$*" >&2; }

die() {
    say "$1"
    [ $# -lt 2 ] || say "what to do: $2"
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${COHERENT_RAY_PYTHON:-python3 python3.12 python3.11 python3.13 python}; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or later was found" \
        "install one, or name it with COHERENT_RAY_PYTHON=/path/to/python3"
}

# What a .venv is made for: another folder (the install points back to it), Python or torch build
# needs a new one.
place() { printf '%s\n' "$project" "${COHERENT_RAY_TORCH_INDEX:-}" "${COHERENT_RAY_PYTHON:-}"; }

# What decides which packages are in it.
wanted() { cat "$project/pyproject.toml" "$project/constraints.txt"; }

is_same() { "$1" | cmp -s - "$2" 2>/dev/null; }

install() {
    local log=$venv/set-up.log
    if ! "$python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        die "pip could not install the packages; all it said is in $log"
    fi
}

make_venv() {
    local base
    base=$(find_python)
    say "making .venv with $("$base" --version) ($base)"
    "$base" -m venv --clear "$venv" ||
        die "this Python cannot make a virtual environment" \
            "install its venv module (on Debian and Ubuntu: apt-get install python3-venv)"
    place >"$made_for"
}

set_up() {
    local started=$SECONDS
    rm -f "$stamp"
    if is_same place "$made_for" && is_new_enough "$python"; then
        say "bringing .venv up to date: pyproject.toml or constraints.txt has changed"
    else
        make_venv
        say "installing torch, Ray and the rest of constraints.txt: 1 to 2 minutes, 2.4 GB (more with CUDA)"
    fi
    cd "$project"
    if [ -n "${COHERENT_RAY_TORCH_INDEX:-}" ]; then
        install --constraint constraints.txt --index-url "$COHERENT_RAY_TORCH_INDEX" torch
    fi
    install --constraint constraints.txt --editable '.[dev]'
    # Written last, so that an interrupted set-up is taken up again.
    wanted >"$stamp"
    say "done in $((SECONDS - started)) s"
}

if is_new_enough "$python" && is_same place "$made_for" && is_same wanted "$stamp"; then
    say ".venv is current"
else
    set_up
fi
