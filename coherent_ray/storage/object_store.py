"""Storage under a prefix of an object store: S3, Google Cloud Storage, Azure, or what speaks alike.

What is stored is durable when the store says so, and seen at once by every reader: all three
vendors promise both. A small object is one conditional put, so a name is taken once and for all
(`coherent_ray.storage.claim`); a large one is sent in parts (`coherent_ray.storage.object_writer`).

There are no directories: nothing keeps a name from being a file's and a directory's too. Bytes that
a reader gets are those that the store sent; that they are right is for digests to say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import obstore
from obstore.exceptions import BaseError

from coherent_ray.digests import Buffer
from coherent_ray.errors import StorageError
from coherent_ray.storage.address import parse_address
from coherent_ray.storage.base import TEMPORARY_PREFIX, Entry, checked_path
from coherent_ray.storage.claim import claim
from coherent_ray.storage.clients import connect
from coherent_ray.storage.object_writer import ObjectWriter
from coherent_ray.storage.options import StorageOptions
from coherent_ray.storage.refusals import ANSWERS, explained, explanation
from coherent_ray.storage.signing import KeyPlace

#: What the client says of an answer that began well and did not end.
_BROKEN_OFF = "response body"
#: Bytes that are copied at once from an answer into a reader's buffer.
_CHUNK = 2**20

_Names = list[str]  # `list` is a method's name in the class below


class ObjectStorage:
    """The objects below one prefix. May be used from any thread."""

    def __init__(self, uri: str, options: StorageOptions | None = None) -> None:
        """Name the root; no request is sent yet.

        Args:
            uri: ``s3://BUCKET/PREFIX``, ``gs://...`` or ``az://...``.
            options: How to talk to the store; None: as the environment says.

        Raises:
            ConfigError: The address or the options cannot be used.
        """
        self._options = options or StorageOptions()
        self._address = parse_address(uri)
        self._clients = connect(self._address, self._options)

    def __reduce__(self) -> tuple[type[ObjectStorage], tuple[str, StorageOptions]]:
        # Credentials do not travel: another process has its own environment.
        return ObjectStorage, (self.uri, self._options)

    @property
    def key_place(self) -> KeyPlace | None:
        """Where the key is found that records are signed with; None: they are not."""
        return self._options.key_place

    @property
    def uri(self) -> str:
        """The root's address."""
        return self._address.uri

    def create(self, path: str, data: Buffer) -> None:
        """Make an object that did not exist; see `Storage.create` and `claim`.

        The bytes are held in memory and sent in one request.
        """
        claim(self._clients, checked_path(path), memoryview(data).cast("B"))

    def replace(self, path: str, data: Buffer) -> None:
        """Make or overwrite an object; see `Storage.replace`.

        A request whose answer was lost is sent again, so an older writer's bytes may win over a
        newer's that came in between: for hints, which nobody believes.
        """
        flat = memoryview(data).cast("B")
        with explained(self._where(checked_path(path))):
            obstore.put(self._clients.patient, path, flat, mode="overwrite", use_multipart=False)

    def open_writer(self, path: str) -> ObjectWriter:
        """Begin a large object under a name that is free; see `ObjectWriter`."""
        return ObjectWriter(self._clients, checked_path(path))

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a range of an object; see `Storage.read`."""
        found = self._get(path, start, length)
        if found is None:
            return b""
        with explained(self._where(path)):
            data = bytes(found.bytes())
        self._check_whole(path, found, len(data))
        return data

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Fill a buffer from an object; see `Storage.read_into`."""
        flat = target.cast("B")
        found = self._get(path, start, flat.nbytes)
        if found is None:
            return 0
        done = 0
        with explained(self._where(path)):
            for chunk in found.stream(min_chunk_size=_CHUNK):
                piece = memoryview(chunk)
                flat[done : done + len(piece)] = piece
                done += len(piece)
        self._check_whole(path, found, done)
        return done

    def size(self, path: str) -> int:
        """Return an object's size in bytes."""
        with explained(self._where(checked_path(path))):
            return obstore.head(self._clients.patient, path)["size"]

    def written_at(self, path: str) -> datetime | None:
        """Return when the store says that an object was written; see `Dated`."""
        with explained(self._where(checked_path(path))):
            try:
                return obstore.head(self._clients.patient, path)["last_modified"]
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the objects under a directory, in order of path; see `Storage.list`.

        All their names are held in memory. What other tools put under a directory's own name, to
        show that it exists, is left out.
        """
        above = checked_path(prefix) + "/" if prefix else ""
        found = self._names(prefix)
        for path in sorted(found):
            if path.startswith(above) and path and f"/{TEMPORARY_PREFIX}" not in f"/{path}":
                yield Entry(path, found[path])

    def delete(self, path: str) -> None:
        """Remove an object; nothing happens where there is none."""
        with explained(self._where(checked_path(path))):
            try:
                obstore.delete(self._clients.patient, path)
            except FileNotFoundError:
                return

    def directories(self, above: str) -> _Names:
        """Return the names of what looks like directories; see `Foldered.directories`."""
        with explained(self._where(checked_path(above) if above else "")):
            found = obstore.list_with_delimiter(self._clients.patient, above or None)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def _names(self, prefix: str) -> dict[str, int]:
        """Return names and sizes under a directory, not in order."""
        failure: StorageError | None = None
        # The client asks again for a page that was refused, not for one that broke off.
        for pause in self._clients.pauses():
            time.sleep(pause)
            try:
                pages = obstore.list(self._clients.patient, prefix or None)
                return {item["path"]: item["size"] for page in pages for item in page}
            except ANSWERS as error:
                failure = explanation(error, self._where(prefix))
                if _BROKEN_OFF not in str(error):
                    break
        assert failure is not None
        raise failure

    def _where(self, path: str) -> str:
        return self._address.where(path)

    def _get(self, path: str, start: int, length: int | None) -> Any:
        """Ask for a range; None: it begins at the object's end or behind it, or is empty."""
        checked_path(path)
        if length == 0:
            self.size(path)
            return None
        wanted: Any = {"offset": start} if length is None else (start, start + length)
        options: Any = {} if start == 0 and length is None else {"range": wanted}
        with explained(self._where(path)):
            try:
                return obstore.get(self._clients.patient, path, options=options)
            except BaseError:
                # These stores refuse a range that holds no byte. Here it is just empty.
                if options and start >= self.size(path):
                    return None
                raise

    def _check_whole(self, path: str, found: Any, count: int) -> None:
        first, last = found.range
        if count != last - first:
            raise StorageError(
                f"the store sent {count} of {last - first} bytes", where=self._where(path)
            )
