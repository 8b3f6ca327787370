"""Reading at somebody's pace: each read waits until so many bytes may be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from coherent_ray.storage.base import Storage


def paced(storage: Storage, pace: Callable[[int], None]) -> Storage:
    """Return a storage of which every read of bytes waits for its turn.

    Args:
        storage: Where they are read.
        pace: Called with a number of bytes; returns when these may be read. It may raise.
    """
    return cast(Storage, _Paced(storage, pace))


class _Paced:
    def __init__(self, inner: Storage, pace: Callable[[int], None]) -> None:
        self._inner = inner
        self._pace = pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file; see `Storage.read`. How many they are is known afterwards."""
        self._pace(0)
        data = self._inner.read(path, start, length)
        self._pace(len(data))
        return data

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Fill a buffer from a file; see `Storage.read_into`."""
        self._pace(target.nbytes)
        return self._inner.read_into(path, start, target)
