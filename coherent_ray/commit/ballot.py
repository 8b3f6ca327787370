"""One generation's way to its publish record, as types: each stage has only what it has earned.

`Staged` collects acknowledgements, and may become `Acknowledged`, which has a manifest. That one
becomes `Verified` when the storage agrees with it, where shards are read back by way of `Checked`,
and `Sealed` when the manifest is durable. Only a `Sealed` generation has a `publish` body, so an
append before its time does not type-check. What ranks disagree about is decided here, in
`Staged.decide`, from their words alone, and in `Checked.decide` what they have read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coherent_ray.commit.events import Key
from coherent_ray.commit.fates import Fate, Kind, against, groups_of, name_ranks
from coherent_ray.commit.manifest import (
    REUSING_FORMAT,
    Acknowledgement,
    GenerationHeader,
    Manifest,
    ReadBack,
    ShardRecord,
    dump,
    manifest_path,
)
from coherent_ray.commit.packing import dump_manifest
from coherent_ray.commit.prints import named, tensors_a_print
from coherent_ray.commit.records import PublishBody
from coherent_ray.digests import Digest, digest_of

#: Problems that a fate's sentence quotes; all are in its details.
QUOTED_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class Vote:
    """An acknowledgement without its header, which only rank 0 sends."""

    shard: ShardRecord
    header_digest: Digest
    fingerprint: Digest
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """The manifest is durable: the generation may be published."""

    publish: PublishBody


@dataclass(frozen=True, slots=True)
class Verified:
    """The storage holds every shard as its rank said: the manifest may be written."""

    manifest: Manifest
    data: bytes
    """The manifest's canonical JSON, exactly as it is stored."""

    @property
    def path(self) -> str:
        """Where the manifest goes, relative to the run's root."""
        header = self.manifest.header
        return manifest_path(header.number, header.attempt)

    def sealed(self) -> Sealed:
        """Return the next stage, once the manifest is durable."""
        header = self.manifest.header
        return Sealed(
            PublishBody(
                number=header.number,
                attempt=header.attempt,
                update=header.position.update,
                epoch=header.position.epoch,
                manifest=self.path,
                manifest_size=len(self.data),
                manifest_digest=digest_of(self.data),
                receipts=header.receipts,
                base=self.manifest.base,
            )
        )


@dataclass(slots=True)
class Checked:
    """The storage has every shard in its size, and the ranks read one another's."""

    manifest: Manifest
    since: float
    """When the reading began, in seconds on the shell's monotonic clock."""
    read: dict[int, ReadBack]
    """What ranks have read, by the rank that read it."""

    @property
    def unread(self) -> list[int]:
        """Ranks that have not told yet how the shard of the rank before reads, in order."""
        return [rank for rank in range(self.manifest.header.ranks) if rank not in self.read]

    @property
    def complete(self) -> bool:
        """Whether every rank has read. Asked at each word, so it takes no time for the others'."""
        return len(self.read) == self.manifest.header.ranks

    def shard_for(self, rank: int) -> ShardRecord:
        """Return the shard that a rank reads: the one of the rank before; of one rank, its own."""
        return self.manifest.shards[(rank - 1) % len(self.manifest.shards)]

    def decide(self, new: int | None = None) -> Verified | Fate | None:
        """Return what was read comes to; None: so far all is well, and ranks are missing.

        Args:
            new: The only rank whose word was not looked at before; None: none was.
        """
        problems: list[str] = []
        words = self.read.items() if new is None else [(new, self.read[new])]
        for rank, word in sorted(words, key=lambda item: item[0]):
            shard = self.shard_for(rank)
            if (word.rank, word.digest) != (shard.rank, shard.digest):
                return self._failed(f"rank {rank} read back what it was not asked for", rank=rank)
            problems += [f"read back by rank {rank}: {problem}" for problem in word.problems]
        if problems:
            return self._failed(quoted(problems), problems=problems)
        return Verified(self.manifest, dump_manifest(self.manifest)) if self.complete else None

    def _failed(self, reason: str, **details: object) -> Fate:
        header = self.manifest.header
        return Fate("failed", header.number, header.attempt, reason, None, details)


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Every rank has acknowledged and none disagrees: the storage may be asked."""

    manifest: Manifest
    read: dict[int, ReadBack] = field(default_factory=dict)
    """What ranks that were asked by an earlier coordinator have read already."""

    def checked(self, now: float) -> Checked:
        """Return the next stage, once every size is right and shards are to be read back."""
        return Checked(self.manifest, now, self.read)

    def verified(self) -> Verified:
        """Return the next stage, once the storage holds every shard."""
        return Verified(self.manifest, dump_manifest(self.manifest))


@dataclass(slots=True)
class Staged:
    """Some ranks have acknowledged."""

    key: Key
    run_id: str
    ranks: int
    since: float
    """When the first acknowledgement came, in seconds on the shell's monotonic clock."""
    votes: dict[int, Vote] = field(default_factory=dict)
    header: GenerationHeader | None = None
    read: dict[int, ReadBack] = field(default_factory=dict)
    """What ranks that were asked by an earlier coordinator have read already."""

    @property
    def missing(self) -> list[int]:
        """Ranks whose acknowledgement has not come, in order."""
        return [rank for rank in range(self.ranks) if rank not in self.votes]

    @property
    def complete(self) -> bool:
        """Whether none is missing. Asked at each word, so it takes no time for the others'."""
        return len(self.votes) == self.ranks

    def add(self, ack: Acknowledgement) -> Fate | None:
        """Take in one acknowledgement; the same one again changes nothing.

        Returns:
            A fate if the acknowledgement contradicts itself or an earlier one, else None.
        """
        contradiction = self._contradiction(ack)
        if contradiction:
            return contradiction
        vote = Vote(ack.shard, ack.header_digest, ack.fingerprint, self._shared(ack))
        known = self.votes.setdefault(ack.rank, vote)
        if known != vote:
            return self._twice(ack.rank, known, vote)
        if ack.header is not None:
            self.header = ack.header
        if ack.read_back is not None:
            self.read[ack.rank] = ack.read_back
        return None

    def decide(self) -> Acknowledged | Fate:
        """Return what the ranks' words, all of them, come to. Call it when none is missing."""
        header = self.header
        if header is None:
            return self._failed("rank 0 acknowledged without the generation's header")
        if digest_of(dump(header)) != self.votes[0].header_digest:
            return self._failed("rank 0's header is not the one whose digest it sent")
        if (header.run_id, header.number, header.attempt, header.ranks) != (
            self.run_id, self.key.number, self.key.attempt, self.ranks,
        ):  # fmt: skip
            seen = f"run {header.run_id}, g{header.number}-a{header.attempt}, {header.ranks} ranks"
            want = f"run {self.run_id}, {self.key}, {self.ranks} ranks"
            return self._failed(f"the header describes {seen}; the acknowledgements are of {want}")
        return self._disagreement(header) or self._manifest(header)

    def _contradiction(self, ack: Acknowledgement) -> Fate | None:
        if ack.ranks != self.ranks:
            return self._failed(
                f"rank {ack.rank} says that there are {ack.ranks} ranks, others say {self.ranks}"
            )
        if ack.rank >= ack.ranks:
            return self._failed(f"rank {ack.rank} cannot be one of {ack.ranks} ranks")
        if ack.shard.rank != ack.rank:
            return self._failed(f"rank {ack.rank} acknowledged rank {ack.shard.rank}'s shard")
        if ack.header is not None and ack.rank != 0:
            return self._failed(f"rank {ack.rank} sent a header; only rank 0 may")
        return None

    def _shared(self, ack: Acknowledgement) -> tuple[str, ...]:
        # Thousands of ranks send the same thousands of strings: keep them once.
        for vote in self.votes.values():
            if vote.tensors == ack.tensor_fingerprints:
                return vote.tensors
            break
        return ack.tensor_fingerprints

    def _twice(self, rank: int, known: Vote, vote: Vote) -> Fate:
        for name, old, new in (
            ("shard digest", known.shard.digest, vote.shard.digest),
            ("shard size", known.shard.size, vote.shard.size),
            ("shard path", known.shard.path, vote.shard.path),
            ("header digest", known.header_digest, vote.header_digest),
            ("fingerprint", known.fingerprint, vote.fingerprint),
        ):
            if old != new:
                return self._failed(
                    f"rank {rank} acknowledged twice: {name} {old} first, then {new}",
                    rank=rank, first=old, second=new,
                )  # fmt: skip
        return self._failed(f"rank {rank} acknowledged twice, with different shards or tensors")

    def _disagreement(self, header: GenerationHeader) -> Fate | None:
        tensors = len(header.layout.tensors)
        each = tensors_a_print(tensors, self.ranks)
        expected = -(-tensors // each)
        short = [rank for rank, v in sorted(self.votes.items()) if len(v.tensors) != expected]
        if short:
            of = "of " if each == 1 else f"{each} of "
            return self._failed(
                f"{name_ranks(short)} did not send one fingerprint for each {of}{tensors} tensors"
            )
        first = next(iter(self.votes.values()))
        # Equal prints are one object (`_shared`), which thousands of ranks need not hash again.
        prints = {
            rank: (v.fingerprint, None if v.tensors is first.tensors else v.tensors)
            for rank, v in self.votes.items()
        }
        groups = groups_of(prints)
        if len(groups) > 1:
            return self._diverged_state(groups, header)
        groups = groups_of({rank: v.header_digest for rank, v in self.votes.items()})
        if len(groups) > 1:
            return self._diverged_header(groups)
        return None

    def _diverged_state(self, groups: list[list[int]], header: GenerationHeader) -> Fate:
        most = self.votes[groups[0][0]]
        odd = sorted(rank for group in groups[1:] for rank in group)
        places = [
            index
            for rank in odd
            for index, mark in enumerate(self.votes[rank].tensors)
            if mark != most.tensors[index]
        ]
        names = [tensor.name for tensor in header.layout.tensors]
        words, meant = named(names, min(places), self.ranks) if places else ("", [])
        first = f"the first tensor that differs is {words}" if meant else "no tensor differs"
        return self._fate(
            "diverged",
            f"{against(groups, 'state')}; {first}",
            ranks=odd,
            groups=groups,
            tensor=meant[0] if meant else None,
            tensors=meant,
            fingerprints=[self.votes[group[0]].fingerprint for group in groups],
        )

    def _diverged_header(self, groups: list[list[int]]) -> Fate:
        return self._fate(
            "diverged",
            f"{against(groups, 'header')} (position, plan, values, environment or receipts)",
            ranks=sorted(rank for group in groups[1:] for rank in group),
            groups=groups,
            header_digests=[self.votes[group[0]].header_digest for group in groups],
        )

    def _manifest(self, header: GenerationHeader) -> Acknowledged | Fate:
        shards = tuple(self.votes[rank].shard for rank in range(self.ranks))
        if len({shard.path for shard in shards}) != len(shards):
            return self._failed("two ranks acknowledged the same shard file")
        if any(shard.reuse for shard in shards):
            # What the ranks agree on does not say it: each finds out alone what has not changed.
            header = replace(header, format=REUSING_FORMAT)
        try:
            manifest = Manifest(header, self.votes[0].fingerprint, shards)
        except ValueError as error:
            return self._failed(f"the shards do not make one state: {_first_line(error)}")
        return Acknowledged(manifest, self.read)

    def _failed(self, reason: str, **details: object) -> Fate:
        return self._fate("failed", reason, **details)

    def _fate(self, kind: Kind, reason: str, **details: object) -> Fate:
        return Fate(kind, self.key.number, self.key.attempt, reason, None, details)


Stage = Staged | Acknowledged | Checked | Verified | Sealed


def quoted(problems: Sequence[str]) -> str:
    """Return a fate's sentence of several problems: the first ones, and how many there are."""
    more = len(problems) - QUOTED_PROBLEMS
    return "; ".join(problems[:QUOTED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _first_line(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    return str(errors()[0]["msg"]) if errors else str(error)
