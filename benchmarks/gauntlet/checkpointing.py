"""torch-checkpointing (Meta), as its tutorial has it: the highest ``step_N`` directory is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gauntlet import states
from gauntlet.column import Column, Found
from gauntlet.dcp import NO_ORDER, NO_POINTER

if TYPE_CHECKING:
    from gauntlet.column import State

COLUMN = Column(
    key="checkpointing",
    name="torch-checkpointing",
    distribution="torch-checkpointing",
    imports="torch_checkpointing",
    preload=("torch_checkpointing",),
    settings="CheckpointManager with asynchronous saves, its default, and the result of each "
    "awaited; staging without pinned memory, as its documentation says for CPUs; "
    "use_direct_io=False, because the default cannot save on ext4; the newest is the highest "
    "step_N directory, and values change under manager.lock(), as in its tutorial",
    lacks={"ranks": NO_ORDER, "pointer": NO_POINTER},
)


class Session:
    """See `gauntlet.column.Session`."""

    def __init__(self, where: str) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._where = Path(where)
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, step: int, state: State) -> None:
        """See `gauntlet.column.Session`."""
        self._begin(step, state).result()

    def save_behind(self, step: int, state: State, change: Callable[[], None]) -> None:
        """See `gauntlet.column.Session`."""
        future = self._begin(step, state)
        with self._manager.lock():
            change()
        future.result()

    def resume(self, items: int) -> Found | None:
        """See `gauntlet.column.Session`."""
        import torch

        steps = [int(path.name.removeprefix("step_")) for path in self._where.glob("step_*")]
        if not steps:
            return None
        newest = self._of(max(steps))
        empty = states.empty(items)
        model = {"weight": empty["weight"], "moment": empty["moment"]}
        found = self._manager.load(str(newest), into={"model": model, "step": 0})
        step = torch.tensor([int(found["step"])])
        return Found(newest.name, {**model, "step": step})

    def members(self, step: int) -> list[str]:
        """See `gauntlet.column.Session`."""
        files = [path for path in self._of(step).rglob("*") if path.is_file()]
        return sorted(path.relative_to(self._where).as_posix() for path in files)

    def close(self) -> None:
        """See `gauntlet.column.Session`."""
        self._manager.close()

    def _begin(self, step: int, state: State) -> Any:
        model = {"weight": state["weight"], "moment": state["moment"]}
        return self._manager.save(str(self._of(step)), {"model": model, "step": step})

    def _of(self, step: int) -> Path:
        return self._where / f"step_{step}"
