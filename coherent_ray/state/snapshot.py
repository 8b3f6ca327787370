"""The copy that lets training go on: this rank's byte range of the flat state, in host memory.

One buffer a rank, made once, touched once and used for every save: copying into fresh memory costs
three times as much, in page faults. It is page-aligned, so that a storage may write it past the
page cache. Nobody may `take` again before the writer of the last snapshot is done with `memory`.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

import torch

from coherent_ray.commit.manifest import ITEM_BYTES, StateLayout
from coherent_ray.digests import Buffer
from coherent_ray.state.flat import bits_of, carrier_of, items_of
from coherent_ray.state.layout import TORCH_DTYPES, FlatState, Piece, check_tensors
from coherent_ray.state.parts import Part
from coherent_ray.state.sharded import first_item_here, here


class Snapshot:
    """A rank's part of the state as it was at one boundary."""

    def __init__(
        self,
        layout: StateLayout,
        rank: int,
        ranks: int,
        *,
        pinned: bool | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Allocate the buffer, or take one.

        Args:
            layout: Of the whole state.
            rank: Whose part this is.
            ranks: Number of parts.
            pinned: Whether the buffer is page-locked; None: where there is CUDA.
            buffer: 1-D uint8, at least as long as the part, aligned to 16 bytes; None: a new one.
        """
        self.layout = layout
        self.rank = rank
        self.ranks = ranks
        self.start, self.stop = layout.cut(rank, ranks), layout.cut(rank + 1, ranks)
        size = self.stop - self.start
        if buffer is None:
            buffer = _allocate(size, torch.cuda.is_available() if pinned is None else pinned)
        self._buffer = buffer
        self._memory = memoryview(cast(Buffer, self._buffer.numpy()))[:size]
        self._pieces = [p for p in FlatState(layout).pieces(self.start, self.stop) if p.items]
        self._targets = [self._target(piece) for piece in self._pieces]

    @property
    def memory(self) -> memoryview:
        """The bytes of the last `take`: ``[start, stop)`` of the flat state."""
        return self._memory

    @torch.no_grad()
    def take(
        self, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, Part] | None = None
    ) -> None:
        """Copy this rank's part of the tensors; it is whole when the call returns.

        Args:
            tensors: The whole state by name, on any device; of sharded ones this rank's rows.
            parts: But for these, of which this rank has just the items that it stores.

        Raises:
            StateMismatch: The tensors are not those of the layout.
        """
        parts = parts or {}
        whole = tuple(spec for spec in self.layout.tensors if spec.name not in parts)
        check_tensors(StateLayout(whole), tensors)
        sources = [
            parts[piece.name].items_of(piece)
            if piece.name in parts
            else _source(piece, tensors[piece.name])
            for piece in self._pieces
        ]
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        for device in {s.device for s in sources if s.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

    def _target(self, piece: Piece) -> torch.Tensor:
        at = piece.start - self.start
        carrier = carrier_of(TORCH_DTYPES[piece.dtype])
        flat = self._buffer[at : at + piece.items * ITEM_BYTES[piece.dtype]].view(carrier)
        return flat.view(piece.shape) if piece.whole else flat


def _source(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    begin, tensor = first_item_here(tensor), here(tensor)
    first, items = piece.first_item - begin, tensor.numel()
    if first < 0 or first + piece.items > items:
        raise ValueError(f"{piece.name}: items from {piece.first_item} on are not on this rank")
    if piece.whole:
        return bits_of(tensor)
    return items_of(tensor, first, first + piece.items)


def _allocate(size: int, pinned: bool) -> torch.Tensor:
    if pinned:
        return torch.zeros(max(size, 1), dtype=torch.uint8, pin_memory=True)
    # Private, and kept from children: one that is forked while the buffer is in use would have each
    # of its pages copied at the next save. Large pages, since the device pins every page it reads.
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with suppress(AttributeError, OSError):  # advice: not every system has it
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
