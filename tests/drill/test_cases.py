"""Which runs a claim covers: their rank counts, kills and resizes, for jobs of any length."""

from __future__ import annotations

from pathlib import Path

import parity_jobs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coherent_ray import config as config_
from coherent_ray.config import Config
from coherent_ray.drill.cases import POINTS, UPDATES, cases_of, prepared, rank_counts
from coherent_ray.errors import ConfigError


def job(**changes: object) -> Config:
    return config_.build(parity_jobs.values(Path("/nowhere"), **changes))


def test_an_invariant_job_is_tried_at_every_rank_count_and_resized() -> None:
    config = prepared(job(), 20)
    ranks = rank_counts(config, ())
    assert ranks == (1, 2, 3, 4)
    *struck, resized = cases_of(config, ranks, kills=4, seed=0)
    assert [case.name for case in struck] == [
        "1 rank, killed", "2 ranks, killed", "3 ranks, killed", "4 ranks, killed",
    ]  # fmt: skip
    for case in struck:
        assert [blow.where for blow in case.legs[0].blows] == list(POINTS)
    assert resized.ranks == (1, 2, 3, 4, 1)
    assert [leg.until for leg in resized.legs] == [5, 9, 13, 17, None]


def test_an_exact_job_is_tried_at_its_own_rank_count() -> None:
    config = prepared(job(run__claim="exact", cluster__workers=3), 20)
    assert rank_counts(config, ()) == (3,)
    assert rank_counts(config, (2,)) == (2,)
    (case,) = cases_of(config, (3,), kills=2, seed=0)
    assert (case.name, case.ranks) == ("3 ranks, killed", (3,))
    with pytest.raises(ConfigError, match="promises nothing at another rank count"):
        rank_counts(config, (1, 2))


@pytest.mark.parametrize("wanted", [(0,), (5,), (1, -1)])
def test_rank_counts_that_cannot_be(wanted: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot carry 4 lanes"):
        rank_counts(job(), wanted)


def test_very_many_rank_counts_must_be_named() -> None:
    config = job(data__lanes=1000, data__global_batch=1000)
    with pytest.raises(ConfigError, match="1000 rank counts"):
        rank_counts(config, ())
    assert rank_counts(config, (1, 1000, 1)) == (1, 1000)


def test_without_kills_the_reference_s_rank_count_is_not_run_twice() -> None:
    config = prepared(job(), 20)
    assert [case.name for case in cases_of(config, (2, 4), 0, 0)] == ["4 ranks", "resized"]


def test_how_a_job_is_prepared() -> None:
    config = prepared(job(training__epochs=9, training__updates=None, checkpoint__keep=2), None)
    assert (config.training.updates, config.training.epochs) == (UPDATES, None)
    assert config.checkpoint.keep is None
    assert prepared(job(training__updates=10**6), None).training.updates == UPDATES
    assert prepared(job(training__updates=9), None).training.updates == 9
    assert prepared(job(), 1000).training.updates == 1000
    # Enough generations to be struck at; what saves more often keeps its own.
    assert prepared(job(checkpoint__every_updates=500), 1000).checkpoint.every_updates == 200
    assert prepared(job(checkpoint__every_updates=3), 1000).checkpoint.every_updates == 3


@settings(deadline=None, max_examples=200)
@given(
    updates=st.integers(2, 300),
    ranks=st.lists(st.integers(1, 4), min_size=1, unique=True),
    kills=st.integers(0, 12),
    seed=st.integers(0, 9),
)
def test_every_kill_and_resize_has_its_moment(
    updates: int, ranks: list[int], kills: int, seed: int
) -> None:
    config = prepared(job(), updates)
    for case in cases_of(config, ranks, kills, seed):
        for leg in case.legs:
            assert len(leg.blows) in {0, kills}
            assert all(1 <= blow.update < updates for blow in leg.blows)
        stops = [leg.until for leg in case.legs[:-1]]
        assert case.legs[-1].until is None
        assert all(stop is not None and 1 <= stop < updates for stop in stops)
        # No leg is empty: a driver that is killed after an update has done it.
        assert stops == sorted(set(stops))
    assert cases_of(config, ranks, kills, seed) == cases_of(config, ranks, kills, seed)
