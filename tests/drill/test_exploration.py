"""The protocol explored in small: the same as benchmarks/model.py, with narrower bounds."""

from __future__ import annotations

import pytest

from coherent_ray.drill.exploration import explore
from coherent_ray.drill.planted_rules import RULES, Rule, find
from coherent_ray.drill.world import Bounds

SMALL = [
    Bounds(ranks=2, attempts=1, crashes=1, losses=0, doubles=0, timeouts=0),
    Bounds(ranks=2, attempts=1, crashes=0, losses=1, doubles=0, timeouts=0),
    Bounds(ranks=2, attempts=1, crashes=0, losses=0, doubles=1, timeouts=1),
    Bounds(ranks=2, attempts=1, crashes=0, losses=0, doubles=0, reads_back=True, flips=1),
]
REFERRING = Bounds(
    ranks=1, attempts=2, crashes=0, losses=0, doubles=0, timeouts=0, refers=True, prunes=1
)


@pytest.mark.parametrize("bounds", SMALL)
def test_every_world_within_bounds_is_sound_and_a_run_goes_on_from_it(bounds: Bounds) -> None:
    explored = explore(bounds)
    assert (explored.broken, explored.example) == (None, "")
    assert explored.complete
    assert explored.worlds > 500
    assert explored.storages >= 15
    assert "published" in explored.fates


def test_with_two_attempts_the_nearest_worlds_are_sound_and_fencing_is_reached() -> None:
    explored = explore(Bounds(ranks=1, attempts=2, crashes=0, losses=0, doubles=0), most=4000)
    assert (explored.broken, explored.example) == (None, "")
    assert {"published", "fenced"} <= explored.fates


def test_whenever_a_generation_is_given_up_what_refers_to_it_is_whole_or_refused() -> None:
    """A prune of whatever generation, in four steps, against a save that refers to it."""
    explored = explore(REFERRING, finish=False)
    assert (explored.broken, explored.example) == (None, "")
    assert explored.complete
    assert explored.worlds > 5000
    assert {"published", "failed"} <= explored.fates, "both came first somewhere"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "-"))
def test_a_rule_that_is_left_out_is_found_by_name(rule: Rule) -> None:
    assert find(rule) == rule.found_by
