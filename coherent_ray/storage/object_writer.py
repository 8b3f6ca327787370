"""Large objects, sent in parts while they are written: bounded memory, and nothing half-visible.

What fits into one part is held until `ObjectWriter.finish` and then is one conditional put. What is
larger becomes a multipart upload: parts are sent by a few requests at once, each repeated by itself
where it fails, and the name appears when the upload is completed, whole.

**What is promised about a name that is taken.** Stores cannot complete an upload on condition, so:

| the name is taken | a small object | an upload in parts |
|---|---|---|
| before the first part is sent | `AlreadyExists` from `finish` | `AlreadyExists` from `write` |
| while it is written | `AlreadyExists` from `finish` | `AlreadyExists` from `finish` |
| after `finish` last looked, until completed | `AlreadyExists` from `finish` | **overwritten** |

The last window is one request wide, and nobody is in it who keeps this project's rule: what is
large goes to a name that only one writer of one attempt uses. Whoever completes an upload then
looks whose stamp the name bears, and says `AlreadyExists` where it is not its own; so of two who
break the rule at the same moment one may be told too late, never a reader: digests tell it.

A process that dies leaves parts without a name, which no reader sees; Azure drops them after a
week, S3 and GCS when the bucket has a lifecycle rule that aborts incomplete uploads.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import obstore

from coherent_ray.digests import Buffer
from coherent_ray.errors import AlreadyExists, StorageError
from coherent_ray.storage.claim import STAMP, claim, look, new_stamp
from coherent_ray.storage.clients import Clients
from coherent_ray.storage.options import MOST_PARTS
from coherent_ray.storage.refusals import ANSWERS, explained, explanation

if TYPE_CHECKING:
    from obstore import WritableFile


class ObjectWriter:
    """An object that is being written; for one thread at a time."""

    def __init__(self, clients: Clients, path: str) -> None:
        """Begin; no request is sent yet.

        Args:
            clients: Of the root.
            path: Relative to the root, legal.
        """
        self._clients = clients
        self._path = path
        self._where = clients.address.where(path)
        self._stamp = new_stamp()
        self._start = bytearray()
        self._upload: WritableFile | None = None
        self._written = 0
        self._open = True

    def write(self, data: Buffer, /) -> None:
        """Append bytes; waits while as many parts as may be are on their way.

        Raises:
            AlreadyExists: The name is taken.
            StorageFull: No space or quota is left.
            StorageError: A part failed for good, the writer is closed, or the object has become
                larger than the store allows.
        """
        self._refuse_closed()
        view = memoryview(data).cast("B")
        part = self._clients.options.part_bytes
        if self._upload is None and len(self._start) + len(view) <= part:
            self._start += view
            return
        upload = self._upload or self._begin()
        self._refuse_larger(self._written + len(view))
        # In pieces of a part: the client would take a longer one whole, however much that is.
        for at in range(0, len(view), part):
            self._send(upload, view[at : at + part])

    def finish(self) -> None:
        """Give the object its name; see this module's table for names that are taken.

        Raises:
            AlreadyExists: The name is taken.
            StorageError: The store failed; the name is free, or the object may yet be found.
        """
        self._refuse_closed()
        if self._upload is None:
            claim(self._clients, self._path, memoryview(self._start))
            self._open = False
            return
        # Here it costs nothing to have come too late; after the completion it would.
        self._refuse_taken()
        upload, self._upload, self._open = self._upload, None, False
        failure: StorageError | None = None
        try:
            upload.close()
        except ANSWERS as error:
            failure = explanation(error, self._where)
        self._settle(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        upload, self._upload, self._open = self._upload, None, False
        self._start = bytearray()
        if upload is not None:
            # It closes without an error as a file would, and aborts with one.
            with suppress(*ANSWERS):
                upload.__exit__(InterruptedError, InterruptedError("not finished"), None)

    def _begin(self) -> WritableFile:
        self._refuse_taken()
        options = self._clients.options
        with explained(self._where):
            upload = obstore.open_writer(
                self._clients.patient,
                self._path,
                attributes={STAMP: self._stamp},
                buffer_size=options.part_bytes,
                max_concurrency=options.parallel_parts,
            )
        self._upload = upload
        self._send(upload, memoryview(self._start))
        self._start = bytearray()
        return upload

    def _send(self, upload: WritableFile, piece: memoryview) -> None:
        with explained(self._where):
            upload.write(piece)
        self._written += len(piece)

    def _settle(self, failure: StorageError | None) -> None:
        """Look whose object has the name, whatever the completion was answered with."""
        found = look(self._clients, self._path)
        if found is None:
            raise failure or StorageError(
                "the store completed the upload, and has no such object", where=self._where
            )
        ours = found.stamp == self._stamp or (found.stamp is None and failure is None)
        if not ours and found.stamp is None and failure is not None:
            raise failure  # a store that forgets metadata: nobody knows whose it is
        if not ours:
            raise AlreadyExists("the name is taken", where=self._where)
        if found.size != self._written:
            raise StorageError(
                f"the store holds {found.size} of {self._written} bytes", where=self._where
            )

    def _refuse_taken(self) -> None:
        if look(self._clients, self._path) is not None:
            raise AlreadyExists("the name is taken", where=self._where)

    def _refuse_larger(self, size: int) -> None:
        most = self._clients.options.part_bytes * MOST_PARTS
        if size > most:
            raise StorageError(
                f"the object would be larger than {MOST_PARTS:,} parts, {most:,} bytes",
                where=self._where,
                remedy="Set storage.part_bytes higher.",
            )

    def _refuse_closed(self) -> None:
        if not self._open:
            raise StorageError("the file is closed", where=self._where)
