"""Spare workers: Ray still has the request that starts them, and a new group is made of them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import leavers
import pytest
import ray
import tiny
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
from test_seed_cases import assert_same_run

from coherent_ray.train import coordinators, spares, warm
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.trainer import make_trainer, run_config

if TYPE_CHECKING:
    from conftest import OwnRun


def test_ray_has_the_request() -> None:
    request = node_manager_pb2.PrestartWorkersRequest.DESCRIPTOR
    assert {field.name for field in request.fields} == {
        "language", "job_id", "runtime_env_info", "keep_alive_duration_secs", "num_workers",
    }  # fmt: skip
    assert hasattr(node_manager_pb2_grpc.NodeManagerServiceServicer, "PrestartWorkers")


def test_a_warm_process_becomes_the_program_that_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "assert __name__ == '__main__'\n"
        "print(sys.argv[1:], sys.path[0], [n for n in sys.argv[1:] if n not in sys.modules])\n"
    )
    command = [sys.executable, "-m", warm.__name__, str(program), *warm.SLOW]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == f"{list(warm.SLOW)} {tmp_path} []\n"


@pytest.mark.parametrize("on", [False, True])
def test_workers_have_an_environment_of_their_own_only_where_it_is_asked_for(
    on: bool, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny.configured(tmp_path / "run", tiny_data, cluster__spare_workers=on)
    chosen = run_config(config).worker_runtime_env
    assert chosen == (spares.runtime_environment(run_id_of(config)) if on else {})


def test_a_job_that_chooses_its_own_python_keeps_it(
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = SimpleNamespace(runtime_env={"pip": ["something"]})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    config = tiny.configured(tmp_path / "run", tiny_data, cluster__spare_workers=True)
    with caplog.at_level(logging.WARNING):
        assert run_config(config).worker_runtime_env == {}
    assert "cluster.spare_workers is off" in caplog.text
    assert "(pip)" in caplog.text


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_a_group_that_starts_again_is_made_of_its_spares(
    reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    config = tiny.configured(root, tiny_data, cluster__spare_workers=True)
    tiny.fit(make_trainer(config, leavers.killed_beside_spares))
    coordinators.stop(run_id_of(config))
    spare, new = (set(Path(f"{root}.{name}").read_text().split()) for name in ("spares", "workers"))
    assert len(new) == 2
    assert new == spare
    assert_same_run(root, reference)
