"""Which bytes of the state lie where: from tensors to a `StateLayout`, from bytes to pieces.

What the flat state is, `coherent_ray.commit.manifest` says. A *piece* is the part of one tensor
that falls into a byte range of it: all of it, or some of its items in row-major order. Every rank,
reader and writer computes the same pieces from the layout alone, so no plan is ever stored or sent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coherent_ray.commit.manifest import ITEM_BYTES, StateLayout, TensorSpec
from coherent_ray.commit.reserved import is_reserved
from coherent_ray.errors import StateMismatch, TaskError
from coherent_ray.state.sharded import parts_of, unstorable

#: torch's dtype for each of safetensors' names.
TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one tensor that lies in a byte range of the flat state."""

    name: str
    dtype: str
    """safetensors' name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first_item: int
    """Counted in row-major order."""
    items: int
    whole: bool
    start: int
    """Where it begins in the flat state, in bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.items * ITEM_BYTES[self.dtype]


class FlatState:
    """A layout with its offsets computed once, for those who ask for many ranges of it."""

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout
        self.parts = layout.parts
        """Ranks that wrote a state with sharded tensors; 0: none of its tensors is sharded."""
        self.offsets = layout.offsets()
        self.nbytes = layout.nbytes
        self._index = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
        self._runs: dict[int, dict[str, Piece]] = {}
        if self.parts:
            self._edges = layout.cuts(self.parts)
            self._shares = layout.shares(self.parts)
            sizes = (0 if tensor.parts else tensor.nbytes for tensor in layout.tensors)
            self._places = [0, *accumulate(sizes)]

    def find(self, name: str) -> Piece:
        """Return a whole tensor as a piece; where it begins says nothing if any is sharded.

        Raises:
            KeyError: The layout has no such tensor.
        """
        return self._whole(self._index[name])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of bytes ``[start, stop)``, in order.

        A range that cuts an item in two holds the whole item on both sides. A tensor without items
        lies where it begins, or with the state's last byte if it begins behind that.
        """
        if self.parts:
            return list(self._pieces_of_parts(start, stop))
        result = []
        at_end = stop == self.nbytes and (start < stop or stop == 0)
        # Only the tensor before the first that begins at `start` or later can reach into the range.
        for index in range(max(bisect_left(self.offsets, start) - 1, 0), len(self.offsets)):
            if self.offsets[index] >= stop and not at_end:
                break
            piece = _clip(self._whole(index), start, stop)
            if piece.items or (0 in piece.shape and piece.start >= start):
                result.append(piece)
        return result

    def locate(self, name: str, first: int, last: int) -> list[Piece]:
        """Return where items ``[first, last)`` of a tensor lie, in order of the items.

        Args:
            name: The tensor's.
            first: First item, in row-major order.
            last: The item after the last.

        Raises:
            KeyError: The layout has no such tensor.
        """
        index = self._index[name]
        size = ITEM_BYTES[self.layout.tensors[index].dtype]
        if not self.parts:
            at = self.offsets[index]
            piece = _clip(self._whole(index), at + first * size, at + last * size)
            return [piece] if piece.items else []
        found = []
        for rank in self._holders(index, first * size, last * size):
            held = self._run(rank).get(name)
            if held is not None:
                shift = held.start - held.first_item * size
                found.append(_clip(held, shift + first * size, shift + last * size))
        return [piece for piece in found if piece.items]

    def _whole(self, index: int) -> Piece:
        spec = self.layout.tensors[index]
        items = spec.nbytes // ITEM_BYTES[spec.dtype]
        return Piece(spec.name, spec.dtype, spec.shape, 0, items, True, self.offsets[index])

    # --- where a tensor is sharded ----------------------------------------------------------------

    def _run(self, rank: int) -> dict[str, Piece]:
        """Return the pieces of a rank's part by name, in order."""
        if rank not in self._runs:
            run: dict[str, Piece] = {}
            at = self._edges[rank]
            for index, first, last in self.layout.part(rank, self.parts):
                spec = self.layout.tensors[index]
                size = ITEM_BYTES[spec.dtype]
                whole = last - first == spec.nbytes
                items = (last - first) // size
                run[spec.name] = Piece(
                    spec.name, spec.dtype, spec.shape, first // size, items, whole, at
                )
                at += last - first
            self._runs[rank] = run
        return self._runs[rank]

    def _pieces_of_parts(self, start: int, stop: int) -> Iterator[Piece]:
        for rank in range(max(bisect_left(self._edges, start) - 1, 0), self.parts):
            first, last = self._edges[rank : rank + 2]
            if first > stop or first == stop > start:
                return
            run = list(self._run(rank).values())
            at_end = stop == last
            for index in range(max(bisect_left(run, start, key=_start) - 1, 0), len(run)):
                piece = run[index]
                if piece.start > stop or (piece.start == stop and not at_end):
                    break
                clipped = _clip(piece, start, stop)
                if clipped.items or (0 in piece.shape and piece.start >= start):
                    yield clipped

    def _holders(self, index: int, first: int, last: int) -> range:
        """Return the ranks that may have some bytes of a tensor."""
        spec = self.layout.tensors[index]
        if spec.parts:
            chunk = spec.span(0)[1]
            return range(first // chunk, min(-(-last // chunk), self.parts))
        at = self._places[index]
        return range(
            max(bisect_right(self._shares, at + first) - 1, 0),
            min(bisect_left(self._shares, at + last), self.parts),
        )


def pieces(layout: StateLayout, start: int, stop: int) -> list[Piece]:
    """Return the pieces of bytes ``[start, stop)`` of a layout's flat state; see `FlatState`."""
    return FlatState(layout).pieces(start, stop)


def layout_of(tensors: Mapping[str, torch.Tensor]) -> StateLayout:
    """Return the layout of named tensors, in whatever order they come.

    Args:
        tensors: Dense tensors of any device, shape and strides, of a dtype in `TORCH_DTYPES`, or
            `DTensor` that are cut by rows over all ranks.

    Raises:
        TaskError: A tensor, or its name, cannot be stored; the message names it.
    """
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    return StateLayout(tuple(sorted(specs, key=lambda s: (-ITEM_BYTES[s.dtype], s.name))))


def spec_of(name: str, tensor: torch.Tensor, *, with_memory: bool = True) -> TensorSpec:
    """Return what a layout says about one tensor.

    Args:
        name: Its name in the flat state.
        tensor: It.
        with_memory: Refuse one on the meta device.

    Raises:
        TaskError: The tensor, or its name, cannot be stored.
    """
    reason = _unstorable(tensor, with_memory)
    if reason is None and is_reserved(name):
        reason = "has a name that shard files keep for themselves"
    if reason is not None:
        raise TaskError(
            f"tensor {name!r} {reason}",
            where=name,
            remedy="Keep only dense torch tensors of common dtypes in the model and the optimizer.",
        )
    spec = TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape))
    return replace(spec, parts=parts) if (parts := parts_of(tensor)) else spec


def check_tensors(layout: StateLayout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that tensors are those of a layout, by name, dtype and shape.

    Raises:
        StateMismatch: They are not; names the first tensor in layout order and both values.
    """
    for spec in layout.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise mismatch(spec.name, describe(spec), "missing")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != TORCH_DTYPES[spec.dtype]:
            raise mismatch(spec.name, describe(spec), describe(tensor))
    known = {spec.name for spec in layout.tensors}
    for name in sorted(set(tensors) - known):
        raise mismatch(name, "missing", describe(tensors[name]))


def describe(tensor: TensorSpec | torch.Tensor) -> str:
    """Return a tensor's dtype and shape as users read it, ``F32[3, 4]``."""
    if isinstance(tensor, TensorSpec):
        return f"{tensor.dtype}{list(tensor.shape)}"
    return f"{_NAMES.get(tensor.dtype, str(tensor.dtype))}{list(tensor.shape)}"


def mismatch(name: str, stored: str, live: str) -> StateMismatch:
    """Return the error for a tensor that is stored as one thing and live as another."""
    return StateMismatch(
        f"{name}: stored is {stored}, the running job has {live}",
        where=name,
        remedy="Resume with the model, optimizer and precision that the run was started with, "
        "or start a new run.",
        details={"tensor": name, "stored": stored, "live": live},
    )


def _start(piece: Piece) -> int:
    return piece.start


def _clip(piece: Piece, start: int, stop: int) -> Piece:
    size = ITEM_BYTES[piece.dtype]
    first = max(start - piece.start, 0) // size
    last = min(-(-(stop - piece.start) // size), piece.items)
    items = max(last - first, 0)
    if items == piece.items:
        return piece
    begin = piece.start + first * size
    at = piece.first_item + first
    return Piece(piece.name, piece.dtype, piece.shape, at, items, False, begin)


def _unstorable(tensor: torch.Tensor, with_memory: bool) -> str | None:
    if is_lazy(tensor):
        return "has no shape yet: run the lazy module once before the training starts"
    if is_traceable_wrapper_subclass(tensor) and (reason := unstorable(tensor)):
        return reason
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return "is sparse, nested or quantized"
    if tensor.device.type == "meta" and with_memory:
        return "has no memory (it is on the meta device)"
    if tensor.dtype not in _NAMES:
        return f"has dtype {tensor.dtype}, which shards cannot hold"
    return None
