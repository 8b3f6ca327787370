"""The smallest job that exercises everything: 50 rows, two layers, dropout, a short last update.

Workers import this module by its name, so nothing in it may need pytest.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from ray.train import Result, TrainingFailedError
from torch import Tensor, nn

from coherent_ray import config as config_
from coherent_ray.commit.generations import Generations
from coherent_ray.config import Config
from coherent_ray.storage import open_storage
from coherent_ray.train import receipts
from coherent_ray.train.receipts import Receipt

#: Seven updates an epoch, the last one of two examples: two of four lanes have none.
ROWS = 50
INPUTS = 4
UPDATES = 12
EVERY = 3
#: Wide enough for several blocks of 4 KiB a shard.
WIDTH = 512


class TinyTask:
    """Two layers that learn the sign of a sum."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def build_model(self) -> nn.Module:
        width = WIDTH * self.factor
        return nn.Sequential(
            nn.Linear(INPUTS, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 2)
        )

    def collate(self, rows: Any) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


class PacedTask(TinyTask):
    """Takes its time, so that something can happen between two updates."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        time.sleep(0.1)
        return super().loss(model, batch)


class FailingTask(TinyTask):
    """Raises in the loss, on the last of two ranks, after the first generation."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        self.calls = getattr(self, "calls", 0) + 1
        # Four microbatches an update: a global batch of 8 over two ranks, one example each.
        if torch.distributed.get_rank() == 1 and self.calls > 4 * (EVERY + 1):
            raise ZeroDivisionError("the tiny task gives up")
        return super().loss(model, batch)


class UnkeyedTask(TinyTask):
    """Draws noise from a source that no key reaches."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        noise = torch.frombuffer(bytearray(os.urandom(x.numel())), dtype=torch.uint8)
        return super().loss(model, (x + noise.view(x.shape) * 1e-3, y))


def set_width(width: int) -> None:
    """In a worker: change the task's code."""
    global WIDTH
    WIDTH = width


def write_rows(path: Path, rows: int = ROWS, seed: int = 0) -> Path:
    """Write the data, the same for one seed, and return its path."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, INPUTS)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int64)
    columns = {
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), INPUTS),
        "y": pa.array(y),
    }
    pq.write_table(pa.table(columns), path)
    return path


def values(root: Path, data: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as YAML would give it; ``section__key=value`` changes one setting."""
    made: dict[str, Any] = {
        "run": {"root": str(root)},
        "task": {"factory": "tiny:TinyTask", "args": {}},
        "data": {
            "source": {"format": "parquet", "paths": [str(data)]},
            "seed": 11,
            "global_batch": 8,
            "lanes": 4,
            "microbatch": 1,
        },
        "training": {"updates": UPDATES, "clip_norm": 1.0},
        "optimizer": {"lr": 0.05},
        "checkpoint": {"every_updates": EVERY, "block_bytes": 4096},
        "cluster": {"workers": 2, "max_failures": 3},
    }
    for name, value in changes.items():
        *sections, key = name.split("__")
        at = made
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = value
    return made


def configured(root: Path, data: Path, **changes: Any) -> Config:
    """The same as a `Config`."""
    return config_.build(values(root, data, **changes))


def fit(trainer: Any) -> Result:
    """Let a trainer fit in a thread: in the main one, Ray takes Ctrl-C and never gives it back.

    With it, it would keep the controller of every run alive.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(trainer.fit).result()


def error_of(trainer: Any) -> TrainingFailedError:
    """Fit, and return the error that it must end with.

    Without its traceback, whose frames would keep the controller alive, too.
    """
    try:
        fit(trainer)
    except TrainingFailedError as error:
        return error.with_traceback(None)
    raise AssertionError("it must fail")


def selected(root: Path | str) -> str | None:
    """The generation that a reader selects at this moment, every digest checked."""
    found = Generations(open_storage(str(root))).select()
    return found.publish.name if found else None


def history(root: Path | str) -> list[Receipt]:
    """All receipts of a run, the chain checked."""
    storage = open_storage(str(root))
    return list(receipts.history(storage, Generations(storage).history()))


def published(root: Path | str) -> list[str]:
    """Names of all generations in the log, in its order."""
    return [p.name for p in Generations(open_storage(str(root))).history().publishes]
