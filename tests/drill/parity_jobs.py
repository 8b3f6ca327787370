"""Jobs for proofs: seconds long, and each with something that a resume can lose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from coherent_ray import config as config_
from coherent_ray.config import Config

WIDTH = 4
#: Updates of 8, 8 and 5 examples: in the last, one of four lanes has two examples.
EXAMPLES = 21
UPDATES = 7


class Dropout:
    """Two layers and dropout."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Dropout(0.25), nn.Linear(5, 2))

    def collate(self, rows: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.stack(list(rows["x"]))), torch.as_tensor(rows["y"])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


class Scheduled(Dropout):
    """A cosine over the whole run."""

    def configure_scheduler(self, optimizer: Optimizer, updates: int) -> LRScheduler:
        return CosineAnnealingLR(optimizer, updates)


class NormedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        # Batch norm cannot train on one row, which a microbatch may be.
        both = torch.cat([x, 0.5 * x + 1])
        return self.last(self.norm(self.first(both)))[: len(x)]


class Normed(Dropout):
    """Statistics that a forward pass changes."""

    def build_model(self) -> nn.Module:
        return NormedModel()


class Unkeyed(Dropout):
    """Noise from a source that no key reaches."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y = batch
        noise = torch.frombuffer(bytearray(os.urandom(x.numel())), dtype=torch.uint8)
        noisy = x + noise.view(x.shape) * 1e-4
        return nn.functional.cross_entropy(model(noisy), y, reduction="sum"), len(y)


class Remembering(Dropout):
    """State in an attribute, where no generation holds it."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        self.calls = getattr(self, "calls", 0) + 1
        loss, count = super().loss(model, batch)
        return loss * (1 + self.calls * 1e-3), count


class Growing(Dropout):
    """A model that gets something more in its third update."""

    def __init__(self, kind: str, after: int) -> None:
        self.kind, self.left = kind, after

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        self.left -= len(batch[1])
        if self.left < 0 and not hasattr(model, "seen"):
            if self.kind == "buffer":
                model.register_buffer("seen", torch.zeros(1))
            else:
                model.register_parameter("seen", nn.Parameter(torch.zeros(1)))
        return super().loss(model, batch)


#: By what a planted bug needs.
JOBS: dict[str, dict[str, Any]] = {
    "dropout": {},
    "batch norm": {"task__factory": "parity_jobs:Normed"},
    "scheduler": {"task__factory": "parity_jobs:Scheduled"},
    "fp16": {"training__precision": "fp16"},
}


def values(folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Return plain values; ``data__seed=7`` changes ``data.seed``, ``data={...}`` all of it."""
    made: dict[str, Any] = {
        "run": {"root": str(folder / name)},
        "task": {"factory": "parity_jobs:Dropout"},
        "data": {
            "source": {"format": "parquet", "paths": [str(folder / "data.parquet")]},
            "global_batch": 8,
            "lanes": 4,
            "microbatch": 1,
            "prefetch": 0,
        },
        "training": {"updates": UPDATES, "clip_norm": 1.0},
        "optimizer": {"lr": 0.03},
        "checkpoint": {"every_updates": 2, "block_bytes": 4096},
    }
    for key, value in changes.items():
        section, _, setting = key.partition("__")
        if setting:
            made.setdefault(section, {})[setting] = value
        else:
            made[section] = value
    return made


def job(folder: Path, name: str = "run", width: int = WIDTH, **changes: Any) -> Config:
    """Return a configuration over a folder, whose data is made where it is not there."""
    path = folder / "data.parquet"
    if not path.exists():
        draw = np.random.default_rng(0)
        x = draw.standard_normal((EXAMPLES, width)).astype(np.float32)
        y = (x.sum(1) > 0).astype(np.int64)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), width)
        pq.write_table(pa.table({"x": vectors, "y": y}), path)
    return config_.build(values(folder, name, **changes)).resolved()
