"""What a product must offer to be measured, and the plainest one: torch.save and fsync."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

State = dict[str, torch.Tensor]


class Product:
    """One product in one rank. All ranks call the same methods in the same order."""

    def __init__(self, place: Path, rank: int, ranks: int, state: State) -> None:
        """Take an empty directory, the same for all ranks, and the live, replicated state."""
        self.place = place
        self.rank = rank
        self.ranks = ranks
        self.state = state

    def begin(self, step: int) -> None:
        """Save; return as soon as the state may be changed again."""
        raise NotImplementedError

    def finish(self) -> None:
        """Return once the last save is as durable as the product ever makes it."""

    def done(self) -> bool:
        """Whether `finish` would return at once."""
        return True

    def changing(self) -> AbstractContextManager[object]:
        """Lie round a change of the state."""
        return nullcontext()

    def load(self, step: int) -> None:
        """Read a save into the live tensors."""
        raise NotImplementedError

    def files(self, step: int) -> list[Path]:
        """Return the files of a save."""
        return sorted(path for path in self.of(step).rglob("*") if path.is_file())

    def of(self, step: int) -> Path:
        """Return the directory of a save."""
        return self.place / f"step-{step}"

    def drop(self, step: int) -> None:
        """Delete a save; one rank is asked."""
        shutil.rmtree(self.of(step), ignore_errors=True)

    def told(self) -> dict[str, float]:
        """Return what else the product knows of its last save, by name."""
        return {}

    def close(self) -> None:
        """End what it has started."""


class TorchSave(Product):
    """Rank 0 writes, everybody waits: what most scripts do, and with the sync that they lack."""

    def begin(self, step: int) -> None:
        """See `Product`."""
        if self.rank == 0:
            self.of(step).mkdir(parents=True)
            path = self.of(step) / "state.pt"
            with path.open("wb") as file:
                torch.save(self.state, file)
                file.flush()
                os.fsync(file.fileno())
            sync_directory(path.parent)
        if self.ranks > 1:
            dist.barrier()

    def load(self, step: int) -> None:
        """See `Product`."""
        found = torch.load(self.of(step) / "state.pt")
        with torch.no_grad():
            for name, tensor in self.state.items():
                tensor.copy_(found[name])


def sync_directory(place: Path) -> None:
    """Make a directory's names durable."""
    directory = os.open(place, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def sync_files(paths: Iterator[Path] | list[Path]) -> None:
    """Make files durable, for a product that does not."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
