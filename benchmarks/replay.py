"""Exact replay, at length: every rank count, both ready tasks, killed again and again.

For 1, 2, 3 and 4 workers, an uninterrupted run and one that loses a random worker to SIGKILL three
times and its coordinator once. Receipts must be the same from the first update to the last, within
a pair and across all rank counts, and so must the final state. Takes about half an hour on 2 cores.

    python benchmarks/replay.py --out benchmarks/results/replay.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PROJECT = Path(__file__).resolve().parent.parent
JOBS = {
    "language model": ("configs/quickstart.yaml", ["training.updates=40"]),
    "image classifier": (
        "configs/digits.yaml",
        ["training.epochs=2", "checkpoint.every_updates=7"],
    ),
}


def main() -> int:
    """Run the campaign; 1 if any history differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/replay.json")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.update(QUIET)
    os.chdir(PROJECT)

    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="cr", dir="/tmp") as scratch:
        head = {"num_cpus": 8, "object_store_memory": 128 * 2**20, "temp_dir": f"{scratch}/ray"}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            rows = [
                row
                for job in options.jobs
                for row in replays(job, cluster.address, Path(scratch), options)
            ]
        finally:
            ray.shutdown()
            cluster.shutdown()
    result = {"seed": options.seed, "equal": all(row["equal"] for row in rows), "runs": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"equal: {result['equal']}; written to {options.out}")
    return 0 if result["equal"] else 1


def replays(
    job: str, address: str, scratch: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run one job at every rank count, left alone and struck; compare all with the first."""
    from coherent_ray import config
    from coherent_ray.drill.replay import history_of, replay
    from coherent_ray.drill.strikes import random_strikes
    from coherent_ray.train.receipts import first_difference

    path, overrides = JOBS[job]
    settings = config.load(path, [*overrides, f"cluster.address={address}"]).resolved()
    rows: list[dict[str, Any]] = []
    reference = None
    for workers in options.workers:
        for struck in (False, True):
            seed = options.seed * 1000 + workers
            root = str(scratch / f"{job.replace(' ', '-')}-{workers}{'-struck' if struck else ''}")
            updates = len(reference) if reference else 40
            strikes = random_strikes(seed, updates, options.kills) if struck else []
            begun = time.monotonic()
            run = replay(settings, root, workers, strikes, seed)
            history = history_of(root)
            reference = reference or history
            difference = first_difference(reference, history)
            rows.append(
                {
                    "job": job,
                    "workers": workers,
                    "kills": [s.strike.target for s in run.struck],
                    "kills_at": [s.seen_update for s in run.struck],
                    "kills_wanted": len(strikes),
                    "attempts": run.attempts,
                    "updates": run.updates,
                    "receipts": run.tip,
                    "state": run.state,
                    "seconds": round(time.monotonic() - begun, 1),
                    "equal": difference is None
                    and run.tip == reference[-1].digest
                    and run.state == (rows[0]["state"] if rows else run.state)
                    and len(run.struck) == len(strikes),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            if difference is not None:
                print(f"  first difference: {difference}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
