"""A changed job's settings of its optimizer win over the stored; schedules keep their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_run import config_for
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from coherent_ray.train.code import NO_CODE, Code
from coherent_ray.train.recipe import recipe_of
from coherent_ray.train.resettings import are_meant, settings_of, take_over

UPDATES = 12


def cosine(optimizer: Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, UPDATES)


def warm(optimizer: Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, UPDATES)]
    return SequentialLR(optimizer, parts, [3])


def trained(
    lr: float, make: Callable[[Optimizer], LRScheduler] | None, updates: int
) -> tuple[Optimizer, LRScheduler | None, list[float]]:
    """An optimizer, its schedule, and the rate that each update had."""
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=lr)
    scheduler = make(optimizer) if make else None
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return optimizer, scheduler, rates


def on(optimizer: Optimizer, scheduler: LRScheduler | None, updates: int) -> list[float]:
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


@pytest.mark.parametrize("make", [None, cosine, warm])
def test_a_changed_rate_goes_on_as_if_the_run_had_begun_with_it(
    make: Callable[[Optimizer], LRScheduler] | None,
) -> None:
    optimizer, scheduler, _ = trained(0.1, make, 5)
    fresh, _, _ = trained(0.02, make, 0)
    notes = take_over(settings_of(fresh), optimizer, scheduler)
    assert notes == ["optimizer.param_groups.0: lr, where it begins: 0.1 -> 0.02"]
    *_, rates = trained(0.02, make, UPDATES)
    assert on(optimizer, scheduler, UPDATES - 5) == pytest.approx(rates[5:])


def test_what_a_schedule_has_done_is_no_change() -> None:
    for make in (cosine, warm, lambda o: OneCycleLR(o, 0.1, total_steps=UPDATES)):
        optimizer, scheduler, _ = trained(0.1, make, 5)
        before = copy.deepcopy(settings_of(optimizer))
        fresh, _, _ = trained(0.1, make, 0)
        assert take_over(settings_of(fresh), optimizer, scheduler) == []
        assert settings_of(optimizer) == before


def test_a_rate_whose_beginning_nobody_kept_stays_and_is_told() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    reduced = optimizer.param_groups[0]["lr"]
    assert reduced < 0.1
    fresh = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    [note] = take_over(settings_of(fresh), optimizer, scheduler)
    assert "lr stays" in note
    assert optimizer.param_groups[0]["lr"] == reduced


def test_other_settings_win_group_by_group() -> None:
    def made(decay: float, betas: tuple[float, float]) -> Optimizer:
        weights, biases = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        groups = [{"params": [weights], "weight_decay": decay}, {"params": [biases]}]
        return AdamW(groups, betas=betas, weight_decay=0.0)

    optimizer = made(0.1, (0.9, 0.999))
    notes = take_over(settings_of(made(0.5, (0.8, 0.999))), optimizer)
    assert notes == [
        "optimizer.param_groups.0: betas: (0.9, 0.999) -> (0.8, 0.999)",
        "optimizer.param_groups.0: weight_decay: 0.1 -> 0.5",
        "optimizer.param_groups.1: betas: (0.9, 0.999) -> (0.8, 0.999)",
    ]
    assert settings_of(optimizer) == settings_of(made(0.5, (0.8, 0.999)))


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    """A captured graph holds it."""
    rate = torch.tensor(0.1)
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=rate, foreach=True, capturable=True)
    fresh = AdamW(
        [nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5), foreach=True, capturable=True
    )
    take_over(settings_of(fresh), optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


@pytest.mark.parametrize(("claim", "meant"), [("statistical", True), ("invariant", False)])
def test_only_the_claim_that_lets_a_job_change_lets_its_settings(
    claim: str, meant: bool, tmp_path: Path
) -> None:
    """A source that one side does not know is no change that anybody made."""
    config = config_for(tmp_path, run__claim=claim)
    header = SimpleNamespace(recipe=recipe_of(config))
    assert not are_meant(config, header, NO_CODE)
    assert are_meant(config, header, Code({"my_task": "blake3:00"}, {})) is meant
