"""The tree, enumerated: every rank count and every set of absent lanes gives one expression."""

from __future__ import annotations

import itertools
import math

import pytest

from coherent_ray.train.lanes import (
    Carry,
    Subtree,
    cover,
    holds,
    lanes_of,
    merge_order,
    tree_sum,
    width,
)

Expression = int | tuple["Expression", "Expression"]


def defined(present: frozenset[int], start: int, size: int) -> Expression | None:
    """The tree's definition, word for word."""
    if size == 1:
        return start if start in present else None
    left = defined(present, start, size // 2)
    right = defined(present, start + size // 2, size // 2)
    if left is None or right is None:
        return left if right is None else right
    return (left, right)


def carried(owned: range, lanes: int, present: frozenset[int]) -> dict[Subtree, Expression]:
    """What one rank holds after its lanes have arrived, and the most it held at once."""
    carry, stack = Carry(owned, lanes), []
    for lane in owned:
        additions = carry.arrive(lane, lane in present)
        if lane in present:
            stack.append(lane)
        for _ in range(additions):
            right = stack.pop()
            stack[-1] = (stack[-1], right)
        assert len(stack) == len(carry.held)
        assert len(stack) <= 2 * math.log2(width(lanes)) + 1
    return dict(zip(carry.held, stack, strict=True))


def reduced(lanes: int, ranks: int, present: frozenset[int]) -> Expression | None:
    parts: dict[Subtree, Expression] = {}
    for rank in range(ranks):
        parts |= carried(lanes_of(lanes, rank, ranks), lanes, present)
    nodes, values = sorted(parts), [parts[node] for node in sorted(parts)]
    for into, other in merge_order(nodes):
        values[into] = (values[into], values[other])
    return values[0] if values else None


@pytest.mark.parametrize("lanes", range(1, 9))
def test_every_rank_count_and_every_absence_gives_the_same_expression(lanes: int) -> None:
    for bits in itertools.product([False, True], repeat=lanes):
        present = frozenset(lane for lane, bit in enumerate(bits) if bit)
        expected = defined(present, 0, width(lanes))
        for ranks in range(1, lanes + 1):
            assert reduced(lanes, ranks, present) == expected, (ranks, present)


@pytest.mark.parametrize("lanes", [13, 16, 31, 32, 33])
def test_larger_trees_too(lanes: int) -> None:
    for absent in (frozenset(), {0}, {lanes - 1}, set(range(3, 9)), set(range(lanes // 2, lanes))):
        present = frozenset(range(lanes)) - absent
        for ranks in range(1, lanes + 1):
            assert reduced(lanes, ranks, present) == defined(present, 0, width(lanes))


@pytest.mark.parametrize("lanes", range(1, 20))
def test_ranks_tile_the_lanes_and_what_a_rank_holds_is_its_cover(lanes: int) -> None:
    everything = frozenset(range(lanes))
    for ranks in range(1, lanes + 1):
        blocks = [lanes_of(lanes, rank, ranks) for rank in range(ranks)]
        assert [lane for block in blocks for lane in block] == list(range(lanes))
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
        for owned in blocks:
            nodes = cover(owned, lanes)
            tiled = [lane for node in nodes for lane in range(node.start, node.stop)]
            assert [lane for lane in tiled if lane < lanes] == list(owned)
            assert list(carried(owned, lanes, everything)) == nodes


def test_a_rank_that_owns_an_aligned_block_holds_one_node() -> None:
    assert cover(range(8), 8) == [Subtree(0, 8)]
    assert cover(range(4, 8), 8) == [Subtree(4, 4)]
    assert cover(range(6), 6) == [Subtree(0, 8)]
    assert cover(range(4, 5), 5) == [Subtree(4, 4)]
    assert cover(range(2, 5), 8) == [Subtree(2, 2), Subtree(4, 1)]
    assert cover(range(1), 1) == [Subtree(0, 1)]


def test_a_full_power_of_two_needs_log2_buffers() -> None:
    carry, most = Carry(range(64), 64), 0
    for lane in range(64):
        additions = carry.arrive(lane, True)
        # The first addition is done straight from the lane's gradient.
        most = max(most, len(carry.held) + max(additions - 1, 0))
    assert most == 6


def test_lanes_must_arrive_in_order() -> None:
    carry = Carry(range(2, 4), 8)
    with pytest.raises(ValueError, match="lane 3 came where lane 2"):
        carry.arrive(3, True)
    carry.arrive(2, True)
    assert carry.arrive(3, True) == 1
    with pytest.raises(ValueError, match="lane 4 came"):
        carry.arrive(4, True)


@pytest.mark.parametrize("lanes", range(1, 9))
def test_whole_nodes_arrive_as_their_lanes_would(lanes: int) -> None:
    """Broken off after any lane at any rank count, gone on with at any other: one expression."""
    everything = frozenset(range(lanes))
    for before, after in itertools.product(range(1, lanes + 1), repeat=2):
        for done in range(lanes + 1):
            stored: dict[Subtree, Expression] = {}
            for rank in range(before):
                owned = lanes_of(lanes, rank, before)
                stored |= up_to(owned, lanes, done)
            parts: dict[Subtree, Expression] = {}
            for rank in range(after):
                parts |= gone_on(lanes_of(lanes, rank, after), lanes, stored)
            nodes, values = sorted(parts), [parts[node] for node in sorted(parts)]
            for into, other in merge_order(nodes):
                values[into] = (values[into], values[other])
            assert values[0] == defined(everything, 0, width(lanes)), (before, after, done)


def up_to(owned: range, lanes: int, done: int) -> dict[Subtree, Expression]:
    """What a rank holds when its first lanes are done."""
    carry, stack = Carry(owned, lanes), []
    for lane in owned[:done]:
        additions = carry.arrive(lane, True)
        stack.append(lane)
        for _ in range(additions):
            right = stack.pop()
            stack[-1] = (stack[-1], right)
    return dict(zip(carry.held, stack, strict=True))


def gone_on(
    owned: range, lanes: int, stored: dict[Subtree, Expression]
) -> dict[Subtree, Expression]:
    """What a rank comes to that takes the stored nodes that it can use."""
    carry, stack = Carry(owned, lanes), []
    usable = {node.start: node for node in stored if holds(owned, node, lanes)}
    while carry.next < owned.stop:
        node = usable.get(carry.next, Subtree(carry.next, 1))
        additions = carry.arrive(node.start, True, node.size)
        stack.append(stored.get(node, node.start))
        for _ in range(additions):
            right = stack.pop()
            stack[-1] = (stack[-1], right)
    return dict(zip(carry.held, stack, strict=True))


def test_a_node_that_is_not_owned_whole_cannot_arrive() -> None:
    for owned, node in ((range(1, 4), (0, 2)), (range(4), (0, 8)), (range(2, 3), (2, 2))):
        carry = Carry(owned, 8)
        carry.next = node[0]
        with pytest.raises(ValueError, match="was due"):
            carry.arrive(node[0], True, node[1])
    assert Carry(range(4, 6), 6).arrive(4, True, 4) == 0, "the lanes that do not exist are its own"


@pytest.mark.parametrize(("lanes", "rank", "ranks"), [(4, 0, 5), (4, 4, 4), (4, -1, 2), (0, 0, 1)])
def test_impossible_ranks_are_refused(lanes: int, rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="cannot carry"):
        lanes_of(lanes, rank, ranks)


@pytest.mark.parametrize(("start", "size"), [(1, 2), (0, 3), (4, 8), (0, 0)])
def test_a_node_is_aligned(start: int, size: int) -> None:
    with pytest.raises(ValueError, match="no aligned node"):
        Subtree(start, size)


def test_tree_sum_is_the_tree_and_not_a_fold() -> None:
    values = [1e16, 1.0, 1.0, 1.0]
    assert tree_sum(values) == (1e16 + 1.0) + (1.0 + 1.0) != sum(values)
    assert tree_sum([]) == 0.0
    assert tree_sum([3.5]) == 3.5
    assert tree_sum([1.0, 2.0, 4.0, 8.0, 16.0]) == 31.0


def test_merge_order_of_few_parts() -> None:
    assert merge_order([]) == []
    assert merge_order([Subtree(6, 1)]) == []
    assert merge_order([Subtree(1, 1), Subtree(6, 1)]) == [(0, 1)]
    assert merge_order([Subtree(0, 1), Subtree(2, 1), Subtree(3, 1)]) == [(1, 2), (0, 1)]
