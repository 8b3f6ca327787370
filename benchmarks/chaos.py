"""An external judge: PyPI's ckpt-chaos kills our save at every file operation, and resumes.

The judge knows nothing of this project. It runs a small job that saves and loads with the product's
code (``judged/``), kills it before each file operation, with the file torn, with what was not
synced taken back, and by SIGTERM; resumes it each time; and compares with a run that nothing
struck. Struck are rank 0, rank 1 and the coordinator, at 1 and 2 ranks. Then planted bugs must be
found, or all of it would prove nothing. Takes about ten minutes on 2 cores;
``--jobs`` shortens that on a busy machine, ``--go-on`` goes on with a run that was stopped.

    python -m venv /tmp/judge && /tmp/judge/bin/pip install ckpt-chaos==0.1.8
    python benchmarks/chaos.py --judge /tmp/judge/bin/ckpt-chaos
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from judged import report, warm

PROJECT = Path(__file__).resolve().parent.parent
#: Who is struck, at which rank count.
MATRIX = (
    (1, "rank 0"),
    (1, "coordinator"),
    (2, "rank 0"),
    (2, "rank 1"),
    (2, "coordinator"),
)
#: Who is struck, and which bug is planted.
PLANTED = (
    (1, "rank 0", "files are not synced"),
    (1, "coordinator", "records and manifests are written in place"),
    (1, "rank 0", "a shard is acknowledged before it is written"),
)
#: Seconds that the judge gives one run of the job.
TIMEOUT_S = 120


#: Points at which a planted bug is looked for, spread over modes and operations.
PLANTED_POINTS = 24
ALL_POINTS = 10_000


def judged(judge: Path, jobs: int, ranks: int, struck: str, bug: str | None) -> dict[str, Any]:
    """Let the judge strike one process, and return what it says.

    Args:
        judge: The judge's program.
        jobs: Runs of the job at once.
        ranks: Of the job.
        struck: Who is struck.
        bug: Planted. None: nothing is, and the judge strikes at every point.
    """
    begun = time.monotonic()
    job = ["--out", "{out}", "--ranks", str(ranks), "--struck", struck]
    job += ["--plant", bug] if bug else []
    with tempfile.TemporaryDirectory(prefix="judged") as scratch:
        address, work, said = (Path(scratch) / name for name in ("socket", "work", "said"))
        with warm.listening(address) as listener, said.open("wb") as output:
            program = subprocess.Popen(
                [str(judge), "run", *_options(work, jobs, bug), "--", *warm.command(job)],
                stdout=output,
                stderr=subprocess.STDOUT,
                # The job lets the judge into the one process that is to be struck, and no other.
                env=os.environ | {"CKPT_CHAOS_ARMED": "1", warm.ADDRESS_VARIABLE: str(address)},
                cwd=scratch,
            )
            warm.serve(listener, program)
        found = report.read(said.read_text(), work)
    row = {"ranks": ranks, "struck": struck, **({"bug": bug} if bug else {}), **found}
    return row | {"seconds": round(time.monotonic() - begun, 1)}


def _options(work: Path, jobs: int, bug: str | None) -> list[str]:
    """Return what the judge is asked for.

    To the judge a checkpoint is a publish record, with the record's number as its step: what has no
    record never happened. Record 1 opens the attempt; generations begin with record 2.
    """
    options = {
        "work": str(work),
        "checkpoint-glob": "{out}/run/log/*[2-9].json",
        "step-regex": r"resumed from record (\d+)",
        "result-file": "{out}/final.bin",
        "modes": ",".join(report.MODES),
        "fail-on": ",".join((*report.BAD, "CONTROL_FAIL")),
        "max-points": str(PLANTED_POINTS if bug else ALL_POINTS),
        "jobs": str(jobs),
        "timeout": str(TIMEOUT_S),
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole result; it holds once every cell and every bug is there."""
    cells = [row for row in rows if "bug" not in row]
    planted = [row for row in rows if "bug" in row]
    whole = len(cells) == len(MATRIX) and len(planted) == len(PLANTED)
    return {
        "judge": " and ".join(sorted({f"ckpt-chaos {row['judge']}" for row in rows})),
        "held": whole and all(map(report.kept, cells)) and all(map(report.found, planted)),
        "points": sum(sum(cell["points"].values()) for cell in cells),
        "cells": cells,
        "planted": planted,
    }


def main() -> int:
    """Let the judge strike; 1 if a promise is broken or a planted bug is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", type=Path, default=Path("ckpt-chaos"), help="its program")
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/chaos.json")
    parser.add_argument("--jobs", type=int, default=1, help="runs of the job at once")
    parser.add_argument("--go-on", action="store_true", help="keep what --out has already")
    options = parser.parse_args()
    before = json.loads(options.out.read_text()) if options.go_on else result_of([])
    rows = [*before["cells"], *before["planted"]]
    for ranks, struck, bug in (*((*cell, None) for cell in MATRIX), *PLANTED):
        if (ranks, struck, bug) in {(row["ranks"], row["struck"], row.get("bug")) for row in rows}:
            continue
        rows.append(judged(options.judge, options.jobs, ranks, struck, bug))
        print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps(result_of(rows), indent=1) + "\n")
    result = result_of(rows)
    print(f"held: {result['held']}; {result['points']} points; written to {options.out}")
    return int(not result["held"])


if __name__ == "__main__":
    sys.exit(main())
