"""What need not be written again: blocks of this rank's shard that are as they were.

A block is found by its digest, which the generation before has in its manifest: equal digests,
equal bytes, for 128 bits of XXH3 by accident never, for BLAKE3 and SHA-256 not even on purpose.
Nothing is asked of the tensors, whose version counters know nothing of a write through ``.data``.

Each block must be hashed anyway. Where everything has changed, as in most training, that must cost
no more than before: so a few blocks, spread over the shard, are looked at first, and where none of
them is as it was, the shard is written whole, while the rest is being hashed. Else all is hashed
first, since the file's header says what is in it. What would save little is not worth that a
generation depends on another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from coherent_ray.commit.manifest import GenerationHeader, ShardRecord, StateLayout
from coherent_ray.commit.partial_files import header_of_runs
from coherent_ray.commit.shard_records import Base, Places, Reuse, Run, StoredFile
from coherent_ray.digests import Algorithm

#: Blocks that are hashed to see whether anything is as it was.
SAMPLE = 16
#: Earlier files that one shard refers to at most; what lies in others is written again, the file
#: of which least is needed first. So no old file is kept for a few of its bytes for long.
FILES = 8
#: A shard is written whole unless this part of it need not be: a sixteenth.
LEAST = 16
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Previous:
    """A published generation, as far as one rank must know it to refer to it."""

    base: Base
    layout: StateLayout
    ranks: int
    shard: ShardRecord
    """The rank's."""

    def known(
        self, header: GenerationHeader, algorithm: Algorithm, block_bytes: int, generations: int
    ) -> Known | None:
        """Return what a new generation may refer to; None: it is to be written whole.

        Args:
            header: Of the new generation.
            algorithm: Hashes its blocks.
            block_bytes: Bytes of one.
            generations: How much older than the new one a file may be.
        """
        alike = (
            self.ranks == header.ranks
            and self.shard.algorithm == algorithm
            and self.shard.block_bytes == block_bytes
            and self.base.number < header.number
            and self.layout == header.layout
        )
        return Known(self.base, self.shard, header.number - generations) if alike else None


@dataclass(frozen=True, slots=True)
class Known:
    """What a shard may refer to."""

    base: Base
    shard: ShardRecord
    oldest: int
    """Number of the oldest generation whose files may be referred to."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is written of a shard, and where the rest lies."""

    digests: list[str]
    """Of all blocks, in hex."""
    header: bytes
    """Of the file."""
    written: list[tuple[int, int]]
    """First byte of the shard, and the one after the last, of each run that follows the header."""
    reuse: Reuse


def previous_of(header: GenerationHeader, shard: ShardRecord) -> Previous:
    """Return what the next generation may refer to.

    Args:
        header: Of a published generation.
        shard: This rank's of it.
    """
    return Previous(Base(header.number, header.attempt), header.layout, header.ranks, shard)


def plan(known: Known, digest: Callable[[int], str], digests: dict[int, str]) -> Plan | None:
    """Find the blocks that are as they were.

    Args:
        known: What may be referred to.
        digest: Returns the digest of a block of the new shard, in hex; may be called by several
            threads at once.
        digests: Takes the digests that were found out, by block.

    Returns:
        What is to be written; None: all of it.
    """
    record = known.shard
    places = Places(record)
    kept = {file.path for file in record.files if file.key[0] >= known.oldest}
    candidates = [
        block
        for block in range(len(record.blocks))
        if all(piece.path in kept for piece in places.pieces(*record.block_range(block)))
    ]
    if not _any_alike(record, candidates, digest, digests):
        return None
    rest = [block for block in range(len(record.blocks)) if block not in digests]
    with ThreadPoolExecutor(_THREADS, "coherent-ray-hash") as pool:
        digests |= zip(rest, pool.map(digest, rest), strict=True)
    alike = [block for block in candidates if digests[block] == record.blocks[block]]
    return _planned(known, places, _concentrated(record, places, alike), digests)


def _any_alike(
    record: ShardRecord,
    candidates: list[int],
    digest: Callable[[int], str],
    digests: dict[int, str],
) -> bool:
    count = min(SAMPLE, len(candidates))
    for index in range(count):
        block = candidates[index * len(candidates) // count]
        digests[block] = digest(block)
        if digests[block] == record.blocks[block]:
            return True
    return False


def _concentrated(record: ShardRecord, places: Places, alike: list[int]) -> set[int]:
    """Return the blocks of those that lie in the `FILES` files that hold most of them."""
    held: Counter[str] = Counter()
    for block in alike:
        for path, _, size in places.pieces(*record.block_range(block)):
            held[path] += size
    chosen = {path for path, _ in held.most_common(FILES)}
    return {
        block
        for block in alike
        if all(piece.path in chosen for piece in places.pieces(*record.block_range(block)))
    }


def _planned(known: Known, places: Places, taken: set[int], digests: dict[int, str]) -> Plan | None:
    record = known.shard
    spans = list(_spans(record, taken))
    written = [(first, last) for first, last, is_taken in spans if not is_taken]
    header = header_of_runs(record.start, record.stop, known.base.name, written)
    size = len(header) + sum(last - first for first, last in written)
    if size > record.size - record.size // LEAST:
        return None
    files = {file.path: file for file in record.files}
    used: dict[str, int] = {}
    runs: list[Run] = []
    at = len(header)
    for first, last, is_taken in spans:
        if not is_taken:
            runs.append(Run(last - first, 0, at))
            at += last - first
            continue
        runs += [
            Run(piece.size, used.setdefault(piece.path, len(used) + 1), piece.at)
            for piece in places.pieces(first, last)
        ]
    earlier: tuple[StoredFile, ...] = tuple(files[path] for path in used)
    all_digests = [digests[block] for block in range(len(record.blocks))]
    return Plan(all_digests, header, written, Reuse(known.base, size, earlier, tuple(runs)))


def _spans(record: ShardRecord, taken: set[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield runs of blocks that are all taken over, or all written: first byte, and the end."""
    count = len(record.blocks)
    edges = [b for b in range(1, count) if (b in taken) != (b - 1 in taken)]
    for first, last in pairwise([0, *edges, count]):
        yield (
            first * record.block_bytes,
            min(last * record.block_bytes, record.size),
            first in taken,
        )
