"""A fingerprint of the whole replica, computed where the tensors are, at the speed of memory.

Each rank stores only its part of the state, so ranks that have silently diverged would store a
mixture that never existed. Equal fingerprints say that they have not.

A tensor's bytes, in row-major order and padded with zeros, are signed 32-bit words ``w``. A chunk
of `CHUNK_WORDS` of them becomes ``sum(w[i] * key[i]) mod 2^64`` with pseudo-random odd 64-bit keys:
the multilinear hash of Lemire and Kaser ("Strongly universal string hashing is fast", 2014), which
any change of one word changes, and two given contents share with a chance of about 2^-31. The sums
of a tensor's chunks are words again, and so on until one is left. Integer sums have no order, so
the value does not depend on device, thread count or strides.

Sums can be shared out: of a sharded tensor each rank takes its own rows, and one sum over the ranks
gives what one rank with the whole tensor would have found. So a state has the same fingerprint at
any rank count, sharded or not; but no two ranks hold the same rows, so only where a tensor is whole
on every rank does it find ranks that have diverged.

It finds accidents, not forgeries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from coherent_ray import canonical
from coherent_ray.commit import manifest
from coherent_ray.commit.manifest import StateLayout, TensorSpec
from coherent_ray.digests import Digest, digest_of
from coherent_ray.state.flat import items_of
from coherent_ray.state.layout import check_tensors
from coherent_ray.state.sharded import first_item_here, here

#: 32-bit words of one chunk: 128 KiB of state, so that a chunk and its keys stay in a core's cache.
CHUNK_WORDS = 2**15
#: Chunks that are taken at once: 16 MiB of state.
_CHUNKS = 128
#: Tensors up to so many words are taken together, up to so many words at once.
_SMALL_WORDS = 2**9
_PACK_WORDS = 2**15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a replica holds, tensor by tensor."""

    digest: Digest
    """Of the layout and all tensors' fingerprints."""
    tensors: tuple[str, ...]
    """16 hex digits a tensor, in layout order."""


@torch.no_grad()
def fingerprint(
    layout: StateLayout,
    tensors: Mapping[str, torch.Tensor],
    add_ranks: Callable[[torch.Tensor], None] | None = None,
) -> Fingerprint:
    """Return the fingerprint of a replica.

    Takes a few megabytes of memory on each device, whatever the size of the tensors, and waits for
    the device once.

    Args:
        layout: The layout of the tensors.
        tensors: By name; any device and strides; of sharded ones this rank's rows.
        add_ranks: Adds a 1-D int64 tensor over all ranks, in place, and wraps around; called once,
            and only where tensors are sharded. All ranks must come there.

    Raises:
        StateMismatch: The tensors are not those of the layout.
    """
    check_tensors(layout, tensors)
    live = [here(tensors[spec.name]) for spec in layout.tensors]
    places = [first_item_here(tensors[spec.name]) for spec in layout.tensors]
    values = _to_host(_all_sums(layout, live, places, add_ranks))
    hexes = tuple(
        f"{_mix(value ^ _mix(spec.nbytes)):016x}"
        for value, spec in zip(values, layout.tensors, strict=True)
    )
    return combined(layout, hexes)


def combined(layout: StateLayout, hexes: tuple[str, ...]) -> Fingerprint:
    """Return the fingerprint of a state of which each tensor's is known.

    Args:
        layout: Of all tensors.
        hexes: One a tensor, in layout order.
    """
    content = manifest.dump(layout.whole) + canonical.dump(list(hexes))
    return Fingerprint(digest_of(content), hexes)


def _all_sums(
    layout: StateLayout,
    tensors: list[torch.Tensor],
    places: list[int],
    add_ranks: Callable[[torch.Tensor], None] | None,
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield the hashes of all tensors, as int64 on their device, with the tensors' indices."""
    sharded = [index for index, spec in enumerate(layout.tensors) if spec.parts]
    yield from _whole_sums(tensors, frozenset(sharded))
    if not sharded:
        return
    if add_ranks is None:
        raise ValueError("tensors are sharded, and nothing adds their ranks' sums")
    shares = [_share_sums(layout.tensors[i], tensors[i], places[i]) for i in sharded]
    lengths = [share.numel() for share in shares]
    together = torch.cat(shares)
    add_ranks(together)
    for index, sums in zip(sharded, torch.split_with_sizes(together, lengths), strict=True):
        yield [index], _sum_of_sums(sums)


def _share_sums(spec: TensorSpec, rows: torch.Tensor, first: int) -> torch.Tensor:
    """Return what some rows of a tensor add to the hash of each of its chunks.

    Args:
        spec: Of the whole tensor.
        rows: Some of it.
        first: Their first item in it.
    """
    size, items = rows.element_size(), rows.numel()
    chunk = CHUNK_WORDS * 4 // size
    sums = torch.zeros(-(-spec.nbytes // (CHUNK_WORDS * 4)), dtype=torch.int64, device=rows.device)
    # Up to where the next chunk begins, then whole chunks, and what is left.
    head = min(-first % chunk, items)
    if head:
        into = first % chunk * size
        found = items_of(rows, 0, head)
        words = _as_words(torch.cat([found.new_zeros(into % 4 // size), found]))
        keys = _keys(rows.device)[into // 4 :][: words.numel()]
        sums[first // chunk] = (words * keys).sum()
    if head < items:
        rest = _chunk_sums(items_of(rows, head, items))
        sums[-(-first // chunk) :][: rest.numel()] = rest
    return sums


def _whole_sums(
    tensors: list[torch.Tensor], without: frozenset[int]
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield the same of the tensors that are whole on this rank."""
    packs: dict[torch.device, list[int]] = {}
    words: dict[torch.device, int] = {}
    for index, tensor in enumerate(tensors):
        if index in without:
            continue
        device = tensor.device
        if tensor.nbytes > _SMALL_WORDS * 4:
            yield [index], _sum_of(tensor)
            continue
        pack = packs.setdefault(device, [])
        pack.append(index)
        words[device] = words.get(device, 0) + tensor.nbytes // 4 + 1
        if words[device] > _PACK_WORDS:
            yield pack, _packed_sums([tensors[i] for i in pack])
            packs[device], words[device] = [], 0
    for pack in packs.values():
        if pack:
            yield pack, _packed_sums([tensors[i] for i in pack])


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's hash as an int64 tensor of one item, on its device."""
    return _sum_of_sums(_chunk_sums(tensor))


def _sum_of_sums(sums: torch.Tensor) -> torch.Tensor:
    while sums.numel() > 1:
        sums = _chunk_sums(sums)
    return sums


def _packed_sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the hashes of many small tensors: a few calls for all, not a few for each.

    The hash of each is a difference of running sums over all, which wrap around like any other.
    """
    words = [_as_words(items_of(tensor, 0, tensor.numel())) for tensor in tensors]
    device = words[0].device
    lengths = torch.tensor([part.numel() for part in words])
    ends = lengths.cumsum(0)
    begins = ends - lengths
    places = torch.arange(int(ends[-1])) - torch.repeat_interleave(begins, lengths)
    products = torch.cat(words) * _keys(device)[places.to(device)]
    running = torch.cat([products.new_zeros(1), products.cumsum(0)])
    return running[ends.to(device)] - running[begins.to(device)]


def _chunk_sums(tensor: torch.Tensor) -> torch.Tensor:
    keys = _keys(tensor.device)
    parts = [_hash_words(words, keys) for words in _words(tensor)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's bytes as int32 words: whole chunks, then what is left."""
    # Of what lies scattered in host memory a copy is made, which must stay in a core's cache.
    scattered = tensor.device.type == "cpu" and not tensor.is_contiguous()
    step = (1 if scattered else _CHUNKS) * CHUNK_WORDS * 4 // tensor.element_size()
    whole = tensor.numel() - tensor.numel() % (CHUNK_WORDS * 4 // tensor.element_size())
    for first in range(0, whole, step):
        yield _as_words(items_of(tensor, first, min(first + step, whole)))
    if whole < tensor.numel():
        yield _as_words(items_of(tensor, whole, tensor.numel()))


def _as_words(items: torch.Tensor) -> torch.Tensor:
    """Return a 1-D contiguous tensor's bytes as int32, without a copy where that is possible."""
    size = items.element_size()
    odd = items.numel() * size % 4
    if odd == 0 and items.storage_offset() * size % 4 == 0:
        return items.view(torch.int32)
    padded = items.new_zeros(items.numel() + (4 - odd) % 4 // size)
    padded[: items.numel()].copy_(items)
    return padded.view(torch.int32)


def _hash_words(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    count = words.numel()
    if words.device.type == "cpu":
        # One pass, which widens the words as it goes: torch would write them down, wider, first.
        rows = words.numpy().reshape(-1, min(count, CHUNK_WORDS))
        return torch.from_numpy(np.einsum("ni,i->n", rows, keys[:count].numpy()))
    if count <= CHUNK_WORDS:
        return (words * keys[:count]).sum().view(1)
    return (words.view(-1, CHUNK_WORDS) * keys).sum(1)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    """Return `CHUNK_WORDS` odd 64-bit keys: SplitMix64's output for seed 0."""
    counter = np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = counter * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(keys.view(np.int64)).to(device)


def _to_host(hashed: Iterable[tuple[list[int], torch.Tensor]]) -> list[int]:
    """Return all hashes by index, unsigned, with one wait a device."""
    by_device: dict[torch.device, list[tuple[list[int], torch.Tensor]]] = {}
    for indices, sums in hashed:
        by_device.setdefault(sums.device, []).append((indices, sums))
    values: dict[int, int] = {}
    for group in by_device.values():
        order = [index for indices, _ in group for index in indices]
        fetched = torch.cat([sums for _, sums in group]).tolist()
        values |= {i: value & _MASK for i, value in zip(order, fetched, strict=True)}
    return [values[index] for index in range(len(values))]


def _mix(value: int) -> int:
    """SplitMix64's finalizer: spreads a difference in any bit over all of them."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
