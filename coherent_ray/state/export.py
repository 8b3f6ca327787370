"""Export: a stored state, or the weights in it, as one ordinary ``.safetensors`` file.

What ranks have stored in parts, and in files of earlier generations where it did not change, is put
together tensor by tensor. Every block is verified before one byte of it is written, and the file
has its name only once it is whole and durable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.canonical import Json
from coherent_ray.commit.manifest import ITEM_BYTES, Manifest, TensorSpec
from coherent_ray.digests import Digest, new_hasher
from coherent_ray.errors import AlreadyExists, ConfigError, NotFound
from coherent_ray.state.blocks import Block, ShardReader, readers_of
from coherent_ray.state.header import HEADER_ALIGNMENT
from coherent_ray.state.layout import FlatState
from coherent_ray.storage.base import Storage

#: Verified blocks that are kept in memory: tensors in layout order need each block once, those of
#: which each rank has some rows need one a rank.
_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Exported:
    """A file that was written."""

    tensors: int
    size: int
    """Bytes."""
    digest: Digest
    """SHA-256 of the file, as a run that starts from it records it."""


def export(
    storage: Storage,
    manifest: Manifest,
    target: Storage,
    path: str,
    *,
    prefix: str = "",
    about: Mapping[str, str] | None = None,
) -> Exported:
    """Write the tensors whose names begin with a prefix into one file, without the prefix.

    Holds a few blocks in memory, whatever the size of the state.

    Args:
        storage: The run's root.
        manifest: Of the generation; may have any rank count and be of any strategy.
        target: Where the file goes.
        path: Its name there, which must be free.
        prefix: ``model/`` for the model's weights by the model's own names; empty: all tensors.
        about: What the file's header tells of where it comes from.

    Raises:
        AlreadyExists: The name is taken.
        ConfigError: The generation has no such tensors.
        ShardDamaged: A block is not what its digest says; nothing was written.
        StorageError: A storage failed; nothing has the name.
    """
    _require_free(target, path)
    specs = [spec for spec in manifest.header.layout.tensors if spec.name.startswith(prefix)]
    if not specs:
        raise ConfigError(f"the generation has no tensors under {prefix}", where=prefix)
    blocks = _Blocks(storage, manifest)
    hasher, size = new_hasher("sha256"), 0
    with target.open_writer(path) as writer:
        for data in _content(blocks, specs, prefix, about or {}):
            hasher.update(data)
            writer.write(data)
            size += len(data)
        writer.finish()
    return Exported(len(specs), size, f"sha256:{hasher.hexdigest()}")


def _require_free(target: Storage, path: str) -> None:
    try:
        target.size(path)
    except NotFound:
        return
    raise AlreadyExists(
        "there is such a file already",
        where=f"{target.uri}/{path}",
        remedy="Name another directory, or take the file away: nothing is overwritten.",
    )


def _content(
    blocks: _Blocks, specs: Sequence[TensorSpec], prefix: str, about: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    entries: dict[str, Json] = {"__metadata__": {"format": "pt", **about}}
    at = 0
    for spec in specs:
        entries[spec.name.removeprefix(prefix)] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = canonical.dump(entries)
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for spec in specs:
        yield from blocks.tensor(spec)


class _Blocks:
    """Verified bytes of a generation, tensor by tensor."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._flat = FlatState(manifest.header.layout)
        self._readers = [r for r in readers_of(storage, manifest, self._flat) if _holds(r)]
        self._starts = [reader.record.start for reader in self._readers]
        self._kept: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        for reader in self._readers:
            reader.check_size()

    def tensor(self, spec: TensorSpec) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in row-major order."""
        for piece in self._flat.locate(spec.name, 0, spec.nbytes // ITEM_BYTES[spec.dtype]):
            yield from self._range(piece.start, piece.start + piece.nbytes)

    def _range(self, start: int, stop: int) -> Iterator[memoryview]:
        while start < stop:
            reader = self._readers[bisect_right(self._starts, start) - 1]
            (block,) = reader.blocks(start, start + 1)
            first, last = reader.flat_range(block)
            end = min(stop, last)
            yield self._block(reader, block)[start - first : end - first]
            start = end

    def _block(self, reader: ShardReader, block: Block) -> memoryview:
        key = reader.record.rank, block.index
        if key not in self._kept:
            buffer = memoryview(bytearray(block.last - block.first))
            self._kept[key] = reader.read(block, buffer)
            if len(self._kept) > _BLOCKS:
                self._kept.popitem(last=False)
        return self._kept[key]


def _holds(reader: ShardReader) -> bool:
    return reader.record.start < reader.record.stop
