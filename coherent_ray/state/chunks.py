"""The hash of a tensor that lies whole in host memory: XXH3 of chunks, at the speed of memory.

A tensor's bytes in row-major order are cut into chunks of `CHUNK_BYTES`. One that is no longer than
a chunk has XXH3 (64 bits) of its bytes as its hash; a longer one that of its chunks' hashes, one
after the other. The tensor's length in bytes is the seed, of a chunk's hash among several it is 0.

So a chunk can be hashed by itself, elsewhere and at another time: from the live tensor, or from a
copy of a part of the state in which it lies whole. The value is the same however it was put
together, and does not depend on the tensor's strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch

from coherent_ray.digests import Buffer, quick_hash
from coherent_ray.state.flat import bits_of, items_of

#: Bytes of one chunk. Smaller ones cost no more to hash, but behind training a thread asks for the
#: interpreter after each; and two chunks at most lie across the edges of a rank's range.
CHUNK_BYTES = 4 * 2**20
#: Bytes that are copied at once of what lies scattered: the copy stays in a core's cache.
_SCATTERED_BYTES = 128 * 2**10
#: Bytes of small tensors that are brought from a device together.
_PACK_BYTES = 4 * 2**20

Read = Callable[[int, int], Iterable[Buffer]]
"""Gives a tensor's bytes from one on, to the one before another, in order."""


def spans(nbytes: int) -> list[tuple[int, int]]:
    """Return each chunk's first byte and the byte after its last; of no bytes, one empty chunk."""
    starts = range(0, max(nbytes, 1), CHUNK_BYTES)
    return [(first, min(first + CHUNK_BYTES, nbytes)) for first in starts]


def chunk_hash(nbytes: int, read: Read, first: int, last: int) -> bytes:
    """Return the 8 bytes that one chunk of a tensor of so many bytes has as its hash."""
    return quick_hash(read(first, last), nbytes if nbytes <= CHUNK_BYTES else 0)


def tensor_hash(nbytes: int, read: Read, known: Mapping[int, bytes] | None = None) -> str:
    """Return a tensor's hash, 16 hex digits.

    Args:
        nbytes: Bytes of the whole tensor.
        read: Of it; asked for chunks that are not known only.
        known: `chunk_hash` of some chunks, by their first byte.
    """
    if nbytes <= CHUNK_BYTES and not known:  # there may be very many small ones
        return quick_hash(read(0, nbytes), nbytes).hex()
    known = known or {}
    marks = [
        known[first] if first in known else chunk_hash(nbytes, read, first, last)
        for first, last in spans(nbytes)
    ]
    return (marks[0] if len(marks) == 1 else quick_hash(marks, nbytes)).hex()


def from_tensor(tensor: torch.Tensor) -> Read:
    """Return what reads a live tensor in host memory, of any dtype, shape and strides."""
    bits = bits_of(tensor)
    if bits.is_contiguous():
        raw = bits.numpy().reshape(-1).view(np.uint8).data
        return lambda first, last: (raw[first:last],)
    size = bits.element_size()
    step = _SCATTERED_BYTES if bits.nbytes > CHUNK_BYTES else CHUNK_BYTES

    def read(first: int, last: int) -> Iterator[Buffer]:
        for at in range(first, last, step):
            items = items_of(bits, at // size, min(at + step, last) // size)
            yield items.numpy().view(np.uint8).data

    return read


def from_copy(copy: memoryview, at: int) -> Read:
    """Return what reads a tensor, or those chunks of it that are there, in a copy of bytes.

    Args:
        copy: Of a part of the flat state.
        at: Where the tensor begins in it; below 0: that many bytes before it.
    """
    return lambda first, last: (copy[at + first : at + last],)


def hashes_of_small(tensors: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, str]]:
    """Yield the hashes of tensors of some bytes each that lie on devices, in whatever order.

    Many are brought to the host at once, in packs of a few megabytes.

    Args:
        tensors: Each with its index, which is given back with the hash.
    """
    packs: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    nbytes: dict[torch.device, int] = {}
    for index, tensor in tensors:
        device = tensor.device
        packs.setdefault(device, []).append((index, tensor))
        nbytes[device] = nbytes.get(device, 0) + tensor.nbytes
        if nbytes[device] > _PACK_BYTES:
            yield from _hashes_of_pack(packs.pop(device))
            nbytes[device] = 0
    for pack in packs.values():
        yield from _hashes_of_pack(pack)


def _hashes_of_pack(pack: list[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, str]]:
    parts = [items_of(tensor, 0, tensor.numel()).view(torch.uint8) for _, tensor in pack]
    raw = torch.cat(parts).cpu().numpy().data
    at = 0
    for (index, _), part in zip(pack, parts, strict=True):
        yield index, tensor_hash(part.numel(), from_copy(raw, at))
        at += part.numel()
