"""NVIDIA Resiliency Extension: its local checkpoint manager, on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gauntlet.column import Column, Found
from gauntlet.dcp import NO_ORDER, NO_POINTER

if TYPE_CHECKING:
    from gauntlet.column import State

COLUMN = Column(
    key="nvrx",
    name="NVRx local",
    distribution="nvidia-resiliency-ext",
    imports="nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager",
    preload=("torch", "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"),
    settings="LocalCheckpointManager, one process, synchronous saves, no replication (which is "
    "what it has against the loss of a file); its BasicTensorAwareStateDict wants CUDA tensors, so "
    "the state is one of its subclasses that leaves tensors where they are; find_latest, then load",
    lacks={
        "ranks": NO_ORDER,
        "pointer": NO_POINTER,
        "later": "its asynchronous save waits for CUDA, and there is none here",
    },
)


class Session:
    """See `gauntlet.column.Session`."""

    def __init__(self, where: str) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

        logging.getLogger().setLevel(logging.CRITICAL)
        _one_process()
        self._where = Path(where)
        self._manager = local_manager.LocalCheckpointManager(where)

    def save(self, step: int, state: State) -> None:
        """See `gauntlet.column.Session`."""
        from gauntlet.nvrx_state import CpuStateDict

        self._manager.save(CpuStateDict(dict(state)), step)

    def save_behind(self, step: int, state: State, change: Callable[[], None]) -> None:
        """See `gauntlet.column.Session`."""
        raise NotImplementedError

    def resume(self, items: int) -> Found | None:
        """See `gauntlet.column.Session`."""
        if self._manager.find_latest() == -1:
            return None
        found, (iteration, _, _) = self._manager.load()
        return Found(self._of(iteration).name, found.state_dict)

    def members(self, step: int) -> list[str]:
        """See `gauntlet.column.Session`."""
        return [self._of(step).relative_to(self._where).as_posix()]

    def close(self) -> None:
        """See `gauntlet.column.Session`."""

    def _of(self, step: int) -> Path:
        return self._where / "0" / f"iter_{step:07d}_0_local.pt"


def _one_process() -> None:
    import torch

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
