"""torch.distributed.checkpoint in one process; the newest ``step-N`` with ``.metadata`` counts."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gauntlet import states
from gauntlet.column import Column, Found

if TYPE_CHECKING:
    from gauntlet.column import State

NO_ORDER = "has no data order"
NO_POINTER = "has no such file: what is there is told by the names of directories"
COLUMN = Column(
    key="dcp",
    name="torch DCP",
    distribution="torch",
    imports="torch.distributed.checkpoint",
    own=True,
    preload=("torch.distributed.checkpoint",),
    settings="dcp.save, dcp.async_save (its default, a thread) and dcp.load by checkpoint_id, one "
    "process, defaults, so files are synced (sync_files=True). It does not choose what to load: "
    "the newest step-N that has a .metadata is taken, as torchtitan does",
    lacks={"ranks": NO_ORDER, "pointer": NO_POINTER},
)


class Session:
    """See `gauntlet.column.Session`."""

    def __init__(self, where: str) -> None:
        self._where = Path(where)
        # One process without a group: it says at each call that it assumes so.
        warnings.simplefilter("ignore")

    def save(self, step: int, state: State) -> None:
        """See `gauntlet.column.Session`."""
        from torch.distributed import checkpoint

        checkpoint.save(state, checkpoint_id=self._of(step))

    def save_behind(self, step: int, state: State, change: Callable[[], None]) -> None:
        """See `gauntlet.column.Session`."""
        from torch.distributed import checkpoint

        future = checkpoint.async_save(state, checkpoint_id=self._of(step))
        change()
        future.result()

    def resume(self, items: int) -> Found | None:
        """See `gauntlet.column.Session`."""
        from torch.distributed import checkpoint

        steps = [
            int(path.parent.name.removeprefix("step-"))
            for path in self._where.glob("step-*/.metadata")
        ]
        if not steps:
            return None
        newest = self._of(max(steps))
        state = states.empty(items)
        checkpoint.load(state, checkpoint_id=newest)
        return Found(newest.name, state)

    def members(self, step: int) -> list[str]:
        """See `gauntlet.column.Session`."""
        of = self._of(step)
        with (of / ".metadata").open("rb") as file:
            metadata = pickle.load(file)
        named = {info.relative_path for info in metadata.storage_data.values()}
        return [f"{of.name}/{name}" for name in [".metadata", *sorted(named)]]

    def close(self) -> None:
        """See `gauntlet.column.Session`."""

    def _of(self, step: int) -> Path:
        return self._where / f"step-{step}"
