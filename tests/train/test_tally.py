"""What lanes come to, broken off anywhere."""

from __future__ import annotations

import random

import pytest
import torch

from coherent_ray.train.tally import LaneTally, Tally


def test_a_lane_broken_off_anywhere_comes_to_the_same_bits() -> None:
    draw = random.Random(1)
    losses = [torch.tensor(draw.uniform(-1e6, 1e-6), dtype=torch.float32) for _ in range(9)]

    def add(tally: Tally, some: list[torch.Tensor]) -> None:
        for loss in some:
            tally.add(3, loss, 2)
            tally.did(3)

    whole = Tally()
    add(whole, losses)
    expected = 0.0
    for loss in losses:
        expected += float(loss.double())
    assert whole.so_far() == {3: LaneTally(9, expected, 18)}
    for at in range(10):
        first, second = Tally(), Tally()
        add(first, losses[:at])
        second.resume(first.so_far())
        assert second.done(3) == at
        add(second, losses[at:])
        assert second.so_far() == whole.so_far()


def test_to_look_changes_nothing() -> None:
    tally = Tally()
    tally.add(0, torch.tensor(0.5), 1)
    assert tally.so_far() == tally.so_far() == {0: LaneTally(0, 0.5, 1)}
    tally.did(0)
    tally.did(1)
    assert tally.so_far() == {0: LaneTally(1, 0.5, 1), 1: LaneTally(1, 0.0, 0)}
    assert tally.done(2) == 0


@pytest.mark.parametrize("loss", [float("inf"), float("-inf")])
def test_losses_that_are_not_finite_stay(loss: float) -> None:
    tally = Tally()
    tally.add(0, torch.tensor(loss), 1)
    assert tally.so_far()[0].loss == loss
