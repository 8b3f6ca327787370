"""Inspection: does a shard in the storage still hold what its record says?

What fails is named as far down as the digests reach: shard, block, byte range, tensors. A shard
that is gone, short or flipped is *damage*, which falling back can answer. A storage that cannot be
reached is not: then nobody knows, and the error goes up as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from coherent_ray.commit.manifest import GenerationHeader, ShardRecord
from coherent_ray.digests import digest_of, new_hasher
from coherent_ray.errors import NotAFile, NotFound, ShardDamaged, StorageError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.sizes import Sizes

#: Bytes that are read at a time, whatever the size of a block.
_PIECE = 4 << 20
#: What to do about a damaged generation that is latest.
_WITHOUT = (
    "Without it `run` does what checkpoint.on_damage says: 'fall_back', the default, goes on from "
    "the newest whole generation before it and trains again what is lost; 'refuse' stops."
)
REMEDY = f"Put the file back from a copy. {_WITHOUT}"
#: And about an older one.
REMEDY_OF_OLDER = (
    "Put the file back from a copy, or let the generation go, as `prune RUN --keep N` does: "
    "nothing resumes from it while a newer one is whole."
)


def tensors_in(header: GenerationHeader, shard: ShardRecord, block: int) -> list[str]:
    """Return the names of the tensors that have bytes in a block of a shard, in layout order.

    Args:
        header: The generation's.
        shard: One of its shards.
        block: Index of the block. One that holds nothing but the shard's header has no tensors.
    """
    return tensors_between(header, shard, *block_range(shard, block))


def tensors_between(
    header: GenerationHeader, shard: ShardRecord, start: int, stop: int
) -> list[str]:
    """Return the names of the tensors that have bytes in a range of a shard's file.

    Args:
        header: The generation's.
        shard: One of its shards.
        start: First byte of the file.
        stop: The byte after the last.
    """
    first = max(start - shard.header_bytes, 0)
    last = min(stop, shard.size) - shard.header_bytes
    if first >= last:
        return []  # nothing but the header
    if header.layout.parts:
        return _sharded_between(header, shard.rank, first, last)
    first, last = first + shard.start, last + shard.start
    layout = header.layout
    offsets = layout.offsets()
    names = []
    for index in range(max(bisect_right(offsets, first) - 1, 0), len(offsets)):
        tensor, begin = layout.tensors[index], offsets[index]
        if begin >= last:
            break
        if begin + tensor.nbytes > first and tensor.nbytes:
            names.append(tensor.name)
    return names


def _sharded_between(header: GenerationHeader, rank: int, first: int, last: int) -> list[str]:
    """Return the names of the tensors that have bytes in a range of a rank's part."""
    names = []
    at = 0
    for index, begin, end in header.layout.part(rank, header.ranks):
        if at >= last:
            break
        if begin < end and at + end - begin > first:
            names.append(header.layout.tensors[index].name)
        at += end - begin
    return names


def block_range(shard: ShardRecord, block: int) -> tuple[int, int]:
    """Return the first byte of a block in the shard's file, and the byte after its last."""
    start = block * shard.block_bytes
    return start, min(start + shard.block_bytes, shard.size)


def shard_damage(
    storage: Storage,
    header: GenerationHeader,
    shard: ShardRecord,
    *,
    deep: bool,
    sizes: Sizes | None = None,
) -> list[ShardDamaged]:
    """Return what is wrong with a shard; nothing: it is whole, as far as it was looked at.

    Args:
        storage: The run's root.
        header: The generation's.
        shard: One of its shards.
        deep: Read every byte and compare every block's digest; else the size alone.
        sizes: Of the files in the generation's directory, where several are asked for.

    Raises:
        StorageError: The storage could not be asked.
    """
    try:
        size = sizes.of(shard.path, shard.size) if sizes else storage.size(shard.path)
        if size != shard.size:
            return [_wrong_size(header, shard, size)]
        return list(_bad_blocks(storage, header, shard)) if deep else []
    except NotFound as error:
        return [_missing(header, shard, error)]


def absence(error: NotFound) -> tuple[str, str]:
    """Return in what way a file is not there: a kind for programs, and words after its name."""
    if isinstance(error, NotAFile):
        return "no_file", f"is no file: there is {error.details.get('found', 'something else')}"
    return "missing", "is missing"


def unreadable_here(error: StorageError) -> bool:
    """Return whether a refusal to read is about this file alone, so that others can be read.

    It is no word on what the file holds: whoever chooses a generation must not go by it.
    """
    return error.details.get("errno") in {"EACCES", "EPERM"}


def is_lost(error: StorageError) -> bool:
    """Return whether the storage says that the bytes are gone, not that it cannot look."""
    return isinstance(error, NotFound) or error.details.get("errno") == "EIO"


def _bad_blocks(
    storage: Storage, header: GenerationHeader, shard: ShardRecord
) -> Iterator[ShardDamaged]:
    buffer = memoryview(bytearray(min(_PIECE, shard.block_bytes, shard.size)))
    for block, expected in enumerate(shard.blocks):
        try:
            found = _block_digest(storage, shard, block, buffer)
        except NotFound:
            raise
        except StorageError as error:
            if not is_lost(error):
                raise
            found = ""
        if found != expected:
            yield _bad_block(header, shard, block, found)
    raw = b"".join(bytes.fromhex(block) for block in shard.blocks)
    if digest_of(raw, shard.algorithm) != shard.digest:
        yield ShardDamaged(
            "the digests of the blocks do not make up the shard's digest",
            where=shard.path,
            remedy="The generation was recorded wrongly and cannot be trusted. " + _WITHOUT,
            details={**_facts(header, shard), "kind": "digest"},
        )


def _block_digest(storage: Storage, shard: ShardRecord, block: int, buffer: memoryview) -> str:
    hasher = new_hasher(shard.algorithm)
    at, stop = block_range(shard, block)
    while at < stop:
        piece = buffer[: min(len(buffer), stop - at)]
        count = storage.read_into(shard.path, at, piece)
        hasher.update(piece[:count])
        if count < len(piece):
            break  # shorter than it was a moment ago; the digest will say so
        at += count
    return hasher.hexdigest()


def _bad_block(
    header: GenerationHeader, shard: ShardRecord, block: int, found: str
) -> ShardDamaged:
    start, stop = block_range(shard, block)
    tensors = tensors_in(header, shard, block)
    verb = "does not hold what was written" if found else "cannot be read from the device"
    return ShardDamaged(
        f"block {block} (bytes {start} to {stop}) {verb}; it holds {_named(shard, start, tensors)}",
        where=shard.path,
        remedy=REMEDY,
        details={
            **_facts(header, shard),
            "kind": "block" if found else "unreadable",
            "block": block,
            "start": start,
            "stop": stop,
            "tensors": tensors,
            "expected": shard.blocks[block],
            "found": found,
        },
    )


def _wrong_size(header: GenerationHeader, shard: ShardRecord, size: int) -> ShardDamaged:
    tensors = tensors_between(header, shard, size, shard.size) if size < shard.size else []
    return ShardDamaged(
        f"the shard of rank {shard.rank} has {size} bytes instead of {shard.size}",
        where=shard.path,
        remedy=REMEDY,
        details={
            **_facts(header, shard),
            "kind": "size",
            "start": min(size, shard.size),
            "stop": max(size, shard.size),
            "tensors": tensors,
            "expected": shard.size,
            "found": size,
        },
    )


def _missing(header: GenerationHeader, shard: ShardRecord, error: NotFound) -> ShardDamaged:
    kind, words = absence(error)
    return ShardDamaged(
        f"the shard of rank {shard.rank} {words}",
        where=shard.path,
        remedy=REMEDY,
        details={
            **_facts(header, shard),
            "kind": kind,
            "start": 0,
            "stop": shard.size,
            "tensors": tensors_between(header, shard, 0, shard.size),
        },
    )


def _facts(header: GenerationHeader, shard: ShardRecord) -> dict[str, object]:
    generation = header.directory.rpartition("/")[2]
    return {"generation": generation, "shard": shard.path, "rank": shard.rank}


def _named(shard: ShardRecord, start: int, tensors: list[str]) -> str:
    """Return what a block holds, in words; three tensors are named."""
    parts = ["the shard's header"] if start < shard.header_bytes else []
    parts += [repr(name) for name in tensors[:3]]
    if len(tensors) > 3:
        parts.append(f"{len(tensors) - 3} more tensors")
    return ", ".join(parts)
