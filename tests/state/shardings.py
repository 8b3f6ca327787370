"""Sharded states to test with, made without processes: each rank's rows are cut by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from saved import DIGEST, header_for

from coherent_ray.commit.manifest import Manifest, StateLayout, format_of, generation_directory
from coherent_ray.state.flat import items_of
from coherent_ray.state.layout import layout_of
from coherent_ray.state.parts import Part
from coherent_ray.state.shards import write_shard
from coherent_ray.state.snapshot import Snapshot


def sharded_layout(
    tensors: dict[str, torch.Tensor], ranks: int, chosen: set[str] | None = None
) -> StateLayout:
    """Return the layout in which some tensors (None: all that can be) are cut over some ranks."""
    specs = []
    for spec in layout_of(tensors).tensors:
        cut = spec.shape and spec.nbytes and ranks > 1 and (chosen is None or spec.name in chosen)
        specs.append(replace(spec, parts=ranks) if cut else spec)
    return StateLayout(tuple(specs))


def rows_at(tensors: dict[str, torch.Tensor], layout: StateLayout, rank: int) -> dict[str, Part]:
    """Return what a rank has of the sharded tensors."""
    parts = {}
    for spec in layout.tensors:
        if spec.parts:
            each = tensors[spec.name].numel() // spec.shape[0]
            first, last = (row * each for row in spec.rows(rank))
            items = items_of(tensors[spec.name], first, last)
            parts[spec.name] = Part(spec, "0" * 16, first, items)
    return parts


def save_sharded(
    storage,
    tensors: dict[str, torch.Tensor],
    ranks: int,
    chosen: set[str] | None = None,
    block_bytes: int = 4096,
) -> Manifest:
    """Write a generation as `ranks` ranks would that have the rows of some tensors each."""
    layout = sharded_layout(tensors, ranks, chosen)
    directory = generation_directory(1, ranks)
    shards = []
    for rank in range(ranks):
        parts = rows_at(tensors, layout, rank)
        snapshot = Snapshot(layout, rank, ranks)
        snapshot.take({n: t for n, t in tensors.items() if n not in parts}, parts)
        shards.append(
            write_shard(
                storage,
                directory,
                rank,
                ranks,
                layout,
                snapshot.memory,
                "xxh3_128",
                block_bytes,
            )
        )
    header = header_for(StateLayout(()), ranks)
    header = replace(header, layout=layout, format=format_of(layout))
    return Manifest(header, DIGEST, tuple(shards))
