"""Reading what is held: shared memory of this node, or what another node's keeper sends.

Stands where a storage stands when a generation is loaded, so that the same code reads it: block by
block, and no byte is used before its block has the digest that the keeper found. Nothing else is
trusted, not even that the slot is still there.

Where all parts lie on this node, a whole state is not even read: it is hashed where it lies, and
its tensors are views of that memory, to be copied from once. Nobody may write to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from coherent_ray.commit.manifest import Manifest, ShardRecord
from coherent_ray.errors import ClusterError, CoherentRayError, NotFound
from coherent_ray.state.blocks import readers_of
from coherent_ray.state.flat import from_bytes
from coherent_ray.state.layout import TORCH_DTYPES, FlatState
from coherent_ray.storage.base import Storage
from coherent_ray.train.coordinators import NAMESPACE
from coherent_ray.train.memory.shelf import Entry
from coherent_ray.train.memory.slots import Slot, open_slot

#: Seconds that another node's keeper may owe a part.
_SENT_S = 30.0
#: Threads that hash what lies here: it is as fast as the memory with a few.
_HASH_THREADS = 4

Fetch = Callable[[Entry, int, int], bytes]
"""Brings some bytes of a snapshot's data from the node that holds it."""


class HeldShards:
    """The parts of one snapshot, by the paths that a generation's shards would have."""

    def __init__(
        self,
        holders: Sequence[Sequence[Entry]],
        node: str,
        fetch: Fetch | None = None,
        turn: int = 0,
    ) -> None:
        """Find each part.

        Args:
            holders: By rank, who holds its part.
            node: Ray's id of this process's node.
            fetch: How what another node holds is brought here; None: through Ray.
            turn: The holder to take where there are several: 0 is the nearest, 1 the next.
        """
        self._fetch = fetch or fetched
        self._entries: dict[str, Entry] = {}
        self._slots: dict[str, Slot] = {}
        for entries in holders:
            near = sorted(entries, key=lambda entry: (entry.node != node, entry.keeper))
            entry = near[turn % len(near)]
            self._entries[entry.shard.path] = entry
            if entry.node == node:
                try:
                    at = entry.at
                    self._slots[entry.shard.path] = open_slot(at.pid, at.file, at.name)
                except ClusterError:
                    continue  # another name space of processes; the keeper is asked

    @property
    def as_storage(self) -> Storage:
        """This, for those who only read shards of a storage."""
        return cast("Storage", self)

    @property
    def uri(self) -> str:
        """What it is called in messages."""
        return "memory"

    def size(self, path: str) -> int:
        """Return the bytes of a part.

        Raises:
            NotFound: There is no such part.
        """
        return self._entry(path).facts.size

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Fill a buffer from a part, and return the number of bytes that it held.

        Raises:
            NotFound: It is not held any more.
        """
        entry = self._entry(path)
        slot = self._slots.get(path)
        if slot is not None:
            head = slot.head()
            if head is None or head.digest != entry.digest:
                raise NotFound("it was written anew", where=path)
            part = slot.memory(entry.facts.size)[start : start + len(target)]
            # By NumPy, which lets other threads run meanwhile.
            np.copyto(np.frombuffer(target, np.uint8)[: len(part)], np.frombuffer(part, np.uint8))
            return len(part)
        data = self._fetch(entry, start, len(target))
        target[: len(data)] = data
        return len(data)

    def views(self, manifest: Manifest) -> dict[str, torch.Tensor] | None:
        """Return a whole state as it lies here, verified; None: it does not all lie here.

        Args:
            manifest: Of the snapshot; none of its tensors is sharded.

        Returns:
            All tensors by name. One that is cut between two parts is a copy.

        Raises:
            ShardDamaged: A block has not its digest, or a part was written anew.
        """
        flat = FlatState(manifest.header.layout)
        readers = readers_of(self.as_storage, manifest, flat)
        if flat.parts or any(shard.path not in self._slots for shard in manifest.shards):
            return None
        memories = [self._slots[s.path].memory(s.size) for s in manifest.shards]
        tasks = [
            (reader, block, memory)
            for reader, memory in zip(readers, memories, strict=True)
            for block in reader.all_blocks()
        ]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _HASH_THREADS)) as pool:
            for _ in pool.map(lambda task: task[0].verify(task[1], task[2]), tasks):
                pass
        for reader in readers:
            head = self._slots[reader.record.path].head()
            if head is None or head.digest != self._entries[reader.record.path].digest:
                raise reader.damage("it was written anew")
        data = [m[s.header_bytes :] for m, s in zip(memories, manifest.shards, strict=True)]
        return {
            spec.name: _bytes_of(data, manifest.shards, at, spec.nbytes, spec.dtype).view(
                spec.shape
            )
            for spec, at in zip(flat.layout.tensors, flat.offsets, strict=True)
        }

    def close(self) -> None:
        """Give back what was opened."""
        for slot in self._slots.values():
            slot.close()

    def _entry(self, path: str) -> Entry:
        try:
            return self._entries[path]
        except KeyError:
            raise NotFound("no such part is held", where=path) from None


def _bytes_of(
    data: Sequence[memoryview], shards: Sequence[ShardRecord], at: int, nbytes: int, dtype: str
) -> torch.Tensor:
    """Return bytes of the flat state as items: a view, unless they lie in several parts."""
    parts = [
        memory[max(at, shard.start) - shard.start : min(at + nbytes, shard.stop) - shard.start]
        for memory, shard in zip(data, shards, strict=True)
        if shard.start < at + nbytes and at < shard.stop
    ]
    joined = parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))
    return from_bytes(joined, TORCH_DTYPES[dtype])


def fetched(entry: Entry, start: int, length: int) -> bytes:
    """Bring some bytes of a snapshot's data from its keeper.

    Raises:
        NotFound: The keeper is gone, or what it held.
    """
    try:
        keeper: Any = ray.get_actor(entry.keeper, namespace=NAMESPACE)
        call = keeper.read.remote(entry.at.name, entry.digest, start, length)
        data: bytes = ray.get(call, timeout=_SENT_S)
    except (RayError, CoherentRayError, ValueError) as error:
        raise NotFound(f"its keeper does not send it: {error}", where=entry.keeper) from error
    return data
