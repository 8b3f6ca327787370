"""A storage that tells how long it has owed an answer: for whoever must not wait for ever.

A call to a disk or a file server may hang in the kernel, where no time-out of ours reaches it. So
the thread that makes it is given up, not the call: somebody else looks at `AttendedStorage.silence`
and decides. Only single calls count, each from its own beginning: a large shard that is written
slowly, piece by piece, is no silence.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from coherent_ray.digests import Buffer
from coherent_ray.errors import StorageError
from coherent_ray.storage.base import Entry, Storage, Writer
from coherent_ray.storage.signing import KeyPlace, Signed
from coherent_ray.storage.uncached import Cached


@dataclass(frozen=True, slots=True)
class Silence:
    """The call that has waited longest for its answer."""

    doing: str
    """Writing, reading, ...: what was asked for."""
    where: str
    """The file's address."""
    lasted_s: float
    """Seconds since the call was made."""

    def error(self) -> StorageError:
        """Return the error of whoever does not wait any longer."""
        return StorageError(
            f"no answer from the storage for {self.lasted_s:.0f} s while {self.doing}",
            where=self.where,
            remedy="See whether the disk or the file server behind this path answers at all; "
            "checkpoint.storage_timeout_s gives a slow one more time.",
            details={"silent_s": self.lasted_s, "doing": self.doing},
        )


class AttendedStorage:
    """A `Storage` that passes every call on, and remembers those that have not come back."""

    def __init__(self, inner: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        """Lie round a storage.

        Args:
            inner: The run's root.
            clock: Seconds, never going back.
        """
        self._inner = inner
        self._clock = clock
        self._numbers = itertools.count()
        # By number; single operations on it are atomic, which is all that is relied on.
        self._waiting: dict[int, tuple[float, str, str]] = {}

    @property
    def uri(self) -> str:
        """The inner root's address."""
        return self._inner.uri

    @property
    def key_place(self) -> KeyPlace | None:
        """The inner root's, where it has one."""
        return self._inner.key_place if isinstance(self._inner, Signed) else None

    def silence(self) -> Silence | None:
        """Return the call that has waited longest; None: no call is on its way. From any thread."""
        calls = list(self._waiting.values())
        if not calls:
            return None
        since, doing, path = min(calls)
        return Silence(doing, f"{self.uri}/{path}", self._clock() - since)

    def create(self, path: str, data: Buffer) -> None:
        """Pass on `Storage.create`."""
        with self.attending("writing", path):
            self._inner.create(path, data)

    def replace(self, path: str, data: Buffer) -> None:
        """Pass on `Storage.replace`."""
        with self.attending("writing", path):
            self._inner.replace(path, data)

    def open_writer(self, path: str) -> AttendedWriter:
        """Pass on `Storage.open_writer`; each call of the writer counts by itself."""
        with self.attending("opening", path):
            return AttendedWriter(self, path, self._inner.open_writer(path))

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Pass on `Storage.read`."""
        with self.attending("reading", path):
            return self._inner.read(path, start, length)

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Pass on `Storage.read_into`."""
        with self.attending("reading", path):
            return self._inner.read_into(path, start, target)

    def size(self, path: str) -> int:
        """Pass on `Storage.size`."""
        with self.attending("asking for the size", path):
            return self._inner.size(path)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Pass on `Storage.list`; each entry counts by itself."""
        entries = self._inner.list(prefix)
        while True:
            with self.attending("listing", prefix):
                entry = next(entries, None)
            if entry is None:
                return
            yield entry

    def delete(self, path: str) -> None:
        """Pass on `Storage.delete`."""
        with self.attending("deleting", path):
            self._inner.delete(path)

    def forget(self, path: str, start: int = 0, length: int = 0) -> None:
        """Pass on `Cached.forget`, where the inner storage has a cache."""
        if isinstance(self._inner, Cached):
            with self.attending("reading", path):
                self._inner.forget(path, start, length)

    @contextmanager
    def attending(self, doing: str, path: str) -> Iterator[None]:
        """Count a call for as long as the block takes."""
        number = next(self._numbers)
        self._waiting[number] = (self._clock(), doing, path)
        try:
            yield
        finally:
            del self._waiting[number]


class AttendedWriter:
    """A writer of an `AttendedStorage`."""

    def __init__(self, storage: AttendedStorage, path: str, inner: Writer) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    def write(self, data: Buffer, /) -> None:
        """Pass on `Writer.write`."""
        with self._storage.attending("writing", self._path):
            self._inner.write(data)

    def finish(self) -> None:
        """Pass on `Writer.finish`."""
        with self._storage.attending("syncing", self._path):
            self._inner.finish()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._storage.attending("closing", self._path):
            self._inner.__exit__(kind, error, trace)
