"""The Storage protocol: bytes that are durable. Eight verbs, and nothing about runs or tensors.

A path is relative to the storage's root, POSIX style (``log/00000000000000000001.json``), made of
plain names: no ``..``, no leading slash, no backslash, no empty part, none of the storage's own
temporary names. A verb that returns has made its effect durable, the directory entries that lead to
it too: what it did survives a power cut. `AlreadyExists` is a promise as well: what it met is
durable. All verbs may be called from any thread.

Errors are those of `coherent_ray.errors`: `NotFound`, or `NotAFile` where something that is no file
has the name; `AlreadyExists`, `StorageFull`, or `StorageError` with the path and the operating
system's reason. ``details["errno"]`` has the symbol of the operating system's error where there is
one; ``EIO`` from a read means that the medium has lost these bytes, any other that nobody could
look. ``details["status"]`` has an object store's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from coherent_ray.digests import Buffer
from coherent_ray.errors import StorageError

#: Names that begin with this belong to the storage itself and are never listed.
TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored file."""

    path: str
    size: int
    """Bytes."""


class Writer(Protocol):
    """A file that is being written; it has its name, whole and durable, once `finish` returns.

    Leaving the ``with`` block without `finish` leaves nothing behind under the name.
    """

    def write(self, data: Buffer, /) -> None:
        """Append bytes."""

    def finish(self) -> None:
        """Make the file and its name durable.

        Raises:
            AlreadyExists: The name is taken.
        """

    def __enter__(self) -> Self:
        """Return the writer."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drop what was written, unless `finish` has returned."""


class Storage(Protocol):
    """A root under which bytes are durable."""

    @property
    def uri(self) -> str:
        """The root's address, as the user may type it."""

    def create(self, path: str, data: Buffer) -> None:
        """Make a file that did not exist, atomically and durably.

        | the name is | outcome |
        |---|---|
        | free | the file exists with exactly these bytes |
        | taken, whoever took it | `AlreadyExists`; what is stored is untouched, and durable |
        | free, and the machine dies | afterwards the file is absent, or whole |
        | free, and the answer is lost (object stores) | the storage reads back what is there |
        | free, and nobody answers any more | `StorageError`; the file may yet be found |

        Raises:
            AlreadyExists: The name is taken.
            StorageError: The storage failed.
        """

    def replace(self, path: str, data: Buffer) -> None:
        """Make or overwrite a file atomically and durably: for hints, never for truth.

        A reader sees the old bytes or the new ones, nothing between.
        """

    def open_writer(self, path: str) -> Writer:
        """Begin a large file under a name that is free; see `Writer`."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes ``[start, start + length)`` of a file, fewer at its end.

        Args:
            path: The file.
            start: First byte.
            length: Number of bytes; None: to the end.

        Raises:
            NotFound: There is no such file.
        """

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Fill a writable buffer from a file, and return the number of bytes that it held.

        Raises:
            NotFound: There is no such file.
        """

    def size(self, path: str) -> int:
        """Return a file's size in bytes.

        Raises:
            NotFound: There is no such file.
        """

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the files under a directory (``""``: all), recursively, in order of path.

        A directory that does not exist holds nothing. Temporary files are not shown.
        """

    def delete(self, path: str) -> None:
        """Remove a file durably; nothing happens where there is none."""


@runtime_checkable
class Dated(Protocol):
    """A storage that also tells when a file was written: for people, never for a decision."""

    def written_at(self, path: str) -> datetime | None:
        """Return when a file was written, by the storage's own clock; None: it is not there."""


def checked_path(path: str) -> str:
    """Return a path unchanged if it is a legal one.

    Raises:
        StorageError: The path could leave the root, or is not made of plain names.
    """
    parts = path.split("/")
    legal = all(part not in {"", ".", ".."} and not set(part) & set("\\\0\n") for part in parts)
    if not legal or not _encodable(path):
        raise StorageError("the path is not made of plain names", where=repr(path))
    if any(part.startswith(TEMPORARY_PREFIX) for part in parts):
        raise StorageError(f"names in {TEMPORARY_PREFIX!r} are the storage's own", where=repr(path))
    return path


def _encodable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
