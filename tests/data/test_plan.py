"""The plan covers every epoch exactly once, whatever the rank count and wherever it is resumed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coherent_ray.commit.manifest import DataPosition, PlanIdentity
from coherent_ray.data import order
from coherent_ray.data.plan import Plan

HASH = "blake3:" + "ab" * 32
GOLDEN_SAMPLER = "blake3:c6a6a16cef26d9a1b27e5a364eb90da65b5342697443efe34785f71e06c957e2"
GOLDEN_SEED = 4593393783890010588
GOLDEN_IDS = "blake3:a8262abe1ebc3652ec5ed3907d969d89e8c9aa6e4246648872e692c725a35e3c"
GOLDEN_TAIL = [78, 85, 16, 64, 54, 18, 45]
GOLDEN_EXAMPLE_SEED = 9536755782944069823
IDENTITY = PlanIdentity(HASH, 103, 7, order.NAME, 16, 6, 2)


def made(**changed):
    return Plan(replace(IDENTITY, **changed))


def ids_of_rank(plan, number, rank, ranks):
    update = plan.update(number)
    return [
        int(i)
        for lane in plan.lanes_of(rank, ranks)
        for micro in update.lanes[lane].microbatches
        for i in plan.example_ids(micro.start, micro.stop, update.epoch)
    ]


# --- an epoch ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    examples=st.integers(1, 400),
    global_batch=st.integers(1, 90),
    lanes=st.integers(1, 12),
    microbatch=st.integers(1, 9),
    ranks=st.integers(1, 12),
)
def test_every_example_is_consumed_once_an_epoch(examples, global_batch, lanes, microbatch, ranks):
    # SimpleTuner#2986: two images twice, two never. accelerate#2016, data#1513: an epoch lost.
    ranks = min(ranks, lanes)
    plan = made(examples=examples, global_batch=global_batch, lanes=lanes, microbatch=microbatch)
    for epoch in (0, 1):
        first = epoch * plan.updates_per_epoch + 1
        seen = [
            i
            for number in range(first, first + plan.updates_per_epoch)
            for rank in range(ranks)
            for i in ids_of_rank(plan, number, rank, ranks)
        ]
        assert sorted(seen) == list(range(examples))


@settings(deadline=None, max_examples=60)
@given(
    examples=st.integers(1, 400),
    global_batch=st.integers(1, 90),
    lanes=st.integers(1, 12),
    microbatch=st.integers(1, 9),
    number=st.integers(1, 900),
)
def test_lanes_and_microbatches_tile_an_update(examples, global_batch, lanes, microbatch, number):
    plan = made(examples=examples, global_batch=global_batch, lanes=lanes, microbatch=microbatch)
    update = plan.update(number)
    at = update.start
    for lane_number, lane in enumerate(update.lanes):
        assert lane.lane == lane_number
        for index, micro in enumerate(lane.microbatches):
            assert (micro.index, micro.start) == (index, at)
            assert 1 <= micro.examples <= microbatch
            at = micro.stop
        # Only the last microbatch of a lane may be short.
        assert all(m.examples == microbatch for m in lane.microbatches[:-1])
    assert at == update.stop
    sizes = [lane.examples for lane in update.lanes]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sum(sizes) == update.examples >= 1


def test_a_tail_by_hand():
    plan = made()
    assert plan.updates_per_epoch == 7
    tail = plan.update(7)
    assert (tail.epoch, tail.start, tail.stop, tail.examples) == (0, 96, 103, 7)
    parts = [[(m.start, m.stop) for m in lane.microbatches] for lane in tail.lanes]
    assert parts == [
        [(96, 98)],
        [(98, 99)],
        [(99, 100)],
        [(100, 101)],
        [(101, 102)],
        [(102, 103)],
    ]
    following = plan.update(8)
    assert (following.epoch, following.start, following.stop) == (1, 0, 16)
    widest = [[m.examples for m in lane.microbatches] for lane in following.lanes]
    assert widest == [[2, 1], [2, 1], [2, 1], [2, 1], [2], [2]]


def test_fewer_examples_than_lanes_leave_lanes_empty():
    # streaming#460: fewer examples than ranks.
    plan = made(examples=3)
    update = plan.update(1)
    assert [lane.examples for lane in update.lanes] == [1, 1, 1, 0, 0, 0]
    assert [len(lane.microbatches) for lane in update.lanes] == [1, 1, 1, 0, 0, 0]
    assert plan.updates_per_epoch == 1
    assert ids_of_rank(plan, 1, 5, 6) == []


def test_epochs_have_different_orders():
    # pytorch#31771: the same order every epoch.
    plan = made()
    orders = {tuple(plan.example_ids(0, 103, epoch).tolist()) for epoch in range(20)}
    assert len(orders) == 20
    assert all(sorted(o) == list(range(103)) for o in orders)


# --- ranks ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(lanes=st.integers(1, 64), ranks=st.integers(1, 64))
def test_ranks_carry_contiguous_blocks_of_lanes(lanes, ranks):
    ranks = min(lanes, ranks)
    plan = made(lanes=lanes)
    blocks = [plan.lanes_of(rank, ranks) for rank in range(ranks)]
    assert [lane for block in blocks for lane in block] == list(range(lanes))
    assert {len(b) for b in blocks} <= {lanes // ranks, lanes // ranks + 1}
    assert min(len(b) for b in blocks) >= 1


@pytest.mark.parametrize(("rank", "ranks"), [(0, 7), (2, 2), (-1, 2), (0, 0)])
def test_impossible_ranks_are_refused(rank, ranks):
    with pytest.raises(ValueError, match="6 lanes"):
        made().lanes_of(rank, ranks)


def test_ranks_change_in_mid_epoch_and_nothing_is_lost_or_repeated():
    plan = made(examples=10_007, global_batch=64, lanes=8, microbatch=4)
    seen = []
    for number in range(1, plan.updates_per_epoch + 1):
        ranks = 8 if number <= 60 else 6 if number <= 100 else 1
        for rank in range(ranks):
            seen += ids_of_rank(plan, number, rank, ranks)
    assert sorted(seen) == list(range(10_007))


def test_no_rank_has_an_update_that_another_has_not():
    # pytorch#38174: ranks with fewer batches leave the others waiting in a collective.
    plan = made()
    for number in range(1, 15):
        lanes = [lane.lane for lane in plan.update(number).lanes]
        assert lanes == list(range(6))


# --- positions -----------------------------------------------------------------------------------


def test_positions_follow_updates():
    plan = made()
    assert plan.after(0) == DataPosition(0, 0, 0)
    assert plan.after(3) == DataPosition(0, 48, 3)
    # The end of an epoch is the beginning of the next: one state, one name.
    assert plan.after(7) == DataPosition(1, 0, 7)
    assert plan.after(16) == DataPosition(2, 32, 16)


def test_resuming_any_number_of_times_at_any_place_is_the_same_run():
    # datasets#8308: the second resume restarts. icefall#473: the skip is done twice.
    # verl#7401: an epoch is skipped.
    straight = [tuple(ids_of_rank(made(), n, 0, 1)) for n in range(1, 23)]
    resumed, position = [], DataPosition(0, 0, 0)
    for stop in (1, 2, 5, 7, 8, 8, 14, 22):
        plan = made()
        assert position == plan.after(position.update)
        for number in range(position.update + 1, stop + 1):
            resumed.append(tuple(ids_of_rank(plan, number, 0, 1)))
            position = plan.after(number)
    assert resumed == straight


@pytest.mark.parametrize("number", [0, -1])
def test_there_is_no_update_before_the_first(number):
    with pytest.raises(ValueError, match="numbered from 1"):
        made().update(number)
    with pytest.raises(ValueError, match="no position"):
        made().after(number - 1)


def test_another_order_is_refused():
    with pytest.raises(ValueError, match="'randperm-2'"):
        made(order="randperm-2")


# --- digests and seeds ---------------------------------------------------------------------------


def test_the_sampler_digest_covers_everything():
    position = DataPosition(0, 32, 2)
    digests = {made().sampler_digest(position, 1, 3)}
    for changed in (
        {"dataset_hash": "blake3:" + "cd" * 32},
        {"examples": 104},
        {"seed": 8},
        {"lanes": 7},
        {"microbatch": 3},
    ):
        digests.add(made(**changed).sampler_digest(position, 1, 3))
    digests.add(made(global_batch=17).sampler_digest(DataPosition(0, 34, 2), 1, 3))
    digests.add(made().sampler_digest(DataPosition(0, 48, 3), 1, 3))
    digests.add(made().sampler_digest(position, 0, 3))
    digests.add(made().sampler_digest(position, 1, 2))
    assert len(digests) == 10
    assert made().sampler_digest(position, 1, 3) in digests


def test_the_sampler_digest_is_pinned():
    digest = made().sampler_digest(DataPosition(1, 16, 8), 1, 3)
    assert digest == GOLDEN_SAMPLER


def test_the_sampler_digest_sees_the_examples_themselves(monkeypatch):
    before = made().sampler_digest(DataPosition(0, 0, 0), 0, 2)
    plan = made()
    monkeypatch.setattr(plan, "_order", lambda epoch: order.EpochOrder(103, HASH, 99, epoch))
    assert plan.sampler_digest(DataPosition(0, 0, 0), 0, 2) != before


def test_a_rank_with_empty_lanes_has_a_sampler_digest():
    plan = made(examples=3)
    digests = {plan.sampler_digest(plan.after(0), rank, 6) for rank in range(6)}
    assert len(digests) == 6


@pytest.mark.parametrize(
    "position", [DataPosition(0, 31, 2), DataPosition(0, 103, 7), DataPosition(1, 32, 2)]
)
def test_positions_that_are_not_passed_through_are_refused(position):
    with pytest.raises(ValueError, match="is not where update"):
        made().sampler_digest(position, 0, 1)


def test_the_digest_of_an_updates_ids_is_that_of_its_examples():
    plan = made()
    digests = [plan.ids_digest(plan.update(number)) for number in range(1, 15)]
    assert len(set(digests)) == 14
    assert digests == [made(lanes=2).ids_digest(made().update(n)) for n in range(1, 15)]


def test_the_digest_of_an_updates_ids_is_pinned():
    # Receipts hold it.
    assert made().ids_digest(made().update(7)) == GOLDEN_IDS
    assert made().example_ids(96, 103, 0).tolist() == GOLDEN_TAIL
    assert int(made().example_seeds(np.array([5]), 2)[0]) == GOLDEN_EXAMPLE_SEED


def test_seeds_are_keyed_and_never_collide():
    plan = made()
    seeds = [
        plan.seed_for("forward", update, lane, micro)
        for update in range(20)
        for lane in range(6)
        for micro in range(3)
    ]
    seeds += [plan.seed_for("model"), plan.seed_for("forward"), plan.seed_for("forward", 1)]
    seeds += [made(seed=8).seed_for("forward", 1, 0, 0)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    # Neither the data nor the batch decides dropout.
    assert made(examples=50, lanes=1).seed_for("forward", 1, 0, 0) == seeds[18]
    assert plan.seed_for("forward", 1, 0, 0) == GOLDEN_SEED


def test_example_seeds_belong_to_example_and_epoch():
    # pytorch#5059: every worker augments with the same random numbers.
    plan = made()
    ids = plan.example_ids(0, 103, 0)
    seeds = plan.example_seeds(ids, 0)
    assert seeds.dtype == np.uint64
    assert len(set(seeds.tolist())) == 103
    assert np.array_equal(plan.example_seeds(ids[10:20], 0), seeds[10:20])
    assert not set(plan.example_seeds(ids, 1).tolist()) & set(seeds.tolist())
    assert not set(made(seed=8).example_seeds(ids, 0).tolist()) & set(seeds.tolist())
