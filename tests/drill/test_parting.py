"""Two histories: what is another job, where updates part, where states do, and what is not told."""

from __future__ import annotations

from pathlib import Path

import parity_jobs
import pytest
import torch

from coherent_ray.commit.generations import Generations
from coherent_ray.config import Config
from coherent_ray.drill.parting import Side, compare, leaves
from coherent_ray.drill.patching import planted
from coherent_ray.drill.rehearsal import Life, rehearse
from coherent_ray.errors import NoGeneration, ReceiptsDamaged
from coherent_ray.storage import open_storage
from coherent_ray.train import restoring

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parting")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Config:
    return lived(folder, "whole", Life(1))


def lived(folder: Path, name: str, *lives: Life, **changes: object) -> Config:
    config = parity_jobs.job(folder, name, **changes)
    for life in lives:
        rehearse(config, life)
    return config


def side(config: Config, generation: str | None = None) -> Side:
    return Side(open_storage(config.run.root), generation)


def test_one_history_at_other_ranks_saved_at_other_updates(folder: Path, whole: Config) -> None:
    other = lived(folder, "other", Life(3, stops_after=3), Life(2), checkpoint__every_updates=3)
    found = compare(side(whole), side(other))
    assert found.same
    assert (found.lengths, found.compared, found.notes) == ((7, 7), 7, ())
    assert found.stored is not None
    assert found.stored.updates == (7, 7)
    assert found.job.lines == ["terms: ranks: 1 -> 2"]


def test_another_seed_is_told_before_any_loss(folder: Path, whole: Config) -> None:
    other = lived(folder, "seed", Life(1, stops_after=2), data__seed=3)
    found = compare(side(whole), side(other))
    assert found.job.lines[0] == "plan: seed: 0 -> 3"
    assert (found.same, found.update) == (False, 1)
    assert [each.field for each in found.receipts][:3] == ["ids", "loss", "grad_norm"]


def test_another_setting_is_told_with_both_values(folder: Path, whole: Config) -> None:
    other = lived(folder, "setting", Life(1, stops_after=2), training__clip_norm=0.01)
    found = compare(side(whole), side(other))
    assert found.job.recipe == ("training.clip_norm: 1.0 -> 0.01",)
    # Clipping changes no loss of its own update; the state says it first.
    assert found.update == 2


def test_of_a_history_that_ends_earlier_the_common_part_is_compared(
    folder: Path, whole: Config
) -> None:
    short = lived(folder, "short", Life(2, stops_after=4))
    found = compare(side(whole), side(short))
    assert found.same
    assert (found.lengths, found.compared) == ((7, 4), 4)
    assert found.stored is not None
    assert found.stored.updates == (4, 4)
    assert found.notes == (
        "the first goes on to update 7; beyond update 4 there is nothing to compare it with",
    )


def test_histories_without_a_common_generation_are_compared_by_their_receipts(
    folder: Path, whole: Config
) -> None:
    odd = lived(folder, "odd", Life(1, stops_after=3), checkpoint__every_updates=5)
    found = compare(side(whole), side(odd))
    assert (found.same, found.compared, found.stored) == (True, 3, None)
    assert any("no update has a generation in both" in note for note in found.notes)


def flipped_in_a_moment(folder: Path, name: str) -> Config:
    """A run whose second life starts from a state with one other bit: all else is its own."""

    def restore(original):
        def restored(tensors, *rest):
            tensors["model/3.bias"].view(torch.int32)[1] ^= 1
            return original(tensors, *rest)

        return restored

    config = lived(folder, name, Life(1, stops_after=4))
    with planted([(restoring, "restore", restore)]):
        rehearse(config, Life(1))
    return config


def test_one_bit_of_one_tensor(folder: Path, whole: Config) -> None:
    other = flipped_in_a_moment(folder, "bit")
    found = compare(side(whole), side(other))
    assert not found.same
    assert found.update is not None
    assert found.update > 4
    assert found.stored is not None
    assert found.stored.tensors.tensors
    # At the last update that both share there is none.
    assert compare(side(whole, "g2"), side(other, "g2")).same


def test_generations_that_are_named(folder: Path, whole: Config) -> None:
    other = flipped_in_a_moment(folder, "named")
    # One name: the other run's of the same update, and receipts up to there.
    found = compare(side(whole, "g2"), side(other))
    assert (found.same, found.compared, found.lengths) == (True, 4, (4, 7))
    found = compare(side(whole, "g1"), side(whole, "g2"))
    assert not found.same
    assert found.stored is not None
    assert found.stored.updates == (2, 4)
    assert "the generations that were named are not of one update" in found.notes
    with pytest.raises(NoGeneration):
        compare(side(whole, "g99"), side(other))


def test_what_was_done_again_is_what_stands(folder: Path, whole: Config) -> None:
    """A resume that fell back publishes again; what counts is what was published last."""
    config = lived(folder, "back", Life(1, stops_after=4))
    generations = Generations(open_storage(config.run.root))
    shard = generations.manifest(generations.find("latest")).shards[0]
    path = Path(config.run.root) / shard.path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    rehearse(config, Life(2))
    found = compare(side(whole), side(config))
    assert found.same, found
    assert found.lengths == (7, 7)


def test_damage_is_an_error_and_no_difference(folder: Path, whole: Config) -> None:
    other = lived(folder, "damaged", Life(1))
    segment = next((Path(other.run.root) / "receipts").iterdir())
    segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(ReceiptsDamaged):
        compare(side(whole), side(other))


def test_a_run_without_a_generation_proves_nothing(folder: Path, whole: Config) -> None:
    empty = lived(folder, "empty", Life(1, dies_at=("update", 1)))
    with pytest.raises(NoGeneration, match="no generation to compare"):
        compare(side(whole), side(empty))


def test_json_has_all_of_it(folder: Path, whole: Config) -> None:
    value = compare(side(whole), side(flipped_in_a_moment(folder, "json"))).as_json()
    assert value["same"] is False
    assert value["update"] == value["receipts"][0]["update"]
    assert value["state"]["tensors"]["tensors"][0]["differing"] >= 1


def test_leaves_of_json() -> None:
    value = {"a": [1, {"b": None}], "c": {}, "d": []}
    assert dict(leaves("", value)) == {"a.0": "1", "a.1.b": "null", "c": "{}", "d": "[]"}


def test_it_imports_no_ray() -> None:
    """`diff` must start fast."""
    import subprocess
    import sys

    code = "import coherent_ray.drill.parting, sys; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
