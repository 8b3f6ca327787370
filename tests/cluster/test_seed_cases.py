"""The three deaths that the project began with, on real Ray, and the run goes on as if none were.

A worker dies after half of a shard; the coordinator dies before it publishes, and right after. What
a reader selects *at the moment of death* is written down by the one that dies (``deaths.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny
from deaths import DyingCoordinator, deaths_of, half_a_shard

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.inspection import tensors_between
from coherent_ray.config import Config
from coherent_ray.errors import ShardDamaged
from coherent_ray.state import state_digest
from coherent_ray.storage import open_storage
from coherent_ray.train import coordinators
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.receipts import first_difference
from coherent_ray.train.trainer import make_trainer

if TYPE_CHECKING:
    from conftest import OwnRun


def final_state(root: Path) -> str:
    storage = open_storage(str(root))
    generations = Generations(storage)
    return state_digest(storage, generations.manifest(generations.find("latest")))


def assert_same_run(root: Path, reference: OwnRun) -> None:
    ours, theirs = tiny.history(root), tiny.history(reference.root)
    assert first_difference(ours, theirs) is None
    assert len(ours) == tiny.UPDATES
    assert ours[-1].digest == theirs[-1].digest
    assert final_state(root) == final_state(reference.root)


# --- a worker, after half of a shard --------------------------------------------------------------


def test_a_worker_killed_after_half_a_shard(
    reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    config = tiny.configured(root, tiny_data)
    result = tiny.fit(make_trainer(config, half_a_shard))
    coordinators.stop(run_id_of(config))

    assert deaths_of(root) == {"worker:half-written": "g1-a1"}
    # The group was started again, and the generation that was cut short never happened.
    assert tiny.published(root) == ["g1-a1", "g2-a2", "g3-a2", "g4-a2"]
    torn = root / "generations" / "g2-a1"
    assert not (torn / "manifest.json").exists()
    assert not (torn / "shard-00001-of-00002.safetensors").exists()
    assert result.metrics is not None
    assert (result.metrics["attempt"], result.metrics["resumed_at"]) == (2, tiny.EVERY)
    assert tiny.selected(root) == "g4-a2"
    assert_same_run(root, reference)


# --- the coordinator, before `publish` and right after --------------------------------------------


@pytest.fixture(scope="module")
def dying(
    reference: OwnRun, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Config]:
    """A whole run whose coordinator died before publishing g2 and right after g4, its last."""
    root = tmp_path_factory.mktemp("dying") / "run"
    config = tiny.configured(root, tiny_data)
    with pytest.MonkeyPatch.context() as patch:
        # The workers' gate looks for the coordinator by name, and finds this one.
        patch.setattr(coordinators, "CoordinatorActor", DyingCoordinator)
        # With the very options that the gate asks for: other ones would replace it.
        coordinators.connect(
            run_id_of(config),
            config.run.root,
            ack_timeout_s=config.checkpoint.ack_timeout_s,
            storage=asdict(config.storage.options),
        )
    tiny.fit(make_trainer(config))
    yield config
    coordinators.stop(run_id_of(config))


def copied(dying: Config, to: Path) -> Path:
    return Path(shutil.copytree(dying.run.root, to / "run"))


def test_killed_before_publish_readers_select_the_generation_before(dying: Config) -> None:
    assert deaths_of(dying.run.root)["coordinator:before-publish"] == "g1-a1"


def test_killed_right_after_publish_readers_select_the_new_generation(dying: Config) -> None:
    assert deaths_of(dying.run.root)["coordinator:after-publish"] == "g4-a1"


def test_no_worker_noticed(dying: Config, reference: OwnRun) -> None:
    """One attempt: the ranks' calls waited for the coordinator to come back, twice."""
    assert tiny.published(dying.run.root) == ["g1-a1", "g2-a1", "g3-a1", "g4-a1"]
    assert_same_run(Path(dying.run.root), reference)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_byte_flipped_in_any_block_falls_back(dying: Config, rank: int, tmp_path: Path) -> None:
    """Every block of a shard of the newest generation, one after the other."""
    root = copied(dying, tmp_path)
    generations = Generations(open_storage(str(root)))
    manifest = generations.manifest(generations.find("g4-a1"))
    shard = manifest.shards[rank]
    assert len(shard.blocks) >= 3, "the tiny state must have more than one block a shard"
    for block in range(len(shard.blocks)):
        first = block * shard.block_bytes
        last = min(first + shard.block_bytes, shard.size)
        flip(root / shard.path, last - 1)
        found = generations.select()
        assert found is not None
        assert found.publish.name == "g3-a1"
        (damage,) = found.skipped
        assert isinstance(damage, ShardDamaged)
        assert damage.where == shard.path
        assert damage.details["block"] == block
        assert damage.details["tensors"] == tensors_between(manifest.header, shard, first, last)
        assert damage.details["tensors"] or last <= shard.header_bytes
        flip(root / shard.path, last - 1)
    assert tiny.selected(root) == "g4-a1"


def test_a_run_whose_newest_generation_is_damaged_resumes_before_it(
    dying: Config, reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    coordinators.stop(run_id_of(dying))
    root = copied(dying, tmp_path)
    storage = open_storage(str(root))
    generations = Generations(storage)
    shard = generations.manifest(generations.find("g4-a1")).shards[1]
    flip(root / shard.path, shard.size - 1)

    config = tiny.configured(root, tiny_data)
    result = tiny.fit(make_trainer(config))
    notes = coordinators.answer(coordinators.find(run_id_of(config)).status.remote())["notes"]
    coordinators.stop(run_id_of(config))

    assert result.metrics is not None
    assert result.metrics["resumed_at"] == 3 * tiny.EVERY
    # The damaged generation keeps its number; what replaces it has another attempt.
    assert tiny.published(root) == ["g1-a1", "g2-a1", "g3-a1", "g4-a1", "g5-a2"]
    assert any("g4-a1" in note or shard.path in note for note in notes), notes
    assert_same_run(root, reference)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
