"""Inspection: does a shard in the storage still hold what its record says?

What fails is named as far down as the digests reach: shard, block, byte range, tensors. A shard
that is gone, short or flipped is *damage*, which falling back can answer. A storage that cannot be
reached is not: then nobody knows, and the error goes up as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator

from coherent_ray.commit.manifest import GenerationHeader, ShardRecord
from coherent_ray.commit.partial_files import header_of_record
from coherent_ray.commit.shard_records import Places, StoredFile
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
    """Return the names of the tensors that have bytes in a range of a shard.

    Args:
        header: The generation's.
        shard: One of its shards.
        start: First byte.
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
    """Return the first byte of a block in the shard, and the byte after its last."""
    return shard.block_range(block)


def blocks_of(shard: ShardRecord) -> list[int]:
    """Return what tells each block of a shard: the same digest at the same place, the same number.

    For one process; no two blocks of others are told alike.
    """
    places = Places(shard)
    return [
        hash((digest, *places.pieces(*shard.block_range(block))))
        for block, digest in enumerate(shard.blocks)
    ]


def shard_damage(
    storage: Storage,
    header: GenerationHeader,
    shard: ShardRecord,
    *,
    deep: bool,
    seen: Collection[int] = (),
    sizes: Sizes | None = None,
) -> list[ShardDamaged]:
    """Return what is wrong with a shard; nothing: it is whole, as far as it was looked at.

    Bytes that lie in the file of an earlier generation are looked at there, and that file is named.

    Args:
        storage: The run's root.
        header: The generation's.
        shard: One of its shards.
        deep: Read every byte and compare every block's digest; else sizes alone.
        seen: Blocks that are not read, since somebody has: what `blocks_of` tells them by.
        sizes: Of the files that hold the shards, where several are asked for.

    Raises:
        StorageError: The storage could not be asked.
    """
    damages: list[ShardDamaged] = []
    for file in shard.files:
        try:
            size = sizes.of(file.path, file.size) if sizes else storage.size(file.path)
        except NotFound as error:
            damages.append(_missing(header, shard, file, error))
        else:
            if size != file.size:
                damages.append(_wrong_size(header, shard, file, size))
    if damages or not deep:
        return damages
    try:
        bad = _bad_blocks(storage, header, shard, frozenset(seen))
        return [*_bad_header(storage, header, shard), *bad]
    except NotFound as error:  # it went while it was read
        gone = shard_damage(storage, header, shard, deep=False)
        return gone or [_missing(header, shard, shard.own_file, error)]


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


def _bad_header(
    storage: Storage, header: GenerationHeader, shard: ShardRecord
) -> Iterator[ShardDamaged]:
    """Look at what no block holds: the header of a file in which the shard is not whole."""
    if shard.reuse is None:
        return
    expected = header_of_record(shard)
    found = bytearray(len(expected))
    try:
        storage.read_into(shard.path, 0, memoryview(found))
    except StorageError as error:
        if isinstance(error, NotFound) or not is_lost(error):
            raise
        found = bytearray()
    if found != expected:
        verb = "does not say what was written" if found else "cannot be read from the device"
        yield ShardDamaged(
            f"the file's own header {verb}",
            where=shard.path,
            remedy=REMEDY,
            details={**_facts(header, shard), "kind": "header", "tensors": []},
        )


def _bad_blocks(
    storage: Storage, header: GenerationHeader, shard: ShardRecord, seen: frozenset[int]
) -> Iterator[ShardDamaged]:
    places = Places(shard)
    known = blocks_of(shard) if seen else []
    buffer = memoryview(bytearray(min(_PIECE, shard.block_bytes, shard.size)))
    for block, expected in enumerate(shard.blocks):
        if known and known[block] in seen:
            continue
        try:
            found = _block_digest(storage, shard, places, block, buffer)
        except NotFound:
            raise
        except StorageError as error:
            if not is_lost(error):
                raise
            found = ""
        if found != expected:
            yield _bad_block(header, shard, places, block, found)
    raw = b"".join(bytes.fromhex(block) for block in shard.blocks)
    if digest_of(raw, shard.algorithm) != shard.digest:
        yield ShardDamaged(
            "the digests of the blocks do not make up the shard's digest",
            where=shard.path,
            remedy="The generation was recorded wrongly and cannot be trusted. " + _WITHOUT,
            details={**_facts(header, shard), "kind": "digest"},
        )


def _block_digest(
    storage: Storage, shard: ShardRecord, places: Places, block: int, buffer: memoryview
) -> str:
    hasher = new_hasher(shard.algorithm)
    for path, first, size in places.pieces(*shard.block_range(block)):
        at, stop = first, first + size
        while at < stop:
            piece = buffer[: min(len(buffer), stop - at)]
            count = storage.read_into(path, at, piece)
            hasher.update(piece[:count])
            if count < len(piece):
                break  # shorter than it was a moment ago; the digest will say so
            at += count
    return hasher.hexdigest()


def _bad_block(
    header: GenerationHeader, shard: ShardRecord, places: Places, block: int, found: str
) -> ShardDamaged:
    start, stop = shard.block_range(block)
    tensors = tensors_in(header, shard, block)
    verb = "does not hold what was written" if found else "cannot be read from the device"
    files = list(dict.fromkeys(piece.path for piece in places.pieces(start, stop)))
    return ShardDamaged(
        f"block {block} (bytes {start} to {stop}{_elsewhere(shard, files)}) {verb}; it holds "
        f"{_named(shard, start, tensors)}",
        where=files[0],
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
            "files": files,
        },
    )


def _elsewhere(shard: ShardRecord, files: list[str]) -> str:
    """Return which shard is meant, where a block's bytes do not lie in its own file alone."""
    if files == [shard.path]:
        return ""
    others = f", with bytes in {' and '.join(files[1:])} too" if len(files) > 1 else ""
    return f" of {shard.path}{others}"


def _wrong_size(
    header: GenerationHeader, shard: ShardRecord, file: StoredFile, size: int
) -> ShardDamaged:
    return ShardDamaged(
        f"{_whose(shard, file)} has {size} bytes instead of {file.size}",
        where=file.path,
        remedy=REMEDY,
        details={
            **_facts(header, shard),
            "kind": "size",
            "start": min(size, file.size),
            "stop": max(size, file.size),
            "tensors": _tensors_lost(header, shard, file, size),
            "expected": file.size,
            "found": size,
        },
    )


def _missing(
    header: GenerationHeader, shard: ShardRecord, file: StoredFile, error: NotFound
) -> ShardDamaged:
    kind, words = absence(error)
    return ShardDamaged(
        f"{_whose(shard, file)} {words}",
        where=file.path,
        remedy=REMEDY,
        details={
            **_facts(header, shard),
            "kind": kind,
            "start": 0,
            "stop": file.size,
            "tensors": _tensors_lost(header, shard, file, 0),
        },
    )


def _whose(shard: ShardRecord, file: StoredFile) -> str:
    if file.path == shard.path:
        return f"the shard of rank {shard.rank}"
    return f"the earlier shard of rank {shard.rank}, to which this generation refers,"


def _tensors_lost(
    header: GenerationHeader, shard: ShardRecord, file: StoredFile, size: int
) -> list[str]:
    """Return the tensors that have bytes beyond the first ``size`` ones of a file."""
    names: dict[str, None] = {}
    at = 0
    for path, first, length in Places(shard).pieces(0, shard.size):
        if path == file.path and first + length > size:
            begin = at + max(size - first, 0)
            names |= dict.fromkeys(tensors_between(header, shard, begin, at + length))
        at += length
    return list(names)


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
