"""Holds: how a reader keeps a generation's files from being deleted while it reads them.

A hold is a file of its own under ``holds/``, created exclusively, renewed while the reader lives,
deleted when it is done. The order makes it safe, as long as both look at one storage: a reader
creates its hold and *then* reads in the log that the generation is not retired; a pruner appends
`retire` and *then* looks for holds. One of the two comes first, so either the reader sees the
record and turns away, or the pruner sees the hold and leaves the files.

A reader that is killed leaves its hold behind, so a hold expires. No clock's word is in it, and no
two clocks are ever compared: whoever wants to delete watches the file, and calls it dead when its
bytes have not changed for the whole lease *on his own monotonic clock*. A clock that jumps, here or
there, changes nothing. A reader that stood still for longer finds its hold gone and its files
perhaps too; since every byte that it reads is verified, it can never read wrong ones.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from coherent_ray.commit import manifest
from coherent_ray.commit.history import GenerationKey
from coherent_ray.commit.inventory import item_of
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Count, Format, Positive, generation_name
from coherent_ray.commit.records import PublishBody
from coherent_ray.errors import NoGeneration, NotFound, StorageError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.bounded import TooLong, read_bounded

DIRECTORY = "holds"
#: Seconds without a sign of life after which a watcher calls a hold dead.
LEASE_S = 60.0
#: No hold is longer.
HOLD_BYTES = 16 * 2**10
#: Signs of life in a lease: a few may be lost or late.
BEATS_PER_LEASE = 4


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class HoldRecord:
    """What a hold's file says; canonical JSON."""

    format: Format
    number: Positive
    attempt: Positive
    who: Annotated[str, Field(max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
    """Host and process, for people."""
    lease_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
    """Seconds without a change after which it is dead."""
    beat: Count
    """Counts the renewals: that it changes is the sign of life."""


class Hold:
    """One reader's hold. `renew` and `release` may be called from any thread."""

    def __init__(self, storage: Storage, publish: PublishBody, lease_s: float = LEASE_S) -> None:
        """Make a hold; `take` puts it into the storage.

        Args:
            storage: The run's root.
            publish: The generation.
            lease_s: Seconds that others wait for a sign of life.
        """
        who = f"process {os.getpid()} on {socket.gethostname()}"
        self._storage = storage
        self._record = HoldRecord(1, publish.number, publish.attempt, who, lease_s, 0)
        self.path = f"{DIRECTORY}/{publish.name}-{uuid.uuid4().hex}.json"
        self.lost = False
        """Whether somebody called this reader dead, so that the files may go."""
        self._lock = threading.Lock()
        self._released = threading.Event()

    def take(self, log: CommitLog) -> None:
        """Create the hold, and make sure that it came in time.

        Raises:
            NoGeneration: The generation was retired before it was held.
            LogDamaged: The log cannot be trusted.
            StorageError: The storage failed; nothing is held.
        """
        self._storage.create(self.path, manifest.dump(self._record))
        try:
            # Only what is read after the hold is durable counts: see the module's text.
            retired = log.read_on().retired
        except BaseException:
            self.release()
            raise
        if (self._record.number, self._record.attempt) in retired:
            self.release()
            raise NoGeneration(
                f"{generation_name(self._record.number, self._record.attempt)} was retired before "
                "it could be held",
                remedy="Read the log again and choose another generation.",
            )

    def renew(self) -> bool:
        """Give a sign of life, and return whether the generation is still held.

        A storage that fails now may work at the next beat: that is no reason to give up.
        """
        with self._lock:
            if self.lost or self._released.is_set():
                return False
            with suppress(StorageError):
                try:
                    self._storage.size(self.path)
                except NotFound:
                    self.lost = True
                    return False
                record = replace(self._record, beat=self._record.beat + 1)
                self._storage.replace(self.path, manifest.dump(record))
                self._record = record
            return True

    def keep_renewing(self) -> None:
        """Renew until released or lost; for a thread of its own."""
        while not self._released.wait(self._record.lease_s / BEATS_PER_LEASE):
            if not self.renew():
                return

    def release(self) -> None:
        """Delete the hold. Where that fails it expires."""
        self._released.set()
        with self._lock, suppress(StorageError):
            self._storage.delete(self.path)


@contextmanager
def holding(
    storage: Storage, log: CommitLog, publish: PublishBody, lease_s: float = LEASE_S
) -> Iterator[Hold | None]:
    """Hold a generation inside the block.

    A storage that cannot be written to is no reason not to read: then nothing is held, the block
    gets None, and what it reads is verified like everything else.

    Args:
        storage: The run's root.
        log: Its commit log.
        publish: The generation.
        lease_s: Seconds that others wait for a sign of life.

    Raises:
        NoGeneration: The generation was retired before it was held.
        LogDamaged: The log cannot be trusted.
    """
    hold: Hold | None = Hold(storage, publish, lease_s)
    assert hold is not None
    try:
        hold.take(log)
    except StorageError:
        hold = None
    if hold is None:
        yield None
        return
    threading.Thread(target=hold.keep_renewing, name=f"hold {publish.name}", daemon=True).start()
    try:
        yield hold
    finally:
        hold.release()


@plain_dataclass(frozen=True, slots=True)
class Held:
    """A hold as a watcher sees it."""

    path: str
    generation: GenerationKey
    who: str
    expires_in_s: float
    """Seconds until it is called dead, if it does not change; infinite where it cannot be read."""
    seen_alive: bool
    """Whether it has changed while it was watched."""

    @property
    def expired(self) -> bool:
        """Whether it has stood still for its whole lease."""
        return self.expires_in_s <= 0


@plain_dataclass(slots=True)
class _Seen:
    data: bytes
    since: float
    changed: bool = False


class Watch:
    """Watches the holds of a run; only what it has seen itself makes a hold dead."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a watch that has seen nothing yet.

        Args:
            storage: The run's root.
            clock: Seconds, never going back.
        """
        self._storage = storage
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def look(self) -> list[Held]:
        """Look at every hold, and return all that are there, expired ones too, in order of path.

        Raises:
            StorageError: The storage failed.
        """
        held: list[Held] = []
        seen: dict[str, _Seen] = {}
        for entry in self._storage.list(DIRECTORY):
            item = item_of(entry.path)
            if item is None or item.generation is None:
                continue
            try:
                data = read_bounded(self._storage, entry.path, HOLD_BYTES)
            except NotFound:
                continue  # released meanwhile
            except TooLong:
                data = b""  # no hold of ours: it holds like any other that cannot be read
            # After the read: what is seen later than it was true only lives a little longer.
            now = self._clock()
            before = self._seen.get(entry.path)
            if before is None:
                before = _Seen(data, now)
            elif before.data != data:
                before = _Seen(data, now, changed=True)
            seen[entry.path] = before
            held.append(_held(entry.path, item.generation, before, now))
        self._seen = seen
        return held


def _held(path: str, generation: GenerationKey, seen: _Seen, now: float) -> Held:
    try:
        record = manifest.load(HoldRecord, seen.data)
    except ValueError:
        # Of a later format, or damaged: nobody knows its lease, so it holds until it is removed.
        return Held(path, generation, f"unreadable file {path}", float("inf"), seen.changed)
    left = record.lease_s - (now - seen.since)
    return Held(path, generation, record.who, left, seen.changed)
