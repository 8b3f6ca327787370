"""Bugs for the judge to find: a judge that finds none of them proves nothing.

Each takes one thing out of the product for the job's whole life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from coherent_ray.commit import performer
from coherent_ray.commit.fates import Fate
from coherent_ray.drill.planted import never, planted
from coherent_ray.errors import AlreadyExists
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.attended import AttendedStorage
from coherent_ray.storage.testing.buffered import Buffered
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.train.saving import Saved, Saver, _Flight


class _Unsynced(Buffered):
    """Syncs directories alone."""

    def fsync(self, descriptor: int) -> None:
        """Sync, or return as if it were done."""
        file = self._files.get(descriptor)
        if file is None:
            super().fsync(descriptor)
        else:
            file.close()


@contextmanager
def _files_are_not_synced() -> Iterator[Buffered]:
    yield _Unsynced()


@contextmanager
def _acknowledged_before_written() -> Iterator[None]:
    with planted(((Saver, "_save", _word_first), (performer, "_problem", never("")))):
        yield


def _word_first(original: Any) -> Callable[[Saver, _Flight], Saved]:
    def save(saver: Saver, flight: _Flight) -> Saved:
        hook, storage = saver._hook, saver._storage
        saver._hook, saver._storage = None, AttendedStorage(MemoryStorage())
        shard, sealed = saver._write(flight, None)
        word = saver._word(flight, shard, sealed)
        saver._hook, saver._storage = hook, storage
        fate = saver._line.acknowledge(word)
        assert isinstance(fate, Fate)
        saver._write(flight, None)
        return flight.saved(fate, shard.size)

    return save


@contextmanager
def _written_in_place() -> Iterator[None]:
    with planted(((LocalStorage, "create", _in_place),)):
        yield


def _in_place(original: Any) -> Callable[[LocalStorage, str, bytes], None]:
    def create(storage: LocalStorage, path: str, data: bytes) -> None:
        place = Path(storage.uri) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(place, "xb") as file:  # noqa: PTH123 (as judges know it)
                file.write(data)
        except FileExistsError:
            raise AlreadyExists("the name is taken", where=str(place)) from None

    return create


#: By name: a context that plants it, and gives what stands in for the backend's ``os``.
PLANTS: dict[str, Callable[[], AbstractContextManager[Buffered | None]]] = {
    "files are not synced": _files_are_not_synced,
    "records and manifests are written in place": _written_in_place,
    "a shard is acknowledged before it is written": _acknowledged_before_written,
}
