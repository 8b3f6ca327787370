"""A shelf: what one node holds in memory for a run, of its own ranks and of another node's.

Knows no Ray: the keeper actor is a list of methods round it. Each rank has a *set* of slots here
and writes them in turn. Only the newest attempt gets slots; what older ones left stays until the
newer has two whole snapshots, because by then every rank has the first: a rank takes its second
only after an update that all of them reduced.

Every snapshot is hashed soon after it was written, block by block as a shard is; whoever reads it
later compares. A slot that is written anew meanwhile is let go: the newer one is hashed.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from coherent_ray.commit.manifest import ShardRecord, generation_directory, shard_path
from coherent_ray.digests import digest_of, new_hasher
from coherent_ray.errors import ClusterError, Fenced, NotFound
from coherent_ray.train.memory.slots import HEAD_BYTES, Head, Slot, available_bytes, make
from coherent_ray.train.memory.words import Facts, unpack

#: Of the memory that is free, what a reservation may take: the rest is the training's.
_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Reserved:
    """Where a worker of this machine finds a slot; see `slots.open_slot`."""

    pid: int
    file: int
    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole snapshot of one rank that is held somewhere."""

    keeper: str
    """Name of the keeper that holds it."""
    node: str
    """Ray's id of its node."""
    at: Reserved
    digest: str
    """Of its words: what it is known by."""
    facts: Facts
    shard: ShardRecord


@dataclass(eq=False)
class _Set:
    """The slots of one rank in one attempt."""

    attempt: int
    rank: int
    data_bytes: int
    home: bool
    """Whether the rank writes them itself; else another keeper sends what they hold."""
    slots: list[Slot]
    hashed: dict[str, tuple[str, Facts, ShardRecord]] = field(default_factory=dict)
    """By slot: what it held when it was hashed."""
    turn: int = 0
    """The slot that what is being sent goes to."""


class Shelf:
    """One node's. All methods may be called by several threads."""

    def __init__(
        self,
        run_id: str,
        *,
        keeper: str = "",
        node: str = "",
        available: Callable[[], int] = available_bytes,
    ) -> None:
        """Make an empty shelf.

        Args:
            run_id: The run.
            keeper: The name that its entries say.
            node: The node that its entries say.
            available: Bytes that may be reserved.
        """
        self._run_id = run_id
        self._keeper, self._node = keeper, node
        self._available = available
        self._attempt = 0
        self._sets: list[_Set] = []
        self._lock = threading.RLock()

    # --- a rank of this node ----------------------------------------------------------------------

    def reserve(self, attempt: int, rank: int, data_bytes: int, count: int) -> list[Reserved]:
        """Make slots for a rank; those that it has of this size it gets again.

        Args:
            attempt: The rank's.
            rank: The rank.
            data_bytes: Of the data of one snapshot.
            count: Slots.

        Raises:
            Fenced: A later attempt has slots here.
            ClusterError: There is not so much memory.
        """
        with self._lock:
            found = self._set_of(attempt, rank, data_bytes, home=True)
            if found is None:
                found = self._add(attempt, rank, data_bytes, count, home=True)
            return [self._reserved(slot) for slot in found.slots]

    def written(self, name: str, digest: str) -> Entry | None:
        """Take in that a slot was written; returns once it is hashed.

        Args:
            name: The slot's.
            digest: Of its words.

        Returns:
            What is held; None: the slot holds something else by now.

        Raises:
            NotFound: There is no such slot, or no longer: its rank needs new ones.
        """
        with self._lock:
            place = self._find(name)
            if place is None:
                raise self._gone(name)
            self._forget_older(place[0])
        found = self._look(*place)
        return found if found is not None and found.digest == digest else None

    # --- whoever wants to know, and to read -------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return all that is whole, hashed."""
        with self._lock:
            places = [(each, slot) for each in self._sets for slot in each.slots]
        found = (self._look(each, slot) for each, slot in places)
        return [entry for entry in found if entry is not None]

    def words(self, name: str, digest: str) -> bytes:
        """Return the words of a snapshot.

        Raises:
            NotFound: It is not held any more.
        """
        slot, head = self._whole(name, digest)
        words = slot.words(head)
        if words is None:
            raise self._gone(name)
        return words

    def read(self, name: str, digest: str, start: int, length: int) -> bytes:
        """Return bytes of a snapshot's data; they are as many, whatever they hold.

        Raises:
            NotFound: It is not held any more.
        """
        slot, head = self._whole(name, digest)
        length = max(min(length, head.data_bytes - start), 0)
        data = bytearray(length)
        slot.read_into(start, memoryview(data))
        return bytes(data)

    # --- another node's ---------------------------------------------------------------------------

    def receive(self, facts: Facts, start: int, data: bytes) -> None:
        """Take a part of a snapshot that another node holds; the first part begins at 0.

        Raises:
            Fenced: A later attempt has slots here.
            ClusterError: There is not so much memory.
        """
        with self._lock:
            found = self._set_of(facts.attempt, facts.rank, facts.size, home=False)
            if found is None:
                found = self._add(facts.attempt, facts.rank, facts.size, 2, home=False)
            if start == 0:
                # What was begun and never ended is begun again: the one before must stay.
                if found.slots[found.turn].head() is not None:
                    found.turn = (found.turn + 1) % len(found.slots)
                found.slots[found.turn].begin()
            slot = found.slots[found.turn]
        slot.memory(found.data_bytes)[start : start + len(data)] = data

    def received(self, words: bytes, shard: ShardRecord) -> bool:
        """Make what was received whole, if it has the digests that were sent with it.

        Args:
            words: Of the snapshot.
            shard: As the other node hashed it.
        """
        facts = unpack(words).facts
        with self._lock:
            found = self._set_of(facts.attempt, facts.rank, facts.size, home=False)
        if found is None:
            return False
        slot = found.slots[found.turn]
        if _hash(slot, facts, lambda: True) != shard:
            return False
        digest = slot.end(facts.size, words)
        found.hashed[slot.name] = (digest, facts, shard)
        with self._lock:
            self._forget_older(found)
        return True

    # --- which attempt ----------------------------------------------------------------------------

    def settle(self, attempt: int, kept: Collection[str]) -> None:
        """Take in what an attempt goes on from; all else that older ones left is let go.

        What an admission has passed over is so never found again by a later one.

        Args:
            attempt: It was admitted.
            kept: Digests of the snapshots that it goes on from.
        """
        with self._lock:
            self._attempt = max(self._attempt, attempt)
            for each in list(self._sets):
                if each.attempt >= attempt:
                    continue
                for slot in list(each.slots):
                    head = slot.head()
                    if head is None or head.digest not in kept:
                        each.slots.remove(slot)
                        slot.close()
                if not each.slots:
                    self._sets.remove(each)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            for each in self._sets:
                self._close(each)
            self._sets.clear()

    def nbytes(self) -> int:
        """Return the bytes that all slots take."""
        with self._lock:
            return sum(slot.size for each in self._sets for slot in each.slots)

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, attempt: int, rank: int, data_bytes: int, count: int, *, home: bool) -> _Set:
        if attempt < self._attempt:
            raise Fenced(
                f"attempt {attempt} gets no memory: attempt {self._attempt} has opened",
                where="checkpoint.memory",
            )
        wanted, free = count * (HEAD_BYTES + data_bytes), int(self._available() * _SHARE)
        if wanted > free:
            raise ClusterError(
                f"checkpoint.memory needs {wanted / 2**20:,.0f} MiB for rank {rank} on this node, "
                f"and {free / 2**20:,.0f} MiB can be taken",
                where="checkpoint.memory",
                remedy="leave checkpoint.memory out, or give the node more memory",
                details={"wanted": wanted, "free": free},
            )
        slots: list[Slot] = []
        try:
            slots.extend(make(data_bytes, secrets.token_hex(8)) for _ in range(count))
        except ClusterError:
            for slot in slots:
                slot.close()
            raise
        self._attempt = max(self._attempt, attempt)
        made = _Set(attempt, rank, data_bytes, home, slots)
        self._sets.append(made)
        return made

    def _forget_older(self, newest: _Set) -> None:
        """Let go of what came before a set that has been written twice."""
        if sum(slot.head() is not None for slot in newest.slots) < 2:
            return
        for each in list(self._sets):
            older = each.attempt < newest.attempt
            replaced = (each.attempt, each.rank, each.home) == (
                newest.attempt, newest.rank, newest.home
            )  # fmt: skip
            if older or (replaced and each is not newest):
                self._sets.remove(each)
                self._close(each)

    def _set_of(self, attempt: int, rank: int, data_bytes: int, *, home: bool) -> _Set | None:
        key = (attempt, rank, data_bytes, home)
        return next(
            (s for s in self._sets if (s.attempt, s.rank, s.data_bytes, s.home) == key), None
        )

    def _find(self, name: str) -> tuple[_Set, Slot] | None:
        return next(((s, slot) for s in self._sets for slot in s.slots if slot.name == name), None)

    def _whole(self, name: str, digest: str) -> tuple[Slot, Head]:
        with self._lock:
            place = self._find(name)
        head = place[1].head() if place is not None else None
        if place is None or head is None or head.digest != digest:
            raise self._gone(name)
        return place[1], head

    def _look(self, each: _Set, slot: Slot) -> Entry | None:
        """Return what a slot holds; hashes it, unless it has been."""
        try:
            head = slot.head()
            if head is None or head.data_bytes != each.data_bytes:
                return None
            before = each.hashed.get(slot.name)
            if before is None or before[0] != head.digest:
                before = self._hashed(each, slot, head)
        except OSError:
            return None  # let go of meanwhile
        if before is None:
            return None
        digest, facts, shard = before
        return Entry(self._keeper, self._node, self._reserved(slot), digest, facts, shard)

    def _hashed(self, each: _Set, slot: Slot, head: Head) -> tuple[str, Facts, ShardRecord] | None:
        data = slot.words(head)
        try:
            facts = unpack(data or b"").facts
        except ValueError:
            return None
        if (facts.run_id, facts.attempt, facts.rank, facts.size) != (
            self._run_id, each.attempt, each.rank, each.data_bytes
        ):  # fmt: skip
            return None
        shard = _hash(slot, facts, lambda: slot.head() == head)
        if shard is None:
            return None
        each.hashed[slot.name] = (head.digest, facts, shard)
        return each.hashed[slot.name]

    def _reserved(self, slot: Slot) -> Reserved:
        return Reserved(os.getpid(), slot.file, slot.name)

    def _gone(self, name: str) -> NotFound:
        return NotFound(f"slot {name} does not hold that snapshot any more", where=self._keeper)

    @staticmethod
    def _close(each: _Set) -> None:
        for slot in each.slots:
            slot.close()


def _hash(slot: Slot, facts: Facts, is_still_there: Callable[[], bool]) -> ShardRecord | None:
    """Return the record of a slot's data; None: it was written anew meanwhile."""
    memory = slot.memory(facts.size)
    blocks = []
    for first, last in _blocks(facts.size, facts.block_bytes):
        if not is_still_there():
            return None
        hasher = new_hasher(facts.algorithm)
        hasher.update(memory[first:last])
        blocks.append(hasher.hexdigest())
    if not is_still_there():
        return None
    directory = generation_directory(facts.number, facts.attempt)
    return ShardRecord(
        rank=facts.rank,
        path=shard_path(directory, facts.rank, facts.ranks),
        size=facts.size,
        start=facts.start,
        stop=facts.stop,
        header_bytes=facts.header_bytes,
        algorithm=facts.algorithm,
        block_bytes=facts.block_bytes,
        blocks=tuple(blocks),
        digest=digest_of(b"".join(map(bytes.fromhex, blocks)), facts.algorithm),
    )


def _blocks(size: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    return itertools.pairwise([*range(0, size, block_bytes), size])
