"""The sizes of many files: one listing instead of a request for each.

A generation of thousands of ranks has as many files in one directory. A listing is only a quick way
to what `Storage.size` says: a file that it does not show, or shows with another size than is
expected, is asked for by itself, since a network file system may list what it saw a while ago.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

from coherent_ray.errors import StorageError
from coherent_ray.storage.base import Storage

#: Files from which on a listing is the better way.
MANY = 64


class Sizes:
    """Sizes of many files. For one look: what it has listed is not listed again."""

    def __init__(self, storage: Storage, paths: Iterable[str]) -> None:
        """List the directories where that pays.

        Args:
            storage: Any.
            paths: The files that will be asked for.
        """
        self._storage = storage
        self._listed: dict[str, int] = {}
        for directory, files in Counter(path.rpartition("/")[0] for path in set(paths)).items():
            if files >= MANY:
                # If it cannot be listed, whoever asks for a file hears what is wrong.
                with contextlib.suppress(StorageError):
                    self._listed |= {entry.path: entry.size for entry in storage.list(directory)}

    def of(self, path: str, expected: int) -> int:
        """Return a file's size in bytes.

        Args:
            path: The file.
            expected: The size that it should have.

        Raises:
            NotFound: There is no such file.
            StorageError: The storage failed.
        """
        found = self._listed.get(path)
        return found if found == expected else self._storage.size(path)
