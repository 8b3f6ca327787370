"""A rank's side of the memory tier, while it trains: one copy of its own part, every k updates.

All ranks copy or none: whoever cannot (its slots are not made yet, its last copy is still on the
way to another node) says so in the vote of the update's reduction, which costs no message. So all
ranks hold the same updates. When a rank begins a copy, every rank has ended the one before, since
all took part in the reduction between: at any moment there is one that all of them hold whole.

Training stands still for the copy, for a fingerprint of the whole replica, which tells ranks that
have diverged, and for the words. The keeper hashes what was copied, and copies it to another node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import torch

from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import GenerationHeader, StateLayout
from coherent_ray.config.sections import Checkpoint
from coherent_ray.digests import Digest, digest_of
from coherent_ray.errors import CoherentRayError
from coherent_ray.state.capture import State
from coherent_ray.state.fingerprint import fingerprint
from coherent_ray.state.header import header_of
from coherent_ray.state.layout import FlatState, layout_of
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.state.writer import BackgroundWriter
from coherent_ray.train.collectives import sum_over_ranks
from coherent_ray.train.hooks import Hook, reach
from coherent_ray.train.memory.keeper import Sent
from coherent_ray.train.memory.shelf import Reserved
from coherent_ray.train.memory.slots import Slot, open_slot
from coherent_ray.train.memory.words import Facts, Words
from coherent_ray.train.receipts import Receipt, encode

logger = logging.getLogger(__name__)

#: Slots of a rank: one is whole while the other is written.
SLOTS = 2
#: Seconds that training waits, once, for slots that are being made: their memory is allocated, and
#: in a run's first attempt the keeper starts.
MADE_S = 10.0
#: Seconds until a rank that cannot copy says why.
_PATIENCE_S = 60.0

Describe = Callable[[State, StateLayout], GenerationHeader]
"""Makes the header that a generation at this boundary would have, without receipts."""


class Keeper(Protocol):
    """The keeper of this rank's node."""

    def reserve(
        self, attempt: int, rank: int, data_bytes: int, count: int
    ) -> Future[tuple[list[Reserved], bool]]:
        """Make slots; also says whether there is no other node to copy to."""

    def written(self, name: str, digest: str, replicas: int) -> Future[Sent]:
        """Take in that a slot was written; done once it is hashed, and copied where it can be."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose snapshots they are."""

    run_id: str
    attempt: int
    token: str
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Slots of this rank for one layout, open here."""

    layout: StateLayout
    slots: tuple[Slot, ...]
    snapshots: tuple[Snapshot, ...]
    header: bytes
    alone: bool
    """Whether there was no other node when they were made."""


class MemoryTier:
    """One rank's. For the training thread."""

    def __init__(
        self,
        owner: Owner,
        options: Checkpoint,
        keeper: Keeper | None,
        note: Callable[[list[str]], None],
        hook: Hook | None = None,
    ) -> None:
        """Make it; nothing is asked of the keeper yet.

        Args:
            owner: Whose it is.
            options: The configuration's checkpoint section.
            keeper: Of this node; None: the tier is off.
            note: Takes what the user should know.
            hook: Called at ``memory:begun``, ``memory:half`` and ``memory:whole``, for drills.
        """
        self._owner = owner
        self._options = options
        self._keeper = keeper if options.memory is not None else None
        self._note = note
        self._hook = hook
        self._maker = BackgroundWriter("coherent-ray-memory") if self._keeper else None
        self._layout: StateLayout | None = None
        """That slots were last asked for."""
        self._place: _Place | None = None
        self._making: Future[_Place] | None = None
        self._sent: Future[Sent] | None = None
        self._alone = options.memory is not None and not options.memory.replicas
        self._turn = 0
        self._lines = _Lines()
        self._retry_at = self._made_by = 0.0
        self._skipped_since: float | None = None
        self._has_told = False
        self.stalls_s: list[float] = []
        """Seconds that training stood still, a copy."""

    def is_due(self, update: int) -> bool:
        """Return whether all ranks copy after an update, if all of them can."""
        memory = self._options.memory
        return self._keeper is not None and memory is not None and not update % memory.every_updates

    def can(self, update: int) -> bool:
        """Return whether this rank could copy after an update, or needs not.

        Waits for slots that are being made, `MADE_S` at most.
        """
        if not self.is_due(update):
            return True
        self._arrive()
        if self._place is None and self._layout is not None:
            self.prepare(self._layout)
        if self._making is not None:
            wait([self._making], timeout=max(self._made_by - time.monotonic(), 0.0))
            self._arrive()
        return self._place is not None and (self._alone or self._sent is None)

    def prepare(self, layout: StateLayout) -> None:
        """Have slots made for a state, behind training, unless they are there."""
        keeper, maker, owner = self._keeper, self._maker, self._owner
        if keeper is None or maker is None or self._making is not None:
            return
        self._layout = layout
        if self._place is not None and self._place.layout == layout:
            return
        if time.monotonic() < self._retry_at:
            return
        start, stop = (layout.cut(owner.rank + step, owner.ranks) for step in (0, 1))
        header = header_of(FlatState(layout), start, stop)
        size = len(header) + stop - start

        def make() -> _Place:
            slots, alone = keeper.reserve(owner.attempt, owner.rank, size, SLOTS).result()
            return _open(layout, owner, header, slots, alone)

        self._making = maker.submit(make)
        self._made_by = time.monotonic() + MADE_S

    def keep(
        self, state: State, describe: Describe, pending: Sequence[Receipt], *, agreed: bool
    ) -> None:
        """Copy this rank's part, where all ranks can; all of them call this at the same boundary.

        Args:
            state: References to the live state.
            describe: Makes the header.
            pending: The receipts that no published generation names yet.
            agreed: Whether all ranks have said that they can.
        """
        since = time.monotonic()
        layout = layout_of(state.tensors)
        place = self._place
        if not agreed or place is None or place.layout != layout:
            self._skip(layout)
            return
        self._skipped_since = None
        replica = _replica(layout, state, self._owner.ranks)
        header = describe(state, layout)
        slot, snapshot = place.slots[self._turn], place.snapshots[self._turn]
        words = self._words(header, len(place.header), snapshot, replica, pending)
        slot.begin()
        reach(self._hook, "memory:begun")
        snapshot.take(state.tensors)
        reach(self._hook, "memory:half")
        digest = slot.end(len(place.header) + len(snapshot.memory), words)
        self._turn = (self._turn + 1) % len(place.slots)
        self._send(slot.name, digest)
        self.stalls_s.append(time.monotonic() - since)
        reach(self._hook, "memory:whole")

    def close(self) -> None:
        """Give the shared memory back; what it holds stays with the keeper."""
        if self._maker is not None:
            self._maker.close(timeout=0)
        if self._place is not None:
            _close(self._place)
            self._place = None

    # --- inside -----------------------------------------------------------------------------------

    def _words(
        self,
        header: GenerationHeader,
        header_bytes: int,
        snapshot: Snapshot,
        replica: Digest,
        pending: Sequence[Receipt],
    ) -> bytes:
        owner, options = self._owner, self._options
        told, receipts = records.dump(header), self._lines.of(pending)
        facts = Facts(
            run_id=owner.run_id,
            attempt=owner.attempt,
            token=owner.token,
            number=header.number,
            update=header.update,
            rank=owner.rank,
            ranks=owner.ranks,
            start=snapshot.start,
            stop=snapshot.stop,
            header_bytes=header_bytes,
            algorithm=options.digest,
            block_bytes=options.block_bytes,
            header_digest=digest_of(told),
            fingerprint=replica,
            receipts_digest=digest_of(receipts),
        )
        return Words(facts, told, receipts).pack()

    def _send(self, name: str, digest: str) -> None:
        """Tell the keeper; where there is no other node, nobody waits for its answer."""
        memory = self._options.memory
        assert self._keeper is not None
        assert memory is not None
        sent = self._keeper.written(name, digest, memory.replicas)
        self._sent = self._sent or sent

    def _arrive(self) -> None:
        """Take in what was asked of the keeper and is there by now."""
        if self._making is not None and self._making.done():
            making, self._making = self._making, None
            try:
                place = making.result()
            except Exception as error:
                self._retry_at = time.monotonic() + _PATIENCE_S
                self._tell(error)
            else:
                before, self._place, self._turn = self._place, place, 0
                self._alone = self._alone or place.alone
                if before is not None:
                    _close(before)
        if self._sent is not None and self._sent.done():
            try:
                self._alone = self._sent.result() == "alone"
            except Exception as error:
                # A keeper that was killed comes back empty: slots are made anew.
                logger.warning("the keeper is gone: %s", error)
                self._lose()
            self._sent = None

    def _lose(self) -> None:
        if self._place is not None:
            _close(self._place)
        self._place = None

    def _skip(self, layout: StateLayout) -> None:
        """Leave this boundary out, see to it that the next can be had, and say so in time."""
        self.prepare(layout)
        now = time.monotonic()
        self._skipped_since = self._skipped_since or now
        if now - self._skipped_since > _PATIENCE_S and not self._has_told:
            self._has_told = True
            self._note(
                [
                    f"checkpoint.memory: nothing was kept for {_PATIENCE_S:g} s, since a rank's "
                    "memory is not ready (its log says why); the generations are all there is"
                ]
            )

    def _tell(self, error: Exception) -> None:
        if self._has_told:
            return
        self._has_told = True
        what = error.what if isinstance(error, CoherentRayError) else str(error)
        words = f"checkpoint.memory is off: rank {self._owner.rank}: {what}"
        logger.warning("%s", words)
        self._note([words])


class _Lines:
    """Receipts as JSON Lines, each encoded once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Receipt, bytes]] = {}

    def of(self, receipts: Sequence[Receipt]) -> bytes:
        before, self._known = self._known, {}
        for receipt in receipts:
            known = before.get(receipt.update)
            fresh = known is None or known[0] is not receipt
            line = encode([receipt]) if fresh or known is None else known[1]
            self._known[receipt.update] = (receipt, line)
        return b"".join(line for _, line in self._known.values())


def _replica(layout: StateLayout, state: State, ranks: int) -> Digest:
    """Return what this rank's whole replica is compared with the other ranks' by."""
    if ranks == 1:
        return digest_of(b"there is no other replica")
    prints = fingerprint(layout, state.tensors, lambda sums: sum_over_ranks(sums, None))
    return prints.digest


def _open(
    layout: StateLayout, owner: Owner, header: bytes, reserved: Sequence[Reserved], alone: bool
) -> _Place:
    slots = tuple(open_slot(each.pid, each.file, each.name) for each in reserved)
    snapshots = []
    for slot in slots:
        size = layout.cut(owner.rank + 1, owner.ranks) - layout.cut(owner.rank, owner.ranks)
        memory = slot.memory(len(header) + size)
        memory[: len(header)] = header
        buffer = torch.frombuffer(memory, dtype=torch.uint8)[len(header) :]
        snapshots.append(Snapshot(layout, owner.rank, owner.ranks, buffer=buffer))
    return _Place(layout, slots, tuple(snapshots), header, alone)


def _close(place: _Place) -> None:
    for slot in place.slots:
        slot.close()
