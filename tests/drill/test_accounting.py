"""What a history consumed: whatever is lost, repeated or in another order is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coherent_ray.commit.manifest import PlanIdentity
from coherent_ray.data import order
from coherent_ray.data.plan import Plan
from coherent_ray.digests import Digest, digest_of
from coherent_ray.drill.accounting import epochs_of, faults
from coherent_ray.train.receipts import Receipt, ReceiptChain

IDENTITY = PlanIdentity("blake3:" + "ab" * 32, 21, 7, order.NAME, 8, 4, 1)
Take = tuple[int, int, int, Digest]


def takes(identity: PlanIdentity, updates: int) -> list[Take]:
    """What updates take: epoch, start, stop, digest of the ids."""
    plan = Plan(identity)
    found = [plan.update(number) for number in range(1, updates + 1)]
    return [(u.epoch, u.start, u.stop, plan.ids_digest(u)) for u in found]


def told(took: list[Take]) -> list[Receipt]:
    chain = ReceiptChain("blake3:" + "00" * 32, 0)
    for epoch, start, stop, ids in took:
        chain.append(
            epoch=epoch, start=start, stop=stop, ids=ids,
            count=stop - start, loss=1.0, grad_norm=1.0, lr=[0.1],
        )  # fmt: skip
    return list(chain.pending)


def test_nothing_is_wrong_with_some_epochs() -> None:
    assert faults(IDENTITY, told(takes(IDENTITY, 10))) == []


@settings(deadline=None, max_examples=80)
@given(
    examples=st.integers(1, 200),
    global_batch=st.integers(1, 60),
    lanes=st.integers(1, 8),
    lives=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30), st.integers(0, 5)), max_size=8),
)
def test_any_sequence_of_rank_counts_and_kills_takes_each_example_once_an_epoch(
    examples: int, global_batch: int, lanes: int, lives: list[tuple[int, int, int]]
) -> None:
    """The history is what was published; a kill takes back what was not, and it is done again."""
    lanes = min(lanes, global_batch)
    identity = PlanIdentity("blake3:" + "cd" * 32, examples, 3, order.NAME, global_batch, lanes, 2)
    plan = Plan(identity)
    total = 2 * plan.updates_per_epoch
    history: list[list[int]] = []
    # The last life goes on to the end.
    for ranks, updates, lost in [*lives, (1, total, 0)]:
        position = plan.after(len(history))
        done = [
            ids_of_all_ranks(plan, number, min(ranks, lanes))
            for number in range(position.update + 1, min(position.update + updates, total) + 1)
        ]
        history += done[: max(0, len(done) - lost)]
    for epoch in (0, 1):
        first = epoch * plan.updates_per_epoch
        seen = [i for update in history[first : first + plan.updates_per_epoch] for i in update]
        assert sorted(seen) == list(range(examples))
    assert faults(identity, told(takes(identity, total))) == []


def ids_of_all_ranks(plan: Plan, number: int, ranks: int) -> list[int]:
    update = plan.update(number)
    return [
        int(i)
        for rank in range(ranks)
        for lane in plan.lanes_of(rank, ranks)
        for micro in update.lanes[lane].microbatches
        for i in plan.example_ids(micro.start, micro.stop, update.epoch)
    ]


def _repeated(took: list[Take]) -> Iterator[Take]:
    yield from took[:2]
    yield from took[1:]


def _left_out(took: list[Take]) -> Iterator[Take]:
    yield from (take for index, take in enumerate(took) if index != 1)


def _tail_dropped(took: list[Take]) -> Iterator[Take]:
    yield from (take for take in took if take[2] != IDENTITY.examples)


def _others(took: list[Take]) -> Iterator[Take]:
    for index, (epoch, start, stop, ids) in enumerate(took):
        yield epoch, start, stop, digest_of(b"others") if index == 3 else ids


def _epoch_skipped(took: list[Take]) -> Iterator[Take]:
    yield from took[:3]
    yield from (take for take in took if take[0] >= 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_repeated, "update 3 repeats examples of epoch 0"),
        (_left_out, "epoch 0 is over, and 8 examples were never taken"),
        (_tail_dropped, "update 3 begins at position 0 of epoch 1, not at position 16 of epoch 0"),
        (_others, "update 4 did not take the examples at its positions"),
        (_epoch_skipped, "update 4 begins at position 0 of epoch 2, not at position 0 of epoch 1"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[list[Take]], Iterator[Take]], says: str) -> None:
    assert says in faults(IDENTITY, told(list(change(takes(IDENTITY, 12)))))


def test_one_order_for_all_epochs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = order.EpochOrder.__init__
    monkeypatch.setattr(
        order.EpochOrder, "__init__", lambda self, n, key, seed, epoch: made(self, n, key, seed, 0)
    )
    assert faults(IDENTITY, told(takes(IDENTITY, 6))) == ["epoch 1 has the order of epoch 0"]


def test_positions_beyond_the_data_are_a_fault_and_no_crash() -> None:
    took = takes(IDENTITY, 2)
    found = faults(IDENTITY, told([took[0], (0, 30, 40, took[1][3])]))
    assert "update 2 begins at position 30 of epoch 0, not at position 8 of epoch 0" in found


def test_a_run_of_few_examples_may_repeat_an_order_by_chance() -> None:
    tiny = replace(IDENTITY, examples=1, global_batch=1, lanes=1)
    assert faults(tiny, told(takes(tiny, 5))) == []


def test_how_far_a_run_goes() -> None:
    assert epochs_of(IDENTITY, 3) == 1.0
    assert epochs_of(IDENTITY, 7) == pytest.approx(2 + 8 / 21)
