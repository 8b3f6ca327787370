"""One small local Ray cluster for all tests that need one.

Everything that Ray would do to its surroundings is off: no token in the home directory, no
dashboard, no usage report, no memory monitor (it looks at the whole machine), and no new cluster
behind the back of a test that calls Ray after the end.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.train import Result

    from coherent_ray.config import Config

# The words that ranks send are made in one place, for tests with and without Ray.
sys.path.insert(0, str(Path(__file__).parent.parent / "commit"))

#: CPUs that Ray believes in. They are only tickets; the machine may have two.
LOGICAL_CPUS = 8
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Ray's workers stand back for other processes; here these are tests too.
    "RAY_worker_niceness": "0",
    # Workers, actors and drivers import what tests put beside themselves.
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    ),
}
# Ray reads some of these when it is imported, so they are set before any test module is.
os.environ.update(ENVIRONMENT)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A running Ray that this process is connected to; gives its address."""
    import ray

    # Unix sockets have short names, so the directory must have one too.
    directory = tempfile.mkdtemp(prefix="cr", dir="/tmp")
    context = ray.init(
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _temp_dir=directory,
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class OwnRun:
    """A whole run that nothing struck, by a training function of the user's own."""

    config: Config
    result: Result

    @property
    def root(self) -> Path:
        return Path(self.config.run.root)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny job's data."""
    import tiny

    return tiny.write_rows(tmp_path_factory.mktemp("data") / "rows.parquet")


@pytest.fixture(scope="session")
def reference(
    ray_cluster: str, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> OwnRun:
    """The run that all others are compared with; written as a user would, by the public face."""
    import tiny
    import torch
    import yaml
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    import coherent_ray
    from coherent_ray.train import coordinators
    from coherent_ray.train.identity import run_id_of

    path = tmp_path_factory.mktemp("reference") / "run.yaml"
    path.write_text(yaml.safe_dump(tiny.values(Path("reference"), tiny_data)))
    with pytest.MonkeyPatch.context() as patch:
        # The root is relative, and Ray gives workers another directory than this.
        patch.chdir(path.parent)
        config = coherent_ray.load_config("run.yaml")

        def train() -> None:
            task = tiny.TinyTask()
            with coherent_ray.session(config) as run:
                torch.manual_seed(run.plan.seed_for("model"))
                model = task.build_model()
                run.track(model, torch.optim.AdamW(model.parameters(), lr=0.05))
                for update in run.updates():
                    for micro in update.microbatches():
                        loss_sum, count = task.loss(model, micro.batch)
                        update.backward(loss_sum, count)
                    update.step()

        trainer = TorchTrainer(
            train,
            torch_config=coherent_ray.torch_config(config),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=coherent_ray.run_config(config),
        )
        result = tiny.fit(trainer)
        coordinators.stop(run_id_of(config))
        return OwnRun(config.resolved(), result)
