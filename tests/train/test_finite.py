"""NaN and infinity: the run stops before they are in a generation, unless it is told to go on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import Left, Tiny, admit, config_for, coordinating, run_loop, train
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from coherent_ray.config import Config
from coherent_ray.errors import NotFinite
from coherent_ray.train import finite


class Poisoned(Tiny):
    """Eight microbatches an update, two a lane: the 14th is lane 2's in update 2."""

    def __init__(self, how: str = "nan", at: int = 13, until: int = 14) -> None:
        super().__init__()
        self.how, self.at, self.until = how, at, until
        self.calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = super().loss(model, batch)
        self.calls += 1
        if self.at < self.calls <= self.until:
            if self.how == "gradient":
                parameter = next(model.parameters())
                return total + torch.sqrt(parameter.sum() * 0), count
            return total * float(self.how), count
        return total, count


class Driven(Tiny):
    """Steps so far that a finite gradient leaves no finite parameter."""

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1e38)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = super().loss(model, batch)
        return total * 1000, count


def config(folder: Path, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "task__factory": "test_finite:Poisoned",
        "checkpoint__every_updates": 1,
    }
    return config_for(folder, **(given | changes))


def stopped(settings: Config) -> NotFinite:
    with pytest.raises(NotFinite) as caught:
        train(settings)
    return caught.value


@pytest.mark.parametrize("how", ["nan", "inf", "-inf"])
def test_a_loss_that_is_none_stops_before_the_step(tmp_path: Path, how: str) -> None:
    error = stopped(config(tmp_path, task__args={"how": how}))
    assert error.what.startswith("update 2 is not finite: the loss is ")
    assert "because of lane 2 (rank 0)" in error.what
    assert error.where == "update 2"
    assert "training.on_nonfinite" in error.remedy
    assert (error.exit_code, error.details) == (1, {"update": 2})
    left = Left(config(tmp_path))
    assert left.updates == [1]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in left.state().values())


def test_a_gradient_that_is_none_stops_before_the_step(tmp_path: Path) -> None:
    error = stopped(config(tmp_path, task__args={"how": "gradient"}))
    assert "update 2 is not finite: the norm of the gradient is nan, and the loss 0." in error.what
    assert Left(config(tmp_path)).updates == [1]


def test_parameters_that_a_step_drove_off_are_not_saved(tmp_path: Path) -> None:
    settings = config(tmp_path, task__factory="test_finite:Driven")
    error = stopped(settings)
    assert error.what.startswith("update 1 is not finite: its step left parameter 0.weight with")
    assert Left(settings).generations == []


def test_the_run_goes_on_once_something_is_changed(tmp_path: Path) -> None:
    """What was changed here is the data's luck: the task that resumes counts its calls anew."""
    stopped(config(tmp_path))
    settings = config(tmp_path, training__on_nonfinite="go_on", task__args={"at": 13})
    with pytest.raises(Exception, match="the job changed"):
        train(settings)  # the task's arguments are another job; the setting alone is not:
    settings = config(tmp_path, training__on_nonfinite="go_on")
    left = train(settings)
    assert left.updates[:2] == [1, 2]


def reported(settings: Config) -> list[str]:
    notes: list[str] = []
    with coordinating(settings) as coordinator:
        admit(settings, coordinator)
        run_loop(settings, coordinator)
        for report in coordinator.reports:
            notes += [note for note in report["notes"] if note not in notes]
    return notes


@pytest.mark.usefixtures("one_process")
def test_go_on_steps_and_tells_the_first_of_a_row(tmp_path: Path) -> None:
    notes = reported(config(tmp_path, training__on_nonfinite="go_on"))
    assert len(notes) == 1  # from then on everything is NaN
    assert notes[0].startswith("update 2 is not finite: the loss is nan because of lane 2 (rank 0)")
    assert Left(config(tmp_path)).updates == [1, 2, 3, 4, 5, 6]
    assert [r.loss == "nan" for r in Left(config(tmp_path)).receipts()] == [False] + [True] * 5


@pytest.mark.usefixtures("one_process")
def test_a_step_that_the_scaler_skips_is_no_failure(tmp_path: Path) -> None:
    settings = config(tmp_path, training__precision="fp16", task__args={"how": "inf"})
    assert reported(settings) == []
    skipped = [r.skipped for r in Left(settings).receipts()]
    assert skipped[1]
    assert Left(settings).updates == [1, 2, 3, 4, 5, 6]


def test_ranks_and_lanes_are_named() -> None:
    losses = (0.0, 1.0, math.nan, math.inf)
    assert finite.in_words(math.nan, 1.0, losses, 2, scaled=False) == (
        "the loss is nan because of lanes 2 (rank 1), 3 (rank 1)"
    )
    many = finite.in_words(math.nan, 1.0, (math.nan,) * 20, 4, scaled=False)
    assert "0 (rank 0), 1 (rank 0)" in many
    assert many.endswith("and 12 more")
    assert finite.in_words(1.0, 1.0, losses, 2, scaled=False) == ""
    assert finite.in_words(1.0, math.inf, losses, 2, scaled=True) == ""
    assert finite.in_words(math.nan, 1.0, losses, 2, scaled=True) != ""


def test_frozen_and_empty_parameters_are_no_trouble() -> None:
    model = nn.Linear(3, 2)
    model.empty = nn.Parameter(torch.empty(0))
    model.mask = nn.Parameter(torch.tensor([-math.inf]), requires_grad=False)
    finite.require_parameters(model, 1)
    finite.require_parameters(nn.Identity(), 1)
    with torch.no_grad():
        model.bias[1] = math.nan
    with pytest.raises(NotFinite, match="left parameter bias with"):
        finite.require_parameters(model, 4)


def test_large_numbers_are_finite() -> None:
    """A sum of their squares is not."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(3e38)
    finite.require_parameters(model, 1)
