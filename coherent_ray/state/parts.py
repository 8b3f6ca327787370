"""Tensors of the flat state that no rank holds whole: each has the items that it stores.

Everything else of a replicated state is everywhere, so each rank cuts its own bytes from it. What
only one rank has (the sums of an update that has not ended) is first brought to who stores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coherent_ray.commit.manifest import ITEM_BYTES, StateLayout, TensorSpec
from coherent_ray.state.fingerprint import Fingerprint, combined
from coherent_ray.state.layout import Piece


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank has of a tensor."""

    spec: TensorSpec
    """Of the whole tensor."""
    fingerprint: str
    """Of the whole tensor, 16 hex digits."""
    first: int
    """The first item that is here, in row-major order."""
    items: torch.Tensor
    """1-D, integers of the items' size, as `coherent_ray.state.flat.items_of` gives them."""

    def items_of(self, piece: Piece) -> torch.Tensor:
        """Return the items of a piece of it, all of which must be here."""
        at = piece.first_item - self.first
        if at < 0 or at + piece.items > self.items.numel():
            raise ValueError(f"{piece.name}: items from {piece.first_item} on are not here")
        found = self.items[at : at + piece.items]
        return found.view(piece.shape) if piece.whole else found


def with_specs(layout: StateLayout, specs: list[TensorSpec]) -> StateLayout:
    """Return a layout with more tensors in it."""
    tensors = [*layout.tensors, *specs]
    return StateLayout(tuple(sorted(tensors, key=lambda s: (-ITEM_BYTES[s.dtype], s.name))))


def extended(
    layout: StateLayout, prints: Fingerprint, parts: Mapping[str, Part]
) -> tuple[StateLayout, Fingerprint]:
    """Return the layout and the fingerprint of a state together with its parts.

    Args:
        layout: Of the tensors that every rank has.
        prints: Theirs.
        parts: The others.
    """
    hexes = dict(zip((spec.name for spec in layout.tensors), prints.tensors, strict=True))
    hexes |= {name: part.fingerprint for name, part in parts.items()}
    whole = with_specs(layout, [part.spec for part in parts.values()])
    return whole, combined(whole, tuple(hexes[spec.name] for spec in whole.tensors))
