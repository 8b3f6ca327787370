"""Trying out, on a root, what the commit protocol rests on: a name is taken once and for all.

Many servers that speak S3 take a conditional request and ignore the condition: two coordinators
would then overwrite each other's records, and both go on. That is found out before a run starts,
with a few small objects, and refused with the reason.
"""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress

from coherent_ray.errors import AlreadyExists, ConfigError, NotFound, StorageError
from coherent_ray.storage.base import Storage

#: Where the probe writes; nothing stays.
DIRECTORY = "probe"
_RIVALS = 8
_REMEDY = (
    "Put the run on a store that honours If-None-Match: Amazon S3, Google Cloud Storage, Azure "
    "Blob Storage, or a server that says it does; or on a POSIX file system. A gateway in between "
    "may be what drops the condition."
)


def probe(storage: Storage, *, thorough: bool = True) -> None:
    """Create, create again, read, list and delete under a root; nothing stays.

    Args:
        storage: The root.
        thorough: Let several creators race for a name too. For a root's first use.

    Raises:
        ConfigError: The store does not keep what the protocol needs; says what.
        StorageError: It cannot be reached, or may not be written.
    """
    path = f"{DIRECTORY}/{uuid.uuid4().hex}"
    try:
        _try_twice(storage, path)
        _try_to_see(storage, path)
    except BaseException:
        with suppress(StorageError):
            storage.delete(path)
        raise
    storage.delete(path)
    _try_to_miss(storage, path)
    if thorough:
        _race(storage)


def _try_twice(storage: Storage, path: str) -> None:
    first, second = b"coherent-ray: first", b"coherent-ray: second"
    storage.create(path, first)
    if storage.read(path) != first:
        raise StorageError(
            "the storage gave back other bytes than were written",
            where=f"{storage.uri}/{path}",
            remedy="look at this device, or choose another run.root",
        )
    try:
        storage.create(path, second)
    except AlreadyExists:
        if storage.read(path) == first:
            return
        raise _refused(storage, "it says that a name is taken, and overwrites it") from None
    raise _refused(storage, "it ignores conditions: a name that was taken could be created again")


def _try_to_see(storage: Storage, path: str) -> None:
    if path not in {entry.path for entry in storage.list(DIRECTORY)}:
        raise _refused(storage, "its list does not show what was just written")


def _try_to_miss(storage: Storage, path: str) -> None:
    try:
        storage.read(path)
    except NotFound:
        return
    raise _refused(storage, "what was deleted can still be read")


def _race(storage: Storage) -> None:
    path = f"{DIRECTORY}/{uuid.uuid4().hex}"
    start = threading.Barrier(_RIVALS)
    won: list[bytes] = []
    failed: list[StorageError] = []

    def claim(word: bytes) -> None:
        start.wait()
        try:
            storage.create(path, word)
        except AlreadyExists:
            return
        except StorageError as error:
            failed.append(error)
        else:
            won.append(word)

    threads = [
        threading.Thread(target=claim, args=(b"rival %d" % index,), daemon=True)
        for index in range(_RIVALS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        if failed:
            raise failed[0]
        if len(won) != 1 or storage.read(path) != won[0]:
            raise _refused(storage, f"{len(won)} of {_RIVALS} creators at once were given a name")
    finally:
        with suppress(StorageError):
            storage.delete(path)


def _refused(storage: Storage, reason: str) -> ConfigError:
    return ConfigError(
        f"this storage cannot hold a run: {reason}", where=storage.uri, remedy=_REMEDY
    )
