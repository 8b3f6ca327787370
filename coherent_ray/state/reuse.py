"""What need not be written again: blocks of this rank's shard that are as they were.

A block is found by its digest, which the generation before has in its manifest: equal digests,
equal bytes, for 128 bits of XXH3 by accident never, for BLAKE3 and SHA-256 not even on purpose.
Nothing is asked of the tensors, whose version counters know nothing of a write through ``.data``.

Each block must be hashed anyway. Where everything has changed, as in most training, that must cost
no more than before: so a few blocks, spread over the shard, are looked at first, and where none of
them is as it was, the shard is written whole, while the rest is being hashed. Else all is hashed
first, since the file's header says what is in it. What would save little is not worth that a
generation depends on another one.

Small adapters lie scattered among large weights, so a block that has changed may have changed in a
few places only. Its *grains* are hashed as well, and kept in this process: when it changes again,
no more of it is written than the grains that have. Where nothing is as it was, a few blocks' grains
are hashed too, so that this is found out when every block holds a part of an adapter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import eq

from coherent_ray.commit.manifest import GenerationHeader, ShardRecord, StateLayout
from coherent_ray.commit.partial_files import header_of_runs
from coherent_ray.commit.shard_records import Base, Places, Reuse, Run, StoredFile
from coherent_ray.digests import Algorithm

#: Blocks that are hashed to see whether anything is as it was.
SAMPLE = 8
#: Of each so many of these the grains too, where the block has changed.
_EVERY = 4
#: Earlier files that one shard refers to at most; what lies in others is written again, the file
#: of which least is needed first. So no old file is kept for a few of its bytes for long.
FILES = 8
#: Bytes that are compared one by one in a block that has changed.
GRAIN = 64 * 2**10
#: A shard is written whole unless this part of it need not be: a sixteenth.
LEAST = 16
_THREADS = 2


Grains = dict[int, list[str]]
"""Digests of the grains, in hex, of those blocks of a shard that have changed lately."""


@dataclass(frozen=True, slots=True)
class Previous:
    """A published generation, as far as one rank must know it to refer to it."""

    base: Base
    layout: StateLayout
    ranks: int
    shard: ShardRecord
    """The rank's."""
    grains: Grains = field(default_factory=dict)

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
        if not alike:
            return None
        return Known(self.base, self.shard, header.number - generations, self.grains)


@dataclass(frozen=True, slots=True)
class Known:
    """What a shard may refer to."""

    base: Base
    shard: ShardRecord
    oldest: int
    """Number of the oldest generation whose files may be referred to."""
    grains: Grains = field(default_factory=dict)
    """Of the base."""
    found: Grains = field(default_factory=dict)
    """Of the new generation; filled by `plan`."""


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


def previous_of(
    header: GenerationHeader, shard: ShardRecord, grains: Grains | None = None
) -> Previous:
    """Return what the next generation may refer to.

    Args:
        header: Of a published generation.
        shard: This rank's of it.
        grains: `Known.found` of its save; None: no grains are known.
    """
    base = Base(header.number, header.attempt)
    return Previous(base, header.layout, header.ranks, shard, grains or {})


Hash = Callable[[int, int], str]
"""Returns the digest, in hex, of some bytes of the new shard: first one, and the one after the
last. May be called by several threads at once."""


def plan(known: Known, digest: Hash, digests: dict[int, str]) -> Plan | None:
    """Find what is as it was.

    Args:
        known: What may be referred to.
        digest: Hashes the new shard.
        digests: Takes the digests of blocks that were found out.

    Returns:
        What is to be written; None: all of it.
    """
    record = known.shard
    places = Places(record)
    kept = {file.path for file in record.files if file.key[0] >= known.oldest}

    def may_stay(first: int, last: int) -> bool:
        return all(piece.path in kept for piece in places.pieces(first, last))

    count = range(len(record.blocks))
    # The header is always as it was.
    sample = [b for b in count if record.block_range(b)[1] > record.header_bytes]
    sample = [block for block in sample if may_stay(*record.block_range(block))]
    if not sample:  # all of it is too old; what changes next can be found all the same
        known.found.update((block, _grains(record, digest, block)) for block in known.grains)
        return None
    if not _any_alike(known, sample, digest, digests):
        return None
    rest = [block for block in count if block not in digests]
    with ThreadPoolExecutor(_THREADS, "coherent-ray-hash") as pool:
        hashed = pool.map(lambda block: digest(*record.block_range(block)), rest)
        digests |= zip(rest, hashed, strict=True)
        changed = {block for block in count if digests[block] != record.blocks[block]}
        if record.block_bytes >= 2 * GRAIN:
            new = sorted(changed - known.found.keys())
            grains = pool.map(partial(_grains, record, digest), new)
            known.found.update(zip(new, grains, strict=True))
    known.found.update((b, old) for b, old in known.grains.items() if b not in changed)
    alike = [unit for unit in _alike(known, changed) if may_stay(*unit)]
    return _planned(known, places, _concentrated(places, alike), digests)


def _any_alike(known: Known, candidates: list[int], digest: Hash, digests: dict[int, str]) -> bool:
    """Look at some blocks, and at the grains of a few of these."""
    record = known.shard
    count = min(SAMPLE, len(candidates))
    for index in range(count):
        block = candidates[index * len(candidates) // count]
        digests[block] = digest(*record.block_range(block))
        if digests[block] == record.blocks[block]:
            return True
        if index % _EVERY == 0 and record.block_bytes >= 2 * GRAIN:
            found = known.found[block] = _grains(record, digest, block)
            old = known.grains.get(block, ())
            if sum(map(eq, old, found)) * LEAST > len(found):
                return True
    return False


def _grains(record: ShardRecord, digest: Hash, block: int) -> list[str]:
    first, last = record.block_range(block)
    return [digest(at, min(at + GRAIN, last)) for at in range(first, last, GRAIN)]


def _alike(known: Known, changed: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the blocks that are as they were, and such grains of the others; first byte and end."""
    record = known.shard
    for block in range(len(record.blocks)):
        first, last = record.block_range(block)
        if block not in changed:
            yield first, last
            continue
        pairs = zip(known.grains.get(block, ()), known.found.get(block, ()), strict=False)
        for index, (old, new) in enumerate(pairs):
            if old == new:
                at = first + index * GRAIN
                yield at, min(at + GRAIN, last)


def _concentrated(places: Places, alike: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what lies in the `FILES` files that hold most of it."""
    held: Counter[str] = Counter()
    for unit in alike:
        for path, _, size in places.pieces(*unit):
            held[path] += size
    chosen = {path for path, _ in held.most_common(FILES)}
    return [unit for unit in alike if all(piece.path in chosen for piece in places.pieces(*unit))]


def _planned(
    known: Known, places: Places, taken: list[tuple[int, int]], digests: dict[int, str]
) -> Plan | None:
    record = known.shard
    spans = list(_spans(taken, record.size))
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


def _spans(taken: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int, bool]]:
    """Yield all bytes in order, in runs that are taken over or written: first byte, and the end."""
    at = 0
    begin = None
    for first, last in [*taken, (size, size)]:
        if begin is not None and first > at:
            yield begin, at, True
            begin = None
        if first > at:
            yield at, first, False
        if begin is None and first < last:
            begin = first
        at = last
    if begin is not None:
        yield begin, at, True
