"""The schedule of an exchange, enumerated; that it moves the right bytes is `test_reduce`'s."""

from __future__ import annotations

import itertools

import pytest

from coherent_ray.train.exchange import schedule
from coherent_ray.train.lanes import Subtree, cover, lanes_of, merge_order


def arrivals(lanes: int, ranks: int, present: tuple[bool, ...]) -> list[Subtree]:
    """The nodes in the order in which a rank receives them."""
    plan = schedule(lanes, ranks, present)
    left = [
        [n for n in cover(lanes_of(lanes, r, ranks), lanes) if any(present[n.start : n.stop])]
        for r in range(ranks)
    ]
    result = []
    for senders in plan.rounds:
        assert list(senders) == sorted(set(senders))
        result += [left[rank].pop(0) for rank in senders]
    assert not any(left)
    return result


@pytest.mark.parametrize("lanes", range(1, 8))
def test_everything_is_sent_once_and_added_along_the_tree(lanes: int) -> None:
    for present in itertools.product([False, True], repeat=lanes):
        for ranks in range(1, lanes + 1):
            if not any(present):
                continue
            plan = schedule(lanes, ranks, present)
            nodes = arrivals(lanes, ranks, present)
            assert len(set(nodes)) == len(nodes)
            covered = {lane for n in nodes for lane in range(n.start, n.stop)}
            assert {lane for lane in range(lanes) if present[lane]} <= covered
            by_lane = sorted(nodes)
            expected = [(by_lane[a], by_lane[b]) for a, b in merge_order(by_lane)]
            assert [(nodes[a], nodes[b]) for a, b in plan.additions] == expected
            assert nodes[plan.root] == by_lane[0]
            assert len(plan.additions) == len(nodes) - 1


@pytest.mark.parametrize(("lanes", "ranks"), [(8, 1), (8, 2), (8, 4), (8, 8), (64, 16)])
def test_a_power_of_two_takes_one_round(lanes: int, ranks: int) -> None:
    plan = schedule(lanes, ranks, (True,) * lanes)
    assert plan.rounds == (tuple(range(ranks)),)
    assert plan.root == 0


def test_three_ranks_of_eight_lanes_take_two() -> None:
    plan = schedule(8, 3, (True,) * 8)
    assert plan.rounds == ((0, 1, 2), (1, 2))


def test_who_has_nothing_sends_nothing() -> None:
    plan = schedule(8, 4, (True,) + (False,) * 6 + (True,))
    assert plan.rounds == ((0, 3),)
    assert plan.additions == ((0, 1),)
    assert schedule(8, 4, (False,) * 7 + (True,)).rounds == ((3,),)
