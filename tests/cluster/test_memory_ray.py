"""The memory tier on real Ray: a worker that is killed with SIGKILL loses no update."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import killed
import pytest
import tiny
from test_seed_cases import assert_same_run

from coherent_ray.train import coordinators
from coherent_ray.train.coordinators import answer
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.memory import keepers
from coherent_ray.train.trainer import make_trainer

if TYPE_CHECKING:
    from conftest import OwnRun

pytestmark = pytest.mark.campaign


def alive(run_id: str) -> list[int]:
    """Return the processes of a run's keepers that live."""
    pids = [answer(keeper.ping.remote())["pid"] for keeper in keepers.find(run_id).values()]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_loses_no_update(
    reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny.configured(
        tmp_path / "run", tiny_data, checkpoint__every_updates=100, checkpoint__memory={}
    )
    run_id = run_id_of(config)
    result = tiny.fit(make_trainer(config, killed.killed))
    status: dict[str, Any] = answer(coordinators.find(run_id).status.remote())
    assert result.metrics is not None
    assert result.metrics["attempt"] == 3
    lines = Path(f"{config.run.root}-resumed").read_text().splitlines()
    # Killed when update 5 had ended; then in the middle of keeping 7.
    assert [int(line.split()[0]) for line in lines] == [0, 5, 6]
    assert "from memory: update 6 of attempt 2; durable is nothing yet" in status["notes"]
    assert status["failures"]["count"] == 2
    assert tiny.published(config.run.root) == ["g1-a3"]
    assert_same_run(Path(config.run.root), reference)
    pids = alive(run_id)
    assert len(pids) == 1
    assert keepers.stop(run_id) == 1
    coordinators.stop(run_id)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert keepers.find(run_id) == {}
