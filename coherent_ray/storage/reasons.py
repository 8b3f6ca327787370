"""The operating system's refusals, in this project's words."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from coherent_ray.errors import NotAFile, NotFound, StorageError, StorageFull

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

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
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


def refuse_no_file(directory: int, name: str, where: str) -> None:
    """Return if a name may be opened for reading: it is a file's, or nobody has it.

    Asked before opening: to open a named pipe or a device does something to it.

    Args:
        directory: Descriptor.
        name: In that directory.
        where: The absolute path, for messages.

    Raises:
        NotAFile: Something else has the name.
        OSError: The operating system does not say.
    """
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise no_file(mode, where)


def no_file(mode: int, where: str) -> NotAFile:
    """Return the error for a name that something has which is no file.

    Args:
        mode: Its type, as ``st_mode`` has it.
        where: The absolute path that it is about.
    """
    found = next((word for kind, word in _KINDS.items() if stat.S_IFMT(mode) == kind), "a device")
    details: dict[str, object] = {"found": found}
    remedy = "Move it away, and put the file there."
    if stat.S_ISLNK(mode):
        details["errno"] = "ELOOP"
        remedy = _REMEDIES[errno.ELOOP]
    return NotAFile(f"{found} lies here, and no file", where=where, remedy=remedy, details=details)


def linked_directory(where: str) -> NotAFile:
    """Return the error for a file that could only be reached through a symbolic link."""
    return NotAFile(
        "a directory above it is a symbolic link",
        where=where,
        remedy=_REMEDIES[errno.ELOOP],
        details={"found": "a symbolic link above it", "errno": "ELOOP"},
    )
