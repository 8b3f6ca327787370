#!/usr/bin/env bash
# Sets up, then checks everything: style, types, tests. Stops at the first that fails.
# Arguments go to pytest: bash scripts/test.sh tests/commit -x

source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd "$project"

check() {
    printf '\n== %s\n' "$*"
    "$python" -m "$@"
}

# Where it cannot be installed it says so, and the tests of Azure are skipped.
bash scripts/azurite.sh &
check ruff check .
check ruff format --check .
check mypy
wait
# Two processes: one has the tests on Ray, which mostly wait, and the other all else (conftest.py).
check pytest -n 2 "$@"
