"""Storage in a directory of a POSIX file system: what returned survives a power cut.

The order is everything. Bytes are written to a temporary file and synced; then the file gets its
name by ``link(2)``, which fails where the name is taken; then the directory is synced, since a name
lives in its directory and not in its file. A directory that is new is itself only a name in the one
above, which is synced too. No shortcut that a particular file system would forgive is taken.

Symbolic links under the root are never followed: a path cannot leave the root. The root itself may
be reached through one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coherent_ray.digests import Buffer
from coherent_ray.errors import AlreadyExists, NotFound, StorageError
from coherent_ray.storage.base import TEMPORARY_PREFIX, Entry, checked_path
from coherent_ray.storage.direct import Direct, DirectFile
from coherent_ray.storage.directories import TEMPORARY_NAME, Directories
from coherent_ray.storage.housekeeping import Temporary
from coherent_ray.storage.reasons import explained, linked_directory, no_file, refuse_no_file
from coherent_ray.storage.signing import KeyPlace

#: Bytes after which a writer asks the kernel to begin writing them to the device.
_WRITE_BEHIND = 8 << 20

_Names = list[str]  # `list` is a method's name in the class below
_Temporaries = list[Temporary]


class LocalStorage:
    """A directory; it is made by the first write, and reading an absent one finds nothing."""

    def __init__(
        self, root: str | Path, key_place: KeyPlace | None = None, *, direct_io: bool = True
    ) -> None:
        """Name the root; nothing is touched yet.

        Args:
            root: The directory; a relative one is taken from the current directory, now.
            key_place: Where the key is found that records are signed with; None: they are not.
            direct_io: Write large files past the page cache, where the file system takes it.
        """
        self.key_place = key_place
        self._direct_io = direct_io
        self._direct = Direct(direct_io)
        self._root = Path(os.path.abspath(root))  # noqa: PTH100 (resolve() would follow links)
        self._directories = Directories(self._root)

    def __reduce__(self) -> tuple[Any, ...]:
        # What this process knows to be durable is not known elsewhere.
        make = partial(LocalStorage, direct_io=self._direct_io)
        return make, (str(self._root), self.key_place)

    @property
    def uri(self) -> str:
        """The root's absolute path."""
        return str(self._root)

    def create(self, path: str, data: Buffer) -> None:
        """Make a file that did not exist, atomically and durably; see `Storage.create`."""
        with self.open_writer(path) as writer:
            writer.write(data)
            writer.finish()

    def replace(self, path: str, data: Buffer) -> None:
        """Make or overwrite a file atomically and durably; see `Storage.replace`."""
        with self._new_file(path) as file:
            file.write(data)
            file.rename()

    def open_writer(self, path: str) -> LocalWriter:
        """Begin a large file under a name that is free; see `Storage.open_writer`."""
        return self._new_file(path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a range of a file; see `Storage.read`."""
        with self._open(path) as file, explained(self._where(path)):
            wanted = max(os.fstat(file).st_size - start, 0)
            buffer = bytearray(wanted if length is None else min(length, wanted))
            return bytes(buffer[: _read_full(file, start, memoryview(buffer))])

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Fill a buffer from a file; see `Storage.read_into`."""
        with self._open(path) as file, explained(self._where(path)):
            return _read_full(file, start, target.cast("B"))

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""
        with self._open(path) as file, explained(self._where(path)):
            return os.fstat(file).st_size

    def written_at(self, path: str) -> datetime | None:
        """Return when a file was last changed; see `Dated`."""
        try:
            with self._open(path) as file, explained(self._where(path)):
                return datetime.fromtimestamp(os.fstat(file).st_mtime, UTC)
        except NotFound:
            return None

    def forget(self, path: str, start: int = 0, length: int = 0) -> None:
        """Ask the page cache to forget a range of a file; see `Cached.forget`."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(StorageError, OSError), self._open(path) as file:
            os.posix_fadvise(file, start, length, os.POSIX_FADV_DONTNEED)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the files under a directory, in order of path; see `Storage.list`."""
        return self._walk(_names(prefix))

    def delete(self, path: str) -> None:
        """Remove a file durably; nothing happens where there is none."""
        *above, name = checked_path(path).split("/")
        self._unlink(above, name, self._where(path))

    # --- housekeeping -----------------------------------------------------------------------------

    def directories(self, above: str) -> _Names:
        """Return the names of the directories in a directory; see `Housekeeping.directories`."""
        try:
            with explained(self._where(above)):
                found = self._directories.scan(_names(above))
        except NotFound:
            return []
        return [name for name, size in found if size is None]

    def temporaries(self, directories: Iterable[str]) -> _Temporaries:
        """Return the temporary files in some directories; see `Housekeeping.temporaries`."""
        found: list[tuple[str, int, float]] = []
        for directory in directories:
            names = _names(directory)
            with suppress(NotFound), explained(self._where(directory)):
                for name, size, touched in self._directories.temporaries(names):
                    found.append(("/".join([*names, name]), size, touched))
        if not found:
            return []
        now = self._directories.now()
        return [
            Temporary(path, size, 0.0 if now is None else max(now - touched, 0.0))
            for path, size, touched in found
        ]

    def drop_temporary(self, path: str) -> bool:
        """Remove a temporary file durably; see `Housekeeping.drop_temporary`."""
        *above, name = path.split("/")
        if not TEMPORARY_NAME.fullmatch(name):
            raise StorageError("this is no temporary file of the storage", where=self._where(path))
        if above:
            checked_path("/".join(above))
        if self._directories.in_use(above, name):
            return False
        self._unlink(above, name, self._where(path))
        return True

    def drop_directory(self, path: str) -> bool:
        """Remove an empty directory durably; see `Housekeeping.drop_directory`."""
        with explained(self._where(path)):
            return self._directories.remove(checked_path(path).split("/"))

    # --- leaves -----------------------------------------------------------------------------------

    def _where(self, path: str) -> str:
        return str(self._root / path)

    def _unlink(self, above: Sequence[str], name: str, where: str) -> None:
        with explained(where):
            try:
                directory = self._directories.open(above)
            except FileNotFoundError:
                return
            try:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
                # Also where it was gone already: whoever removed it may not have come this far.
                os.fsync(directory)
            finally:
                os.close(directory)

    def _new_file(self, path: str) -> LocalWriter:
        *above, name = checked_path(path).split("/")
        with explained(self._where(path)):
            directory = self._directories.open(above, make=True)
            return LocalWriter(directory, name, self._where(path), self._direct)

    @contextmanager
    def _open(self, path: str) -> Iterator[int]:
        """Open a regular file for reading, and close it."""
        *above, name = checked_path(path).split("/")
        where = self._where(path)
        with explained(where):
            directory = self._above(above, where)
            try:
                refuse_no_file(directory, name, where)
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                file = os.open(name, flags, dir_fd=directory)
            finally:
                os.close(directory)
        try:
            with explained(where):  # a device may fail between any two calls
                mode = os.fstat(file).st_mode
            if not stat.S_ISREG(mode):  # put there since the look above
                raise no_file(mode, where)
            yield file
        finally:
            with suppress(OSError):  # what was read is read
                os.close(file)

    def _above(self, names: Sequence[str], where: str) -> int:
        """Open the directory of a file that is to be read."""
        try:
            return self._directories.open(names)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise linked_directory(where) from error

    def _walk(self, above: Sequence[str]) -> Iterator[Entry]:
        try:
            with explained(self._where("/".join(above))):
                found = self._directories.scan(above)
        except NotFound:
            return  # it holds nothing, or was removed while we walked
        for name, size in found:
            if name.startswith(TEMPORARY_PREFIX):
                continue
            if size is None:
                yield from self._walk([*above, name])
            else:
                yield Entry("/".join([*above, name]), size)


class LocalWriter:
    """A file that is being written under a temporary name in its directory."""

    def __init__(self, directory: int, name: str, where: str, direct: Direct) -> None:
        """Take over a directory's descriptor, and begin the file in it.

        Args:
            directory: Descriptor; closed with the writer.
            name: The name that the file gets.
            where: The file's absolute path, for messages.
            direct: Whether large pieces go past the page cache.
        """
        self._directory = directory
        self._name = name
        self._where = where
        self._temporary = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        self._named = False
        self._written = self._begun = 0
        self._file = -1
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._temporary, flags, 0o666, dir_fd=directory)
            # Says that the writer lives, whatever any clock says; the kernel lets go of it with the
            # process. Where there are no locks, a temporary file is told by its age alone.
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(directory)
            raise
        self._pieces = DirectFile(self._file, direct)

    def write(self, data: Buffer, /) -> None:
        """Append bytes.

        Raises:
            StorageFull: No space is left.
            StorageError: The operating system refused, or the writer is closed.
        """
        self._refuse_closed()
        rest = memoryview(data).cast("B")
        with explained(self._where):
            while rest:
                count = self._write_some(rest)
                rest = rest[count:]
                self._written += count
                self._write_behind()

    def finish(self) -> None:
        """Make the file durable, give it its name, and make that durable.

        Raises:
            AlreadyExists: The name is taken; what has it is durable.
        """
        self._refuse_closed()
        with explained(self._where):
            # A sync that failed is never asked again: the kernel may have dropped what it could not
            # write, and would say yes. The file goes, unnamed.
            os.fsync(self._file)
            free = self._link()
            self._named = True
            os.unlink(self._temporary, dir_fd=self._directory)
            # The name, and that the temporary one is gone, in one. A power cut before this leaves
            # the name absent or whole, since the bytes were synced before there was a name.
            os.fsync(self._directory)
            self._close()
        if not free:
            raise AlreadyExists("the name is taken", where=self._where)

    def rename(self) -> None:
        """Make the file durable and put it in the place of whatever has its name."""
        self._refuse_closed()
        with explained(self._where):
            os.fsync(self._file)
            os.rename(
                self._temporary,
                self._name,
                src_dir_fd=self._directory,
                dst_dir_fd=self._directory,
            )
            self._named = True
            os.fsync(self._directory)
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What was not finished goes, and what was is closed: nothing that a close could say matters
        # beside the error that brought us here.
        with suppress(OSError):
            self._close()

    def _write_some(self, rest: memoryview) -> int:
        """Write at least one byte, unless a file system refused to be written to past its cache."""
        piece = self._pieces.next_piece(rest, self._written)
        try:
            count = os.write(self._file, piece)
        except OSError as error:
            if not self._pieces.takes_back(error):
                raise
            return 0
        if count == 0 and not self._pieces.takes_back(None):
            raise OSError(errno.EIO, "the file system wrote nothing, and said nothing")
        return count

    def _write_behind(self) -> None:
        """Let the device begin with what was written, so that the sync at the end has little left.

        Only advice: nothing is durable by it. What is on the device also leaves the page cache, so
        a shard does not push the training's data out, and reading it back reads the device.
        """
        size = self._written - self._begun
        if size >= _WRITE_BEHIND and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._file, self._begun, size, os.POSIX_FADV_DONTNEED)
            self._begun = self._written

    def _link(self) -> bool:
        """Give the file its name, and return whether that was free."""
        try:
            os.link(
                self._temporary,
                self._name,
                src_dir_fd=self._directory,
                dst_dir_fd=self._directory,
                follow_symlinks=False,
            )
        except FileExistsError:
            # A network file system may have lost its answer and asked twice. Then the name that is
            # taken is this very file's, which has two names now.
            return os.fstat(self._file).st_nlink == 2
        return True

    def _refuse_closed(self) -> None:
        if self._file < 0:
            raise StorageError("the file is closed", where=self._where)

    def _close(self) -> None:
        if self._file < 0:
            return
        file, self._file = self._file, -1
        try:
            if not self._named:
                # Best effort: a temporary file that stays is never listed and never read.
                with suppress(OSError):
                    os.unlink(self._temporary, dir_fd=self._directory)
            os.close(file)
        finally:
            os.close(self._directory)


def _names(directory: str) -> list[str]:
    return checked_path(directory).split("/") if directory else []


def _read_full(file: int, start: int, target: memoryview) -> int:
    done = 0
    while done < target.nbytes:
        count = os.preadv(file, [target[done:]], start + done)
        if count == 0:
            break
        done += count
    return done
