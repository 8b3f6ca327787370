"""Flat gradients: buckets, contiguous tensors in which every parameter has its view.

A bucket holds parameters of one dtype that a backward pass reaches one after the other, so that it
is complete while others are still computed. A lane's gradient is copied into the views (or added to
them) in one call a bucket, exchanged as the flat tensor that it already is, and handed back as the
parameters' ``.grad``: the views themselves, so nothing is copied out.

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
#: Bytes of a bucket, but for a parameter that is larger by itself; DistributedDataParallel's, too.
BUCKET_BYTES = 25 << 20
#: Bytes of the first bucket, so that something is sent soon.
FIRST_BYTES = 1 << 20

NamedParameter = tuple[str, Parameter]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some parameters of one dtype, and how they lie in their flat tensor."""

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

    def __init__(
        self, parameters: Sequence[NamedParameter], ranks: int, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Lay out the parameters that require a gradient.

        Args:
            parameters: Names and parameters; those that are frozen are left out.
            ranks: Number of chunks that every flat tensor is cut into.
            bucket_bytes: A bucket takes no further parameter that would make it larger than this,
                or the first one larger than `FIRST_BYTES`.

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
        self.buckets = tuple(self._bucket(entries) for entries in _filled(trainable, bucket_bytes))
        """In the order in which a backward pass completes them: what was made last comes first."""

    def _bucket(self, entries: list[tuple[int, str, Parameter]]) -> Bucket:
        indices, names, parameters = zip(*entries, strict=True)
        dtype, device = parameters[0].dtype, parameters[0].device
        step = ALIGNMENT // dtype.itemsize
        offsets, at = [], 0
        for parameter in parameters:
            offsets.append(at)
            at += -(-parameter.numel() // step) * step
        chunk = -(-at // (self.ranks * step)) * step
        return Bucket(dtype, device, indices, names, parameters, tuple(offsets), at, chunk)

    def places(self, names: Collection[str]) -> list[int]:
        """Return where some parameters are in the sequence that this was made from."""
        return [
            index
            for bucket in self.buckets
            for index, name in zip(bucket.indices, bucket.names, strict=True)
            if name in names
        ]

    def facts(self) -> list[list[object]]:
        """Return what two ranks must have in common to exchange gradients, as JSON."""
        return [
            [name, str(bucket.dtype), list(parameter.shape)]
            for bucket in self.buckets
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
        ]


class FlatGradients:
    """One set of flat tensors: the gradient of a lane, or the sum of some."""

    __slots__ = ("_layout", "_views", "flats")

    def __init__(self, layout: FlatLayout, flats: Sequence[Tensor] | None = None) -> None:
        """Make one of zeros, or in memory that is there.

        Args:
            layout: What lies where.
            flats: One 1-D tensor a bucket, of whole chunks.
        """
        self._layout = layout
        self.flats = (
            tuple(
                torch.zeros(bucket.chunk * layout.ranks, dtype=bucket.dtype, device=bucket.device)
                for bucket in layout.buckets
            )
            if flats is None
            else tuple(flats)
        )
        """One 1-D tensor a bucket, padded to whole chunks."""
        self._views = tuple(
            _views(flat, bucket) for flat, bucket in zip(self.flats, layout.buckets, strict=True)
        )

    @torch.no_grad()
    def take(self, add: bool) -> None:
        """Move the parameters' ``.grad`` in, and clear them.

        Args:
            add: Add to what is here, rather than replace it.

        Raises:
            TaskError: A gradient is sparse.
        """
        for bucket, views in zip(self._layout.buckets, self._views, strict=True):
            _move(bucket, views, add)
            for parameter in bucket.parameters:
                parameter.grad = None

    @torch.no_grad()
    def total(self, index: int, under: Sequence[FlatGradients]) -> None:
        """Set one bucket to the parameters' ``.grad`` and others' sums, added one after the other.

        What is added stays as it is: so a total can be made again, of other gradients. Where there
        is nothing to add, the ``.grad``s become the bucket's views.

        Raises:
            TaskError: A gradient is sparse.
        """
        bucket, views, flat = self._layout.buckets[index], self._views[index], self.flats[index]
        gradients = _plain(bucket)
        if under and len(gradients) == len(views) and flat.device.type == "cpu":
            # In one pass over memory; a GPU has enough of it, and is slow to be called often.
            for view, held, gradient in zip(views, under[0]._views[index], gradients, strict=True):
                torch.add(reals(held), reals(gradient), out=reals(view))
        else:
            if under:
                flat.copy_(under[0].flats[index])
            _move(bucket, views, add=bool(under))
        for other in under[1:]:
            reals(flat).add_(reals(other.flats[index]))
        if not under and len(gradients) == len(views):
            # The sum is the gradient, which need not be there twice.
            for parameter, view in zip(bucket.parameters, views, strict=True):
                parameter.grad = view

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
            for bucket, views in zip(self._layout.buckets, self._views, strict=True)
            for index, name, view in zip(bucket.indices, bucket.names, views, strict=True)
            if index in chosen
        }

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite everything: with these, and with nothing where there is none.

        Args:
            tensors: By the parameter's name; of any device, in the parameter's dtype and shape.
        """
        for bucket, views in zip(self._layout.buckets, self._views, strict=True):
            for name, view in zip(bucket.names, views, strict=True):
                if name in tensors:
                    view.copy_(tensors[name])
                else:
                    view.fill_(_nothing(bucket.dtype))

    def give(self, touched: Sequence[bool]) -> None:
        """Make the views the parameters' ``.grad``.

        Args:
            touched: By place in the layout's sequence; a parameter without it gets None.
        """
        for bucket, views in zip(self._layout.buckets, self._views, strict=True):
            for index, parameter, view in zip(
                bucket.indices, bucket.parameters, views, strict=True
            ):
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
        for bucket in layout.buckets
        for index, parameter in zip(bucket.indices, bucket.parameters, strict=True)
        if parameter.grad is not None
    ]


def clear(layout: FlatLayout) -> None:
    """Drop every ``.grad``."""
    for bucket in layout.buckets:
        for parameter in bucket.parameters:
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


def _move(bucket: Bucket, views: list[Tensor], add: bool) -> None:
    """Copy or add a bucket's ``.grad``s into its views."""
    targets, gradients = _matched(bucket, views, add)
    if targets and add:
        if bucket.dtype.is_complex:
            targets, gradients = [*map(reals, targets)], [*map(reals, gradients)]
        torch._foreach_add_(targets, gradients)
    elif targets:
        torch._foreach_copy_(targets, gradients)


def _matched(bucket: Bucket, views: list[Tensor], add: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the views that receive a gradient, and the gradients, in the views' dtype."""
    plain = _plain(bucket)
    if len(plain) == len(views):
        return views, plain
    gradients = [parameter.grad for parameter in bucket.parameters]
    targets, matched = [], []
    for name, view, gradient in zip(bucket.names, views, gradients, strict=True):
        if gradient is None:
            if not add:
                view.fill_(_nothing(bucket.dtype))
            continue
        require_dense(name, gradient)
        targets.append(view)
        # Rounded before it is added, as it would be if it were copied and added elsewhere.
        matched.append(gradient.to(bucket.dtype))
    return targets, matched


def _plain(bucket: Bucket) -> list[Tensor]:
    """Return the gradients of a bucket that need no care."""
    return [
        parameter.grad
        for parameter in bucket.parameters
        if parameter.grad is not None
        and parameter.grad.dtype == bucket.dtype
        and parameter.grad.layout is torch.strided
    ]


def _filled(
    entries: Sequence[tuple[int, str, Parameter]], bucket_bytes: int
) -> list[list[tuple[int, str, Parameter]]]:
    """Share parameters out to buckets, from the last to the first; in the order of their ends."""
    done: list[list[tuple[int, str, Parameter]]] = []
    open_: dict[torch.dtype, list[tuple[int, str, Parameter]]] = {}
    for entry in reversed(entries):
        dtype, size = entry[2].dtype, _nbytes([entry])
        most = bucket_bytes if done else min(FIRST_BYTES, bucket_bytes)
        if dtype in open_ and _nbytes(open_[dtype]) + size > most:
            done.append(open_.pop(dtype))
        open_.setdefault(dtype, []).append(entry)
    return sorted([*done, *open_.values()], key=lambda bucket: -bucket[-1][0])


def _nbytes(entries: Sequence[tuple[int, str, Parameter]]) -> int:
    return sum(parameter.numel() * parameter.dtype.itemsize for _, _, parameter in entries)


def _nothing(dtype: torch.dtype) -> float | complex:
    return complex(-0.0, -0.0) if dtype.is_complex else -0.0


def _views(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """Return each parameter's view, strided as the parameter is where that leaves no holes."""
    result = []
    for offset, parameter in zip(bucket.offsets, bucket.parameters, strict=True):
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
