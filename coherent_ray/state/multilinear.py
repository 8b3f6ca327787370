"""The hash of a tensor that is a sum: what ranks can share out, and a device computes by itself.

A tensor's bytes, in row-major order and padded with zeros, are signed 32-bit words ``w``. A chunk
of `CHUNK_WORDS` of them becomes ``sum(w[i] * key[i]) mod 2^64`` with pseudo-random odd 64-bit keys:
the multilinear hash of Lemire and Kaser ("Strongly universal string hashing is fast", 2014), which
any change of one word changes, and two given contents share with a chance of about 2^-31. The sums
of a tensor's chunks are words again, and so on until one is left. Integer sums have no order, so
the value does not depend on device, thread count or strides.

Sums can be shared out: of a sharded tensor each rank takes its own rows, and one sum over the ranks
gives what one rank with the whole tensor would have found.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch

from coherent_ray.commit.manifest import TensorSpec
from coherent_ray.state.flat import items_of

#: 32-bit words of one chunk: 128 KiB of state, so that a chunk and its keys stay in a core's cache.
CHUNK_WORDS = 2**15
#: Chunks that are taken at once: 16 MiB of state.
_CHUNKS = 128
_MASK = 2**64 - 1


def hash_of_sum(value: int, nbytes: int) -> str:
    """Return a tensor's hash, 16 hex digits, from its one sum and its length in bytes."""
    return f"{_mix((value & _MASK) ^ _mix(nbytes)):016x}"


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor's sum as an int64 tensor of one item, on its device."""
    if not tensor.numel():
        return torch.zeros(1, dtype=torch.int64, device=tensor.device)
    return sum_of_sums(_chunk_sums(tensor))


def sum_of_sums(sums: torch.Tensor) -> torch.Tensor:
    """Return the one sum of a tensor from those of its chunks."""
    while sums.numel() > 1:
        sums = _chunk_sums(sums)
    return sums


def share_sums(spec: TensorSpec, rows: torch.Tensor, first: int) -> torch.Tensor:
    """Return what some rows of a tensor add to the sum of each of its chunks, int64.

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


def _mix(value: int) -> int:
    """SplitMix64's finalizer: spreads a difference in any bit over all of them."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
