"""Tasks with every optimizer, schedule and average that a run may have; they draw no numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from session_tasks import Plain
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Lion(Optimizer):
    """Steps by the sign of an interpolated momentum, in the dtype that it was asked for."""

    def __init__(self, parameters: Any, lr: float, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("m", torch.zeros_like(p, dtype=group["dtype"]))
                p.add_(momentum.float().lerp(p.grad, 1 - first).sign(), alpha=-group["lr"])
                momentum.lerp_(p.grad.to(momentum.dtype), 1 - second)


class Odd(Optimizer):
    """Keeps one of everything: each value of its state decides a later step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._one(p, p.grad, self.state[p], group["lr"])

    def _one(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state |= {"count": 0, "best": float("inf"), "warm": True, "last": None, "seen": ()}
            state |= {"rows": torch.zeros(p.shape[0], dtype=torch.float64), "norms": {}}
        norm = float(gradient.norm())
        state["count"] += 1
        state["best"] = min(state["best"], norm)
        state["warm"] = state["count"] < 3
        state["seen"] = (*state["seen"], norm)[-2:]
        state["norms"][state["count"]] = torch.tensor([norm])
        state["rows"] += gradient.double().reshape(p.shape[0], -1).mean(1)
        scale = (
            lr * (0.5 if state["warm"] else 1.0) * (1 + state["best"] / (1 + sum(state["seen"])))
        )
        scale *= 1 + 0.1 * float(torch.cat(list(state["norms"].values())).mean())
        pull = state["rows"].to(p.dtype).reshape(-1, *[1] * (p.dim() - 1))
        p.sub_(scale * (gradient + 0.1 * pull))
        state["last"] = norm if state["last"] is None else state["last"] * 0.5 + norm


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=0.02, foreach=False),
    "adamw-foreach": partial(AdamW, lr=0.02, foreach=True),
    "adamw-fused": partial(AdamW, lr=0.02, fused=True),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": partial(Adafactor, lr=0.02),
    "lion": partial(Lion, lr=0.01),
    "odd": partial(Odd, lr=0.02),
    "closure": partial(torch.optim.LBFGS, lr=0.02),
}


def _sequential(optimizer: Optimizer, updates: int) -> LRScheduler:
    warm, rest = LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, updates)
    return SequentialLR(optimizer, [warm, rest], [2])


SCHEDULERS: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "plateau": lambda o, _: ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.2),
    "sequential": _sequential,
    "one-cycle": lambda o, updates: OneCycleLR(o, 0.1, total_steps=updates + 1),
}


class Chosen(Plain):
    """One of each, by name; a factor makes fp16 overflow at first."""

    def __init__(self, optimizer: str = "adamw", scheduler: str = "", factor: float = 1.0) -> None:
        super().__init__()
        self._optimizer, self._scheduler, self._factor = optimizer, scheduler, factor
        if scheduler:
            self.configure_scheduler = SCHEDULERS[scheduler]

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        return OPTIMIZERS[self._optimizer](model.parameters())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        return self._factor * loss, count


class Averaged(Chosen):
    """An exponential moving average of the weights."""

    def configure_average(self, model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)


class Growing(Chosen):
    """Its optimizer begins with the last layer alone."""

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model[2].parameters(), lr=0.02)  # type: ignore[index]


class Hoarder(Chosen):
    """Its optimizer makes, in its first step, what no generation can hold."""

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        class Hoards(SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                super().step()
                for group in self.param_groups:
                    for parameter in group["params"]:
                        self.state[parameter]["history"] = [torch.zeros(5000)]

        return Hoards(model.parameters(), lr=0.1)
