"""Why two histories part: what is not deterministic, and what a resume does not give back."""

from __future__ import annotations

from pathlib import Path

import parity_jobs
import pytest

from coherent_ray.commit.generations import Generations
from coherent_ray.config import Config
from coherent_ray.drill.causes import cause_of
from coherent_ray.drill.rehearsal import Life, rehearse
from coherent_ray.drill.rerun import rerun
from coherent_ray.drill.spots import first_spot
from coherent_ray.storage import open_storage
from coherent_ray.train.receipts import history

pytestmark = pytest.mark.usefixtures("unsynced")


def lived(folder: Path, name: str, *lives: Life, **changes: object) -> Config:
    config = parity_jobs.job(folder, name, **changes)
    for life in lives:
        rehearse(config, life)
    return config


@pytest.mark.parametrize("kind", ["dropout", "batch norm", "fp16"])
def test_an_update_run_again_is_the_update(kind: str, tmp_path: Path) -> None:
    """At every rank count, from the beginning and from a generation; and nothing is written."""
    config = lived(tmp_path, "run", Life(2), **parity_jobs.JOBS[kind])
    storage = open_storage(config.run.root)
    generations = Generations(storage)
    stored = list(history(storage, generations.history()))
    before = sorted((entry.path, entry.size) for entry in storage.list())
    live = generations.history().live
    again = [rerun(config, None, 1, 6), rerun(config, live[1], 3, 6), rerun(config, live[0], 4, 6)]
    assert [each.receipt.digest for each in again] == [stored[5].digest] * 3
    assert [each.receipt.update for each in again] == [6, 6, 6]
    assert {each.states[-1] for each in again} == {again[0].states[-1]}
    # After update 4 it is what the second generation holds.
    assert again[0].states[3][0] == generations.manifest(live[1]).fingerprint
    for each in again[1:]:
        assert first_spot(again[0].recordings, each.recordings) is None
    assert sorted((entry.path, entry.size) for entry in storage.list()) == before


def test_a_random_source_outside_the_keys_is_named(tmp_path: Path) -> None:
    changes = {"task__factory": "parity_jobs:Unkeyed"}
    runs = [lived(tmp_path, name, Life(1, stops_after=3), **changes) for name in ("one", "two")]
    cause = cause_of(*runs, update=1)
    assert cause.kind == "not deterministic"
    assert cause.update == 1
    assert cause.spot is not None
    assert (cause.spot.lane, cause.spot.microbatch) == (0, 0)
    assert "parity_jobs.py:" in cause.spot.where
    assert "update 1 is not deterministic: run twice on this machine" in str(cause)


def test_state_that_no_generation_holds_is_named(tmp_path: Path) -> None:
    changes = {"task__factory": "parity_jobs:Remembering"}
    straight = lived(tmp_path, "one", Life(1), **changes)
    resumed = lived(tmp_path, "two", Life(1, stops_after=4), Life(1), **changes)
    cause = cause_of(straight, resumed, update=5)
    assert cause.kind == "resume"
    assert cause.update == 5
    assert cause.spot is not None
    assert (cause.spot.lane, cause.spot.operation) == (0, "aten.mul")
    assert cause.says.startswith("a resume from update 4 does not give back all")


def test_what_is_not_seen_again_is_said(tmp_path: Path) -> None:
    """The same run twice: there is nothing to find."""
    runs = [lived(tmp_path, name, Life(1, stops_after=3)) for name in ("one", "two")]
    cause = cause_of(*runs, update=3)
    assert (cause.kind, cause.spot) == ("elsewhere", None)


def test_a_job_that_cannot_be_run_here_is_said(tmp_path: Path) -> None:
    runs = [lived(tmp_path, name, Life(1, stops_after=3)) for name in ("one", "two")]
    (tmp_path / "data.parquet").unlink()
    cause = cause_of(*runs, update=3)
    assert cause.kind == "elsewhere"
    assert "could not be run again here" in str(cause)
