"""The gauntlet: the ways in which checkpoints break, as experiments; we and others as columns.

Each cell is obtained by running, in processes of its own: a save is killed, stopped or watched by
strace, a disk is full, a file is damaged, and then a fresh process says what it would go on from.
The table is in docs/gauntlet.md. What is pinned in ``benchmarks/rivals.txt`` lies in an environment
of its own; without it those columns say so. About half an hour on 2 cores.

    python -m venv VENV && VENV/bin/pip install -r benchmarks/rivals.txt
    python benchmarks/gauntlet.py --python VENV/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from gauntlet.bench import Bench  # noqa: E402 - the package of the same name beside this file
from gauntlet.cluster import cluster  # noqa: E402
from gauntlet.column import Column  # noqa: E402
from gauntlet.rows import ROWS  # noqa: E402

KEYS = ("ours", "dcp", "checkpointing", "ray_train", "orbax", "nvrx")
#: A product's version, or why it cannot be imported, from its own interpreter.
PROBE = """
import importlib, importlib.metadata, sys
try:
    importlib.import_module(sys.argv[1])
    print("version", importlib.metadata.version(sys.argv[2]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def columns(keys: Sequence[str]) -> list[Column]:
    return [importlib.import_module(f"gauntlet.{key}").COLUMN for key in keys]


def probe(column: Column, python: str | None) -> tuple[str | None, str]:
    """Return a product's version, or None and the reason."""
    if python is None:
        return None, "not asked for: --python names the interpreter that has it"
    command = [python, "-c", PROBE, column.imports, column.distribution]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    answer = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    if answer.startswith("version "):
        return answer.removeprefix("version "), ""
    return None, f"does not install: {answer}"


def main() -> int:
    """Run cells, and write each down as soon as it is known; 1 if ours broke in one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/gauntlet.json")
    parser.add_argument("--python", help="the interpreter that has benchmarks/rivals.txt")
    parser.add_argument("--columns", nargs="*", choices=KEYS, default=KEYS)
    parser.add_argument("--rows", nargs="*", choices=[row.key for row in ROWS], default=None)
    parser.add_argument("--missing", action="store_true", help="only cells that are not there")
    options = parser.parse_args()
    # Who is told to end still ends its children.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    result |= {"benchmark": "gauntlet", "cores": os.cpu_count(), "system": platform.system()}
    result.setdefault("columns", {})
    result["rows"] = {
        row.key: {
            "asks": row.asks,
            "report": row.seen,
            "cells": result.get("rows", {}).get(row.key, {}).get("cells", {}),
        }
        for row in ROWS
    }
    for column in columns(options.columns):
        own = cluster(sys.executable) if column.key == "ray_train" else contextlib.nullcontext()
        with own:
            run(column, options, result)
    cells = [row["cells"].get("ours", {}) for row in result["rows"].values()]
    return int(any(cell.get("verdict") == "broke" for cell in cells))


def run(column: Column, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Run a column's cells."""
    python = sys.executable if column.own else options.python
    version, reason = probe(column, python)
    result["columns"][column.key] = {
        "name": column.name,
        "distribution": column.distribution,
        "version": version,
        "settings": column.settings,
    }
    for row in ROWS:
        if options.rows is not None and row.key not in options.rows:
            continue
        if options.missing and column.key in result["rows"][row.key]["cells"]:
            continue
        begun = time.monotonic()
        if version is None or python is None:
            cell = {"verdict": "not run", "seen": reason}
        else:
            with Bench(column, python) as bench:
                found = row.cell(bench, column.lacks)
            cell = {"verdict": found.word, "seen": found.seen}
        result["rows"][row.key]["cells"][column.key] = cell
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        seconds = time.monotonic() - begun
        print(f"{seconds:5.1f} s {column.key:14} {row.key:10} {cell['verdict']:14} {cell['seen']}")


if __name__ == "__main__":
    sys.exit(main())
