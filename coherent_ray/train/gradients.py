"""Flat gradients: one contiguous tensor for each dtype, in which every parameter has its view.

A lane's gradient is copied into the views (or added to them) in one call, exchanged as the flat
tensor that it already is, and handed back as the parameters' ``.grad``: the views themselves, so
nothing is copied out.

A parameter without gradient in a lane holds -0.0 there, not 0.0: -0.0 is what leaves every number
unchanged when it is added, 0.0 turns -0.0 into 0.0. Items between the views are 0.0 for ever.
Every addition is one of real numbers, item by item, so its bits do not depend on how a tensor is
cut; but for those inside a NaN, which no one promises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from coherent_ray.errors import TaskError

#: Bytes to which every view and every rank's chunk is aligned.
ALIGNMENT = 64

NamedParameter = tuple[str, Parameter]


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters of one dtype, and how they lie in its flat tensor."""

    dtype: torch.dtype
    device: torch.device
    indices: tuple[int, ...]
    """Places of the parameters in the sequence that the layout was made from."""
    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    offsets: tuple[int, ...]
    """Items."""
    items: int
    """Items that are used; the rest is padding."""
    chunk: int
    """Items of each rank's chunk; ``ranks`` of them are the whole flat tensor."""


class FlatLayout:
    """Where every trainable parameter lies; the same on every rank."""

    def __init__(self, parameters: Sequence[NamedParameter], ranks: int) -> None:
        """Lay out the parameters that require a gradient.

        Args:
            parameters: Names and parameters; those that are frozen are left out.
            ranks: Number of chunks that every flat tensor is cut into.

        Raises:
            TaskError: The trainable parameters lie on several devices.
        """
        self.ranks = ranks
        trainable = [(i, n, p) for i, (n, p) in enumerate(parameters) if p.requires_grad]
        self.trainable = tuple(index for index, _, _ in trainable)
        devices = sorted({str(p.device) for _, _, p in trainable})
        if len(devices) > 1:
            raise TaskError(
                f"the model's parameters lie on several devices: {', '.join(devices)}",
                remedy="put the whole model on one device",
            )
        dtypes = sorted({p.dtype for _, _, p in trainable}, key=str)
        self.groups = tuple(
            self._group(dtype, [entry for entry in trainable if entry[2].dtype == dtype])
            for dtype in dtypes
        )

    def _group(self, dtype: torch.dtype, entries: list[tuple[int, str, Parameter]]) -> Group:
        step = ALIGNMENT // dtype.itemsize
        offsets, at = [], 0
        for _, _, parameter in entries:
            offsets.append(at)
            at += -(-parameter.numel() // step) * step
        chunk = -(-at // (self.ranks * step)) * step
        indices, names, parameters = zip(*entries, strict=True)
        device = parameters[0].device
        return Group(dtype, device, indices, names, parameters, tuple(offsets), at, chunk)

    def facts(self) -> list[list[object]]:
        """Return what two ranks must have in common to exchange gradients, as JSON."""
        return [
            [name, str(group.dtype), list(parameter.shape)]
            for group in self.groups
            for name, parameter in zip(group.names, group.parameters, strict=True)
        ]


class FlatGradients:
    """One set of flat tensors: the gradient of a lane, or the sum of some."""

    __slots__ = ("_layout", "_views", "flats")

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self.flats = tuple(
            torch.zeros(group.chunk * layout.ranks, dtype=group.dtype, device=group.device)
            for group in layout.groups
        )
        """One 1-D tensor a dtype, padded to whole chunks."""
        self._views = tuple(
            _views(flat, group) for flat, group in zip(self.flats, layout.groups, strict=True)
        )

    @torch.no_grad()
    def take(self, add: bool) -> None:
        """Move the parameters' ``.grad`` in, and clear them.

        Args:
            add: Add to what is here, rather than replace it.

        Raises:
            TaskError: A gradient is sparse.
        """
        for group, views in zip(self._layout.groups, self._views, strict=True):
            targets, gradients = _matched(group, views, add)
            if targets and add:
                if group.dtype.is_complex:
                    targets, gradients = [*map(reals, targets)], [*map(reals, gradients)]
                torch._foreach_add_(targets, gradients)
            elif targets:
                torch._foreach_copy_(targets, gradients)
            for parameter in group.parameters:
                parameter.grad = None

    def add(self, other: FlatGradients) -> None:
        """Add another set to this one."""
        for mine, theirs in zip(self.flats, other.flats, strict=True):
            reals(mine).add_(reals(theirs))

    def named(self, chosen: Collection[int]) -> dict[str, Tensor]:
        """Return the views of some parameters by name; they share this memory.

        Args:
            chosen: Places in the layout's sequence.
        """
        return {
            name: view
            for group, views in zip(self._layout.groups, self._views, strict=True)
            for index, name, view in zip(group.indices, group.names, views, strict=True)
            if index in chosen
        }

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite everything: with these, and with nothing where there is none.

        Args:
            tensors: By the parameter's name; of any device, in the parameter's dtype and shape.
        """
        for group, views in zip(self._layout.groups, self._views, strict=True):
            for name, view in zip(group.names, views, strict=True):
                if name in tensors:
                    view.copy_(tensors[name])
                else:
                    view.fill_(_nothing(group.dtype))

    def give(self, touched: Sequence[bool]) -> None:
        """Make the views the parameters' ``.grad``.

        Args:
            touched: By place in the layout's sequence; a parameter without it gets None.
        """
        for group, views in zip(self._layout.groups, self._views, strict=True):
            for index, parameter, view in zip(group.indices, group.parameters, views, strict=True):
                parameter.grad = view if touched[index] else None


def reals(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers, sharing its memory.

    Complex addition is not used: torch multiplies by a complex one on the way, which turns an
    infinity's other part into NaN in some loops and not in others.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def touched_now(layout: FlatLayout) -> list[int]:
    """Return the places of the parameters that have a ``.grad``."""
    return [
        index
        for group in layout.groups
        for index, parameter in zip(group.indices, group.parameters, strict=True)
        if parameter.grad is not None
    ]


def clear(layout: FlatLayout) -> None:
    """Drop every ``.grad``."""
    for group in layout.groups:
        for parameter in group.parameters:
            parameter.grad = None


def require_dense(name: str, gradient: Tensor) -> None:
    """Check that a parameter's gradient can be added up.

    Raises:
        TaskError: It is sparse.
    """
    if gradient.layout is not torch.strided:
        raise TaskError(
            f"the gradient of parameter {name!r} is sparse",
            where=name,
            remedy="build its embedding with sparse=False",
        )


def _matched(group: Group, views: list[Tensor], add: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the views that receive a gradient, and the gradients, in the views' dtype."""
    gradients = [parameter.grad for parameter in group.parameters]
    plain = [
        gradient
        for gradient in gradients
        if gradient is not None
        and gradient.dtype == group.dtype
        and gradient.layout is torch.strided
    ]
    if len(plain) == len(views):
        return views, plain
    targets, matched = [], []
    for name, view, gradient in zip(group.names, views, gradients, strict=True):
        if gradient is None:
            if not add:
                view.fill_(_nothing(group.dtype))
            continue
        require_dense(name, gradient)
        targets.append(view)
        # Rounded before it is added, as it would be if it were copied and added elsewhere.
        matched.append(gradient.to(group.dtype))
    return targets, matched


def _nothing(dtype: torch.dtype) -> float | complex:
    return complex(-0.0, -0.0) if dtype.is_complex else -0.0


def _views(flat: Tensor, group: Group) -> list[Tensor]:
    """Return each parameter's view, strided as the parameter is where that leaves no holes."""
    result = []
    for offset, parameter in zip(group.offsets, group.parameters, strict=True):
        piece = flat[offset : offset + parameter.numel()]
        if _dense(parameter):
            result.append(piece.as_strided(parameter.shape, parameter.stride()))
        else:
            result.append(piece.view(parameter.shape))
    return result


def _dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of contiguous ones (``channels_last`` is)."""
    expected = 1
    for stride, items in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if items == 1:
            continue
        if stride != expected:
            return False
        expected *= items
    return tensor.numel() > 0
