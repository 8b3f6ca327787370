"""Roots: a new run begins in a place of its own, and not among the files of another.

Retention and repair look through everything below a root, and two runs in one would each call the
other's files foreign. So where a root has no history yet, the places above it are asked whether
they are a run's. One request a level; a place that may not be looked at is passed by.

Whether a root can be made at all is asked without making it, of directories alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from coherent_ray.commit.inventory import item_of
from coherent_ray.commit.log import DIRECTORY
from coherent_ray.errors import ConfigError, StorageError
from coherent_ray.storage import LocalStorage, Storage, StorageOptions, open_storage

#: File systems that only show what the kernel knows.
_VIRTUAL = {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "securityfs", "debugfs", "tracefs"}


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


def require_place(root: str) -> None:
    """Return if a root is a directory that may be written, or one can be made; touches nothing.

    Args:
        root: As configured; an address of an object store is passed by.

    Raises:
        ConfigError: There is something else, no right to write, or no file system for files.
    """
    if "://" in root:
        return
    place = Path(root).expanduser().absolute()
    try:
        nearest = next(path for path in (place, *place.parents) if os.path.lexists(path))
        if not nearest.is_dir():
            _refuse(root, f"{nearest} is there, and is no directory")
    except OSError as error:
        _refuse(root, f"it cannot be looked at: {(error.strerror or str(error)).lower()}")
    kind = _file_system(nearest)
    if kind in _VIRTUAL:
        _refuse(root, f"{nearest} is of the kernel's file system {kind}, which keeps no files")
    if not os.access(nearest, os.W_OK | os.X_OK):
        _refuse(root, f"this user may not write into {nearest}")


def _refuse(root: str, why: str) -> NoReturn:
    raise ConfigError(
        f"no directory can be made there: {why}",
        where=f"run.root: {root}",
        remedy="name a directory that is there, or that can be made, and that may be written",
    )


def _file_system(path: Path) -> str:
    """Return the type of the file system that a directory lies in; empty where nobody says."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    mounts = [line.split(" ") for line in lines.splitlines()]
    above = {str(parent) for parent in (path.resolve(), *path.resolve().parents)}
    found = [(len(m[1]), at, m[2]) for at, m in enumerate(mounts) if len(m) > 2 and m[1] in above]
    return max(found)[2] if found else ""


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
