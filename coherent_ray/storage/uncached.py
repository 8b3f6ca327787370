"""Reading from the device: what a cache holds says nothing of what a power cut would leave.

A file that was just written is read from memory, unless the cache is asked to forget it first. Only
advice, to a cache of this machine alone: what the device or a file server keep for themselves, and
pages that are still dirty or that others have mapped, are out of reach.
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

from coherent_ray.storage.base import Storage


@runtime_checkable
class Cached(Protocol):
    """A storage before which this machine keeps a cache that can be asked to forget."""

    def forget(self, path: str, start: int = 0, length: int = 0) -> None:
        """Ask the cache to forget a range of a file; a file that is not there is no error.

        Args:
            path: The file.
            start: First byte.
            length: Bytes; 0: to the end of the file.
        """


def from_device(storage: Storage) -> Storage:
    """Return a storage whose large reads, one file after the other and in order, miss the cache.

    And leave nothing in it: reading back must not push out what the training reads.
    """
    return cast(Storage, _FromDevice(storage, storage)) if isinstance(storage, Cached) else storage


class _FromDevice:
    """Passes every verb on, and has the cache forget what `read_into` reads."""

    def __init__(self, inner: Storage, cache: Cached) -> None:
        self._inner = inner
        self._cache = cache
        self._path = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Fill a buffer from a file; see `Storage.read_into`."""
        if start == 0 or path != self._path:
            # All of it, and once: the kernel reads ahead of us from here on.
            self._cache.forget(path)
        self._path = path
        count = self._inner.read_into(path, start, target)
        self._cache.forget(path, start, count)
        return count
