"""What scenarios plan: points that exist, moments that will come, storms that follow their seed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coherent_ray import config as config_
from coherent_ray.config import Config
from coherent_ray.config.sections import WorkerRange
from coherent_ray.drill.acts import DEEDS
from coherent_ray.drill.campaign import chosen
from coherent_ray.drill.scenarios import SCENARIOS, Course, Scenario, Storm, course_of
from coherent_ray.errors import ConfigError
from coherent_ray.train import hooks

COURSE = Course(updates=40, every=4, workers=2, kills=30, seed=3)
#: Every point that the product has, as its table says.
POINTS = set(re.findall(r"`([a-z:-]+)(?:@N)?`", hooks.__doc__ or ""))
everyone = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))


def test_the_table_of_points_is_what_the_product_reaches() -> None:
    package = Path(hooks.__file__).parent.parent
    source = "\n".join(
        path.read_text() for path in package.rglob("*.py") if path.parent.name != "drill"
    )
    for point in POINTS:
        assert re.search(rf'"{point}[@"]', source), f"nobody reaches {point}"


@everyone
def test_a_scenario_says_what_it_does_and_strikes_at_points_that_exist(scenario: Scenario) -> None:
    assert scenario.__doc__ != Scenario.__doc__
    plan = scenario.plan(COURSE)
    assert len({injection.hold.name for injection in plan}) == len(plan) > 0
    for injection in plan:
        assert injection.hold.point in POINTS
        assert injection.act in DEEDS


@everyone
def test_every_moment_lies_in_the_run_at_every_shape_of_it(scenario: Scenario) -> None:
    """A save comes after each: the last generation is due at or behind every threshold."""
    for every in (1, 3, 7):
        for updates in (3 * every + 2, 5 * every, 40 * every):
            for injection in scenario.plan(Course(updates, every, 3, kills=20)):
                hold = injection.hold
                assert 1 <= hold.update <= updates
                assert hold.rank is None or 0 <= hold.rank < 3


def test_what_is_stopped_goes_on_and_what_is_filled_gets_room() -> None:
    for scenario in SCENARIOS.values():
        acts = [injection.act for injection in scenario.plan(COURSE)]
        for begins, ends in (("stop", "go on"), ("freeze", "go on"), ("fill", "free")):
            if begins in acts:
                assert acts.index(ends) > acts.index(begins), scenario.name


def test_a_storm_follows_its_seed_and_leaves_no_target_out() -> None:
    storm = Storm()
    plan = storm.plan(COURSE)
    assert plan == storm.plan(COURSE)
    assert plan != storm.plan(Course(40, 4, 2, kills=30, seed=4))
    assert len(plan) == COURSE.kills
    updates = [injection.hold.update for injection in plan]
    assert updates == sorted(updates)
    assert updates[-1] <= COURSE.updates - COURSE.every
    many = storm.plan(Course(4000, 4, 2, kills=400, seed=1))
    targets = Counter(injection.target for injection in many)
    assert set(targets) == set(Storm.TARGETS)
    assert targets["worker"] > targets["coordinator"] > targets["driver"]
    assert {i.hold.point for i in many} == {*Storm.POINTS, *Storm.PUBLISH}
    assert {injection.let_go for injection in many} == {True, False}
    for injection in many:
        assert (injection.hold.rank is None) == injection.hold.point.startswith("publish:")


def test_a_run_of_too_few_generations_is_refused() -> None:
    values = {
        "run": {"root": "run"},
        "data": {
            "source": {"format": "parquet", "paths": ["x"]},
            "global_batch": 8,
            "microbatch": 1,
        },
        "training": {"updates": 12},
        "checkpoint": {"every_updates": 5},
    }
    with pytest.raises(ConfigError, match="too few") as caught:
        course_of(config_.build(values), updates=12, kills=1, seed=0)
    assert "every_updates=2" in caught.value.remedy
    values["checkpoint"]["every_updates"] = 2
    assert course_of(config_.build(values), updates=12, kills=1, seed=0).every == 2


def a_run(workers: int, claim: str = "invariant") -> Config:
    return config_.build(
        {
            "run": {"root": "x", "claim": claim},
            "data": {
                "source": {"format": "parquet", "paths": ["x"]},
                "global_batch": 8,
                "lanes": 4,
                "microbatch": 1,
            },
            "training": {"updates": 12},
            "cluster": {"workers": workers},
        }
    )


def test_scenarios_are_chosen_by_name_in_their_own_order() -> None:
    run = a_run(workers=2)
    assert chosen((), None, run) == tuple(SCENARIOS)
    assert chosen(("all",), None, run) == tuple(SCENARIOS)
    assert chosen(("driver", "worker-mid-shard"), None, run) == ("worker-mid-shard", "driver")


@pytest.mark.parametrize(
    ("run", "why"),
    [({"workers": 2, "claim": "exact"}, "claim is exact"), ({"workers": 1}, "cannot become fewer")],
)
def test_what_a_run_cannot_suffer_is_left_out(run: dict[str, Any], why: str) -> None:
    found = a_run(**run)
    assert chosen((), None, found) == tuple(n for n in SCENARIOS if n != "elastic")
    with pytest.raises(ConfigError, match=f"elastic is not for this run: .*{why}"):
        chosen(("elastic",), None, found)


def test_a_run_that_follows_its_cluster_has_no_failure_to_spare() -> None:
    settings = SCENARIOS["elastic"].settings_for(a_run(workers=3))["cluster"]
    assert settings["workers"] == WorkerRange(min=1, max=3)
    assert settings["max_failures"] == 0


def test_a_given_cluster_s_nodes_are_left_alone() -> None:
    run, ours = a_run(workers=2), ("node", "node-frozen", "elastic", "partition")
    allowed = chosen((), "127.0.0.1:6379", run)
    assert {"worker-mid-shard", "driver", "storm"} <= set(allowed)
    assert not set(ours) & set(allowed)
    for name in ours:
        with pytest.raises(ConfigError, match=name):
            chosen((name,), "127.0.0.1:6379", run)


def test_a_scenario_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="no scenario 'earthquake'") as caught:
        chosen(("earthquake",), None, a_run(workers=2))
    assert "worker-mid-shard" in caught.value.remedy
