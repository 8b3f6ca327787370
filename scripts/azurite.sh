#!/usr/bin/env bash
# Installs azurite, the emulator of Azure Blob Storage that tests run against, into .venv with npm.
# Where npm or its registry is missing, it says so and fails; the tests of Azure are then skipped.

set -euo pipefail

version=3.37.0
project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
place=$project/.venv/azurite

say() { printf 'azurite: %s\n' "$*" >&2; }

if [ "$(cat "$place/version" 2>/dev/null)" = "$version" ]; then
    exit 0
fi
if ! command -v npm >/dev/null; then
    say "npm is not installed: tests of Azure will be skipped"
    exit 1
fi
say "installing $version with npm: two minutes, once"
mkdir -p "$place"
if ! npm install --prefix "$place" --no-audit --no-fund --ignore-scripts --loglevel=error \
    "azurite@$version" >"$place/install.log" 2>&1; then
    tail -n 5 "$place/install.log" >&2
    say "npm could not install it: tests of Azure will be skipped"
    exit 1
fi
printf '%s' "$version" >"$place/version"
