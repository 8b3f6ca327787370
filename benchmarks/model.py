"""The protocol explored: every order of events within bounds, over the machine and log that run.

Two coordinators, up to three ranks an attempt, deaths, lost and doubled messages, time-outs. Bounds
that give more worlds than the limit are explored to the nearest ones, and the table says so.

    python benchmarks/model.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coherent_ray.drill.exploration import PROPERTIES, explore
from coherent_ray.drill.planted_rules import RULES, find
from coherent_ray.drill.world import Bounds

PROJECT = Path(__file__).resolve().parent.parent
BOUNDS = (
    Bounds(ranks=2, attempts=1, crashes=1, losses=0, doubles=0, timeouts=1),
    Bounds(ranks=2, attempts=1, crashes=0, losses=1, doubles=1, timeouts=0),
    Bounds(ranks=3, attempts=1, crashes=1, losses=0, doubles=0, timeouts=0),
    Bounds(ranks=2, attempts=1, losses=0, doubles=0, reads_back=True, flips=1),
    Bounds(ranks=2, attempts=1, crashes=0, timeouts=0, reads_back=True),
    Bounds(ranks=1, attempts=2, crashes=1, losses=0, doubles=0, timeouts=0),
    Bounds(ranks=2, attempts=2, crashes=0, losses=0, doubles=0, timeouts=0),
    Bounds(ranks=2, attempts=2, crashes=1, losses=1, doubles=1, timeouts=1),
    Bounds(ranks=1, attempts=2, crashes=0, losses=0, doubles=0, timeouts=0, refers=True, prunes=1),
    Bounds(ranks=1, attempts=2, crashes=1, losses=0, doubles=0, timeouts=0, refers=True, prunes=2),
)


def main() -> int:
    """Explore; 1 if a property is broken or a planted bug survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/model.json")
    parser.add_argument("--most", type=int, default=12_000, help="worlds for each bounds")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for bounds in BOUNDS:
        begun = time.monotonic()
        found = explore(bounds, options.most)
        runs.append(
            {
                **asdict(bounds),
                "worlds": found.worlds,
                "moves": found.moves,
                "storages": found.storages,
                "complete": found.complete,
                "fates": sorted(found.fates),
                "broken": found.broken,
                "example": found.example,
                "seconds": round(time.monotonic() - begun, 1),
            }
        )
        print(json.dumps(runs[-1]), flush=True)
    rules = [{"bug": rule.name, "found_by": find(rule)} for rule in RULES]
    properties = [check.__name__ for check in PROPERTIES]
    result = {"properties": properties, "runs": runs, "bugs": rules}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    sound = not any(run["broken"] for run in runs)
    return 0 if sound and all(rule["found_by"] for rule in rules) else 1


if __name__ == "__main__":
    sys.exit(main())
