"""Generations: what readers ask of a run. Which are there, are they whole, which one to take.

A reader walks back from the newest publish. The manifest must hash to what the log says, and the
shards must be what the manifest says; what fails is reported by name, and the caller's policy
decides. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from coherent_ray.commit.history import History
from coherent_ray.commit.inspection import (
    absence,
    is_lost,
    shard_damage,
    tensors_between,
    tensors_in,
    unreadable_here,
)
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import (
    MANIFEST_BYTES,
    RECEIPTS_BYTES,
    GenerationHeader,
    LaterFormat,
    Manifest,
    ShardRecord,
    generation_directory,
)
from coherent_ray.commit.packing import load_manifest
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.references import Reference, names_generation, parse_reference
from coherent_ray.commit.verdicts import (
    absent,
    is_meant,
    manifest_damaged,
    newer_manifest,
    no_name,
    none_whole,
    not_readable,
    of_older,
    receipts_damaged,
    refused,
)
from coherent_ray.digests import algorithm_of, digest_of
from coherent_ray.errors import Damage, ManifestDamaged, NotAFile, NotFound, StorageError
from coherent_ray.storage.base import Entry, Storage
from coherent_ray.storage.bounded import TooLong, read_bounded
from coherent_ray.storage.sizes import Sizes

__all__ = [
    "GenerationInfo",
    "Generations",
    "OnDamage",
    "Reference",
    "Selected",
    "parse_reference",
    "tensors_between",
    "tensors_in",
]

OnDamage = Literal["fall_back", "refuse"]
_Infos = list["GenerationInfo"]  # `list` is a method's name in the class below
_Damages = list[Damage]
_Entries = list[Entry]
_Looks = list[Callable[[], Iterable[Damage]]]


@dataclass(frozen=True, slots=True)
class GenerationInfo:
    """One published generation, as the log tells it; its files have not been looked at."""

    publish: PublishBody
    seq: int
    """Number of the record that published it."""
    retired: bool
    pinned: bool
    latest: bool

    @property
    def name(self) -> str:
        """``g12-a3``."""
        return self.publish.name


@dataclass(frozen=True, slots=True)
class Selected:
    """The generation to take, and what was passed over on the way to it."""

    publish: PublishBody
    manifest: Manifest
    skipped: tuple[Damage, ...]
    """Damage of newer generations, newest first."""


class Generations:
    """The generations of the run under one root."""

    def __init__(self, storage: Storage, log: CommitLog | None = None) -> None:
        """Make a view; nothing is read yet.

        Args:
            storage: The run's root.
            log: Its commit log, where the caller has one.
        """
        self._storage = storage
        self._log = log or CommitLog(storage)
        self._run_id: str | None = None  # never changes once there is one

    def history(self) -> History:
        """Read the whole commit log; see `CommitLog.read`."""
        history = self._log.read()
        self._run_id = history.run_id
        return history

    def list(self) -> _Infos:
        """Return every published generation in log order, retired ones too.

        Raises:
            LogDamaged: The log cannot be trusted.
            StorageError: The storage failed.
        """
        history = self.history()
        retired, pinned, latest = history.retired, history.pinned, history.latest
        return [
            GenerationInfo(
                publish=body,
                seq=record.seq,
                retired=(body.number, body.attempt) in retired,
                pinned=(body.number, body.attempt) in pinned,
                latest=body == latest,
            )
            for record in history.records
            if isinstance(body := record.body, PublishBody)
        ]

    def find(self, reference: str) -> PublishBody:
        """Return the generation that a reference names: ``g12``, ``12``, ``g12-a3``, ``latest``.

        Args:
            reference: With or without ``RUN@`` before it; the run is not looked at. A number alone
                names the generation of that number that was published last.

        Raises:
            NoGeneration: There is none, it is retired, or the reference names none.
            LogDamaged: The log cannot be trusted.
            StorageError: The storage failed.
        """
        name = reference.rpartition("@")[2]
        wanted = parse_reference(f"@{name}")
        if names_generation(name) and wanted.number is None and (end := self._end()).latest:
            return end.latest
        history = self.history()
        if not names_generation(name):
            raise no_name(name, history)
        if wanted.number is None:
            found = history.latest
        else:
            found = next((p for p in reversed(history.live) if is_meant(p, wanted)), None)
        if found is None:
            raise absent(wanted, history)
        return found

    def manifest(self, publish: PublishBody) -> Manifest:
        """Read a generation's manifest, and check that it is the one that was published.

        Raises:
            ManifestDamaged: It is missing, torn, foreign or not what the log says.
            NewerFormat: A later version of this software wrote it.
            StorageError: The storage could not be asked.
        """
        most = min(publish.manifest_size, MANIFEST_BYTES)
        try:
            data = read_bounded(self._storage, publish.manifest, most)
        except TooLong:
            what = f"the manifest has more bytes than {publish.manifest_size}"
            if most < publish.manifest_size:
                what = f"no manifest has {publish.manifest_size} bytes"
            raise manifest_damaged(publish, "size", what) from None
        except NotFound as error:
            kind, words = absence(error)
            raise manifest_damaged(publish, kind, f"the manifest {words}") from None
        except StorageError as error:
            if not is_lost(error):
                raise
            what = "the manifest cannot be read from the device"
            raise manifest_damaged(publish, "unreadable", what) from error
        if len(data) != publish.manifest_size:
            what = f"the manifest has {len(data)} bytes instead of {publish.manifest_size}"
            raise manifest_damaged(publish, "size", what)
        if digest_of(data) != publish.manifest_digest:
            what = "the manifest does not hash to the digest that was published"
            raise manifest_damaged(publish, "digest", what)
        try:
            manifest = load_manifest(data)
        except LaterFormat as error:
            # Its digest is right, so it is no damage: the one who wrote it can read it.
            raise newer_manifest(publish, str(error)) from error
        except ValueError as error:
            raise manifest_damaged(publish, "content", f"the manifest is wrong: {error}") from error
        weak = next((s for s in manifest.shards if s.algorithm == "xxh3_128"), None)
        if weak is not None and self._log.keyed:
            what = f"shard {weak.path} is hashed with xxh3_128, which anyone can forge"
            raise manifest_damaged(publish, "unsigned", what)
        run_id = self._run_id or self._end().run_id
        if contradiction := _foreign(publish, manifest.header, run_id):
            raise manifest_damaged(publish, "foreign", contradiction)
        return manifest

    def verify(self, publish: PublishBody, deep: bool = True) -> _Damages:
        """Return everything that is wrong with a generation; nothing: it is whole.

        Reports the receipts that led to it as well. ``details`` of each has ``kind``: missing,
        no_file, size, digest, content, foreign, unreadable, block, receipts, or refused where this
        user may not read a file. A file that its manifest does not name is no damage: `unnamed`.

        Args:
            publish: What the log says of it.
            deep: Read every byte of it; else compare sizes alone.

        Raises:
            StorageError: The storage could not be asked.
        """
        damages: list[Damage] = []
        looks: _Looks = [partial(self._receipt_damages, publish)]
        try:
            manifest = self.manifest(publish)
        except ManifestDamaged as damage:
            damages.append(damage)
        except StorageError as error:
            damages.append(_refused_here(publish, error))
        else:
            looks = [
                *(partial(self._shard_damage, manifest, s, deep) for s in manifest.shards),
                *looks,
            ]
        for look in looks:
            try:
                damages += look()
            except StorageError as error:
                # What this user may not read is told, and is no reason to leave out the rest.
                damages.append(_refused_here(publish, error))
        if damages and publish != self.history().latest:
            return [of_older(damage) for damage in damages]
        return damages

    def unnamed(self, publish: PublishBody) -> _Entries:
        """Return the files in a generation's directory that it does not name: nothing reads them.

        None where its manifest is damaged, or this user may not look: then nobody can tell.

        Raises:
            StorageError: The storage could not be asked.
        """
        try:
            manifest = self.manifest(publish)
            named = {publish.manifest, *(shard.path for shard in manifest.shards)}
            found = self._storage.list(generation_directory(publish.number, publish.attempt))
            return [entry for entry in found if entry.path not in named]
        except ManifestDamaged:
            return []
        except StorageError as error:
            if not unreadable_here(error):
                raise
            return []

    def select(self, on_damage: OnDamage = "fall_back", deep: bool = True) -> Selected | None:
        """Return the newest live generation that is whole; None where none was ever published.

        Args:
            on_damage: What to do where the newest is not whole: take the one before, or refuse.
            deep: Read every byte; else compare sizes alone, and leave the digests to the reader.

        Raises:
            Damage: The newest generation is not whole, and the policy is to refuse.
            NoGeneration: None is whole, or all are retired; ``details`` has the damages.
            LogDamaged: The log cannot be trusted.
            StorageError: The storage could not be asked.
        """
        history = self._end()
        if not history.publishes:
            return None
        skipped: list[Damage] = []
        for publish in self._log.newest_first(history):
            try:
                manifest = self.manifest(publish)
                damages: list[Damage] = list(self._shard_damages(manifest, deep))
            except ManifestDamaged as damage:
                damages = [damage]
            else:
                if not damages:
                    return Selected(publish, manifest, tuple(skipped))
            if on_damage == "refuse":
                raise refused(publish, damages)
            skipped += damages
        raise none_whole(self.history(), skipped)

    # --- leaves -----------------------------------------------------------------------------------

    def _end(self) -> History:
        """Read what the log says of the latest generation, in a time that its length is not in."""
        history = self._log.read_end()
        self._run_id = history.run_id
        return history

    def _shard_damages(self, manifest: Manifest, deep: bool) -> Iterator[Damage]:
        sizes = Sizes(self._storage, manifest.files)
        for shard in manifest.shards:
            yield from shard_damage(self._storage, manifest.header, shard, deep=deep, sizes=sizes)

    def _shard_damage(self, manifest: Manifest, shard: ShardRecord, deep: bool) -> Iterable[Damage]:
        return shard_damage(self._storage, manifest.header, shard, deep=deep)

    def _receipt_damages(self, publish: PublishBody) -> Iterator[Damage]:
        segment = publish.receipts
        if segment is None:
            return
        try:
            data = read_bounded(self._storage, segment.path, min(segment.size, RECEIPTS_BYTES))
        except TooLong:
            yield receipts_damaged(publish, segment, "have more bytes than were published")
            return
        except StorageError as error:
            if not is_lost(error):
                raise
            yield receipts_damaged(publish, segment, _gone(error))
            return
        if (
            len(data) != segment.size
            or digest_of(data, algorithm_of(segment.digest)) != segment.digest
        ):
            yield receipts_damaged(publish, segment, "do not hash to the digest that was published")


def _refused_here(publish: PublishBody, error: StorageError) -> Damage:
    """Return the verdict on a file that this user may not read; any other failure goes up."""
    if not unreadable_here(error):
        raise error
    return not_readable(publish, error)


def _gone(error: StorageError) -> str:
    if isinstance(error, NotAFile):
        return absence(error)[1].replace("is no file", "are in no file")
    return "are missing" if isinstance(error, NotFound) else "cannot be read"


def _foreign(publish: PublishBody, header: GenerationHeader, run_id: str | None) -> str | None:
    """Return how a manifest contradicts the record that published it; None: it does not."""
    facts = [
        ("run", header.run_id, run_id),
        ("number", header.number, publish.number),
        ("attempt", header.attempt, publish.attempt),
        ("update", header.position.update, publish.update),
        ("epoch", header.position.epoch, publish.epoch),
    ]
    for name, found, expected in facts:
        if found != expected:
            return f"the manifest is of {name} {found!r}, the log says {expected!r}"
    return None
