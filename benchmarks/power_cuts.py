"""Real power cuts: FS_IOC_SHUTDOWN on ext4 and xfs at random moments of saves, then a remount.

Two ranks and a coordinator save, prune and are cut; after each cut the journal is replayed, every
live generation is read to the last byte, and the run goes on. The controls forget the syncs of
files, or of directories, and must be caught: the former at once, the latter sometimes, since
both file systems write their whole journal at most syncs of a file. Needs root,
loop devices, mkfs.ext4 and mkfs.xfs; takes about ten minutes.

    python benchmarks/power_cuts.py --out benchmarks/results/power_cuts.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from coherent_ray.drill.shutdowns import LATEST_CUT_S, RANKS, Campaign, Cut, Forgets, campaign
from coherent_ray.storage.testing.loop_device import Journal, Kind, why_not

PROJECT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run all campaigns; 1 if a promise was broken or a control was not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/power_cuts.json")
    parser.add_argument("--cuts", type=int, default=100, help="of each kind")
    parser.add_argument("--control-cuts", type=int, default=25, help="of each kind of control")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="cuts") as folder:
        for kind in get_args(Kind):
            if reason := why_not(kind, Path(folder)):
                print(f"{kind}: cannot be cut here: {reason}", file=sys.stderr)
                return 2
            for journal in get_args(Journal):
                for forgets in get_args(Forgets):
                    if (journal, forgets) == ("logflush", "directories"):
                        continue  # such a cut keeps the names that nobody synced
                    cuts = options.cuts if forgets == "nothing" else options.control_cuts
                    rows.append(row(kind, journal, forgets, cuts, options.seed, Path(folder)))
    result = {
        "kernel": platform.release(),
        "ranks": RANKS,
        "latest_cut_s": LATEST_CUT_S,
        "seed": options.seed,
        "campaigns": rows,
        "held": all((r["failures"] == 0) is (r["forgets"] == "nothing") for r in rows),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(not result["held"])


def row(
    kind: Kind, journal: Journal, forgets: Forgets, cuts: int, seed: int, folder: Path
) -> dict[str, Any]:
    """Run one campaign and return what it came to, as JSON values."""
    done = campaign(kind, journal, cuts, seed, folder, forgets=forgets, told=tell)
    found = {
        "file_system": kind,
        "shutdown": journal,
        "forgets": forgets,
        "cuts": len(done.cuts),
        "failures": done.failures,
        "generations_promised": sum(cut.promised for cut in done.cuts),
        "cut_before_any_promise": sum(cut.promised == 0 for cut in done.cuts),
        "cut_between_commit_and_answer": sum(cut.untold for cut in done.cuts),
        "cut_with_remains": sum(cut.remains > 0 for cut in done.cuts),
        "problems": problems_of(done),
    }
    print(json.dumps(found), flush=True)
    return found


def problems_of(done: Campaign) -> list[str]:
    """Return the first problem of some cuts."""
    return [cut.problems[0] for cut in done.cuts if cut.problems][:3]


def tell(cut: Cut) -> None:
    """Say that something was found wrong."""
    for problem in cut.problems[:1]:
        print(f"  cut after {cut.after_s:.3f} s: {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
