"""Directories under one root, opened name by name: never through a symbolic link, made durably.

A directory that was just made is only a name in the one above it, so that one is synced before the
new one is used. That holds for a directory that somebody else has made, too: it may be younger than
the last sync. So each process syncs above every directory that it writes into, once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from coherent_ray.storage.base import TEMPORARY_PREFIX

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

#: Exactly the names that this backend gives; whatever else begins like them is not its own.
TEMPORARY_NAME = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}[0-9a-f]{{32}}")


class Directories:
    """The directories under a root. May be used from any thread."""

    def __init__(self, root: Path) -> None:
        """Name the root.

        Args:
            root: An absolute path; it need not exist.
        """
        self._root = root
        # Only ever grows; two threads that miss an entry at once sync once too often.
        self._durable: set[tuple[str, ...]] = set()

    def open(self, names: Sequence[str], *, make: bool = False) -> int:
        """Open a directory, and return its descriptor, which the caller closes.

        Args:
            names: From the root down; none: the root itself.
            make: Make what is missing, durably, and make durable what others have made.

        Raises:
            OSError: As the operating system says. ELOOP where a name is a symbolic link.
        """
        if make:
            self._make_root()
        directory = os.open(self._root, _FLAGS)
        for depth, name in enumerate(names, 1):
            above = directory
            try:
                directory = self._step(above, name, tuple(names[:depth]), make)
            finally:
                os.close(above)
        return directory

    def scan(self, names: Sequence[str]) -> list[tuple[str, int | None]]:
        """Return what a directory holds: names with sizes in bytes, None for a directory.

        What is neither a file nor a directory is left out. Sorted so that walking it depth first
        meets whole paths in order: a directory sorts as if its name ended in a slash.

        Raises:
            OSError: As for `open`.
        """
        directory = self.open(names)
        found: list[tuple[str, int | None]] = []
        try:
            for name in os.listdir(directory):  # noqa: PTH208 (a descriptor)
                with suppress(FileNotFoundError):  # removed since
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        found.append((name, None))
                    elif stat.S_ISREG(status.st_mode):
                        found.append((name, status.st_size))
        finally:
            os.close(directory)
        return sorted(found, key=lambda entry: entry[0] + ("/" if entry[1] is None else ""))

    def temporaries(self, names: Sequence[str]) -> list[tuple[str, int, float]]:
        """Return the temporary files in a directory: name, bytes, when they were last touched.

        The time is in seconds, by whoever keeps the file system. A file that is renamed or linked
        is touched as well, so what was just finished is not old.

        Raises:
            OSError: As for `open`.
        """
        directory = self.open(names)
        found: list[tuple[str, int, float]] = []
        try:
            for name in os.listdir(directory):  # noqa: PTH208 (a descriptor)
                if not TEMPORARY_NAME.fullmatch(name):
                    continue
                with suppress(FileNotFoundError):  # its writer has finished
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        touched = max(status.st_mtime, status.st_ctime)
                        found.append((name, status.st_size, touched))
        finally:
            os.close(directory)
        return sorted(found)

    def now(self) -> float | None:
        """Return the time in seconds on the file system's clock, which may not be this machine's.

        A file is made and removed for it. None where that cannot be: this machine's clock is no
        substitute, it may be hours ahead.
        """
        name = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            directory = self.open([])
            try:
                file = os.open(name, _NEW_FILE, 0o666, dir_fd=directory)
                try:
                    return os.fstat(file).st_mtime
                finally:
                    os.close(file)
                    os.unlink(name, dir_fd=directory)
            finally:
                os.close(directory)
        except OSError:
            return None

    def in_use(self, names: Sequence[str], name: str) -> bool:
        """Whether the writer of a temporary file lives, as far as the file system has locks."""
        try:
            directory = self.open(names)
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = os.open(name, flags, dir_fd=directory)
            finally:
                os.close(directory)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(file)
        except BlockingIOError:
            return True
        except OSError:
            return False  # nobody can tell
        return False

    def remove(self, names: Sequence[str]) -> bool:
        """Remove an empty directory durably; False: it is not there, or not empty.

        Raises:
            OSError: As the operating system says.
        """
        *above, name = names
        try:
            directory = self.open(above)
        except FileNotFoundError:
            return False
        try:
            try:
                os.rmdir(name, dir_fd=directory)
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}:
                    return False
                raise
            os.fsync(directory)
        finally:
            os.close(directory)
        return True

    def _make_root(self) -> None:
        if not self._root.exists():
            _make_durably(self._root)
        elif () not in self._durable:
            # Somebody made it who may not have synced it. Whether this user may do so is not in our
            # hands, and a root in a directory of others is theirs to keep.
            with suppress(PermissionError):
                _sync(self._root.parent)
        self._durable.add(())

    def _step(self, above: int, name: str, names: tuple[str, ...], make: bool) -> int:
        new = False
        if make:
            try:
                directory = _enter(above, name)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=above)
                directory, new = _enter(above, name), True
        else:
            try:
                directory = _enter(above, name)
            except NotADirectoryError:
                # Below a file there is nothing: a reader need not be told why.
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None
        if new or (make and names not in self._durable):
            try:
                os.fsync(above)
            except OSError:
                os.close(directory)
                raise
            self._durable.add(names)
        return directory


def _enter(above: int, name: str) -> int:
    try:
        return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        # Linux says the same of a file and of a symbolic link; the reader of the message should
        # know which it is.
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def _make_durably(path: Path) -> None:
    if not path.parent.is_dir():
        _make_durably(path.parent)
    try:
        os.mkdir(path)  # noqa: PTH102 (one module makes every call that must be durable)
    except FileExistsError:
        if not path.is_dir():
            raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    directory = os.open(path, _FLAGS)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
