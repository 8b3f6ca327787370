"""Configuration to Ray Train: scaling, failures, storage, and the recovery settings that matter.

What dominates the time from a death to the next update was measured: how often Ray's controller
looks at its workers, and Python's imports in the new processes. The first is set here.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from coherent_ray.config import Config
from coherent_ray.config.sections import Cluster
from coherent_ray.storage import LocalStorage, open_storage
from coherent_ray.train import spares
from coherent_ray.train.backend import FatalErrors, torch_config
from coherent_ray.train.elastic import Elasticity
from coherent_ray.train.identity import derived, run_id_of
from coherent_ray.train.loop import train

logger = logging.getLogger(__name__)

#: Ray Train's own bookkeeping. It is written in place; torn, it would keep a run from starting.
RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
#: Seconds that a group of any size waits for the room that was counted for it.
START_TIMEOUT_S = 20.0


def set_environment(cluster: Cluster) -> None:
    """Set what Ray Train reads from the driver's environment; what the user has set stays.

    Args:
        cluster: The configuration's cluster section.
    """
    settings = {
        # How fast a death is seen; Ray's default is 2 s.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(cluster.health_check_interval_s),
        # A worker that hangs in native code is given up after this; Ray's default is 600 s.
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(cluster.collective_timeout_s),
        # Relative paths mean the same in a worker as in the configuration.
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        # One process less a run: what it watches for, nothing here asks it yet.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    if cluster.elastic:
        # A group is made for the nodes that Ray counts. Where one went meanwhile, the next try is
        # made for those that are left; Ray's default is 60 s.
        settings["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(START_TIMEOUT_S)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def make_trainer(
    config: Config, function: Callable[[dict[str, Any]], None] = train
) -> TorchTrainer:
    """Return Ray's trainer for a configuration.

    Args:
        config: The run.
        function: The training function; gets the configuration as plain values.

    Returns:
        A trainer whose workers are admitted before they may enter a collective.
    """
    config = config.resolved()
    cluster = config.cluster
    return TorchTrainer(
        function,
        train_loop_config=config.model_dump(mode="json"),
        torch_config=torch_config(config, function),
        scaling_config=ScalingConfig(
            num_workers=cluster.num_workers,
            elastic_resize_monitor_interval_s=cluster.resize_interval_s,
            use_gpu=cluster.use_gpu,
            resources_per_worker=dict(cluster.resources_per_worker),
        ),
        run_config=run_config(config),
    )


def run_config(config: Config) -> RunConfig:
    """Return the ``run_config`` for Ray's `TorchTrainer` that makes Ray and the run one.

    Ray keeps its own files in the run's root, so that a generation can be its checkpoint where it
    lies; for a root in an object store, in a new temporary directory. A worker's death is survived
    as often as ``cluster.max_failures`` says, and an error that a restart would only meet again
    ends the run at once. What Ray remembers of an earlier start is removed, because Ray cannot
    start where that is torn, and nothing here depends on it. Where ``cluster.workers`` is a range,
    a group is told before Ray resizes it: give your ``ScalingConfig`` ``cluster.num_workers``.

    Args:
        config: The run's configuration.
    """
    config = config.resolved()
    elastic = Elasticity(config) if config.cluster.elastic else None
    place = rays_place(config)
    (place / RAY_SNAPSHOT).unlink(missing_ok=True)
    return RunConfig(
        name=place.name,
        storage_path=str(place.parent),
        # Of a range, a lost node is no failure, which Ray would charge: so they are counted here.
        failure_config=FailureConfig(max_failures=-1 if elastic else config.cluster.max_failures),
        callbacks=[FatalErrors(config, elastic), *([elastic] if elastic else [])],
        worker_runtime_env=_worker_environment(config),
    )


def _worker_environment(config: Config) -> dict[str, Any]:
    """Return the runtime environment of the workers, beside the job's own."""
    if not config.cluster.spare_workers:
        return {}
    chosen: set[str] = set()
    if ray.is_initialized():
        chosen = set(ray.get_runtime_context().runtime_env) & spares.OWN_PYTHON
    if chosen:
        logger.warning(
            "cluster.spare_workers is off: the job's runtime environment chooses the Python of its "
            "workers itself (%s)",
            ", ".join(sorted(chosen)),
        )
        return {}
    return spares.runtime_environment(run_id_of(config))


def rays_place(config: Config) -> Path:
    """Return the directory for Ray Train's own files: the run's root, or a new one.

    Ray writes them in place and remembers in them what happened; in an object store it would need
    settings and credentials of its own, and nothing here depends on them.

    Args:
        config: The run's configuration.
    """
    config = config.resolved()
    storage = open_storage(config.run.root, config.storage.options)
    if isinstance(storage, LocalStorage):
        return Path(storage.uri)
    return Path(tempfile.mkdtemp(prefix="coherent-ray-")) / derived(config.run.root)
