"""Tasks with everything that a state can hold: schedulers, groups, ties, statistics, scalers."""

from __future__ import annotations

from typing import Any

import torch
from small_run import WIDTH, Tiny
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)


class Momentum(Tiny):
    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class Warmed(Tiny):
    """A schedule of schedules, over an AdamW of the configuration."""

    def configure_scheduler(self, optimizer: Optimizer, updates: int) -> LRScheduler:
        parts: list[Any] = [LinearLR(optimizer, 0.1, total_iters=2)]
        parts.append(CosineAnnealingLR(optimizer, updates - 2))
        return SequentialLR(optimizer, parts, [2])


class Plateau(Momentum):
    """A schedule that looks at the loss; its best so far is an infinity at first."""

    def configure_scheduler(self, optimizer: Optimizer, updates: int) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)


class Grouped(Tiny):
    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim == 1]
        groups = [
            {"params": biases, "weight_decay": 0.0, "lr": 0.01},
            {"params": weights, "amsgrad": True},
        ]
        return AdamW(groups, lr=0.003, weight_decay=0.1)


class Frozen(Tiny):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        return model


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))[:, :2]


class Tied(Tiny):
    def build_model(self) -> nn.Module:
        return TiedModel()


class NormedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        # Batch norm cannot train on one row, which a microbatch may be.
        both = torch.cat([x, 0.5 * x + 1])
        return self.last(self.norm(self.first(both)))[: len(x)]


class Normed(Tiny):
    def build_model(self) -> nn.Module:
        return NormedModel()


class SometimesModel(nn.Module):
    """A layer that only some microbatches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result = self.always(x)
        return result + self.sometimes(x) if float(x[0, 0]) > 0.6 else result


class Sometimes(Tiny):
    def build_model(self) -> nn.Module:
        return SometimesModel()


class Plain(Tiny):
    """No dropout: a second opinion can be had by hand."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 2))

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.5)
