"""Where verified bytes of a generation go: new tensors, live ones, or some rows of each.

A sink is handed verified bytes of the flat state, block by block and in any order, by several
threads at once. No two blocks hold the same item.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch

from coherent_ray.commit.manifest import ITEM_BYTES
from coherent_ray.state.blocks import Block, ShardReader
from coherent_ray.state.flat import carrier_of, from_bytes, put_items
from coherent_ray.state.layout import TORCH_DTYPES, FlatState, Piece, check_tensors

#: Threads that read and hash: enough to keep a disk and a hash busy at once.
_READ_THREADS = 4


class Sink(Protocol):
    """Takes verified bytes of the flat state."""

    def window(self, start: int, stop: int) -> memoryview | None:
        """Return the memory that these bytes may be read into; None: they pass through a buffer."""

    def store(self, start: int, data: memoryview) -> None:
        """Take verified bytes that begin at a byte of the flat state."""


class NewTensors:
    """Fills one new piece of memory, which all tensors are views of."""

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._memory = fresh_memory(flat.nbytes)
        self.tensors: dict[str, torch.Tensor] = {}
        self._begin: dict[str, int] = {}
        for spec, at in zip(flat.layout.tensors, flat.offsets, strict=True):
            data = self._memory[at : at + spec.nbytes]
            self.tensors[spec.name] = from_bytes(data, TORCH_DTYPES[spec.dtype]).view(spec.shape)
            self._begin[spec.name] = at

    def window(self, start: int, stop: int) -> memoryview | None:
        """Return the memory itself, where the flat state lies in it as it is."""
        return None if self._flat.parts else self._memory[start:stop]

    def store(self, start: int, data: memoryview) -> None:
        """Take verified bytes of the flat state."""
        if not self._flat.parts:
            self._memory[start : start + len(data)] = data
            return
        for piece in self._flat.pieces(start, start + len(data)):
            at = self._begin[piece.name] + piece.first_item * ITEM_BYTES[piece.dtype]
            begin = piece.start - start
            self._memory[at : at + piece.nbytes] = data[begin : begin + piece.nbytes]


def fresh_memory(size: int) -> memoryview:
    """Return new zeroed memory, of which nothing is touched before its bytes come.

    A `bytearray` is written to at once, by one thread, which takes four times as long as reading a
    state into memory that is touched by those who read. (Huge pages were tried: on a machine that
    has run for a while the kernel looks for them for longer than that.)
    """
    if not size or not hasattr(mmap, "MAP_ANONYMOUS"):
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class LiveTensors:
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
            bits = _bits(piece, piece.start - start, data)
            put_items(self.tensors[piece.name], piece.first_item, bits)


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Some items of a tensor that follow one another, and where they go."""

    first: int
    """First item of the whole tensor, in row-major order."""
    target: torch.Tensor
    """Has the items; any device and strides, of the tensor's dtype."""


class Boxes:
    """Fills boxes of tensors; asks for no block that holds nothing of them."""

    def __init__(self, flat: FlatState, boxes: Mapping[str, Box]) -> None:
        self._flat = flat
        self._boxes = boxes

    def blocks(self, readers: Iterable[ShardReader]) -> list[tuple[ShardReader, Block]]:
        """Return the blocks that hold a part of a box, each once."""
        wanted = sorted(
            (piece.start, piece.start + piece.nbytes)
            for name, box in self._boxes.items()
            for piece in self._flat.locate(name, box.first, box.first + box.target.numel())
            if piece.items
        )
        found = []
        at = 0
        for reader in readers:
            chosen: dict[int, Block] = {}
            while at < len(wanted) and wanted[at][1] <= reader.record.start:
                at += 1
            for start, stop in wanted[at:]:
                if start >= reader.record.stop:
                    break
                chosen |= {block.index: block for block in reader.blocks(start, stop)}
            found += [(reader, chosen[index]) for index in sorted(chosen)]
        return found

    def window(self, start: int, stop: int) -> memoryview | None:
        """Return None: bytes pass through a buffer."""
        return None

    def store(self, start: int, data: memoryview) -> None:
        """Take verified bytes of the flat state; what lies in no box is dropped."""
        for piece in self._flat.pieces(start, start + len(data)):
            box = self._boxes.get(piece.name)
            if box is None:
                continue
            first = max(piece.first_item, box.first)
            last = min(piece.first_item + piece.items, box.first + box.target.numel())
            if first < last:
                bits = _bits(piece, piece.start - start, data)
                skipped = first - piece.first_item
                put_items(box.target, first - box.first, bits[skipped : skipped + last - first])


def fill(sink: Sink, tasks: list[tuple[ShardReader, Block]], block_bytes: int) -> None:
    """Read and verify blocks, in several threads, and hand their bytes to a sink.

    Args:
        sink: Takes the bytes.
        tasks: What to read.
        block_bytes: Bytes of the longest block.

    Raises:
        ShardDamaged: A block is wrong; of several the first one in order.
        StorageError: The storage failed.
    """
    threads = max(min(_READ_THREADS, (os.cpu_count() or 1) + 1, len(tasks)), 1)
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(block_bytes)))
    with ThreadPoolExecutor(threads, "coherent-ray-load") as pool:
        jobs = [pool.submit(_load_block, *task, sink, buffers) for task in tasks]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _load_block(
    reader: ShardReader, block: Block, sink: Sink, buffers: SimpleQueue[memoryview]
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


def _bits(piece: Piece, at: int, data: memoryview) -> torch.Tensor:
    return from_bytes(data[at : at + piece.nbytes], carrier_of(TORCH_DTYPES[piece.dtype]))
