"""The operating system's refusals, in this project's words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from coherent_ray.errors import NotFound, StorageError, StorageFull

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REMEDIES = {
    errno.EACCES: "Give this user the right to read and write there, or choose another place.",
    errno.EPERM: "Choose a place whose file system allows this; some have no hard links.",
    errno.EOPNOTSUPP: "Choose a place whose file system has hard links and syncs directories.",
    errno.EROFS: "The file system is mounted read-only: mount it for writing, or choose another.",
    errno.EIO: "The device failed: look at the system's log before trusting it again.",
    errno.ELOOP: "Symbolic links below the root are not followed: put the files there themselves.",
    errno.ENOTDIR: "A file is where a directory should be: move it away.",
}


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn what the operating system says inside the block into this project's errors.

    Args:
        where: The absolute path that it is about.

    Raises:
        NotFound: There is no such file.
        StorageFull: No space or quota is left.
        StorageError: Any other refusal; ``details["errno"]`` is its symbol.
    """
    try:
        yield
    except OSError as error:
        raise explanation(error, where) from error


def explanation(error: OSError, where: str) -> StorageError:
    """Return the error that a user should see for one of the operating system's.

    Args:
        error: What the operating system said.
        where: The absolute path that it is about.
    """
    number = error.errno or 0
    reason = (error.strerror or str(error)).lower()
    details: dict[str, object] = {"errno": errno.errorcode.get(number, str(number))}
    if number == errno.ENOENT:
        return NotFound("nothing is stored here", where=where, details=details)
    if number in _FULL:
        remedy = "Free some space, or choose another place; what is published is untouched."
        return StorageFull(reason, where=where, remedy=remedy, details=details)
    return StorageError(reason, where=where, remedy=_REMEDIES.get(number, ""), details=details)
