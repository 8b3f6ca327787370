"""Exact replay on real Ray, in small: the campaign of benchmarks/replay.py at two rank counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coherent_ray import config
from coherent_ray.config import Config
from coherent_ray.drill.replay import Replayed, history_of, replay
from coherent_ray.drill.strikes import Strike, random_strikes
from coherent_ray.train.receipts import first_difference

ROOT = Path(__file__).parent.parent.parent
UPDATES = 60


@pytest.fixture(scope="module")
def job(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    overrides = [
        f"cluster.address={ray_cluster}",
        f"data.source.paths=[{folder / 'digits.parquet'}]",
        f"data.prepare.args.path={folder / 'digits.parquet'}",
        "training.epochs=null",
        f"training.updates={UPDATES}",
        "checkpoint.every_updates=12",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield config.load(ROOT / "configs" / "digits.yaml", overrides).resolved()


@pytest.fixture(scope="module")
def untouched(job: Config, tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    return replay(job, str(tmp_path_factory.mktemp("untouched") / "run"), workers=1)


@pytest.mark.timeout(600)
def test_a_struck_run_at_another_rank_count_is_the_untouched_run(
    job: Config, untouched: Replayed, tmp_path: Path
) -> None:
    strikes = [Strike(3, "coordinator"), Strike(20, "worker")]
    struck = replay(job, str(tmp_path / "run"), workers=3, strikes=strikes)
    assert [s.strike.target for s in struck.struck] == ["coordinator", "worker"]
    assert struck.attempts == 2
    assert first_difference(history_of(untouched.root), history_of(struck.root)) is None
    assert (struck.updates, struck.tip, struck.state) == (
        UPDATES,
        untouched.tip,
        untouched.state,
    )


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_new_controller_goes_on_where_a_killed_one_stopped(
    job: Config, untouched: Replayed, tmp_path: Path
) -> None:
    struck = replay(job, str(tmp_path / "run"), workers=2, strikes=[Strike(20, "controller")])
    assert struck.struck[0].strike.target == "controller"
    assert any("controller is gone" in note for note in struck.notes)
    assert (struck.tip, struck.state) == (untouched.tip, untouched.state)


def test_random_strikes_follow_from_their_seed_and_lie_within_the_run() -> None:
    for seed in range(50):
        strikes = random_strikes(seed, updates=40, workers=3, coordinators_=1)
        assert strikes == random_strikes(seed, updates=40, workers=3, coordinators_=1)
        assert sorted(s.target for s in strikes) == ["coordinator", *["worker"] * 3]
        assert [s.update for s in strikes] == sorted(s.update for s in strikes)
        assert all(1 <= s.update < 40 for s in strikes)
    assert random_strikes(1, 40) != random_strikes(2, 40)
