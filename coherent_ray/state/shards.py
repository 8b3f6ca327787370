"""Shard files: this rank's bytes of the state, streamed, hashed by block, durable; and back.

A shard is an ordinary ``.safetensors`` file (`coherent_ray.state.header`). Its name and its bytes
follow from layout, rank and rank count. Any state loads at any rank count, because a reader asks
for ranges of the flat state and does not care how many files they lie in.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import SimpleQueue

import torch

from coherent_ray.commit.manifest import (
    CUT_ALIGNMENT,
    ITEM_BYTES,
    Manifest,
    ShardRecord,
    StateLayout,
    shard_path,
)
from coherent_ray.digests import (
    SHARD_ALGORITHM,
    Algorithm,
    digest_of,
    new_hasher,
)
from coherent_ray.errors import ConfigError
from coherent_ray.state.blocks import (
    Block,
    FlatReader,
    ShardReader,
    longest_block,
    readers_of,
)
from coherent_ray.state.flat import carrier_of, from_bytes, put_items
from coherent_ray.state.header import header_of
from coherent_ray.state.layout import TORCH_DTYPES, FlatState, check_tensors
from coherent_ray.storage.base import Storage

#: Bytes that are hashed as one unless the user chooses.
BLOCK_BYTES = 16 * 2**20
#: Threads that read and hash: enough to keep a disk and a hash busy at once.
_READ_THREADS = 4

Hooks = Callable[[str], None]
"""Called with the name of the point that was reached; for injecting faults."""


def write_shard(  # noqa: PLR0917 - a file is described by this many facts
    storage: Storage,
    directory: str,
    rank: int,
    ranks: int,
    layout: StateLayout,
    memory: memoryview,
    algorithm: Algorithm = SHARD_ALGORITHM,
    block_bytes: int = BLOCK_BYTES,
    hooks: Hooks | None = None,
) -> ShardRecord:
    """Write one rank's shard; it is durable when the call returns.

    A second thread hashes while this one writes and syncs.

    Args:
        storage: The run's root.
        directory: The generation's directory, which no other attempt shares.
        rank: Whose shard.
        ranks: Number of shards.
        layout: Of the whole state.
        memory: The rank's bytes, `Snapshot.memory`; must not change until the call returns.
        algorithm: Hashes the blocks.
        block_bytes: Bytes hashed as one; a multiple of 16.
        hooks: Called at ``shard:begun``, ``shard:half-written``, ``shard:unsynced`` and
            ``shard:written``.

    Raises:
        ConfigError: `block_bytes` is not a positive multiple of 16.
        AlreadyExists: The shard is there already.
        StorageError: The storage failed; nothing is left under the shard's name.
    """
    if block_bytes <= 0 or block_bytes % CUT_ALIGNMENT:
        raise ConfigError(
            f"block_bytes is {block_bytes}",
            where="checkpoint.block_bytes",
            remedy=f"Choose a positive multiple of {CUT_ALIGNMENT}.",
        )
    start, stop = layout.cut(rank, ranks), layout.cut(rank + 1, ranks)
    if len(memory) != stop - start:
        raise ValueError(f"rank {rank} of {ranks} owns {stop - start} bytes, not {len(memory)}")
    header = header_of(FlatState(layout), start, stop)
    path = shard_path(directory, rank, ranks)
    blocks = _write_and_hash(storage, path, (header, memory), algorithm, block_bytes, hooks)
    return ShardRecord(
        rank=rank,
        path=path,
        size=len(header) + len(memory),
        start=start,
        stop=stop,
        header_bytes=len(header),
        algorithm=algorithm,
        block_bytes=block_bytes,
        blocks=tuple(blocks),
        digest=digest_of(b"".join(map(bytes.fromhex, blocks)), algorithm),
    )


def load_state(
    storage: Storage, manifest: Manifest, target: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Read a whole generation; every block is verified before its bytes are used.

    Args:
        storage: The run's root.
        manifest: Of the generation; may have any rank count.
        target: Live tensors to fill, of any device and strides; None: new ones on the CPU, which
            share one piece of memory.

    Returns:
        All tensors by name; `target`'s own where it was given.

    Raises:
        StateMismatch: `target` does not fit the stored layout.
        ShardDamaged: A shard is missing or wrong; names shard, block, bytes and tensors. The
            first one in order of rank. Tensors of `target` may have been overwritten in part.
        StorageError: The storage failed.
    """
    flat = FlatState(manifest.header.layout)
    sink: _NewTensors | _LiveTensors | None = None
    if target is not None:
        sink = _LiveTensors(flat, target)
    readers = readers_of(storage, manifest, flat)
    for reader in readers:
        reader.check_size()
    # Memory only for what is there: a manifest may tell of any size.
    sink = sink or _NewTensors(flat)
    tasks = [(reader, block) for reader in readers for block in reader.all_blocks()]
    threads = min(_READ_THREADS, (os.cpu_count() or 1) + 1, len(tasks))
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(longest_block(manifest))))
    with ThreadPoolExecutor(threads, "coherent-ray-load") as pool:
        jobs = [pool.submit(_load_block, *task, sink, buffers) for task in tasks]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sink.tensors


def read_tensor(
    storage: Storage,
    manifest: Manifest,
    name: str,
    box: Sequence[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """Read a box of one tensor, from the shards that hold it; verifies the blocks that it reads.

    Args:
        storage: The run's root.
        manifest: Of the generation.
        name: The tensor's name in the flat state.
        box: ``(first, last)`` for each dimension; None: the whole tensor.

    Returns:
        A new CPU tensor with the box's shape.

    Raises:
        KeyError: The state has no such tensor.
        ValueError: The box does not lie in the tensor.
        ShardDamaged: A block that holds a part of the box is wrong.
    """
    state = FlatReader(storage, manifest)
    whole = state.flat.find(name)
    sides = [(0, n) for n in whole.shape] if box is None else list(box)
    inside = all(0 <= a <= b <= n for (a, b), n in zip(sides, whole.shape, strict=False))
    if len(sides) != len(whole.shape) or not inside:
        raise ValueError(f"{name}: box {sides} does not lie in shape {list(whole.shape)}")
    shape = [b - a for a, b in sides]
    dtype, size = TORCH_DTYPES[whole.dtype], ITEM_BYTES[whole.dtype]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    # From the box's first item to its last: one run of the flat state, read once.
    strides = _row_major(whole.shape)
    first = sum(a * stride for (a, _), stride in zip(sides, strides, strict=True))
    last = sum((b - 1) * stride for (_, b), stride in zip(sides, strides, strict=True))
    begin = whole.start + first * size
    stop = begin + (last - first + 1) * size
    data = state.read(begin, stop)
    return from_bytes(data, dtype).as_strided(shape, strides).clone()


class _NewTensors:
    """Fills one new piece of memory, which all tensors are views of."""

    def __init__(self, flat: FlatState) -> None:
        self._memory = memoryview(bytearray(flat.nbytes))
        self.tensors: dict[str, torch.Tensor] = {}
        for piece in flat.pieces(0, flat.nbytes):
            data = self._memory[piece.start : piece.start + piece.nbytes]
            self.tensors[piece.name] = from_bytes(data, TORCH_DTYPES[piece.dtype]).view(piece.shape)

    def window(self, start: int, stop: int) -> memoryview | None:
        """Return the memory that bytes of the flat state may be read into."""
        return self._memory[start:stop]

    def store(self, start: int, data: memoryview) -> None:
        """Take verified bytes of the flat state."""
        self._memory[start : start + len(data)] = data


class _LiveTensors:
    """Fills tensors that training uses; they never hold a byte that was not verified."""

    def __init__(self, flat: FlatState, target: Mapping[str, torch.Tensor]) -> None:
        check_tensors(flat.layout, target)
        self.tensors = dict(target)
        self._flat = flat

    def window(self, start: int, stop: int) -> memoryview | None:
        """Return None: bytes pass through a buffer."""
        return None

    def store(self, start: int, data: memoryview) -> None:
        """Take verified bytes of the flat state."""
        for piece in self._flat.pieces(start, start + len(data)):
            at = piece.start - start
            carrier = carrier_of(TORCH_DTYPES[piece.dtype])
            bits = from_bytes(data[at : at + piece.nbytes], carrier)
            put_items(self.tensors[piece.name], piece.first_item, bits)


def _load_block(
    reader: ShardReader,
    block: Block,
    sink: _NewTensors | _LiveTensors,
    buffers: SimpleQueue[memoryview],
) -> None:
    start, stop = reader.flat_range(block)
    window = sink.window(start, stop) if stop - start == block.last - block.first else None
    if window is not None:
        reader.read(block, window)
        return
    buffer = buffers.get()
    try:
        sink.store(start, reader.read(block, buffer))
    finally:
        buffers.put(buffer)


def _write_and_hash(  # noqa: PLR0917
    storage: Storage,
    path: str,
    parts: tuple[bytes, memoryview],
    algorithm: Algorithm,
    block_bytes: int,
    hooks: Hooks | None,
) -> list[str]:
    """Return the blocks' digests, in hex."""
    given_up = threading.Event()
    size = len(parts[0]) + len(parts[1])
    edges = [*range(0, size, block_bytes), size]
    with ThreadPoolExecutor(1, "coherent-ray-hash") as pool:
        hashing = pool.submit(_hash_blocks, parts, edges, algorithm, given_up)
        try:
            with storage.open_writer(path) as writer:
                _call(hooks, "shard:begun")
                half = size // 2 if hooks else size
                for first, last in pairwise(sorted({*edges, half})):
                    for view in _views(parts, first, last):
                        writer.write(view)
                    if last == half:
                        _call(hooks, "shard:half-written")
                _call(hooks, "shard:unsynced")
                writer.finish()
        except BaseException:
            given_up.set()
            raise
        _call(hooks, "shard:written")
        return hashing.result()


def _hash_blocks(
    parts: tuple[bytes, memoryview],
    edges: list[int],
    algorithm: Algorithm,
    given_up: threading.Event,
) -> list[str]:
    result = []
    for first, last in pairwise(edges):
        if given_up.is_set():
            break
        hasher = new_hasher(algorithm)
        for view in _views(parts, first, last):
            hasher.update(view)
        result.append(hasher.hexdigest())
    return result


def _views(parts: tuple[bytes, memoryview], first: int, last: int) -> Iterator[memoryview]:
    """Yield bytes ``[first, last)`` of a file that is a header and a body, without copying."""
    header, body = parts
    if first < len(header):
        yield memoryview(header)[first:last]
    if last > len(header):
        yield body[max(first - len(header), 0) : last - len(header)]


def _call(hooks: Hooks | None, point: str) -> None:
    if hooks is not None:
        hooks(point)


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides = [1]
    for side in reversed(shape[1:]):
        strides.append(strides[-1] * side)
    return strides[::-1] if shape else []
