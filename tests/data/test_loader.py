"""The loader gives every update once, in order, with errors in their place and no thread left."""

import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from coherent_ray.commit.manifest import PlanIdentity
from coherent_ray.data import order
from coherent_ray.data.loader import EXAMPLE_COLUMN, SEED_COLUMN, Loader
from coherent_ray.data.plan import Plan
from coherent_ray.errors import DataError

IDENTITY = PlanIdentity("blake3:" + "ab" * 32, 103, 7, order.NAME, 16, 6, 2)
PLAN = Plan(IDENTITY)


class Numbers:
    """A source whose rows are ten times their number."""

    columns = ("x",)

    def __init__(self, size=103):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def rows(self, ids):
        self.asked += ids.tolist()
        return {"x": ids * 10}


def made(rank=0, ranks=1, collate=dict, source=None, plan=PLAN, **options):
    return Loader(source or Numbers(), plan, rank, ranks, collate, **options)


def ids_of(update):
    return [int(i) for lane in update.lanes for m in lane.microbatches for i in m.batch["_example"]]


def threads():
    return [t for t in threading.enumerate() if t.name == "coherent-ray-loader"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert threads() == []


@pytest.mark.parametrize("prefetch", [0, 1, 2, 50])
def test_updates_come_in_order_with_their_rows(prefetch):
    with made(prefetch=prefetch) as loader:
        updates = list(loader.updates(1, 15))
    assert [u.plan.update for u in updates] == list(range(1, 16))
    for update in updates:
        expected = PLAN.update(update.plan.update)
        assert update.plan == expected
        assert update.ids == PLAN.ids_digest(expected)
        assert [lane.lane for lane in update.lanes] == list(range(6))
        ids = PLAN.example_ids(expected.start, expected.stop, expected.epoch)
        assert ids_of(update) == ids.tolist()
        for lane, planned in zip(update.lanes, expected.lanes, strict=True):
            assert tuple(m.plan for m in lane.microbatches) == planned.microbatches
            for micro in lane.microbatches:
                assert np.array_equal(micro.batch["x"], micro.batch[EXAMPLE_COLUMN] * 10)


def test_an_epoch_is_consumed_once_whatever_the_ranks():
    for ranks in (1, 2, 4, 6):
        seen = []
        for rank in range(ranks):
            with made(rank, ranks) as loader:
                seen += [i for update in loader.updates(1, 7) for i in ids_of(update)]
        assert sorted(seen) == list(range(103))


def test_a_lanes_batches_do_not_depend_on_the_rank_count():
    def by_lane(ranks):
        found = {}
        for rank in range(ranks):
            with made(rank, ranks) as loader:
                for update in loader.updates(1, 8):
                    for lane in update.lanes:
                        batches = [m.batch["x"].tolist() for m in lane.microbatches]
                        found[update.plan.update, lane.lane] = batches
        return found

    assert by_lane(1) == by_lane(2) == by_lane(4) == by_lane(6)


def test_every_rank_tells_the_same_digest_of_the_whole_update():
    digests = set()
    for rank in range(4):
        with made(rank, 4) as loader:
            digests.add(tuple(u.ids for u in loader.updates(1, 9)))
    assert len(digests) == 1


def test_what_was_prefetched_and_not_used_is_read_again():
    # data#1520, transformers#40690: prefetched batches are lost on resume.
    with made(prefetch=0) as loader:
        straight = [ids_of(u) for u in loader.updates(1, 14)]
    resumed, done = [], 0
    for stop in (1, 5, 7, 14):
        with made(prefetch=5) as loader:
            for update in loader.updates(done + 1):
                resumed.append(ids_of(update))
                done = update.plan.update
                if done == stop:
                    break
    assert resumed == straight


def test_an_empty_lane_has_no_microbatches():
    plan = Plan(replace(IDENTITY, examples=3))
    with made(source=Numbers(3), plan=plan) as loader:
        (update,) = loader.updates(1, 1)
    assert [len(lane.microbatches) for lane in update.lanes] == [1, 1, 1, 0, 0, 0]
    with made(5, 6, source=Numbers(3), plan=plan) as loader:
        (alone,) = loader.updates(1, 1)
    assert ids_of(alone) == []
    assert alone.ids == update.ids


def test_seeds_belong_to_examples_and_not_to_readers():
    # pytorch#5059: each worker augments with the same random numbers.
    def seeds(rank, ranks, first, last):
        with made(rank, ranks) as loader:
            return {
                (u.plan.epoch, int(i)): int(s)
                for u in loader.updates(first, last)
                for lane in u.lanes
                for m in lane.microbatches
                for i, s in zip(m.batch[EXAMPLE_COLUMN], m.batch[SEED_COLUMN], strict=True)
            }

    whole = seeds(0, 1, 1, 14)
    assert len(whole) == len(set(whole.values())) == 206
    parts = {**seeds(0, 2, 1, 14), **seeds(1, 2, 1, 14)}
    assert parts == whole
    assert seeds(0, 1, 9, 12).items() <= whole.items()


def test_without_a_last_update_it_goes_on():
    with made() as loader:
        for update in loader.updates(5):
            if update.plan.update == 40:
                break
    assert update.plan.epoch == 5


def test_nothing_is_read_beyond_the_bound():
    source = Numbers()
    with made(source=source, prefetch=2) as loader:
        updates = loader.updates(1, 100)
        next(updates)
        time.sleep(0.1)
        # One is out, two are ready, one waits for room.
        assert len(source.asked) == 16 * 4
        updates.close()


def test_nothing_is_read_before_it_is_asked_for():
    source = Numbers()
    with made(source=source):
        assert threads() == []
    assert source.asked == []


def test_an_error_comes_at_its_update_after_all_before_it():
    wanted = int(PLAN.example_ids(33, 34, 0)[0])

    def collate(rows):
        if wanted in rows["_example"]:
            raise RuntimeError("a torn image")
        return rows

    for prefetch in (0, 1, 10):
        seen = []
        loader = made(collate=collate, prefetch=prefetch)
        with pytest.raises(RuntimeError, match="a torn image") as caught:
            seen.extend(update.plan.update for update in loader.updates(1, 5))
        assert seen == [1, 2]
        (note,) = caught.value.__notes__
        assert "lane 0 of update 3 (positions 32 to 33 of epoch 0)" in note


def test_an_error_is_not_swallowed_by_an_iterator_that_is_asked_again():
    def collate(rows):
        raise RuntimeError("always")

    updates = made(collate=collate).updates(1, 5)
    with pytest.raises(RuntimeError):
        next(updates)
    assert list(updates) == []


def test_closing_while_the_reader_waits_or_reads():
    slow = made(collate=lambda rows: time.sleep(0.01) or rows, prefetch=1)
    updates = slow.updates(1)
    next(updates)
    assert len(threads()) == 1
    slow.close()
    slow.close()
    assert threads() == []
    assert list(updates) == []


def test_an_iterator_that_is_dropped_takes_its_thread_along():
    def first():
        return next(iter(made().updates(1))).plan.update

    assert first() == 1


def test_an_exception_in_the_training_loop_closes_the_loader():
    def train():
        with made() as loader:
            for _ in loader.updates(1):
                raise KeyError("in training")

    with pytest.raises(KeyError, match="in training"):
        train()


def test_reading_runs_beside_training():
    seen = set()

    def collate(rows):
        seen.add(threading.current_thread().name)
        return rows

    with made(collate=collate) as loader:
        list(loader.updates(1, 2))
    assert seen == {"coherent-ray-loader"}
    with made(collate=collate, prefetch=0) as loader:
        list(loader.updates(1, 2))
    assert threading.current_thread().name in seen


def test_a_source_of_another_size_is_refused():
    with pytest.raises(DataError, match="102 examples, the plan 103"):
        made(source=Numbers(102))


@pytest.mark.parametrize("options", [{"rank": 6, "ranks": 6}, {"ranks": 7}, {"prefetch": -1}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(ValueError, match=r"6 lanes|prefetch"):
        made(**options)


@pytest.mark.parametrize("name", [EXAMPLE_COLUMN, SEED_COLUMN])
def test_columns_of_reserved_names_are_refused(name):
    class Taken(Numbers):
        def rows(self, ids):
            return {name: ids}

    with pytest.raises(DataError, match=f"column '{name}'"):
        list(made(source=Taken()).updates(1, 1))
