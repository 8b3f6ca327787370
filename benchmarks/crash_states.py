"""Every state that a power cut can leave of a small run, and every planted bug: in full.

For a disk that promises what POSIX promises, and for one that keeps names in order: the power is
cut after every system call of the play, after every call of those who follow a process that died
at any call, and again while each state recovers. Then each planted bug is looked for. Takes about
ten minutes on one core.

    python benchmarks/crash_states.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from coherent_ray.drill.planted import BUGS, find
from coherent_ray.drill.power_cuts import SCENES, Cutter, explore
from coherent_ray.storage.testing.disk import Model

PROJECT = Path(__file__).resolve().parent.parent
MODELS: tuple[Model, ...] = ("weak", "ordered")


def cuts(model: Model) -> dict[str, Any]:
    """Return the counts of one model, and what did not hold."""
    begun = time.monotonic()
    tally = explore(Cutter(model), SCENES, twice=True)
    return {
        "model": model,
        "deaths": tally.deaths,
        "cuts": tally.steps,
        "outcomes": tally.outcomes,
        "drawn": tally.drawn,
        "states": tally.states,
        "broken": dict(tally.broken),
        "examples": tally.examples,
        "seconds": round(time.monotonic() - begun, 1),
    }


def bugs() -> list[dict[str, Any]]:
    """Return by which invariant each bug is found; None where it is not."""
    rows = []
    for bug in BUGS:
        row = {"bug": bug.name, **{model: find(bug, model) for model in MODELS}}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> int:
    """Count; 1 if an invariant is broken or a bug survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=PROJECT / "benchmarks/results/crash_states.json"
    )
    options = parser.parse_args()
    models = []
    for model in MODELS:
        models.append(cuts(model))
        print(json.dumps(models[-1]), flush=True)
    result = {"models": models, "bugs": bugs()}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    whole = not any(row["broken"] for row in models)
    return 0 if whole and all(row["weak"] for row in result["bugs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
