"""The vote's vector: slots that never overlap, whatever the ranks say."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from coherent_ray.train.lanes import lanes_of
from coherent_ray.train.vote import WISH_BITS, Ballot, Outcome, VoteShape, disagreement, failure

EMPTY = Ballot(
    update=1,
    contents=7,
    losses={},
    counts={},
    present=(),
    touched=(False, False),
    wishes=0,
    failed=False,
)


def together(shape: VoteShape, ballots: list[Ballot], order: list[int]) -> Outcome:
    """What a sum collective would bring, adding the ranks in some order."""
    vectors = [shape.encode(ballot, rank) for rank, ballot in enumerate(ballots)]
    assert {len(vector) for vector in vectors} == {shape.length}
    total = [0.0] * shape.length
    for rank in order:
        total = [a + b for a, b in zip(total, vectors[rank], strict=True)]
    return shape.decode(total)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_the_outcome_is_what_was_said_in_any_order_of_adding(ranks: int) -> None:
    lanes, draw = 8, random.Random(ranks)
    shape = VoteShape(lanes, 4, ranks)
    losses = [draw.uniform(-1e9, 1e-9) for _ in range(lanes)]
    counts = [draw.randrange(2**50) for _ in range(lanes)]
    ballots = [
        Ballot(
            update=12,
            contents=2**48 - 1 - rank,
            losses={lane: losses[lane] for lane in lanes_of(lanes, rank, ranks)},
            counts={lane: counts[lane] for lane in lanes_of(lanes, rank, ranks)},
            present=[lane for lane in lanes_of(lanes, rank, ranks) if lane % 3],
            touched=[False, rank == 0, rank == ranks - 1, True],
            wishes=1 << rank | 1 << WISH_BITS - 1,
            failed=rank == 1,
            token=2**53 - 1 - rank if rank % 2 else 0,
            begun=3 * rank + 1,
            again=rank == 2,
        )
        for rank in range(ranks)
    ]
    expected = Outcome(
        losses=tuple(losses),
        counts=tuple(counts),
        present=tuple(lane % 3 > 0 for lane in range(lanes)),
        touched=(False, True, True, True),
        wishes=(1 << ranks) - 1 | 1 << WISH_BITS - 1,
        failed=(1,) if ranks > 1 else (),
        updates=(12,) * ranks,
        contents=tuple(2**48 - 1 - rank for rank in range(ranks)),
        tokens=tuple(2**53 - 1 - rank if rank % 2 else 0 for rank in range(ranks)),
        begun=3 * ranks - 2,
        again=ranks > 2,
    )
    for _ in range(5):
        order = draw.sample(range(ranks), ranks)
        assert together(shape, ballots, order) == expected


def test_an_empty_ballot_says_nothing() -> None:
    outcome = together(VoteShape(3, 2, 1), [EMPTY], [0])
    assert outcome.losses == (0.0,) * 3
    assert outcome.present == (False,) * 3
    assert outcome.touched == (False, False)
    assert (outcome.wishes, outcome.failed, outcome.contents) == (0, (), (7,))


def test_negative_zero_is_the_same_at_one_rank_and_at_two() -> None:
    ballot = replace(EMPTY, losses={0: -0.0})
    alone = together(VoteShape(2, 2, 1), [ballot], [0]).losses
    two = together(VoteShape(2, 2, 2), [ballot, EMPTY], [1, 0]).losses
    assert [math.copysign(1, loss) for loss in alone + two] == [1.0] * 4


def test_losses_that_are_not_finite_arrive() -> None:
    ballot = replace(EMPTY, losses={0: math.inf, 1: math.nan, 2: -math.inf})
    infinite, nothing, negative = together(VoteShape(3, 2, 2), [ballot, EMPTY], [0, 1]).losses
    assert (infinite, negative) == (math.inf, -math.inf)
    assert math.isnan(nothing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wishes": 1 << WISH_BITS}, "do not fit"),
        ({"wishes": -1}, "do not fit"),
        ({"token": 2**53}, "no number below"),
        ({"touched": (True,)}, "1 flags for 2 parameters"),
        ({"losses": {3: 1.0}}, "no lane 3 of 3"),
        ({"counts": {-1: 1}}, "no lane -1 of 3"),
        ({"present": [5]}, "no lane 5 of 3"),
    ],
)
def test_what_has_no_slot_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VoteShape(3, 2, 1).encode(replace(EMPTY, **change), 0)


def test_a_failure_names_every_rank_and_the_first_reason() -> None:
    error = failure(4, {2: "no space", 5: "killed"})
    assert error.what == "update 4 failed on rank 2, 5: no space"
    assert error.where == "rank 2, 5"
    assert error.details == {"update": 4, "ranks": {"2": "no space", "5": "killed"}}


@pytest.mark.parametrize(
    ("said", "usual", "others"),
    [([3, 3, 4], 3, {"2": 4}), ([9, 8], 8, {"0": 9}), ([1, 2, 2, 0], 2, {"0": 1, "3": 0})],
)
def test_a_disagreement_names_the_minority(
    said: list[int], usual: int, others: dict[str, int]
) -> None:
    error = disagreement("update", said)
    assert error.details == {"what": "update", "usual": usual, "ranks": others}
    assert all(f"rank {rank} has {value}" in error.what for rank, value in others.items())
