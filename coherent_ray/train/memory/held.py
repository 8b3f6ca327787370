"""Reading what is held: shared memory of this node, or what another node's keeper sends.

Stands where a storage stands when a generation is loaded, so that the same code reads it: block by
block, and no byte is used before its block has the digest that the keeper found. Nothing else is
trusted, not even that the slot is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError

from coherent_ray.errors import ClusterError, CoherentRayError, NotFound
from coherent_ray.storage.base import Storage
from coherent_ray.train.coordinators import NAMESPACE
from coherent_ray.train.memory.shelf import Entry
from coherent_ray.train.memory.slots import Slot, open_slot

#: Seconds that another node's keeper may owe a part.
_SENT_S = 30.0

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
            return slot.read_into(start, target[: max(entry.facts.size - start, 0)])
        data = self._fetch(entry, start, len(target))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Give back what was opened."""
        for slot in self._slots.values():
            slot.close()

    def _entry(self, path: str) -> Entry:
        try:
            return self._entries[path]
        except KeyError:
            raise NotFound("no such part is held", where=path) from None


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
