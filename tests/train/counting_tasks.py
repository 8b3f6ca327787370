"""Tasks whose microbatches weigh differently: ignored tokens, examples that are filtered out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from small_run import WIDTH
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

IGNORED = -100
#: What a token may say; the last ones are rare.
KINDS = 5


class Words:
    """Each item of a vector is a token, and the kind of the next one its target.

    Tokens of high value are ignored; examples that begin low are filtered out whole.
    """

    dtype = torch.float32

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, KINDS)).to(self.dtype)

    def configure_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.02)

    def collate(self, rows: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return tokens(torch.from_numpy(np.stack(list(rows["x"]))).to(self.dtype))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, targets = batch
        loss = nn.functional.cross_entropy(
            model(x).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss, int((targets != IGNORED).sum())


class DoubleWords(Words):
    dtype = torch.float64


def tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs ``[n, WIDTH - 1, 2]`` and the targets ``[n, WIDTH - 1]`` of examples."""
    kept = x[x[:, 0] > -0.6]
    place = torch.arange(WIDTH - 1, dtype=x.dtype).expand(len(kept), -1)
    targets = (kept[:, 1:] * 1.5 + 2).clamp(0, KINDS - 1).long()
    return torch.stack([kept[:, :-1], place], 2), targets.masked_fill(kept[:, 1:] > 0.7, IGNORED)
