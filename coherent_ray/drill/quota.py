"""A full storage without a disk of its own: the fault storage refuses while the stage says so.

For machines where no small file system can be mounted, and for object stores.
"""

from __future__ import annotations

from coherent_ray.errors import NotFound
from coherent_ray.storage import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage, FaultyWriter

#: Objects of the stage: the drill uses a quota at all; it is used up.
USED, FULL, FREE = "quota/used", "quota/full", "quota/free"


class LimitedStorage(FaultyStorage):
    """A storage whose room is used up as long as the stage says so."""

    __slots__ = ("_stage",)

    def __init__(self, inner: Storage, stage: Storage) -> None:
        """Lie round a storage.

        Args:
            inner: The run's root.
            stage: See `coherent_ray.drill.stage`.
        """
        super().__init__(inner)
        self._stage = stage

    def open_writer(self, path: str) -> FaultyWriter:
        """Pass on `Storage.open_writer`, unless there is no room."""
        full = exists(self._stage, FULL) and not exists(self._stage, FREE)
        self.faults[:] = [Fault("full", verb="write", times=2**31)] if full else []
        self.calls.clear()
        return super().open_writer(path)


def limited(storage: Storage, stage: Storage) -> Storage:
    """Return a worker's storage, under a quota where the drill uses one."""
    return LimitedStorage(storage, stage) if exists(stage, USED) else storage


def exists(stage: Storage, path: str) -> bool:
    """Return whether the stage holds an object."""
    try:
        stage.size(path)
    except NotFound:
        return False
    return True
