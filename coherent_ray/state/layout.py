"""Which bytes of the state lie where: from tensors to a `StateLayout`, from bytes to pieces.

The flat state is all tensors one after another in layout order (`coherent_ray.commit.manifest`). A
*piece* is the part of one tensor that falls into a byte range of it. Every rank, reader and writer
computes the same pieces from the layout alone, so no plan is ever stored or sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coherent_ray.commit.manifest import ITEM_BYTES, StateLayout, TensorSpec, is_reserved
from coherent_ray.errors import StateMismatch, TaskError

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
        self.offsets = layout.offsets()
        self.nbytes = layout.nbytes
        self._index = {tensor.name: i for i, tensor in enumerate(layout.tensors)}

    def find(self, name: str) -> Piece:
        """Return a whole tensor as a piece.

        Raises:
            KeyError: The layout has no such tensor.
        """
        return self._whole(self._index[name])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of bytes ``[start, stop)``, in order.

        A range that cuts an item in two holds the whole item on both sides. A tensor without items
        lies where it begins, or with the state's last byte if it begins behind that.
        """
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

    def _whole(self, index: int) -> Piece:
        spec = self.layout.tensors[index]
        items = spec.nbytes // ITEM_BYTES[spec.dtype]
        return Piece(spec.name, spec.dtype, spec.shape, 0, items, True, self.offsets[index])


def pieces(layout: StateLayout, start: int, stop: int) -> list[Piece]:
    """Return the pieces of bytes ``[start, stop)`` of a layout's flat state; see `FlatState`."""
    return FlatState(layout).pieces(start, stop)


def layout_of(tensors: Mapping[str, torch.Tensor]) -> StateLayout:
    """Return the layout of named tensors, in whatever order they come.

    Args:
        tensors: Dense tensors of any device, shape and strides, of a dtype in `TORCH_DTYPES`.

    Raises:
        TaskError: A tensor, or its name, cannot be stored; the message names it.
    """
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    return StateLayout(tuple(sorted(specs, key=lambda s: (-ITEM_BYTES[s.dtype], s.name))))


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return what a layout says about one tensor.

    Raises:
        TaskError: The tensor, or its name, cannot be stored.
    """
    reason = _unstorable(tensor)
    if reason is None and is_reserved(name):
        reason = "has a name that shard files keep for themselves"
    if reason is not None:
        raise TaskError(
            f"tensor {name!r} {reason}",
            where=name,
            remedy="Keep only dense torch tensors of common dtypes in the model and the optimizer.",
        )
    return TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape))


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


def _clip(piece: Piece, start: int, stop: int) -> Piece:
    size = ITEM_BYTES[piece.dtype]
    first = max(start - piece.start, 0) // size
    last = min(-(-(stop - piece.start) // size), piece.items)
    items = max(last - first, 0)
    if items == piece.items:
        return piece
    begin = piece.start + first * size
    return Piece(piece.name, piece.dtype, piece.shape, first, items, False, begin)


def _unstorable(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return "has no shape yet: run the lazy module once before the training starts"
    if is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}: sharded or wrapped tensors are not supported"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return "is sparse, nested or quantized"
    if tensor.device.type == "meta":
        return "has no memory (it is on the meta device)"
    if tensor.dtype not in _NAMES:
        return f"has dtype {tensor.dtype}, which shards cannot hold"
    return None
