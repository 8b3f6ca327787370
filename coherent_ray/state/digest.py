"""One digest for one state: what two runs compare to know that they are the same run.

It covers the layout and every tensor byte, and nothing of how the bytes were cut into files: the
same state has the same digest at any rank count, sharded or not, in live tensors and on disk.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import ITEM_BYTES, Manifest, StateLayout
from coherent_ray.digests import RECORD_ALGORITHM, Digest, Hasher, new_hasher
from coherent_ray.state.blocks import FlatReader, longest_block, readers_of
from coherent_ray.state.flat import items_of
from coherent_ray.state.layout import FlatState, check_tensors
from coherent_ray.storage.base import Storage

_STEP_ITEMS = 2**20


def state_digest(storage: Storage, manifest: Manifest) -> Digest:
    """Return the digest of a stored state: equal states, equal digests, at any rank count.

    It covers the layout and all tensor bytes, and verifies every block on the way.

    Raises:
        ShardDamaged: A shard is missing or wrong.
    """
    flat = FlatState(manifest.header.layout)
    hasher = _state_hasher(flat.layout)
    if flat.parts:
        _hash_by_tensor(hasher, FlatReader(storage, manifest))
        return f"{RECORD_ALGORITHM}:{hasher.hexdigest()}"
    buffer = memoryview(bytearray(longest_block(manifest)))
    for reader in readers_of(storage, manifest, flat):
        reader.check_size()
        for block in reader.all_blocks():
            hasher.update(reader.read(block, buffer))
    return f"{RECORD_ALGORITHM}:{hasher.hexdigest()}"


def tensors_digest(layout: StateLayout, tensors: Mapping[str, torch.Tensor]) -> Digest:
    """Return the `state_digest` that live tensors will have once they are stored.

    Args:
        layout: Of the tensors.
        tensors: By name.

    Raises:
        StateMismatch: The tensors are not those of the layout.
    """
    check_tensors(layout, tensors)
    hasher = _state_hasher(layout)
    for spec in layout.tensors:
        tensor = tensors[spec.name]
        for first in range(0, tensor.numel(), _STEP_ITEMS):
            items = items_of(tensor, first, min(first + _STEP_ITEMS, tensor.numel()))
            hasher.update(items.cpu().contiguous().numpy().data.cast("B"))
    return f"{RECORD_ALGORITHM}:{hasher.hexdigest()}"


def _hash_by_tensor(hasher: Hasher, state: FlatReader) -> None:
    """Hash a sharded state in the order that it has where it is not sharded."""
    for spec in state.flat.layout.tensors:
        items = spec.nbytes // ITEM_BYTES[spec.dtype]
        for first in range(0, items, _STEP_ITEMS):
            hasher.update(state.items(spec.name, first, min(first + _STEP_ITEMS, items)))


def _state_hasher(layout: StateLayout) -> Hasher:
    hasher = new_hasher(RECORD_ALGORITHM)
    content = records.dump(layout.whole)
    hasher.update(len(content).to_bytes(8, "little") + content)
    return hasher
