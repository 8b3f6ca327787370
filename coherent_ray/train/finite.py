"""Numbers that are none: what is said where a loss, a gradient or a parameter is NaN or infinite.

A step with such a gradient leaves nothing to train on, and a generation saved after it would be
whole and worthless; retention would then give up the good ones for it. So by default a run stops
before the step, and before a save of parameters that are not finite. Every rank sees the same sums
after the reduction and holds the same parameters, so all decide alike without a message.

A step that the fp16 scaler skips is no such failure: finding infinities is how it works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from coherent_ray.errors import NotFinite
from coherent_ray.train.lanes import lanes_of

_REMEDY = (
    "the latest generation is from before it: look at the data; or lower the learning rate or set "
    "training.clip_norm, which needs run.claim: statistical, and run again; "
    "training.on_nonfinite: go_on steps in spite of it"
)
#: Lanes that a message names.
_NAMED = 8


def in_words(
    loss: float, grad_norm: float, losses: Sequence[float], ranks: int, *, scaled: bool
) -> str:
    """Return what is not finite in an update; empty: nothing, or what a scaler deals with.

    Args:
        loss: Of the update.
        grad_norm: Of the whole gradient.
        losses: Sum of each lane, over all lanes.
        ranks: Rank count, by which lanes are carried.
        scaled: Whether a gradient scaler skips this step where the gradient is not finite.
    """
    if math.isfinite(grad_norm) and math.isfinite(loss):
        return ""
    if scaled and not math.isfinite(grad_norm):
        return ""
    bad = [lane for lane, value in enumerate(losses) if not math.isfinite(value)]
    if not bad:
        return f"the norm of the gradient is {grad_norm}, and the loss {loss:g}"
    named = ", ".join(
        f"{lane} (rank {_rank_of(lane, len(losses), ranks)})" for lane in bad[:_NAMED]
    )
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    lanes = "lane" if len(bad) == 1 else "lanes"
    return f"the loss is {loss} because of {lanes} {named}{more}"


def stopped(update: int, what: str) -> NotFinite:
    """Return the error that ends a run, on every rank, before it steps."""
    return NotFinite(
        f"update {update} is not finite: {what}",
        where=f"update {update}",
        remedy=_REMEDY,
        details={"update": update},
    )


def require_parameters(model: nn.Module, update: int) -> None:
    """Return if every trainable parameter is finite, so that the state is worth a generation.

    Raises:
        NotFinite: One is not; names it.
    """
    named = model.named_parameters()
    trainable = [(n, p.detach()) for n, p in named if p.requires_grad and p.numel()]
    # The largest magnitude is finite exactly where all are, and cannot overflow as a sum can.
    if math.isfinite(float(get_total_norm([p for _, p in trainable], math.inf))):
        return
    name = next(n for n, p in trainable if not bool(torch.isfinite(p).all()))
    raise poisoned(name, update)


def poisoned(name: str, update: int) -> NotFinite:
    """Return the error that names the parameter which an update's step left without a number."""
    return stopped(update, f"its step left parameter {name} with a NaN or infinity")


def _rank_of(lane: int, lanes: int, ranks: int) -> int:
    return next(rank for rank in range(ranks) if lane in lanes_of(lanes, rank, ranks))
