"""Refusals on real Ray Train: one clear error, before any collective, and nothing left behind."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
import tiny
from conftest import LOGICAL_CPUS
from ray.train import ControllerError, Result
from ray.util import placement_group_table
from rehearsals import Refused, rehearsed, rehearsing

from coherent_ray.commit.generations import Generations
from coherent_ray.drill.strikes import pids_of
from coherent_ray.errors import ClaimRefused, ClusterError
from coherent_ray.storage import open_storage
from coherent_ray.train import coordinators
from coherent_ray.train import trainer as trainer_module
from coherent_ray.train.code import NO_CODE
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.receipts import first_difference
from coherent_ray.train.trainer import make_trainer

if TYPE_CHECKING:
    from conftest import OwnRun

#: For the one that is not refused: it must have something left to do.
LONGER = tiny.UPDATES + 3
BACK_S = 30.0


def assert_nothing_is_held() -> None:
    """Every placement group is removed, every process of Ray Train gone, every CPU free again."""
    deadline = time.monotonic() + BACK_S
    while True:
        states = {group["state"] for group in placement_group_table().values()}
        free = ray.available_resources().get("CPU", 0.0)
        alive = [target for target in ("worker", "controller") if is_alive(target)]
        if states <= {"REMOVED"} and free == LOGICAL_CPUS and not alive:
            return
        assert time.monotonic() < deadline, f"left behind: {states}, {free} CPUs free, {alive}"
        time.sleep(0.1)


def is_alive(target: Any) -> bool:
    try:
        return bool(pids_of(target))
    except ClusterError:
        return False


# --- one refusal from end to end ------------------------------------------------------------------


def test_a_refusal_ends_fit_and_leaves_nothing_behind(
    reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(reference.root, tmp_path / "run"))
    before = tiny.published(root)
    entered = tmp_path / "entered"
    config = tiny.configured(root, tiny_data, run__claim="exact", cluster__workers=1)

    def train(values: dict[str, Any]) -> None:
        entered.touch()

    trainer = make_trainer(config, train)
    # The source of this function is not what the run was trained with; here, that is not the point.
    trainer.backend_config.code = NO_CODE
    ended = tiny.error_of(trainer)
    coordinators.stop(run_id_of(config))

    assert isinstance(ended, ControllerError)
    error = ended.controller_failure
    assert type(error) is ClaimRefused
    assert error.what == (
        "every rank refused to start: the rank count changed from 2 to 1, and run.claim is exact"
    )
    assert error.where == "cluster.workers"
    assert "use 2 workers" in error.remedy
    assert not entered.exists(), "the training function ran"
    # It was not retried: one attempt was opened, and none published.
    assert Generations(open_storage(str(root))).history().attempt == 2
    assert tiny.published(root) == before
    assert_nothing_is_held()


# --- many refusals of one group -------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsed:
    root: Path
    refused: dict[str, Refused]
    result: Result
    notes: list[str]


@pytest.fixture(scope="module")
def group(
    reference: OwnRun, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rehearsed]:
    """Three workers resume a run of two: wrongly, again and again, then as ``statistical``."""
    folder = tmp_path_factory.mktemp("refusals")
    root = Path(shutil.copytree(reference.root, folder / "run"))

    def resumed(data: Path = tiny_data, **changes: Any) -> Any:
        return tiny.configured(root, data, cluster__workers=3, **changes)

    (folder / "other").mkdir()
    other_data = tiny.write_rows(folder / "other" / tiny_data.name, seed=1)
    wrong = {
        "data": resumed(other_data),
        "lanes": resumed(data__lanes=8),
        "job": resumed(task__args={"factor": 2}),
        "model": resumed(),
        "exact": resumed(run__claim="exact"),
        "another run's generation": resumed(checkpoint__on_damage="refuse"),
        "a later generation in one rank's view": resumed(),
    }
    right = resumed(run__claim="statistical", training__updates=LONGER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer_module, "torch_config", lambda config, function: rehearsing(config, wrong)
        )
        result = tiny.fit(make_trainer(right))
    handle = coordinators.find(run_id_of(right))
    notes = coordinators.answer(handle.status.remote())["notes"]
    yield Rehearsed(root, rehearsed(root), result, notes)
    coordinators.stop(run_id_of(right))


REFUSALS = {
    "data": (
        "AdmissionRefused",
        "the data is not the data that this run was trained on: ",
        "restore the files",
    ),
    "lanes": (
        "AdmissionRefused",
        "data.lanes is 8, but this run was started with 4",
        "set data.lanes: 4",
    ),
    "job": (
        "ClaimRefused",
        "the job changed, and run.claim is invariant: task.args.factor: absent -> 2",
        "set this back",
    ),
    "model": (
        "StateMismatch",
        "model/0.bias",
        "",
    ),
    "exact": (
        "ClaimRefused",
        "the rank count changed from 2 to 3, and run.claim is exact",
        "use 2 workers",
    ),
    "another run's generation": (
        "ManifestDamaged",
        "the manifest ",
        "fall_back",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_every_rank_refuses(group: Rehearsed, name: str) -> None:
    kind, what, remedy = REFUSALS[name]
    refused = group.refused[name]
    assert refused.kind == kind
    assert refused.what.startswith("every rank refused to start: ")
    assert what in refused.what
    assert remedy in refused.remedy
    assert refused.where
    assert refused.details["ranks"] == [0, 1, 2]


def test_one_rank_that_sees_a_later_generation_is_named(group: Rehearsed) -> None:
    refused = group.refused["a later generation in one rank's view"]
    assert refused.kind == "AdmissionRefused"
    assert refused.what == (
        "rank 1 does not agree on the generation: it has g5-a2, ranks 0 and 2 have g4-a1"
    )
    assert refused.where.startswith("rank 1 on ")
    assert "do all nodes see the same storage" in refused.remedy


def test_no_rank_had_a_process_group_when_it_was_refused(group: Rehearsed) -> None:
    assert set(group.refused) == {*REFUSALS, "a later generation in one rank's view"}
    for refused in group.refused.values():
        assert refused.process_groups == [False, False, False], refused.name


def test_the_data_that_changed_is_named(group: Rehearsed) -> None:
    assert "rows.parquet" in group.refused["data"].what


def test_statistical_goes_on_with_another_rank_count_and_says_so(
    group: Rehearsed, reference: OwnRun
) -> None:
    assert "rank count changed from 2 to 3" in group.notes
    assert f"the job changed: training.updates: {tiny.UPDATES} -> {LONGER}" in group.notes
    metrics = group.result.metrics
    assert metrics is not None
    assert (metrics["resumed_at"], metrics["update"]) == (tiny.UPDATES, LONGER)
    history = tiny.history(group.root)
    assert [r.update for r in history] == list(range(1, LONGER + 1))
    # It goes on from the very history that it found.
    assert first_difference(history[: tiny.UPDATES], tiny.history(reference.root)) is None
    assert tiny.selected(group.root) == "g5-a2"


def test_the_group_gave_everything_back(group: Rehearsed) -> None:
    assert_nothing_is_held()
