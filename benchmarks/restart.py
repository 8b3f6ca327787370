"""From the death of one worker to the next update: Ray Train's own checkpoints, and ours.

The quickstart's language model on two workers, saved every few updates. One worker kills itself
with SIGKILL, again and again; every process of the next group notes when it was started, when its
training function began, when it had its state, and when its first update was done. The columns take
turns, each with a local Ray of its own. Run from the repository's root, on a quiet machine, for
about ten minutes:

    python benchmarks/restart.py --out benchmarks/results/restart.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT / "benchmarks"), str(PROJECT)]

from restarts import orders  # noqa: E402
from restarts.marks import restarts  # noqa: E402

WORKERS = 2
EVERY = 4
KILLS = [10, 20, 30]
UPDATES = 34
#: Column: which function, and what of Ray's settings is changed.
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "ray_train": ("ray_train", {}),
    "ray_train_tuned": ("ray_train", {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}),
    "coherent_ray": ("coherent", {}),
    "coherent_ray_spares": ("coherent", {}),
}
PARTS = ("processes", "function", "state", "update", "whole")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks/results/restart.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.arm:
        return train(told.arm, told.place)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in told.arms}
    for turn in range(told.rounds):
        for arm in told.arms if turn % 2 == 0 else told.arms[::-1]:
            found[arm] += measured(arm)
            print(arm, *(f"{row['whole']:.1f} s" for row in found[arm][-len(KILLS) :]), flush=True)
    told.out.write_text(json.dumps(result(found), indent=1) + "\n")
    return 0


def measured(arm: str) -> list[dict[str, float]]:
    """Run one column once, in a process of its own, and return its restarts."""
    with tempfile.TemporaryDirectory(prefix="crb") as place:
        command = [sys.executable, __file__, "--arm", arm, "--place", place]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path[:2]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            **ARMS[arm][1],
        }
        log = Path(place) / "log"
        with log.open("w") as out:
            done = subprocess.run(
                command, env=environment, stdout=out, stderr=out, cwd=PROJECT, check=False
            )
        if done.returncode:
            raise SystemExit(f"{arm} ended with {done.returncode}:\n{log.read_text()[-4000:]}")
        return restarts(Path(place) / "marks", WORKERS)


def train(arm: str, place: Path) -> int:
    """Train to the end, in this process's own Ray."""
    from restarts import jobs

    from coherent_ray import config as config_
    from coherent_ray.train import coordinators
    from coherent_ray.train.identity import run_id_of
    from coherent_ray.train.trainer import make_trainer, set_environment
    from jobs import stdlib_text

    (place / "marks").mkdir()
    orders.give(orders.Orders(str(place / "marks"), KILLS))
    data = place / "text.parquet"
    overrides = [
        f"run.root={place / 'run'}",
        f"data.source.paths=[{data}]",
        f"data.prepare.args.path={data}",
        f"training.updates={UPDATES}",
        f"checkpoint.every_updates={EVERY}",
        f"cluster.workers={WORKERS}",
        f"cluster.max_failures={len(KILLS)}",
        f"cluster.spare_workers={json.dumps(arm.endswith('spares'))}",
    ]
    config = config_.load(PROJECT / "configs" / "quickstart.yaml", overrides).resolved()
    stdlib_text.prepare(str(data), row_bytes=129)
    ours = ARMS[arm][0] == "coherent"
    if ours:
        set_environment(config.cluster)
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    temporary = tempfile.mkdtemp(prefix="cr", dir="/tmp")  # Unix sockets have short names
    ray.init(
        address="local",
        num_cpus=max(WORKERS, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        _temp_dir=temporary,
    )
    try:
        if ours:
            make_trainer(config, jobs.coherent).fit()
            coordinators.stop(run_id_of(config))
        else:
            TorchTrainer(
                jobs.ray_train,
                train_loop_config=config.model_dump(mode="json"),
                scaling_config=ScalingConfig(num_workers=WORKERS),
                run_config=RunConfig(
                    name="run",
                    storage_path=str(place),
                    failure_config=FailureConfig(max_failures=len(KILLS)),
                ),
            ).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)
    return 0


def result(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return what is kept: every restart, and medians."""
    import ray
    import torch

    return {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {"ray": ray.__version__, "torch": torch.__version__},
        "workers": WORKERS,
        "columns": {
            arm: {
                "restarts": rows,
                "median_s": {part: statistics.median(row[part] for row in rows) for part in PARTS},
            }
            for arm, rows in found.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
