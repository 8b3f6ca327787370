"""Orbax: its CheckpointManager with standard save and restore of NumPy arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gauntlet import states
from gauntlet.column import Column, Found
from gauntlet.dcp import NO_ORDER, NO_POINTER

if TYPE_CHECKING:
    from gauntlet.column import State

COLUMN = Column(
    key="orbax",
    name="Orbax",
    distribution="orbax-checkpoint",
    imports="orbax.checkpoint",
    preload=("torch", "orbax.checkpoint"),
    settings="CheckpointManager with its defaults (asynchronous, and wait_until_finished after "
    "each save), StandardSave and StandardRestore of NumPy arrays, latest_step()",
    lacks={"ranks": NO_ORDER, "pointer": NO_POINTER},
)


class Session:
    """See `gauntlet.column.Session`."""

    def __init__(self, where: str) -> None:
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        self._where = Path(where)
        self._ocp = ocp
        self._manager = ocp.CheckpointManager(self._where, options=ocp.CheckpointManagerOptions())

    def save(self, step: int, state: State) -> None:
        """See `gauntlet.column.Session`."""
        self._begin(step, state)
        self._manager.wait_until_finished()

    def save_behind(self, step: int, state: State, change: Callable[[], None]) -> None:
        """See `gauntlet.column.Session`."""
        self._begin(step, state)
        change()
        self._manager.wait_until_finished()

    def resume(self, items: int) -> Found | None:
        """See `gauntlet.column.Session`."""
        import torch

        step = self._manager.latest_step()
        if step is None:
            return None
        target = _arrays(states.empty(items))
        found = self._manager.restore(step, args=self._ocp.args.StandardRestore(target))
        return Found(str(step), {name: torch.from_numpy(found[name]) for name in target})

    def members(self, step: int) -> list[str]:
        """See `gauntlet.column.Session`."""
        files = [path for path in (self._where / str(step)).rglob("*") if path.is_file()]
        return sorted(path.relative_to(self._where).as_posix() for path in files)

    def close(self) -> None:
        """See `gauntlet.column.Session`."""
        self._manager.close()

    def _begin(self, step: int, state: State) -> None:
        if not self._manager.save(step, args=self._ocp.args.StandardSave(_arrays(state))):
            raise RuntimeError(f"save({step}) returned False: it saved nothing")


def _arrays(state: State) -> dict[str, Any]:
    """Return the same memory as NumPy arrays."""
    return {name: tensor.numpy() for name, tensor in state.items()}
