"""What a snapshot in memory says of itself: whose it is, of what, and how it can be proved.

The words lie beside the bytes, in the same slot, so that a worker that dies leaves both. Their
digest stands in the slot's head, which is written last. They hold the header that a generation at
this boundary would have, but for its segment of receipts: the receipts that no generation names yet
lie here themselves, and their chain must lead from the newest generation to this header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass as plain_dataclass

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import Count, GenerationHeader, Positive, RunId
from coherent_ray.commit.records import Token
from coherent_ray.digests import Algorithm, Digest, digest_of

_LENGTHS = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class Facts:
    """The part of the words that is enough to choose by."""

    run_id: RunId
    attempt: Positive
    token: Token
    """That the attempt was opened with: no other attempt of any run under any root has it."""
    number: Positive
    """That a generation at this boundary would have had."""
    update: Count
    rank: Count
    ranks: Positive
    start: Count
    """First byte of the flat state that lies here."""
    stop: Count
    header_bytes: Positive
    """Bytes before the first tensor byte: the data is that of a shard file."""
    algorithm: Algorithm
    block_bytes: Positive
    header_digest: Digest
    """Of the header as this rank sees it."""
    fingerprint: Digest
    """Of this rank's whole replica."""
    receipts_digest: Digest

    def __post_init__(self) -> None:
        if self.rank >= self.ranks or self.stop < self.start:
            raise ValueError("there is no such rank, or no such part of the state")

    @property
    def size(self) -> int:
        """Bytes of the data."""
        return self.header_bytes + self.stop - self.start


@plain_dataclass(frozen=True, slots=True)
class Words:
    """All that a snapshot says."""

    facts: Facts
    header: bytes
    """A `GenerationHeader`'s canonical JSON."""
    receipts: bytes
    """JSON Lines, of the updates since the newest generation that the rank knew of."""

    def pack(self) -> bytes:
        """Return them as bytes."""
        facts = records.dump(self.facts)
        lengths = _LENGTHS.pack(len(facts), len(self.header), len(self.receipts))
        return b"".join((lengths, facts, self.header, self.receipts))

    def read_header(self) -> GenerationHeader:
        """Return the header.

        Raises:
            ValueError: It is none.
        """
        return records.load(GenerationHeader, self.header)


def unpack(data: bytes) -> Words:
    """Return the words of some bytes.

    Raises:
        ValueError: They are not what `Words.pack` makes, or contradict themselves.
    """
    if len(data) < _LENGTHS.size:
        raise ValueError("the words are too short")
    first, second, third = _LENGTHS.unpack_from(data)
    if len(data) != _LENGTHS.size + first + second + third:
        raise ValueError("the words have another length than they say")
    at = _LENGTHS.size
    facts = records.load(Facts, data[at : at + first])
    words = Words(facts, data[at + first : at + first + second], data[at + first + second :])
    if digest_of(words.header) != facts.header_digest:
        raise ValueError("the header does not hash to what the facts say")
    if digest_of(words.receipts) != facts.receipts_digest:
        raise ValueError("the receipts do not hash to what the facts say")
    return words
