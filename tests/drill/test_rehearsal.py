"""Runs without Ray: any rank count, any death and any stop give one history.

These are the named tests of planted bugs (`coherent_ray.drill.planted_training`).
"""

from __future__ import annotations

from pathlib import Path

import parity_jobs
import pytest
import torch

from coherent_ray.commit.generations import Generations
from coherent_ray.config import Config
from coherent_ray.drill.parting import Side, compare
from coherent_ray.drill.ranks import Crew
from coherent_ray.drill.rehearsal import Life, rehearse
from coherent_ray.drill.replay import history_of
from coherent_ray.errors import ClaimRefused, TaskError
from coherent_ray.storage import open_storage

KINDS = sorted(parity_jobs.JOBS)
pytestmark = pytest.mark.usefixtures("unsynced")


def lived(tmp_path: Path, name: str, *lives: Life, **changes: object) -> Config:
    config = parity_jobs.job(tmp_path, name, **changes)
    for life in lives:
        ends = life.dies_at is None
        assert rehearse(config, life) is ends
    return config


def assert_same(one: Config, other: Config) -> None:
    found = compare(*(Side(open_storage(config.run.root)) for config in (one, other)))
    assert found.same, found
    assert found.lengths == (parity_jobs.UPDATES, parity_jobs.UPDATES)
    assert found.stored is not None


@pytest.mark.parametrize("kind", KINDS)
def test_any_rank_count_is_the_same_run(kind: str, tmp_path: Path) -> None:
    changes = parity_jobs.JOBS[kind]
    alone = lived(tmp_path, "alone", Life(1), **changes)
    for ranks in (3, 4):
        assert_same(alone, lived(tmp_path, f"ranks-{ranks}", Life(ranks), **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_died_and_was_resized_is_the_same_run(kind: str, tmp_path: Path) -> None:
    changes = parity_jobs.JOBS[kind]
    alone = lived(tmp_path, "alone", Life(1), **changes)
    lives = (
        Life(2, stops_after=1),
        Life(4, dies_at=("update", 3)),
        Life(3, dies_at=("shard:half-written", 3)),
        Life(1, stops_after=5),
        Life(2),
    )
    assert_same(alone, lived(tmp_path, "struck", *lives, **changes))


def test_what_was_not_published_when_it_died_is_gone(tmp_path: Path) -> None:
    config = lived(tmp_path, "run", Life(2, dies_at=("shard:half-written", 4)))
    generations = Generations(open_storage(config.run.root))
    assert [publish.update for publish in generations.history().publishes] == [2]


def test_a_stop_is_exact_and_publishes(tmp_path: Path) -> None:
    config = lived(tmp_path, "run", Life(3, stops_after=3))
    latest = Generations(open_storage(config.run.root)).find("latest")
    assert latest.update == 3


def test_a_learning_rate_that_was_changed_is_used(tmp_path: Path) -> None:
    """Under the one claim that lets it be changed."""
    changes = {**parity_jobs.JOBS["scheduler"], "run__claim": "statistical"}
    for name, rate in (("kept", 0.03), ("changed", 0.003)):
        lived(tmp_path, name, Life(2, stops_after=3), **changes)
        lived(tmp_path, name, Life(2), **changes, optimizer={"lr": rate})
    kept, changed = (
        [float.fromhex(receipt.lr[0]) for receipt in history_of(str(tmp_path / name))]
        for name in ("kept", "changed")
    )
    assert changed[:3] == kept[:3]
    assert changed[3:] == pytest.approx([rate / 10 for rate in kept[3:]])


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_grows_is_refused_before_it_is_saved(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    growing = {"factory": "parity_jobs:Growing", "args": {"kind": kind, "after": 16 // ranks}}
    config = parity_jobs.job(tmp_path, task=growing)
    with pytest.raises(TaskError, match=r"model/seen was missing, and is F32\[1\] now"):
        rehearse(config, Life(ranks))
    # What is published can be gone on from.
    generations = Generations(open_storage(config.run.root))
    assert generations.find("latest").update == 2
    with pytest.raises(TaskError, match="the model changed while it was trained"):
        rehearse(config, Life(ranks))


def test_the_gate_is_the_product_s_own(tmp_path: Path) -> None:
    config = lived(tmp_path, "run", Life(2, stops_after=3), run__claim="exact")
    with pytest.raises(ClaimRefused, match="rank count changed from 2 to 3"):
        rehearse(config, Life(3))


def test_torch_is_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    state = torch.random.get_rng_state()
    lived(tmp_path, "run", Life(2, stops_after=1))
    assert before == (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    assert torch.equal(state, torch.random.get_rng_state())


def test_an_error_of_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    config = parity_jobs.job(tmp_path, task__factory="parity_jobs:NoSuchTask")
    with pytest.raises(TaskError, match="NoSuchTask"):
        rehearse(config, Life(3))


# --- ranks in threads -----------------------------------------------------------------------------


def test_one_rank_runs_at_a_time_and_all_meet() -> None:
    crew, inside, seen = Crew(4), [], []

    def work(rank: int) -> list[int]:
        for _ in range(20):
            inside.append(rank)
            seen.append(len(inside))
            inside.remove(rank)
            met = crew.meet(rank * 10)
        return met

    assert crew.run(work) == [[0, 10, 20, 30]] * 4
    assert set(seen) == {1}


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    crew = Crew(3)

    def work(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError("rank 1 gives up")
        crew.meet(rank)

    with pytest.raises(ZeroDivisionError, match="gives up"):
        crew.run(work)
    early = Crew(2)
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        early.run(lambda rank: early.meet(rank) if rank else [])
