"""Arrivals: when in a backward pass the gradients of each bucket are final.

A hook on every parameter counts its gradients. Nobody can know which backward pass is the last, or
how often it reaches a parameter (a checkpointed block's several times, an unused layer's never). So
each is taken to come as often as it ever did, and a bucket is told of when it and all before it
are complete by that. In the end it is seen whether that was right: whether what was told of is
still as it was. So a wrong guess costs time, and never a bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from coherent_ray.train.gradients import FlatLayout

Told = Callable[[int], None]
"""Told of a bucket, by its place in the layout."""


class Arrivals:
    """Watches the gradients of one layout. Not thread-safe: a backward pass has one thread."""

    def __init__(self, layout: FlatLayout) -> None:
        self._buckets = layout.buckets
        self._usual = [[0] * len(bucket.parameters) for bucket in layout.buckets]
        self._known = False
        self._told: Told | None = None
        self._left: list[list[int]] | None = None
        """How often each parameter's gradient is still to come; None: nobody counts."""
        self._missing: list[int] = []
        self._next = 0
        self._marks: list[tuple[Tensor | None, int]] = []
        self._handles = self._hooked()

    def open(self, told: Told | None) -> None:
        """Count from now on.

        Args:
            told: Called in the backward pass with each bucket that seems final, in order; what it
                raises ends that pass. It may move the gradients elsewhere. None: it is only learnt
                how often they come.
        """
        self._left = [list(usual) for usual in self._usual]
        self._missing = [sum(usual) for usual in self._usual]
        self._told = told if self._known else None
        self._next = 0
        self._marks.clear()

    def close(self) -> bool:
        """Count no more; return whether every bucket that was told of is still as it was."""
        left, self._left = self._left, None
        if left is None:
            return True
        for usual, rests in zip(self._usual, left, strict=True):
            usual[:] = [before - min(0, rest) for before, rest in zip(usual, rests, strict=True)]
        self._known = self._known or any(map(any, self._usual))
        now = [mark for bucket in self._buckets[: self._next] for mark in _marks(bucket.parameters)]
        return all(
            one is other and version == later
            for (one, version), (other, later) in zip(self._marks, now, strict=True)
        )

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _arrived(self, bucket: int, place: int) -> None:
        left = self._left
        if left is None:
            return
        left[bucket][place] -= 1
        if left[bucket][place] >= 0:
            self._missing[bucket] -= 1
        if self._told is None:
            return
        while self._next < len(self._missing) and not self._missing[self._next]:
            index, self._next = self._next, self._next + 1
            self._told(index)
            self._marks += _marks(self._buckets[index].parameters)

    def _hooked(self) -> list[RemovableHandle]:
        # What is nobody's any more must not be kept by the parameters that it watched.
        me = weakref.ref(self)

        def hook(bucket: int, place: int) -> Callable[[Tensor], None]:
            def arrived(_: Tensor) -> None:
                if (arrivals := me()) is not None:
                    arrivals._arrived(bucket, place)

            return arrived

        return [
            Tensor.register_post_accumulate_grad_hook(parameter, hook(index, place))  # type: ignore[no-untyped-call]
            for index, bucket in enumerate(self._buckets)
            for place, parameter in enumerate(bucket.parameters)
        ]


def _marks(parameters: tuple[Tensor, ...]) -> list[tuple[Tensor | None, int]]:
    """Return what tells whether a gradient was changed: which tensor it is, and its version."""
    return [(p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]
