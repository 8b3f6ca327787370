"""Reading a shard block by block: no byte is used before its block's digest has been checked.

The first read is the verification. What fails is named exactly: shard, block, byte range, tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coherent_ray.commit.inspection import absence, is_lost
from coherent_ray.commit.manifest import CUT_ALIGNMENT, Manifest, ShardRecord
from coherent_ray.commit.shard_records import Places
from coherent_ray.digests import new_hasher
from coherent_ray.errors import NotFound, ShardDamaged, StorageError
from coherent_ray.state.header import header_of
from coherent_ray.state.layout import FlatState
from coherent_ray.storage.base import Storage
from coherent_ray.storage.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a shard, by its place."""

    index: int
    first: int
    """First byte of the shard."""
    last: int
    """The byte of the shard after its last."""


class ShardReader:
    """One shard of a generation; safe to use from several threads."""

    def __init__(self, storage: Storage, flat: FlatState, record: ShardRecord) -> None:
        self._storage = storage
        self._flat = flat
        self.record = record
        self._places = Places(record)
        self._header = header_of(flat, record.start, record.stop)
        if len(self._header) != record.header_bytes or record.block_bytes % CUT_ALIGNMENT:
            raise self.damage("the manifest describes a shard that this format cannot be")

    def check_size(self, sizes: Sizes | None = None) -> None:
        """Check that each file that holds bytes of it is there, as long as the manifest says.

        Args:
            sizes: Of the files that hold the shards, where several are looked at.

        Raises:
            ShardDamaged: One is not.
        """
        for file in self.record.files:
            try:
                size = sizes.of(file.path, file.size) if sizes else self._storage.size(file.path)
            except NotFound as error:
                raise self.damage(f"the shard {absence(error)[1]}", path=file.path) from error
            if size != file.size:
                what = f"the shard has {size} bytes instead of {file.size}"
                raise self.damage(what, path=file.path)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Yield the blocks that hold bytes ``[start, stop)`` of the flat state, and no others."""
        shift = self.record.header_bytes - self.record.start
        yield from self._blocks(
            max(start, self.record.start) + shift, min(stop, self.record.stop) + shift
        )

    def all_blocks(self) -> Iterator[Block]:
        """Yield every block, those that hold only the header too."""
        yield from self._blocks(0, self.record.size)

    def flat_range(self, block: Block) -> tuple[int, int]:
        """Return the bytes of the flat state that a block holds; may be empty."""
        shift = self.record.start - self.record.header_bytes
        start = max(block.first + shift, self.record.start)
        return start, max(block.last + shift, start)

    def read(self, block: Block, buffer: memoryview) -> memoryview:
        """Read and verify one block.

        Args:
            block: Of this shard.
            buffer: Writable, at least as long as the block; holds nothing of use after an error.

        Returns:
            The part of the buffer that holds `flat_range`.

        Raises:
            ShardDamaged: The bytes are not those that were acknowledged.
            StorageError: The storage failed.
        """
        target = buffer[: block.last - block.first]
        count = 0
        for path, at, size in self._places.pieces(block.first, block.last):
            try:
                found = self._storage.read_into(path, at, target[count : count + size])
            except NotFound as error:
                raise self.damage(f"the shard {absence(error)[1]}", path=path) from error
            except StorageError as error:
                if not is_lost(error):
                    raise
                raise self.damage("it cannot be read from the device", block, path) from error
            if found != size:
                raise self.damage(f"the shard ends after {at + found} bytes", block, path)
            count += size
        return self._verified(block, target)

    def verify(self, block: Block, memory: memoryview) -> None:
        """Check a block of a shard that is in memory.

        Args:
            block: Of this shard.
            memory: The whole shard.

        Raises:
            ShardDamaged: The bytes are not those that were acknowledged.
        """
        self._verified(block, memory[block.first : block.last])

    def _verified(self, block: Block, target: memoryview) -> memoryview:
        """Return the part of a block's bytes that holds `flat_range`, if they are right."""
        hasher = new_hasher(self.record.algorithm)
        hasher.update(target)
        if hasher.hexdigest() != self.record.blocks[block.index]:
            raise self.damage("the bytes do not have the digest that was acknowledged", block)
        head = self._header[block.first : block.last]
        if bytes(target[: len(head)]) != head:
            raise self.damage("the header is not that of this part of the state", block)
        return target[len(head) :]

    def damage(
        self, what: str, block: Block | None = None, path: str | None = None
    ) -> ShardDamaged:
        """Return the error for this shard, or for one block of it.

        Args:
            what: What is wrong.
            block: Where, if that is known.
            path: The file; None: the one in which the block begins, or the shard's own.
        """
        details: dict[str, object] = {"shard": self.record.path}
        if block is not None:
            files = [piece.path for piece in self._places.pieces(block.first, block.last)]
            path = path or files[0]
            names = [piece.name for piece in self._flat.pieces(*self.flat_range(block))]
            of = "" if set(files) == {self.record.path} else f" of {self.record.path}"
            what = f"block {block.index} (bytes {block.first} to {block.last}{of}): {what}; it "
            what += f"holds {_listed(names) if names else 'the header'}"
            details |= {"block": block.index, "first_byte": block.first, "last_byte": block.last}
            details |= {"tensors": names, "files": list(dict.fromkeys(files))}
        return ShardDamaged(
            what,
            where=path or self.record.path,
            remedy="Resume from an earlier generation (`on_damage: fall_back` does), or restore "
            "the file from a copy.",
            details=details,
        )

    def _blocks(self, first: int, last: int) -> Iterator[Block]:
        size = self.record.block_bytes
        if first < last:
            for index in range(first // size, -(-last // size)):
                yield Block(index, index * size, min((index + 1) * size, self.record.size))


class FlatReader:
    """Any bytes of a generation's flat state, in memory for these bytes and one block."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.flat = FlatState(manifest.header.layout)
        self._readers = readers_of(storage, manifest, self.flat)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)`` of the flat state; every block of them is verified.

        Raises:
            ShardDamaged: A block that holds a part of them is wrong.
            StorageError: The storage failed.
        """
        readers = [r for r in self._readers if r.record.start < stop and start < r.record.stop]
        for reader in readers:
            reader.check_size()
        data = memoryview(bytearray(stop - start))
        for reader in readers:
            for block in reader.blocks(start, stop):
                found = reader.read(block, memoryview(bytearray(block.last - block.first)))
                at, _ = reader.flat_range(block)
                first, last = max(at, start), min(at + len(found), stop)
                data[first - start : last - start] = found[first - at : last - at]
        return data

    def items(self, name: str, first: int, last: int) -> memoryview:
        """Return the bytes of items ``[first, last)`` of a tensor, in row-major order.

        Raises:
            KeyError: The state has no such tensor.
            ShardDamaged: A block that holds a part of them is wrong.
            StorageError: The storage failed.
        """
        pieces = self.flat.locate(name, first, last)
        parts = [self.read(piece.start, piece.start + piece.nbytes) for piece in pieces]
        return parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))


def readers_of(storage: Storage, manifest: Manifest, flat: FlatState) -> list[ShardReader]:
    """Return a reader for each shard of a generation, in order of rank."""
    return [ShardReader(storage, flat, record) for record in manifest.shards]


def check_sizes(storage: Storage, readers: Sequence[ShardReader]) -> None:
    """Check that all files are there, with the sizes that their manifest says.

    Raises:
        ShardDamaged: One is not; the first one in order.
    """
    sizes = Sizes(storage, (file.path for reader in readers for file in reader.record.files))
    for reader in readers:
        reader.check_size(sizes)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def longest_block(manifest: Manifest) -> int:
    """Return the bytes that a buffer for any block of a generation must have."""
    return max(min(shard.block_bytes, shard.size) for shard in manifest.shards)
