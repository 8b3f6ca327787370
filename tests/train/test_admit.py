"""What one rank finds out alone: from a run on disk, before any other rank is asked."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import (
    CPU,
    EXAMPLES,
    Left,
    Tiny,
    admit,
    assert_same_state,
    config_for,
    coordinating,
    flip,
    found,
    open_attempt,
    refused,
    request_for,
    run_loop,
    stop_at,
    ticket_of,
    train,
    working,
    write_data,
)
from torch import nn

from coherent_ray.commit.log import CommitLog, RetireBody
from coherent_ray.commit.manifest import DataPosition
from coherent_ray.errors import (
    AdmissionRefused,
    ClaimRefused,
    DataError,
    ManifestDamaged,
    NoGeneration,
    ShardDamaged,
    StateMismatch,
    StorageError,
    TaskError,
)
from coherent_ray.storage import LocalStorage
from coherent_ray.train import admit as admit_
from coherent_ray.train import datasets
from coherent_ray.train.admission import Expected, judge
from coherent_ray.train.admit import find_out
from coherent_ray.train.receipts import first_link

pytestmark = pytest.mark.usefixtures("one_process")


# --- a start, and a resume ------------------------------------------------------------------------


def test_a_fresh_start(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    admitted = found(config)
    assert (admitted.selected, admitted.state) == (None, None)
    assert (admitted.next_number, admitted.position) == (1, DataPosition(0, 0, 0))
    assert admitted.receipt_tip == first_link(admitted.plan.identity)
    assert admitted.plan.identity.examples == EXAMPLES
    assert admitted.notes == ()
    assert isinstance(admitted.task, Tiny)
    # What changed can be said later, whoever started the run.
    kept = LocalStorage(config.run.root).read(datasets.path_of(admitted.dataset.hash))
    assert b"data.parquet" in kept


def test_every_rank_builds_the_same_model_whatever_was_drawn_before(tmp_path: Path) -> None:
    request = open_attempt(config_for(tmp_path))
    torch.manual_seed(1)
    one = find_out(request, 0, 2, CPU).model
    torch.rand(100)
    other = find_out(request, 1, 2, CPU).model
    assert one is not None
    assert other is not None
    assert_same_state(dict(one.state_dict()), dict(other.state_dict()))
    reseeded = found(config_for(tmp_path, data__seed=1)).model
    assert reseeded is not None
    assert not torch.equal(next(one.parameters()), next(reseeded.parameters()))


def test_a_resume_brings_the_verified_state(folder: Path) -> None:
    config = config_for(folder)
    admitted = found(config)
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g2-a1"
    assert admitted.selected.skipped == ()
    assert (admitted.next_number, admitted.attempt) == (3, 2)
    assert admitted.position == DataPosition(epoch=1, position=8, update=4)
    assert admitted.receipt_tip == Left(config).receipts()[-1].digest
    assert admitted.state is not None
    assert_same_state(admitted.state, Left(config).state())


def test_all_tickets_of_a_resume_agree(folder: Path) -> None:
    config = config_for(folder)
    with coordinating(config) as coordinator:
        tickets = admit(config, coordinator, ranks=3)
        assert {t.generation for t in tickets} == {"g2-a1"}
        assert len({t.sampler_digest for t in tickets}) == 3
        assert [t.node for t in tickets] == ["node-0", "node-1", "node-2"]
        assert tickets[0].notes == ("rank count changed from 1 to 3",)
        assert admit_.current().rank == 0
        assert admit_.current().ranks == 3


def test_who_was_not_admitted_is_told_how(folder: Path) -> None:
    with pytest.raises(AdmissionRefused, match="never admitted") as caught:
        admit_.current()
    assert "torch_config" in caught.value.remedy


# --- other data, another plan, another model ------------------------------------------------------


def test_a_changed_file_is_named_with_what_changed(folder: Path) -> None:
    config = config_for(folder)
    write_data(folder / "data.parquet", seed=1)
    error = refused(config, AdmissionRefused)
    assert "data.parquet has the same size and other bytes" in error.what
    assert error.where == "data.source.paths"
    write_data(folder / "data.parquet", examples=EXAMPLES + 1)
    error = refused(config, AdmissionRefused)
    assert f"the number of examples changed from {EXAMPLES} to {EXAMPLES + 1}" in error.what
    assert "data.parquet changed its size from" in error.what


def test_a_file_more_is_named(folder: Path) -> None:
    write_data(folder / "more.parquet", seed=1)
    paths = [str(folder / "data.parquet"), str(folder / "more.parquet")]
    source = {"format": "parquet", "paths": paths}
    error = refused(config_for(folder, data__source=source), AdmissionRefused)
    assert "more.parquet is new" in error.what


def test_without_the_kept_manifest_the_hashes_are_named(folder: Path) -> None:
    config = config_for(folder)
    shutil.rmtree(folder / "run" / "datasets")
    write_data(folder / "data.parquet", seed=1)
    assert "its hash was blake3:" in refused(config, AdmissionRefused).what


def test_data_that_is_gone(folder: Path) -> None:
    config = config_for(folder)
    (folder / "data.parquet").unlink()
    assert "does not exist" in refused(config, DataError).what


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("lanes", 4, 2), ("seed", 0, 7), ("global_batch", 8, 16), ("microbatch", 1, 2)],
)
def test_a_changed_plan_is_named_with_both_values(
    folder: Path, name: str, before: int, after: int
) -> None:
    config = config_for(folder, **{f"data__{name}": after})
    error = refused(config, AdmissionRefused)
    assert f"data.{name} is {after}, but this run was started with {before}" in error.what
    assert error.where == f"data.{name}"
    assert error.remedy.startswith(f"set data.{name}: {before}")
    assert error.details == {"stored": before, "now": after}


def test_a_changed_model_is_refused_by_its_first_tensor(folder: Path) -> None:
    """Where the claim allows another job, the shapes still decide."""
    changes: dict[str, Any] = {"task__args": {"hidden": 6}}
    error = refused(config_for(folder, **changes), ClaimRefused)
    assert "the job changed" in error.what
    error = refused(config_for(folder, run__claim="statistical", **changes), StateMismatch)
    assert "model/0.bias" in str(error)
    assert "[5]" in str(error)
    assert "[6]" in str(error)


class Broken(Tiny):
    """A task that cannot build its model, or builds something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build_model(self) -> nn.Module:
        if self.how == "raises":
            raise LookupError("no weights here")
        return nn.Linear(4, 2).double() if self.how == "other" else "a model"  # type: ignore


@pytest.mark.parametrize(
    ("how", "words"), [("raises", "LookupError: no weights here"), ("wrong", "returned str")]
)
def test_a_task_that_cannot_build_its_model(tmp_path: Path, how: str, words: str) -> None:
    config = config_for(tmp_path, task__factory="test_admit:Broken", task__args={"how": how})
    error = refused(config, TaskError)
    assert words in error.what
    assert error.where == "Broken.build_model"


# --- another history ------------------------------------------------------------------------------


def other_run(folder: Path, tmp_path: Path) -> Path:
    """Another run over the same data: same shapes, same names, other weights."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(folder / "data.parquet", other / "data.parquet")
    train(config_for(other, run__run_id="other", data__seed=9), stop_at(4))
    return other / "run"


def replaced(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target)


def test_another_runs_generation_copied_in_is_not_taken(folder: Path, tmp_path: Path) -> None:
    foreign = other_run(folder, tmp_path)
    config = config_for(folder)
    replaced(foreign / "generations/g2-a1", folder / "run/generations/g2-a1")
    admitted = found(config)
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g1-a1"
    assert "g2-a1/manifest.json" in admitted.notes[0]
    replaced(foreign / "generations/g1-a1", folder / "run/generations/g1-a1")
    refused(config, NoGeneration)
    refused(config_for(folder, checkpoint__on_damage="refuse"), ManifestDamaged)


def test_another_runs_log_is_refused(folder: Path, tmp_path: Path) -> None:
    foreign = other_run(folder, tmp_path)
    request = open_attempt(config_for(folder))
    replaced(foreign, folder / "run")
    error = ticket_of(request).refusal
    assert isinstance(error, AdmissionRefused)
    assert "of run 'other', not of 'small'" in error.what
    assert error.where == LocalStorage(folder / "run").uri


@pytest.mark.parametrize("attempt", [1, 3])
def test_a_log_at_another_attempt_is_refused(folder: Path, attempt: int) -> None:
    request = open_attempt(config_for(folder))
    error = ticket_of(replace(request, attempt=attempt)).refusal
    assert isinstance(error, AdmissionRefused)
    assert f"the newest attempt in the log is 2, not {attempt}" in error.what


def test_a_root_without_a_log_is_refused(folder: Path) -> None:
    request = open_attempt(config_for(folder))
    shutil.rmtree(folder / "run")
    error = ticket_of(request).refusal
    assert isinstance(error, AdmissionRefused)
    assert "of run None" in error.what


def test_a_rank_that_sees_a_later_generation_is_refused(folder: Path, tmp_path: Path) -> None:
    """Two roots that were one: rank 1's has gone on by a generation under the same attempt."""
    config = config_for(folder)
    attempt = open_attempt(config).attempt
    later = shutil.copytree(folder, tmp_path / "later")
    ahead = config_for(later)
    request = request_for(ahead, attempt)
    with working(), coordinating(ahead) as coordinator:
        assert ticket_of(request).refusal is None
        run_loop(ahead, coordinator)
    assert Left(ahead).generations[-1] == "g3-a2"

    tickets = [
        ticket_of(request_for(config, attempt), 0, 2),
        ticket_of(request_for(ahead, attempt), 1, 2),
    ]
    assert [t.refusal for t in tickets] == [None, None]
    assert [t.generation for t in tickets] == ["g2-a1", "g3-a2"]
    with pytest.raises(
        AdmissionRefused, match=r"rank 1 .* generation: it has g3-a2, rank 0 has g2"
    ):
        judge(tickets, Expected("small", attempt, 2), same_environment=True)


def test_a_rank_whose_copy_is_damaged_disagrees(folder: Path, tmp_path: Path) -> None:
    config = config_for(folder)
    attempt = open_attempt(config).attempt
    copy = shutil.copytree(folder, tmp_path / "damaged")
    flip(Left(config_for(copy)).shard())
    tickets = [
        ticket_of(request_for(config_for(place), attempt), rank, 3)
        for rank, place in enumerate([folder, copy, folder])
    ]
    with pytest.raises(AdmissionRefused, match=r"rank 1 .* it has g1-a1, ranks 0 and 2 have g2-a1"):
        judge(tickets, Expected("small", attempt, 3), same_environment=True)


# --- damage ---------------------------------------------------------------------------------------


def test_a_damaged_shard_falls_back_and_names_shard_block_and_tensor(folder: Path) -> None:
    config = config_for(folder)
    flip(Left(config).shard())
    admitted = found(config)
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g1-a1"
    assert admitted.position.update == 2
    # Numbers go on from what was published, never from what was taken.
    assert admitted.next_number == 3
    [note] = admitted.notes
    path = "generations/g2-a1/shard-00000-of-00001.safetensors"
    assert path in note
    assert "block 1 (bytes 4096 to" in note
    assert "model/0.bias" in note
    [damage] = admitted.selected.skipped
    assert (damage.details["shard"], damage.details["block"]) == (path, 1)


@pytest.mark.parametrize("how", ["missing", "short", "manifest"])
def test_every_kind_of_damage_falls_back(folder: Path, how: str) -> None:
    config = config_for(folder)
    shard = Left(config).shard()
    match how:
        case "missing":
            shard.unlink()
        case "short":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "manifest":
            flip(shard.parent / "manifest.json", 100)
    admitted = found(config)
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g1-a1"
    assert "g2-a1" in admitted.notes[0]


def test_a_device_that_lost_a_block_is_damage_and_one_that_is_away_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(folder)
    reading = LocalStorage.read_into
    code = "EIO"

    def failing(self: Any, path: str, start: int, target: memoryview) -> int:
        if "g2-a1" in path:
            raise StorageError("cannot be read", where=path, details={"errno": code})
        return reading(self, path, start, target)

    monkeypatch.setattr(LocalStorage, "read_into", failing)
    selected = found(config).selected
    assert selected is not None
    assert selected.publish.name == "g1-a1"
    code = "ESTALE"
    refused(config, StorageError)


def test_damage_is_refused_where_the_configuration_says_so(folder: Path) -> None:
    config = config_for(folder, checkpoint__on_damage="refuse")
    flip(Left(config).shard())
    error = refused(config, ShardDamaged)
    assert "shard-00000-of-00001" in error.where
    assert "model/" in error.what


def test_nothing_that_is_whole_is_no_fresh_start(folder: Path) -> None:
    config = config_for(folder)
    for name in ("g1-a1", "g2-a1"):
        flip(Left(config).shard(name))
    error = refused(config, NoGeneration)
    assert "none of the 2 published generations is whole" in error.what
    assert len(error.details["damages"]) == 2  # type: ignore[arg-type]
    for name in ("g1-a1", "g2-a1"):
        assert f"generations/{name}/shard-00000-of-00001.safetensors: block 1" in str(error.details)
    assert "generations/g2-a1/shard-00000-of-00001.safetensors: block 1" in error.what


def test_everything_retired_is_no_fresh_start(folder: Path) -> None:
    config = config_for(folder)
    request = open_attempt(config)
    log = CommitLog(LocalStorage(config.run.root))
    for number in (1, 2):
        log.append(RetireBody(number=number, attempt=1), request.attempt)
    error = ticket_of(request).refusal
    assert type(error) is NoGeneration
    assert "retired" in error.what


def test_a_retired_generation_is_passed_over_without_a_word(folder: Path) -> None:
    config = config_for(folder)
    request = open_attempt(config)
    CommitLog(LocalStorage(config.run.root)).append(RetireBody(number=2, attempt=1), 2)
    admitted = find_out(request, 0, 1, CPU)
    assert admitted.selected is not None
    assert (admitted.selected.publish.name, admitted.notes) == ("g1-a1", ())
