"""The commit log: the run's only source of truth, one file a record, over any Storage.

Everything rests on one primitive, `Storage.create`, which makes a file that did not exist or says
`AlreadyExists`. To append is to read to the end and create the next number. Whoever finds the
number taken reads what is there: its own bytes mean that an answer was lost and the append
succeeded; another's mean that the log went on, and the rules are asked again.

An attempt that is not the newest is *fenced*: since the attempt that fences it holds a record, and
records have one order, no process that still believes in the old attempt can get past that record.

A record that can be read need not be *durable*: its writer may have died between giving the file
its name and syncing the directory. So a writer that answers by records, or builds on them,
*settles* them first: it creates the last one's own bytes again, and `AlreadyExists` is the word
that they are durable. The last one is enough: whoever wrote it had settled those before it.

A root can vanish under a process that lives: a file system is unmounted, and the directory that it
was mounted on is there, empty. So a view looks for the last record that it knows whenever it reads
on, and once more behind each append: a record whose predecessor is not beside it is in no log.

`latest.json` is a hint. It says where the end of the log was a while ago, and is never believed.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress

from coherent_ray import canonical
from coherent_ray.commit import log_errors
from coherent_ray.commit.history import History, RecordRefused
from coherent_ray.commit.log_end import HINT, end_of, gap_behind, read_hint
from coherent_ray.commit.manifest import LaterFormat
from coherent_ray.commit.records import (
    DIRECTORY,
    RECORD_BYTES,
    AttemptBody,
    Body,
    PinBody,
    PublishBody,
    Record,
    RetireBody,
    WrongSignature,
    decode,
    encode,
    is_signed,
    record_path,
)
from coherent_ray.errors import (
    AlreadyExists,
    ConfigError,
    Fenced,
    NotAFile,
    NotFound,
    SaveFailed,
    StorageError,
)
from coherent_ray.storage.base import Storage
from coherent_ray.storage.bounded import read_bounded
from coherent_ray.storage.signing import KEY_VARIABLE, key_of

__all__ = [
    "DIRECTORY",
    "HINT",
    "AttemptBody",
    "Body",
    "CommitLog",
    "History",
    "PinBody",
    "PublishBody",
    "Record",
    "RetireBody",
    "record_path",
]

_NAME = re.compile(rf"{DIRECTORY}/([0-9]{{20}})\.json")
#: How often a number may be both taken and unreadable before the storage is called inconsistent.
_PATIENCE = 3


class CommitLog:
    """One writer's, or reader's, view of a run's commit log. May be called from any thread."""

    def __init__(self, storage: Storage, writer: str | None = None) -> None:
        """Make a view; nothing is read yet.

        Args:
            storage: The run's root.
            writer: A name that no other writer uses; None: a random one.

        Raises:
            ConfigError: The root's signing key is not where it must be.
        """
        self._storage = storage
        self._key = key_of(storage)
        self._signed = False
        """Whether a signed record was read; only ever set."""
        self.writer = writer or uuid.uuid4().hex
        self._lock = threading.Lock()
        self._known = History()
        self._settled = 0  # number of the last record that this view knows to be durable

    @property
    def keyed(self) -> bool:
        """Whether records count only with the root's signature."""
        return self._key is not None

    def read(self) -> History:
        """Read and check every record.

        Returns:
            The history; empty where there is no log.

        Raises:
            LogDamaged: A record is missing, torn, foreign or out of the chain. `details` has
                ``readable_until``: the number of the last record before it.
            StorageError: The storage failed.
        """
        history = self._read_on(History(), self._last_listed())
        with self._lock:
            self._require_same(history)
            if history.seq > self._known.seq or self._known.omitted:
                self._known = history
        return history

    def read_end(self) -> History:
        """Read the log's end, as far back as its latest generation; of a short log all.

        For a reader of the latest generation: it takes the same time however long the log is. What
        it returns is verified; damage in older records is for `read` to find. What this view knows
        already is not read again.

        Raises:
            LogDamaged: As for `read`.
            StorageError: The storage failed.
        """
        with self._lock:
            known = self._known
        if known.records:
            return self.read_on()
        try:
            found = end_of(read_hint(self._storage), self._record, self._exists)
        except NotFound:
            found = None
        except RecordRefused as error:
            raise log_errors.damaged(
                error.seq, f"the record does not belong here: {error}"
            ) from error
        if found is None:
            return self.read()
        with self._lock:
            if not self._known.records:
                self._known = found
            return self._known

    def newest_first(self, history: History) -> Iterator[PublishBody]:
        """Yield the live generations, the newest first; the whole log is read where it must be.

        Args:
            history: As this view has returned it.
        """
        yield from reversed(history.live)
        if history.omitted:
            told = {(publish.number, publish.attempt) for publish in history.publishes}
            for publish in reversed(self.read().live):
                if (publish.number, publish.attempt) not in told:
                    yield publish

    def confirm(self) -> None:
        """Return if the last record that this view knows is where it was: if this is still the log.

        Raises:
            LogDamaged: It is not there, or another is.
            StorageError: The storage failed.
        """
        with self._lock:
            known = self._known
        if not self._stands(known):
            raise log_errors.gone(self._storage, known.seq)

    def read_on(self) -> History:
        """Read only what was appended since this view last looked; the whole log the first time.

        For a writer, which lives long. A reader that must find damage in old records calls `read`.

        Raises:
            LogDamaged: As for `read`.
            StorageError: The storage failed.
        """
        with self._lock:
            self._known = self._refreshed(self._known, whole=False)
            return self._known

    def settled(self) -> History:
        """Read on as `read_on` does, and make what was read durable before it is returned.

        For a writer that answers or deletes by what the log says. Costs one `create` where others
        have appended since, and nothing else.

        Raises:
            LogDamaged: As for `read`.
            StorageError: The storage failed, or does not say that the records are durable.
        """
        with self._lock:
            self._known = self._settle(self._refreshed(self._known))
            return self._known

    def append(self, body: Body, attempt: int) -> Record:
        """Append a record on behalf of an attempt, durably and at most once.

        | the next number is | outcome |
        |---|---|
        | free | the record is written |
        | taken by these very bytes | an answer was lost: that record |
        | taken by another record | the rules are asked again, then the number after it |
        | taken by a later attempt | `Fenced` |

        A body that the log holds already is not written again: its record is returned, durable.

        Args:
            body: What to say.
            attempt: The attempt on whose behalf; for an `AttemptBody`, the one that it opens.

        Raises:
            Fenced: A later attempt has opened.
            SaveFailed: The generation cannot be published after what the log holds.
            ConfigError: The generation cannot be retired or pinned.
            WrongRun: The log is another run's.
            LogDamaged: The log cannot be trusted.
            StorageError: Nothing is known to have been written. The record may yet be found.
        """
        return self._append(body, attempt)

    def _append(self, body: Body, attempt: int, *, just_read: bool = False) -> Record:
        with self._lock:
            self._known = self._refreshed(self._known, stands=just_read)
            while True:
                self._known = self._settle(self._known)
                if record := self._known.record_of(body):
                    return record
                self._check(body, attempt)
                record = self._known.successor(body, self.writer)
                if self._claim(record):
                    self._require_behind(self._known)
                    self._known = self._known.extended([record])
                    self._settled = record.seq
                    return record
                self._known = self._read_on(self._known, record.seq)

    def open_attempt(self, run_id: str, token: str) -> Record:
        """Open the next attempt, whatever its number; every older attempt is fenced.

        Args:
            run_id: Whose attempt.
            token: Unique to this opening. Called again with it, the same record is returned.

        Raises:
            WrongRun: The log is another run's.
            LogDamaged: The log cannot be trusted.
            StorageError: As for `append`.
        """
        while True:
            history = self._whole()
            opened = next((a for a in history.attempts if a.token == token), None)
            body = opened or AttemptBody(attempt=history.attempt + 1, run_id=run_id, token=token)
            try:
                return self._append(body, body.attempt, just_read=True)
            except Fenced:
                continue  # someone else opened that number in between: take the next one

    def refresh_hint(self, history: History) -> bool:
        """Write `latest.json`; where that fails, nothing is lost but time.

        Returns:
            Whether it was written.
        """
        tip = history.records[-1] if history.records else None
        latest = history.latest
        hint = {
            "attempt": history.attempt,
            "digest": tip.digest if tip else None,
            "generation": latest.name if latest else None,
            "run_id": history.run_id,
            "seq": history.seq,
            "update": latest.update if latest else None,
        }
        try:
            self._storage.replace(HINT, canonical.dump(hint))
        except StorageError:
            return False
        return True

    # --- reading ----------------------------------------------------------------------------------

    def _whole(self) -> History:
        """Return the whole log; of what this view has read and checked only the end is looked at.

        So a run whose log is long does not read all of it at each restart of its workers.
        """
        with self._lock:
            if self._known.records:
                self._known = self._refreshed(self._known)
                if not gap_behind(self._known.seq, self._exists):
                    return self._known
        return self.read()

    def _exists(self, seq: int) -> bool:
        try:
            self._storage.size(record_path(seq))
        except NotFound:
            return False
        return True

    def _refreshed(self, known: History, *, stands: bool = False, whole: bool = True) -> History:
        # The first look is a whole one, so that a gap is found; later ones read what is new.
        if not (known.omitted and whole) and (stands or self._stands(known)):
            return self._read_on(known, known.seq if known.records else self._last_listed())
        found = self._read_on(History(), self._last_listed())
        self._require_same(found)
        return found

    def _require_same(self, found: History) -> None:
        """Return if a log that was read anew is the one that this view knows.

        The last record, and it alone, may have been read before it was durable: then a power cut
        elsewhere (a file server's) may have taken it, and nobody has answered by it.
        """
        known = self._known
        sure = known.records[: max(self._settled, known.seq - 1) - known.omitted]
        if found.records[known.omitted :][: len(sure)] != sure:
            raise log_errors.gone(self._storage, known.seq)

    def _stands(self, known: History) -> bool:
        """Whether the last record of a history is in the storage; an empty one's always is."""
        if not known.records:
            return True
        tip = known.records[-1]
        try:
            data = read_bounded(self._storage, record_path(tip.seq), RECORD_BYTES)
            return decode(data, self._key) == tip
        except (NotFound, ValueError):
            return False

    def _require_behind(self, known: History) -> None:
        """Return if what was just appended lies in the log, and not in the place of one."""
        with suppress(StorageError):  # who cannot look has seen nothing that is wrong
            if self._stands(known):
                return
            raise log_errors.gone(self._storage, known.seq)

    def _last_listed(self) -> int:
        names = (_NAME.fullmatch(entry.path) for entry in self._storage.list(DIRECTORY))
        return max((int(name[1]) for name in names if name), default=0)

    def _read_on(self, history: History, at_least: int) -> History:
        """Read from a history's end to the log's, which is not before record `at_least`."""
        records: list[Record] = []
        while True:
            seq = history.seq + len(records) + 1
            try:
                records.append(self._record(seq))
            except NotFound:
                if seq <= at_least:
                    raise log_errors.damaged(
                        seq, "the record is missing, but later ones exist"
                    ) from None
                break
        try:
            return history.extended(records)
        except RecordRefused as error:
            raise log_errors.damaged(
                error.seq, f"the record does not belong here: {error}"
            ) from error

    def _record(self, seq: int) -> Record:
        """Read one record and check it by itself.

        Raises:
            NotFound: There is none.
            LogDamaged: It is damaged.
            StorageError: The storage failed.
        """
        try:
            data = read_bounded(self._storage, record_path(seq), RECORD_BYTES)
            record = decode(data, self._key)
        except NotAFile as error:
            raise log_errors.damaged(seq, f"the record is damaged: {error.what}") from error
        except WrongSignature as error:
            raise log_errors.not_signed(seq, str(error)) from error
        except LaterFormat as error:
            raise log_errors.newer(seq, str(error)) from error
        except ValueError as error:
            raise log_errors.damaged(seq, f"the record is damaged: {error}") from error
        self._signed = self._signed or is_signed(data)
        return record

    # --- writing ----------------------------------------------------------------------------------

    def _settle(self, known: History) -> History:
        """Make a history durable, and return it; or what is there now, where its end was lost."""
        while known.seq > self._settled:
            self._require_key()
            tip = known.records[-1]
            if self._claim(tip):
                self._settled = tip.seq
                break
            # A power cut elsewhere (a file server's) took a record that this view had read, and
            # another has its number since. Nobody has answered by the lost one.
            before, known = known, self._read_on(History(), self._last_listed())
            if known.records[-1:] == before.records[-1:]:
                raise self._not_sure(record_path(tip.seq))
        return known

    def _require_key(self) -> None:
        """Return if what this view writes counts for those who read with a key."""
        if self._signed and self._key is None:
            raise ConfigError(
                "the log is signed, and no signing key was given: what was written now would be "
                "refused by all who have it",
                where=self._storage.uri,
                remedy=f"Set storage.signing_key, or {KEY_VARIABLE} for a command.",
            )

    def _check(self, body: Body, attempt: int) -> None:
        """Ask every rule that stands between a body and the end of the log."""
        known = self._known
        self._require_key()
        if known.attempt > attempt:
            raise log_errors.fenced(attempt, known)
        if isinstance(body, AttemptBody):
            if known.run_id not in {None, body.run_id}:
                raise log_errors.wrong_run(str(known.run_id), body.run_id)
            if known.attempt == attempt:
                raise log_errors.fenced(attempt, known)
        elif known.attempt < attempt:
            raise log_errors.damaged(
                known.seq + 1, f"the record that opened attempt {attempt} is gone"
            )
        if reason := known.refusal(body):
            if isinstance(body, PublishBody):
                raise SaveFailed(reason, where=body.name)
            raise ConfigError(reason, where=DIRECTORY)

    def _claim(self, record: Record) -> bool:
        """Create a record's file, and return whether the number is this record's now."""
        path, data = record_path(record.seq), encode(record, self._key)
        refusal: StorageError | None = None
        for _ in range(_PATIENCE):
            try:
                self._storage.create(path, data)
            except AlreadyExists:
                stored = self._stored(path)
                if stored is not None:
                    return stored == data
            except StorageError as error:
                # The answer may be lost and the record written. If it is there, ask once more:
                # only `AlreadyExists`, next time round, says that it is durable as well.
                if self._stored(path) != data:
                    raise
                refusal = error
            else:
                return True
        raise self._not_sure(path, refusal)

    def _not_sure(self, path: str, refusal: StorageError | None = None) -> StorageError:
        what = "the storage does not say whether this record is durable"
        remedy = "Look at the storage; the record is found at the next read if it is there."
        if refusal is not None:
            what = f"{refusal.what}: so {what}, on which the next one would build"
            remedy = refusal.remedy or remedy
        return StorageError(
            what,
            where=f"{self._storage.uri}/{path}",
            remedy=remedy,
            details=refusal.details if refusal else None,
        )

    def _stored(self, path: str) -> bytes | None:
        try:
            # One byte more than a record has is enough to see that it is another's.
            return self._storage.read(path, 0, RECORD_BYTES + 1)
        except NotFound:
            return None
