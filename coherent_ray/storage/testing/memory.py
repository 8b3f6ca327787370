"""A storage in memory: for tests of protocols, and as the shortest text of the verbs' meaning."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from coherent_ray.digests import Buffer
from coherent_ray.errors import AlreadyExists, NotFound, StorageError
from coherent_ray.storage.base import TEMPORARY_PREFIX, Entry, checked_path


class MemoryStorage:
    """Files in a dictionary; `files` may be read and changed behind the verbs' back."""

    def __init__(self, name: str = "test") -> None:
        self.files: dict[str, bytes] = {}
        self._name = name
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """The root's address."""
        return f"memory://{self._name}"

    def create(self, path: str, data: Buffer) -> None:
        """Make a file that did not exist; see `Storage.create`."""
        checked_path(path)
        with self._lock:
            if path in self.files:
                raise AlreadyExists("the name is taken", where=path)
            self._refuse_mixture(path)
            self.files[path] = bytes(data)

    def replace(self, path: str, data: Buffer) -> None:
        """Make or overwrite a file; see `Storage.replace`."""
        checked_path(path)
        with self._lock:
            self._refuse_mixture(path)
            self.files[path] = bytes(data)

    def open_writer(self, path: str) -> MemoryWriter:
        """Begin a file under a name that is free; see `Storage.open_writer`."""
        return MemoryWriter(self, checked_path(path))

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a range of a file; see `Storage.read`."""
        data = self._file(path)
        return data[start:] if length is None else data[start : start + length]

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Fill a buffer from a file; see `Storage.read_into`."""
        flat = target.cast("B")
        piece = self._file(path)[start : start + flat.nbytes]
        flat[: len(piece)] = piece
        return len(piece)

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""
        return len(self._file(path))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the files under a directory, in order of path; see `Storage.list`."""
        start = checked_path(prefix) + "/" if prefix else ""
        with self._lock:
            found = sorted((p, len(d)) for p, d in self.files.items() if p.startswith(start))
        hidden = f"/{TEMPORARY_PREFIX}"
        yield from (Entry(path, size) for path, size in found if hidden not in f"/{path}")

    def delete(self, path: str) -> None:
        """Remove a file; nothing happens where there is none."""
        checked_path(path)
        with self._lock:
            self.files.pop(path, None)

    def _file(self, path: str) -> bytes:
        checked_path(path)
        try:
            return self.files[path]
        except KeyError:
            raise NotFound("nothing is stored here", where=path) from None

    def _refuse_mixture(self, path: str) -> None:
        parts = path.split("/")
        above = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if above & self.files.keys() or any(p.startswith(path + "/") for p in self.files):
            raise StorageError("a name cannot be both a file and a directory", where=path)


class MemoryWriter:
    """A file of a `MemoryStorage` that is being written."""

    def __init__(self, storage: MemoryStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._data: bytearray | None = bytearray()

    def write(self, data: Buffer, /) -> None:
        """Append bytes."""
        if self._data is None:
            raise StorageError("the file is closed", where=self._path)
        self._data += data

    def finish(self) -> None:
        """Give the file its name."""
        if self._data is None:
            raise StorageError("the file is closed", where=self._path)
        data, self._data = self._data, None
        self._storage.create(self._path, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._data = None
