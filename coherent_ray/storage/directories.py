"""Directories under one root, opened name by name: never through a symbolic link, made durably.

A directory that was just made is only a name in the one above it, so that one is synced before the
new one is used. That holds for a directory that somebody else has made, too: it may be younger than
the last sync. So each process syncs above every directory that it writes into, once.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
