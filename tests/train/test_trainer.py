"""Configuration to Ray Train's objects: nothing is started here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ray.train.torch import TorchTrainer
from small_run import config_for

import coherent_ray
from coherent_ray import config as config_
from coherent_ray.config import Config
from coherent_ray.config.sections import WorkerRange
from coherent_ray.train.backend import AdmissionBackend, FatalErrors
from coherent_ray.train.elastic import Elasticity
from coherent_ray.train.trainer import (
    RAY_SNAPSHOT,
    START_TIMEOUT_S,
    make_trainer,
    run_config,
    set_environment,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_for(tmp_path)


def test_ray_keeps_its_files_in_the_run_s_root(config: Config) -> None:
    made = run_config(config)
    assert Path(made.storage_path) / made.name == Path(config.run.root)
    # Ray would delete generations that it believes to be its checkpoints.
    assert made.checkpoint_config.num_to_keep is None
    assert [type(callback) for callback in made.callbacks] == [FatalErrors]


def test_a_relative_root_is_the_current_directory_s(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = config.model_copy(update={"run": config.run.model_copy(update={"root": "a/b"})})
    made = run_config(relative)
    assert (made.storage_path, made.name) == (str(tmp_path / "a"), "b")


@pytest.mark.parametrize("failures", [0, 7, -1])
def test_failures_are_allowed_as_configured(config: Config, failures: int) -> None:
    cluster = config.cluster.model_copy(update={"max_failures": failures})
    made = run_config(config.model_copy(update={"cluster": cluster}))
    assert made.failure_config.max_failures == failures


def elastic(config: Config, **settings: object) -> Config:
    values = {"workers": WorkerRange(min=1, max=2), **settings}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=values)})


def test_a_range_of_workers_is_ray_s_elastic_scaling(config: Config) -> None:
    made = make_trainer(elastic(config, resize_interval_s=7.0))
    scaling = made.scaling_config
    assert scaling.elasticity_enabled
    assert (scaling.min_workers, scaling.max_workers) == (1, 2)
    assert scaling.elastic_resize_monitor_interval_s == 7.0
    assert not make_trainer(config).scaling_config.elasticity_enabled


def test_of_a_range_failures_are_counted_here(config: Config) -> None:
    made = run_config(elastic(config, max_failures=0))
    assert made.failure_config.max_failures == -1, "Ray would charge a node that was lost"
    assert [type(callback) for callback in made.callbacks] == [FatalErrors, Elasticity]
    assert made.callbacks[0]._elastic is made.callbacks[1]


def test_a_range_does_not_wait_for_long_where_a_node_went(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    set_environment(config.cluster)
    assert name not in os.environ
    set_environment(elastic(config).cluster)
    assert os.environ[name] == str(START_TIMEOUT_S)


def test_what_ray_remembers_of_an_earlier_start_is_removed(config: Config) -> None:
    root = Path(config.run.root)
    root.mkdir(parents=True)
    (root / RAY_SNAPSHOT).write_text("torn")
    (root / "latest.json").write_text("kept")
    run_config(config)
    assert [path.name for path in root.iterdir()] == ["latest.json"]


def test_nothing_is_made_where_no_run_is_yet(config: Config) -> None:
    run_config(config)
    assert not Path(config.run.root).exists()


def test_the_trainer_admits_first(config: Config, tmp_path: Path) -> None:
    def train(values: dict[str, Any]) -> None:
        raise AssertionError("never called here")

    cluster = config.cluster.model_copy(
        update={"workers": 2, "resources_per_worker": {"CPU": 0.5, "disk": 1.0}}
    )
    config = config.model_copy(update={"cluster": cluster})
    made = make_trainer(config, train)
    assert isinstance(made, TorchTrainer)
    assert made.scaling_config.num_workers == 2
    assert made.scaling_config.resources_per_worker == {"CPU": 0.5, "disk": 1.0}
    assert not made.scaling_config.use_gpu
    backend = made.backend_config
    assert backend.backend_cls is AdmissionBackend
    assert backend.code_path == str(Path.cwd())
    assert config_.build(backend.run) == config.resolved()
    assert backend.timeout_s == int(config.cluster.collective_timeout_s)


def test_the_public_face_is_these_functions() -> None:
    assert coherent_ray.run_config is run_config
    assert coherent_ray.load_config is config_.load
    assert coherent_ray.session.__module__ == "coherent_ray.train.session"
    assert coherent_ray.torch_config.__module__ == "coherent_ray.train.backend"


def test_recovery_settings_are_set_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S")
    # setenv first, so that what is set below is taken back after the test.
    for name in (*names, "RAY_CHDIR_TO_TRIAL_DIR", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(names[1], "17")
    set_environment(config.cluster)
    assert os.environ[names[0]] == str(config.cluster.health_check_interval_s)
    assert os.environ[names[1]] == "17", "what the user has set stays"
    assert os.environ["RAY_CHDIR_TO_TRIAL_DIR"] == "0"
