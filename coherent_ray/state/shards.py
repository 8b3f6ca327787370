"""Shard files: this rank's bytes of the state, streamed, hashed by block, durable; and back.

A shard is an ordinary ``.safetensors`` file (`coherent_ray.state.header`). Its name and its bytes
follow from layout, rank and rank count. Where most of it is as it was in the generation before, the
file holds what has changed, and the record says where the rest lies (`coherent_ray.state.reuse`).
Any state loads at any rank count, because a reader asks for ranges of the flat state and does not
care how many files they lie in.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from coherent_ray.commit.manifest import (
    CUT_ALIGNMENT,
    Manifest,
    ShardRecord,
    StateLayout,
    TensorSpec,
    shard_path,
)
from coherent_ray.digests import (
    SHARD_ALGORITHM,
    Algorithm,
    digest_of,
    new_hasher,
)
from coherent_ray.errors import ConfigError
from coherent_ray.state.blocks import FlatReader, check_sizes, longest_block, readers_of
from coherent_ray.state.flat import from_bytes
from coherent_ray.state.header import header_of
from coherent_ray.state.layout import TORCH_DTYPES, FlatState, check_tensors
from coherent_ray.state.reuse import Known, plan
from coherent_ray.state.sharded import first_item_here, here, is_distributed
from coherent_ray.state.sinks import Box, Boxes, LiveTensors, NewTensors, fill
from coherent_ray.storage.base import Storage

#: Bytes that are hashed as one unless the user chooses.
BLOCK_BYTES = 16 * 2**20
#: Bytes of one call to a writer: a disk has its full speed from here on, with one call at a time.
_WRITE_BYTES = 16 * 2**20

Hooks = Callable[[str], None]
"""Called with the name of the point that was reached; for injecting faults."""


@dataclass(slots=True)
class ShardTimes:
    """Where the time of one shard went, in seconds; writing and hashing go on at once."""

    write_s: float = 0.0
    hash_s: float = 0.0
    sync_s: float = 0.0
    """From the last byte that was written until the file was durable under its name."""


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
    known: Known | None = None,
    times: ShardTimes | None = None,
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
        known: What need not be written where it is as it was; None: all is written.
        times: Where to tell how long it took; None: nowhere.

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
    parts = header, memory
    times = times or ShardTimes()
    digests: dict[int, str] = {}
    planned = None
    if known is not None and len(header) + len(memory) == known.shard.size:
        begun = time.monotonic()
        planned = plan(known, partial(_hash, parts, algorithm), digests)
        times.hash_s = time.monotonic() - begun
    if planned is not None:
        _write(storage, path, planned.header, planned.written, parts, hooks, times)
        blocks = planned.digests
    else:
        blocks = _write_and_hash(
            storage, path, parts, algorithm, block_bytes, hooks, digests, times
        )
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
        reuse=planned.reuse if planned else None,
    )


def load_state(
    storage: Storage, manifest: Manifest, target: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Read a whole generation; every block is verified before its bytes are used.

    Args:
        storage: The run's root.
        manifest: Of the generation; may have any rank count and be of any strategy.
        target: Live tensors to fill, of any device and strides; None: new ones on the CPU, which
            share one piece of memory. Where some are `DTensor`, only what lies on this rank is
            read.

    Returns:
        All tensors by name; `target`'s own where it was given.

    Raises:
        StateMismatch: `target` does not fit the stored layout.
        ShardDamaged: A shard is missing or wrong; names shard, block, bytes and tensors. The
            first one in order of rank. Tensors of `target` may have been overwritten in part.
        StorageError: The storage failed.
    """
    flat = FlatState(manifest.header.layout)
    if target is not None and any(map(is_distributed, target.values())):
        check_tensors(flat.layout, target)
        boxes = {name: Box(first_item_here(t), here(t)) for name, t in target.items()}
        _load_boxes(storage, manifest, flat, boxes)
        return dict(target)
    live = LiveTensors(flat, target) if target is not None else None
    readers = readers_of(storage, manifest, flat)
    check_sizes(storage, readers)
    # Memory only for what is there: a manifest may tell of any size.
    sink = live or NewTensors(flat)
    tasks = [(reader, block) for reader in readers for block in reader.all_blocks()]
    fill(sink, tasks, longest_block(manifest))
    return sink.tensors


def load_rows(
    storage: Storage, manifest: Manifest, rows: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Read some rows of some tensors of a generation, and all others whole.

    Reads the blocks that hold a part of these, and no others; each is verified before its bytes
    are used. That every shard is there at its full length is looked at all the same.

    Args:
        storage: The run's root.
        manifest: Of the generation; may have any rank count and be of any strategy.
        rows: By name of the tensor, its first row (index of the first dimension) and the one after
            the last.

    Returns:
        All tensors by name, new ones on the CPU.

    Raises:
        KeyError: The state has no such tensor.
        ValueError: A tensor has no such rows.
        ShardDamaged: A shard is missing, or a block that was read is wrong.
        StorageError: The storage failed.
    """
    flat = FlatState(manifest.header.layout)
    for name in rows:
        flat.find(name)
    check_sizes(storage, readers_of(storage, manifest, flat))
    boxes = {spec.name: _box(spec, rows.get(spec.name)) for spec in flat.layout.tensors}
    _load_boxes(storage, manifest, flat, boxes)
    return {name: box.target for name, box in boxes.items()}


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
    dtype = TORCH_DTYPES[whole.dtype]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    # From the box's first item to its last: one run of the tensor, read once.
    strides = _row_major(whole.shape)
    first = sum(a * stride for (a, _), stride in zip(sides, strides, strict=True))
    last = sum((b - 1) * stride for (_, b), stride in zip(sides, strides, strict=True))
    data = state.items(name, first, last + 1)
    return from_bytes(data, dtype).as_strided(shape, strides).clone()


def _box(spec: TensorSpec, rows: tuple[int, int] | None) -> Box:
    """Return new memory for some rows of a tensor, or for all of it."""
    dtype = TORCH_DTYPES[spec.dtype]
    if rows is None:
        return Box(0, torch.empty(spec.shape, dtype=dtype))
    if not spec.shape or not 0 <= rows[0] <= rows[1] <= spec.shape[0]:
        raise ValueError(f"{spec.name}: {list(spec.shape)} has no rows {rows[0]} to {rows[1]}")
    items = math.prod(spec.shape[1:])
    return Box(rows[0] * items, torch.empty(rows[1] - rows[0], *spec.shape[1:], dtype=dtype))


def _load_boxes(
    storage: Storage, manifest: Manifest, flat: FlatState, boxes: Mapping[str, Box]
) -> None:
    sink = Boxes(flat, boxes)
    tasks = sink.blocks(readers_of(storage, manifest, flat))
    check_sizes(storage, list({id(reader): reader for reader, _ in tasks}.values()))
    fill(sink, tasks, longest_block(manifest))


def _write_and_hash(  # noqa: PLR0917
    storage: Storage,
    path: str,
    parts: tuple[bytes, memoryview],
    algorithm: Algorithm,
    block_bytes: int,
    hooks: Hooks | None,
    digests: Mapping[int, str],
    times: ShardTimes,
) -> list[str]:
    """Write a shard whole, and return its blocks' digests in hex; some may be known already."""
    given_up = threading.Event()
    size = len(parts[0]) + len(parts[1])
    edges = [*range(0, size, block_bytes), size]
    spans = [(0, size // 2), (size // 2, size)] if hooks else [(0, size)]
    with ThreadPoolExecutor(1, "coherent-ray-hash") as pool:
        hashing = pool.submit(_hash_blocks, parts, edges, algorithm, given_up, digests, times)
        try:
            _write(storage, path, b"", spans, parts, hooks, times)
        except BaseException:
            given_up.set()
            raise
        return hashing.result()


def _write(  # noqa: PLR0917
    storage: Storage,
    path: str,
    lead: bytes,
    spans: Sequence[tuple[int, int]],
    parts: tuple[bytes, memoryview],
    hooks: Hooks | None,
    times: ShardTimes,
) -> None:
    """Write a file of `lead` and some spans of the shard; it is durable when the call returns."""
    begun = time.monotonic()
    with storage.open_writer(path) as writer:
        _call(hooks, "shard:begun")
        if lead:
            writer.write(lead)
        for index, span in enumerate(spans):
            if index == len(spans) // 2:
                _call(hooks, "shard:half-written")
            for first, last in pairwise([*range(*span, _WRITE_BYTES), span[1]]):
                for view in _views(parts, first, last):
                    writer.write(view)
        if not spans:
            _call(hooks, "shard:half-written")
        _call(hooks, "shard:unsynced")
        written = time.monotonic()
        writer.finish()
    times.write_s, times.sync_s = written - begun, time.monotonic() - written
    _call(hooks, "shard:written")


def _hash_blocks(  # noqa: PLR0917
    parts: tuple[bytes, memoryview],
    edges: list[int],
    algorithm: Algorithm,
    given_up: threading.Event,
    digests: Mapping[int, str],
    times: ShardTimes,
) -> list[str]:
    result = []
    begun = time.monotonic()
    for block, (first, last) in enumerate(pairwise(edges)):
        if given_up.is_set():
            break
        result.append(digests.get(block) or _hash(parts, algorithm, first, last))
    times.hash_s += time.monotonic() - begun
    return result


def _hash(parts: tuple[bytes, memoryview], algorithm: Algorithm, first: int, last: int) -> str:
    hasher = new_hasher(algorithm)
    for view in _views(parts, first, last):
        hasher.update(view)
    return hasher.hexdigest()


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
