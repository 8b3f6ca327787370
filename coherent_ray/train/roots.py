"""Roots: a new run begins in a place of its own, and not among the files of another.

Retention and repair look through everything below a root, and two runs in one would each call the
other's files foreign. So where a root has no history yet, the places above it are asked whether
they are a run's. One request a level; a place that may not be looked at is passed by.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coherent_ray.commit.inventory import item_of
from coherent_ray.commit.log import DIRECTORY
from coherent_ray.errors import ConfigError, StorageError
from coherent_ray.storage import LocalStorage, Storage, StorageOptions, open_storage


def require_own(storage: Storage, options: StorageOptions | None) -> None:
    """Return if no place above a root holds a run.

    Args:
        storage: The root.
        options: How to talk to an object store.

    Raises:
        ConfigError: A run lies above it; names that run's root.
    """
    for root in _above(storage):
        if _holds_a_run(root, options):
            raise ConfigError(
                f"this lies inside the root of another run: {root}",
                where=f"run.root: {storage.uri}",
                remedy="give the run a root beside that one",
            )


def _above(storage: Storage) -> Iterator[str]:
    if isinstance(storage, LocalStorage):
        yield from map(str, Path(storage.uri).resolve().parents)
        return
    scheme, _, rest = storage.uri.partition("://")
    bucket, *names = rest.split("/")
    for length in range(len(names) - 1, -1, -1):
        yield f"{scheme}://" + "/".join([bucket, *names[:length]])


def _holds_a_run(root: str, options: StorageOptions | None) -> bool:
    try:
        first = next(iter(open_storage(root, options).list(DIRECTORY)), None)
    except StorageError:
        return False
    item = item_of(first.path) if first else None
    return item is not None and item.kind == "record"
