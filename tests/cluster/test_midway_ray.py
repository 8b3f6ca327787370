"""Preempted between two microbatches, resumed at another rank count: the same receipts. On Ray."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import leavers
import pytest
import tiny
from test_seed_cases import assert_same_run

from coherent_ray import config as config_
from coherent_ray.commit.generations import Generations
from coherent_ray.config import Config
from coherent_ray.storage import open_storage
from coherent_ray.train import coordinators, partial
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.receipts import first_difference
from coherent_ray.train.trainer import make_trainer

if TYPE_CHECKING:
    from conftest import OwnRun

ROOT = Path(__file__).parent.parent.parent


def record_of(root: str, name: str) -> partial.Record:
    generations = Generations(open_storage(root))
    manifest = generations.manifest(generations.find(name))
    return partial.load(manifest.header.values[partial.KEY])


def fitted(config: Config, function: object = leavers.plain) -> None:
    tiny.fit(make_trainer(config, function))  # type: ignore[arg-type]
    coordinators.stop(run_id_of(config))


def test_a_group_that_must_leave_in_an_update_goes_on_in_it(
    reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    """SIGTERM to rank 1 of 2 while it computes; the group starts again by itself."""
    config = tiny.configured(
        tmp_path / "run", tiny_data, checkpoint__mid_update=True, cluster__max_failures=0
    )
    fitted(config, leavers.terminated_midway)
    root = config.run.root
    assert tiny.published(root) == ["g1-a1", "g2-a1", "g3-a2", "g4-a2", "g5-a2"]
    record = record_of(root, "g2-a1")
    assert record.update == leavers.BEFORE + 1
    assert 0 < sum(lane.done for lane in record.lanes) < 8, "not all of the update"
    assert_same_run(Path(root), reference)


@pytest.mark.timeout(600)
@pytest.mark.campaign
@pytest.mark.parametrize("job", ["quickstart", "digits"])
def test_stopped_between_microbatches_2_and_3_of_4_and_resumed_at_another_rank_count(
    ray_cluster: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The language model, and the network with batch norm; 1 rank against 2, then 3."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(ROOT)
    data = tmp_path / "data.parquet"
    small = {
        "quickstart": ["task.args.width=32", "task.args.depth=1", "task.args.heads=2"],
        "digits": ["task.args.width=8", "training.epochs=null"],
    }

    def configured(name: str, workers: int) -> Config:
        settings = [
            f"run.root={tmp_path / name}",
            f"cluster.address={ray_cluster}",
            f"cluster.workers={workers}",
            f"data.source.paths=[{data}]",
            f"data.prepare.args.path={data}",
            "data.global_batch=16",
            "data.lanes=4",
            "data.microbatch=1",
            "training.updates=4",
            "checkpoint.every_updates=100",
            "checkpoint.mid_update=true",
            *small[job],
        ]
        return config_.load(ROOT / "configs" / f"{job}.yaml", settings).resolved()

    from coherent_ray.train.preflight import check

    straight = configured("straight", 1)
    check(straight)  # makes the data
    fitted(straight)
    fitted(configured("stopped", 2), leavers.stopped_midway)
    root = str(tmp_path / "stopped")
    record = record_of(root, "g1-a1")
    assert record.update == 3
    assert {lane.lane: lane.done for lane in record.lanes}[3] == 2
    fitted(configured("stopped", 3))
    ours, theirs = tiny.history(root), tiny.history(straight.run.root)
    assert first_difference(ours, theirs) is None
    assert (len(ours), ours[-1].digest) == (4, theirs[-1].digest)
