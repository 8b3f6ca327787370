"""`coherent-ray prove` on real Ray, for every kind of job: rank counts, kills and a resize.

AdamW, a cosine schedule, clipping, three microbatches a lane and a short tail; a convolutional net
with batch norm and dropout, an LSTM, a causal transformer with tied embeddings, and a net with
frozen layers and a weight used twice. Each at 1, 2, 3 and 4 ranks with four lanes, and at 1, 2, 3,
5 and 6 with six; a worker killed in mid-shard, the coordinator before and after a publish, a worker
at a random update. Takes more than an hour on 2 cores; what is done is kept after each proof, and
``--missing`` goes on.

    python benchmarks/prove.py --out benchmarks/results/prove.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
#: Where the jobs are; the same that are proved without Ray in the tests.
JOBS = PROJECT / "tests" / "drill"
KINDS = {
    "Convolutions": "convolutions, batch norm, dropout",
    "Recurrent": "LSTM",
    "Attention": "causal transformer, tied embedding",
    "Frozen": "frozen layers, a weight used twice",
}
RANKS = {4: (1, 2, 3, 4), 6: (1, 2, 3, 5, 6)}
KILLS = 4
UPDATES = 16
QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main() -> int:
    """Prove them all; 1 if any claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/prove.json")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--lanes", nargs="+", type=int, choices=list(RANKS), default=list(RANKS))
    parser.add_argument("--missing", action="store_true", help="only what --out has not")
    told = parser.parse_args()
    os.environ.update(QUIET)
    sys.path[:0] = [str(JOBS), str(PROJECT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

    import ray

    before = json.loads(told.out.read_text())["proofs"] if told.missing else []
    proofs = {(proof["job"], proof["lanes"]): proof for proof in before}
    with tempfile.TemporaryDirectory(prefix="cr", dir="/tmp") as scratch:
        context = ray.init(
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200 * 2**20,
            _temp_dir=f"{scratch}/ray",
        )
        address = context.address_info["gcs_address"]
        try:
            for lanes in told.lanes:
                for kind in told.kinds:
                    if (KINDS[kind], lanes) not in proofs:
                        place = Path(scratch) / f"{kind}-{lanes}"
                        proof = proved(place, kind, lanes, address)
                        proofs[proof["job"], lanes] = proof
                        print(json.dumps(proof), flush=True)
                        kept = {"updates": UPDATES, "proofs": list(proofs.values())}
                        told.out.write_text(json.dumps(kept, indent=1) + "\n")
        finally:
            ray.shutdown()
    return 0 if all(proof["good"] for proof in proofs.values()) else 1


def proved(place: Path, kind: str, lanes: int, address: str) -> dict[str, Any]:
    """Prove one job as a user does, at the command line; return what is kept of it."""
    import parity_jobs
    import yaml
    from acceptance_jobs import WIDTH

    place.mkdir()
    changes = {
        "task": {"factory": f"acceptance_jobs:{kind}", "folder": str(JOBS)},
        "data__lanes": lanes,
        # Three microbatches a lane; the last update of an epoch has fewer examples than lanes.
        "data__global_batch": 3 * lanes,
        "cluster__health_check_interval_s": 0.2,
    }
    parity_jobs.job(place, width=WIDTH, **changes)  # makes the data, and checks the settings
    config = place / "job.yaml"
    config.write_text(yaml.safe_dump(parity_jobs.values(place, **changes)))
    ranks = ",".join(map(str, RANKS[lanes]))
    done = subprocess.run(
        [
            sys.executable, "-m", "coherent_ray", "prove", str(config), "--json",
            "--out", str(place / "proof"), "--address", address,
            "--ranks", ranks, "--kills", str(KILLS), "--updates", str(UPDATES),
        ],
        capture_output=True, text=True, check=False, cwd=PROJECT,
    )  # fmt: skip
    if not done.stdout:
        raise SystemExit(f"{kind}, {lanes} lanes: prove said nothing:\n{done.stderr[-4000:]}")
    proof = json.loads(done.stdout)
    runs = proof["runs"]
    return {
        "job": KINDS[kind],
        "lanes": lanes,
        "ranks": RANKS[lanes],
        "good": proof["good"] and done.returncode == 0,
        "runs": len(runs),
        "planned": len(proof["planned"]),
        "attempts": sum(run["attempts"] for run in runs),
        "done": [line for run in runs for line in run["done"]],
        "receipts": runs[0]["receipts"],
        "state": runs[0]["state"],
        "equal": len({(run["receipts"], run["state"]) for run in runs}) == 1,
        "seconds": round(sum(run["seconds"] for run in runs), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
