"""Sharing: each rank's part of an update that has not ended goes to the ranks that store it.

Every rank stores its own byte range of the flat state, whoever computed what lies there. So the
ranks tell one another what they hold (names, shapes, fingerprints), which gives all the same
layout, and then send each byte to the rank in whose range it falls: once, and nothing else.

Only for a save between two microbatches; no other update sends anything of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter
from torch import Tensor

from coherent_ray import canonical
from coherent_ray.commit.manifest import StateLayout, TensorSpec
from coherent_ray.state.fingerprint import fingerprint
from coherent_ray.state.flat import carrier_of, items_of
from coherent_ray.state.layout import TORCH_DTYPES, FlatState, Piece, layout_of
from coherent_ray.state.parts import Part, with_specs
from coherent_ray.train import partial
from coherent_ray.train.collectives import Group, gather_all, scatter_all, wait
from coherent_ray.train.partial import Held, Record

_SPEC = TypeAdapter(TensorSpec)
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Among:
    """Between whom."""

    rank: int
    ranks: int
    device: torch.device
    """Where collectives run."""
    group: Group = None


@dataclass(frozen=True, slots=True)
class _Word:
    """What one rank says that it holds."""

    record: Record
    specs: tuple[TensorSpec, ...]
    prints: tuple[str, ...]


def share(held: Held, layout: StateLayout, among: Among) -> tuple[Record, dict[str, Part]]:
    """Bring what every rank holds of an update to those that store it. All ranks must call this.

    Args:
        held: What this rank holds.
        layout: Of the state that every rank has.
        among: The ranks.

    Returns:
        What all of them have done, and of each tensor the items that this rank stores.

    Raises:
        PeerLost: Another rank is gone.
    """
    words = [_read(word) for word in _gather(_word(held), among)]
    holder = {spec.name: rank for rank, word in enumerate(words) for spec in word.specs}
    prints = {
        spec.name: text
        for word in words
        for spec, text in zip(word.specs, word.prints, strict=True)
    }
    specs = [spec for word in words for spec in word.specs]
    flat = FlatState(with_specs(layout, specs))
    ranges = [
        [p for p in _pieces(flat, rank, among.ranks) if p.name in holder and p.items]
        for rank in range(among.ranks)
    ]
    mine = ranges[among.rank]
    sent = [[p for p in to if holder[p.name] == among.rank] for to in ranges]
    received = [[p for p in mine if holder[p.name] == rank] for rank in range(among.ranks)]
    found = _exchange(held.tensors, sent, received, among)
    nothing = torch.empty(0, dtype=torch.uint8)
    parts = {}
    for spec in specs:
        first, raw = found.get(spec.name, (0, nothing))
        items = raw.view(carrier_of(TORCH_DTYPES[spec.dtype]))
        parts[spec.name] = Part(spec, prints[spec.name], first, items)
    return partial.together([word.record for word in words]), parts


def _pieces(flat: FlatState, rank: int, ranks: int) -> list[Piece]:
    return flat.pieces(flat.layout.cut(rank, ranks), flat.layout.cut(rank + 1, ranks))


def _word(held: Held) -> bytes:
    layout = layout_of(held.tensors)
    prints = fingerprint(layout, held.tensors).tensors
    specs = [_SPEC.dump_python(spec, mode="json") for spec in layout.tensors]
    return canonical.dump([partial.dump(held.record), specs, list(prints)])


def _read(word: bytes) -> _Word:
    record, specs, prints = canonical.load(word)
    found = tuple(_SPEC.validate_json(canonical.dump(spec)) for spec in specs)
    return _Word(partial.load(record), found, tuple(prints))


def _gather(word: bytes, among: Among) -> list[bytes]:
    """Bring every rank's word to all; they may differ in length."""
    if among.ranks == 1:
        return [word]
    own = len(word).to_bytes(_LENGTH_BYTES, "little")
    lengths = [int.from_bytes(raw, "little") for raw in _rows(own, among)]
    rows = _rows(word.ljust(max(lengths), b"\0"), among)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _rows(mine: bytes, among: Among) -> list[bytes]:
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(among.device)
    rows = torch.empty(among.ranks * len(mine), dtype=torch.uint8, device=among.device)
    gather_all(rows, own, among.group)
    raw = bytes(rows.cpu().numpy())
    return [raw[at : at + len(mine)] for at in range(0, len(raw), len(mine))]


def _exchange(
    tensors: Mapping[str, Tensor],
    sent: list[list[Piece]],
    received: list[list[Piece]],
    among: Among,
) -> dict[str, tuple[int, Tensor]]:
    """Send pieces, one list a rank, and return what has arrived: first item and bytes, by name."""
    outgoing = [_raw(tensors[p.name], p).to(among.device) for to in sent for p in to]
    out = torch.cat([torch.empty(0, dtype=torch.uint8, device=among.device), *outgoing])
    sizes = [sum(p.nbytes for p in pieces) for pieces in received]
    if among.ranks == 1:
        arrived = out
    else:
        arrived = torch.empty(sum(sizes), dtype=torch.uint8, device=among.device)
        send = [sum(p.nbytes for p in to) for to in sent]
        wait(scatter_all(arrived, out, sizes, send, among.group))
    found, at = {}, 0
    for piece in (p for pieces in received for p in pieces):
        # A copy: bytes of another item size may lie before it.
        found[piece.name] = (piece.first_item, arrived[at : at + piece.nbytes].clone())
        at += piece.nbytes
    return found


def _raw(tensor: Tensor, piece: Piece) -> Tensor:
    items = items_of(tensor, piece.first_item, piece.first_item + piece.items)
    return items.contiguous().view(torch.uint8)
