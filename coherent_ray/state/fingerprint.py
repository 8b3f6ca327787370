"""A fingerprint of the whole replica, computed where the tensors are, at the speed of memory.

Each rank stores only its part of the state, so ranks that have silently diverged would store a
mixture that never existed. Equal fingerprints say that they have not.

Each tensor has a hash. There are two ways to it, and where a tensor lies decides which:

- in host memory, whole: XXH3 of chunks, the fastest there is (`coherent_ray.state.chunks`). So,
  too, with a tensor of at most `SMALL_BYTES` on an accelerator, which is brought to the host: it
  does not matter on which side counters and other scalars lie.
- on an accelerator, or sharded: a sum, which the device computes by itself and ranks can share out
  (`coherent_ray.state.multilinear`).

So two replicas have the same fingerprint if they hold the same bits and each tensor lies in the
same way: on the host or on an accelerator, and sharded or not. How many ranks there are does not
matter, nor over how many a tensor is sharded, nor its strides. *Not* the same is the fingerprint of
one state sharded and not sharded, or on the host and on an accelerator: whoever wants to compare
states that lie differently takes `coherent_ray.state.digest`. Ranks of one job, and two runs of one
job, let their tensors lie alike; and where they do not, they do not compute the same bits either.

No two ranks hold the same rows of a sharded tensor, so only where a tensor is whole on every rank
does the fingerprint find ranks that have diverged. It finds accidents, not forgeries.

What a rank copies for its shard anyway need not be read twice while training stands still: `begin`
reads the rest, and `Unfinished.finish` the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from coherent_ray import canonical
from coherent_ray.commit import manifest
from coherent_ray.commit.manifest import StateLayout
from coherent_ray.digests import Digest, digest_of
from coherent_ray.state.chunks import (
    chunk_hash,
    from_copy,
    from_tensor,
    hashes_of_small,
    spans,
    tensor_hash,
)
from coherent_ray.state.layout import check_tensors
from coherent_ray.state.multilinear import hash_of_sum, share_sums, sum_of, sum_of_sums
from coherent_ray.state.sharded import first_item_here, here

#: Bytes up to which a tensor on an accelerator is hashed on the host.
SMALL_BYTES = 2**11

AddRanks = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a replica holds, tensor by tensor."""

    digest: Digest
    """Of the layout and all tensors' hashes."""
    tensors: tuple[str, ...]
    """16 hex digits a tensor, in layout order."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A fingerprint, but for the chunks that lie whole in a range of the flat state."""

    layout: StateLayout
    start: int
    """Where the range begins, in bytes."""
    hashes: tuple[str, ...]
    """Of each tensor, in layout order; empty: some of its chunks are missing."""
    chunks: dict[int, dict[int, bytes]]
    """Of these tensors, by index, the hashes of the chunks that are not, by their first byte."""

    def finish(self, copy: memoryview) -> Fingerprint:
        """Return the fingerprint.

        Args:
            copy: The bytes of the range, as they were when this was begun.
        """
        hashes = list(self.hashes)
        for index, at in enumerate(self.layout.offsets()):
            if not hashes[index]:
                nbytes = self.layout.tensors[index].nbytes
                read = from_copy(copy, at - self.start)
                hashes[index] = tensor_hash(nbytes, read, self.chunks.get(index))
        return combined(self.layout, tuple(hashes))


def fingerprint(
    layout: StateLayout, tensors: Mapping[str, torch.Tensor], add_ranks: AddRanks | None = None
) -> Fingerprint:
    """Return the fingerprint of a replica, at once; see `begin` for the arguments and errors."""
    return begin(layout, tensors, add_ranks).finish(memoryview(b""))


@torch.no_grad()
def begin(
    layout: StateLayout,
    tensors: Mapping[str, torch.Tensor],
    add_ranks: AddRanks | None = None,
    copied: tuple[int, int] = (0, 0),
) -> Unfinished:
    """Read a replica, but for what will be in a copy.

    Takes a few megabytes of memory on each device, whatever the size of the tensors, and waits for
    the device once, and where it has small tensors once for each few megabytes of them.

    Args:
        layout: The layout of the tensors.
        tensors: By name; any device and strides; of sharded ones this rank's rows.
        add_ranks: Adds a 1-D int64 tensor over all ranks, in place, and wraps around; called once,
            and only where tensors are sharded. All ranks must come there. Whoever has all rows of
            what the layout calls sharded has nothing to add.
        copied: The range of the flat state, in bytes, of which there will be a copy. Chunks in it
            are left out, but of tensors that are sharded or on accelerators nothing is, and where
            any is sharded nothing of the others either.

    Raises:
        StateMismatch: The tensors are not those of the layout.
    """
    check_tensors(layout, tensors)
    start, stop = (0, 0) if layout.parts else copied
    hashes = [""] * len(layout.tensors)
    chunks: dict[int, dict[int, bytes]] = {}
    small: list[tuple[int, torch.Tensor]] = []
    large: list[tuple[int, torch.Tensor]] = []
    sharded: list[int] = []
    for index, (spec, at) in enumerate(zip(layout.tensors, layout.offsets(), strict=True)):
        tensor, nbytes = tensors[spec.name], spec.nbytes
        if spec.parts:
            sharded.append(index)
        elif not _is_on_host(tensor):
            (small if nbytes <= SMALL_BYTES else large).append((index, here(tensor)))
        elif at + nbytes <= start or at >= stop:
            hashes[index] = tensor_hash(nbytes, from_tensor(here(tensor)))
        elif at < start or at + nbytes > stop:
            read = from_tensor(here(tensor))
            chunks[index] = {
                first: chunk_hash(nbytes, read, first, last)
                for first, last in spans(nbytes)
                if at + first < start or at + last > stop
            }
    for index, found in hashes_of_small(small):
        hashes[index] = found
    sums = [(index, sum_of(tensor)) for index, tensor in large]
    sums += _sums_of_all_ranks(layout, tensors, sharded, add_ranks)
    for index, value in _fetched(sums):
        hashes[index] = hash_of_sum(value, layout.tensors[index].nbytes)
    return Unfinished(layout, start, tuple(hashes), chunks)


def combined(layout: StateLayout, hexes: tuple[str, ...]) -> Fingerprint:
    """Return the fingerprint of a state of which each tensor's hash is known.

    Args:
        layout: Of all tensors.
        hexes: One a tensor, in layout order.
    """
    content = manifest.dump(layout.whole) + canonical.dump(list(hexes))
    return Fingerprint(digest_of(content), hexes)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _sums_of_all_ranks(
    layout: StateLayout,
    tensors: Mapping[str, torch.Tensor],
    sharded: list[int],
    add_ranks: AddRanks | None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the sums of sharded tensors, with their indices; all ranks come here together."""
    if not sharded:
        return
    if add_ranks is None:
        raise ValueError("tensors are sharded, and nothing adds their ranks' sums")
    shares = []
    for index in sharded:
        spec = layout.tensors[index]
        tensor = tensors[spec.name]
        shares.append(share_sums(spec, here(tensor), first_item_here(tensor)))
    lengths = [share.numel() for share in shares]
    together = torch.cat(shares)
    add_ranks(together)
    for index, sums in zip(sharded, torch.split_with_sizes(together, lengths), strict=True):
        yield index, sum_of_sums(sums)


def _fetched(sums: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, int]]:
    """Yield sums as numbers, with one wait a device."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, value in sums:
        by_device.setdefault(value.device, []).append((index, value))
    for group in by_device.values():
        fetched = torch.cat([value for _, value in group]).tolist()
        yield from zip((index for index, _ in group), fetched, strict=True)
