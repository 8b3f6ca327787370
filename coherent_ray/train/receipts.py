"""Receipts: one line an update, of what it consumed and what came out, chained by hash.

A receipt's digest covers everything that the update determined, and the digest before it; the first
one follows the digest of the plan (and of the weights that the run started from, where these were
not the task's own). So two runs of one job have the same chain or differ at an
update that can be named, and the run's id, attempts and ranks are no part of it. Nor is `state`: a
generation that was saved on demand names its state here, without changing what the chain says.

Receipts are stored as segments, JSON Lines that a generation's publish names by digest. Each goes
on where the published history ended. A resume that fell back to an older generation publishes
again from there: a later segment replaces every receipt from its first update on.

Floats are hex strings, exact to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.commit import manifest
from coherent_ray.commit.history import History
from coherent_ray.commit.inspection import absence, is_lost
from coherent_ray.commit.manifest import (
    RECEIPTS_BYTES,
    Count,
    GenerationHeader,
    PlanIdentity,
    Positive,
    ReceiptSegment,
)
from coherent_ray.commit.records import PublishBody
from coherent_ray.digests import Digest, digest_of
from coherent_ray.errors import NotFound, ReceiptsDamaged, StorageError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.bounded import TooLong, read_bounded
from coherent_ray.train.recipe import origin_of

HexFloat = Annotated[str, Field(pattern=r"^(-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}|-?inf|nan)$")]
"""What ``float.hex`` gives."""

#: What the chain's digest does not cover.
_OUTSIDE = ("digest", "state")
_REMEDY = "the generations can still be read; restore the segment from a copy to read on"


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class Receipt:
    """What one update consumed, and what came out. One that exists has the right digest."""

    update: Positive
    epoch: Count
    start: Count
    """First position of the epoch that it took."""
    stop: Count
    """The position after the last one."""
    ids: Digest
    """Of the example ids, in order of position."""
    count: Count
    """Accepted examples or tokens, over all lanes."""
    loss: HexFloat
    """Mean over these."""
    grad_norm: HexFloat
    """Before clipping."""
    lr: tuple[HexFloat, ...]
    """One a parameter group, as this update used it."""
    skipped: bool
    """The gradient was not finite, so the optimizer took no step."""
    previous: Digest
    """Of the receipt before, or `first_link`."""
    digest: Digest
    """Of all the above."""
    state: Digest | None = None
    """Of the state after it, where a generation holds it."""

    def __post_init__(self) -> None:
        if self.stop <= self.start:
            raise ValueError(f"update {self.update} took no positions")
        if self.digest != _chained(_facts(self)):
            raise ValueError(f"the receipt of update {self.update} does not hash to its digest")


_ADAPTER: TypeAdapter[Receipt] = TypeAdapter(Receipt)
_FIELDS = tuple(Receipt.__dataclass_fields__)


def first_link(plan: PlanIdentity, origin: Mapping[str, str] | None = None) -> Digest:
    """Return what the first receipt calls `previous`: the digest of what decides the updates.

    Args:
        plan: What is read, and when.
        origin: What the recipe tells of the weights that the run started from, where these were not
            the task's own; see `coherent_ray.train.origin`.
    """
    return digest_of(manifest.dump(plan) + (canonical.dump(dict(origin)) if origin else b""))


def first_link_of(header: GenerationHeader) -> Digest:
    """Return what the first receipt of a generation's run follows."""
    return first_link(header.plan, origin_of(header.recipe))


@plain_dataclass(frozen=True, slots=True)
class Segment:
    """Receipts that are about to be stored: where, and the bytes."""

    record: ReceiptSegment
    data: bytes


class ReceiptChain:
    """The receipts since the published history ended, and the tip that the next one follows.

    Every rank keeps one, and all have the same.
    """

    def __init__(self, tip: Digest, update: int, pending: Sequence[Receipt] = ()) -> None:
        """Go on where a generation ended, or a snapshot in memory.

        Args:
            tip: Digest of the last receipt (a generation's `receipt_tip`), or `first_link`.
            update: The update that it is of; 0 for none.
            pending: The receipts up to it that no generation names yet.
        """
        self.tip = tip
        """What the next receipt calls `previous`."""
        self.update = update
        """The last update."""
        self._pending: list[Receipt] = list(pending)

    @property
    def pending(self) -> tuple[Receipt, ...]:
        """The receipts that no published generation names yet."""
        return tuple(self._pending)

    def append(
        self,
        *,
        epoch: int,
        start: int,
        stop: int,
        ids: Digest,
        count: int,
        loss: float,
        grad_norm: float,
        lr: Sequence[float],
        skipped: bool = False,
    ) -> Receipt:
        """Add the receipt of the next update; the arguments are those of `Receipt`.

        Raises:
            ValueError: A value is impossible.
        """
        facts: dict[str, Any] = {
            "update": self.update + 1,
            "epoch": epoch,
            "start": start,
            "stop": stop,
            "ids": ids,
            "count": count,
            "loss": float(loss).hex(),
            "grad_norm": float(grad_norm).hex(),
            "lr": tuple(float(rate).hex() for rate in lr),
            "skipped": skipped,
            "previous": self.tip,
        }
        receipt = Receipt(**facts, digest=_chained(facts))
        self._pending.append(receipt)
        self.update, self.tip = receipt.update, receipt.digest
        return receipt

    def segment(self, generation: str, state: Digest | None = None) -> Segment | None:
        """Return the pending receipts as a segment; see `segment_of`."""
        return segment_of(self._pending, generation, state)

    def published(self, update: int) -> None:
        """Drop the receipts up to an update: a published generation names them."""
        self._pending = [receipt for receipt in self._pending if receipt.update > update]


def segment_of(
    pending: Sequence[Receipt], generation: str, state: Digest | None = None
) -> Segment | None:
    """Return receipts as a segment for a generation; None where there are none.

    Args:
        pending: Those that no published generation names yet.
        generation: Its name, which no other attempt can share: so is the segment's path.
        state: Digest of the state that it holds, which the last receipt names here, and nowhere
            else: if this generation is not published, the next one's segment says nothing of it.
    """
    if not pending:
        return None
    first, last = pending[0].update, pending[-1].update
    data = encode([*pending[:-1], replace(pending[-1], state=state or pending[-1].state)])
    path = f"receipts/{first:012d}-{last:012d}-{generation}.jsonl"
    return Segment(ReceiptSegment(path, len(data), digest_of(data), first, last), data)


def encode(receipts: Iterable[Receipt]) -> bytes:
    """Return receipts as JSON Lines, each line canonical JSON."""
    return b"".join(_line(receipt) for receipt in receipts)


def decode(data: bytes) -> list[Receipt]:
    """Return the receipts of JSON Lines from outside, chained one to the next.

    Raises:
        ValueError: They are not what `encode` makes, or a line does not follow the one before;
            the message says which.
    """
    if data and not data.endswith(b"\n"):
        raise ValueError("the last line is torn")
    receipts: list[Receipt] = []
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            receipt = _ADAPTER.validate_json(line)
        except ValidationError as error:
            raise ValueError(f"line {number}: {manifest.reason_of(error, 'receipt')}") from error
        if _line(receipt) != line:
            raise ValueError(f"line {number} is not canonical JSON")
        if receipts and not _follows(receipt, receipts[-1].update, receipts[-1].digest):
            raise ValueError(f"line {number} does not follow the line before it")
        receipts.append(receipt)
    return receipts


def last_update(commits: History) -> int:
    """Return the last update that a run has published receipts of; 0: none."""
    return max((last for _, last in _in_force(commits.publishes)), default=0)


def history(
    storage: Storage, commits: History, first: Digest | None = None, since: int = 1
) -> Iterator[Receipt]:
    """Yield a run's receipts, to the last update that it published.

    One segment is in memory at a time, and each is checked before any of it is yielded.

    Args:
        storage: The run's root.
        commits: Its commit log.
        first: What the first receipt must follow (`first_link`); None: not checked.
        since: The first update to yield. Segments that end before it are not looked at, so what
            their last receipt says of the first one here is not checked.

    Raises:
        ReceiptsDamaged: A segment is missing or damaged, or the chain has a gap; ``where`` is the
            segment, ``details`` has the last update that can be read.
        StorageError: The storage failed.
    """
    update, tip = 0, first
    wanted = [(segment, last) for segment, last in _in_force(commits.publishes) if last >= since]
    if since > 1 and wanted and wanted[0][0].first > 1:
        update, tip = wanted[0][0].first - 1, None
    for segment, last in wanted:
        receipts = _read(storage, segment, update)
        for receipt in receipts[: last - segment.first + 1]:
            if not _follows(receipt, update, tip):
                raise _damaged(
                    segment, f"update {receipt.update} does not follow update {update}", update
                )
            if receipt.update >= since:
                yield receipt
            update, tip = receipt.update, receipt.digest


@plain_dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two histories part."""

    update: int
    field: str
    """The receipt's field, or ``update`` where one history has ended."""
    first: object
    """None where the first history has ended."""
    second: object
    """None where the second history has ended."""


def first_difference(first: Iterable[Receipt], second: Iterable[Receipt]) -> Difference | None:
    """Return where two histories part, or None.

    A state's digest is compared where both have one. Links are compared last, so that what is
    named is the cause where there is one.
    """
    for one, other in itertools.zip_longest(first, second):
        if one is None or other is None:
            ours, theirs = (None if r is None else r.update for r in (one, other))
            return Difference(ours or theirs or 0, "update", ours, theirs)
        if found := differences(one, other):
            return found[0]
    return None


def differences(one: Receipt, other: Receipt) -> list[Difference]:
    """Return every field in which two receipts differ, links last.

    A state's digest is compared where both have one.
    """
    found = []
    for name in sorted(_FIELDS, key=lambda name: name in {"previous", "digest"}):
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours != theirs and not (name == "state" and None in {ours, theirs}):
            found.append(Difference(one.update, name, ours, theirs))
    return found


def _in_force(publishes: Sequence[PublishBody]) -> list[tuple[ReceiptSegment, int]]:
    """Return the segments that still say something, each with the last update that it speaks for.

    A publish stands for the history up to its update, and nothing said before it stands beyond.
    """
    result: list[tuple[ReceiptSegment, int]] = []
    until: int | None = None
    for publish in reversed(publishes):
        segment = publish.receipts
        if segment is not None:
            last = segment.last if until is None else min(segment.last, until)
            if last >= segment.first:
                result.append((segment, last))
        reached = publish.update if segment is None else segment.first - 1
        until = reached if until is None else min(until, reached)
    return result[::-1]


def _read(storage: Storage, segment: ReceiptSegment, readable: int) -> list[Receipt]:
    try:
        data = read_bounded(storage, segment.path, min(segment.size, RECEIPTS_BYTES))
    except NotFound as error:
        raise _damaged(segment, f"the segment {absence(error)[1]}", readable) from error
    except TooLong as error:
        raise _damaged(
            segment, f"the segment has more bytes, published were {segment.size}", readable
        ) from error
    except StorageError as error:
        if not is_lost(error):
            raise
        raise _damaged(segment, "it cannot be read from the device", readable) from error
    if len(data) != segment.size:
        raise _damaged(
            segment, f"the segment has {len(data)} bytes, published were {segment.size}", readable
        )
    if digest_of(data) != segment.digest:
        raise _damaged(segment, "the segment does not hash to what was published", readable)
    try:
        receipts = decode(data)
    except ValueError as error:
        raise _damaged(segment, str(error), readable) from error
    # The count first: what the log says of a segment may be any two numbers.
    count = segment.last - segment.first + 1
    if len(receipts) != count or [receipts[0].update, receipts[-1].update] != [
        segment.first,
        segment.last,
    ]:
        raise _damaged(
            segment, f"it does not hold updates {segment.first} to {segment.last}", readable
        )
    return receipts


def _damaged(segment: ReceiptSegment, what: str, readable: int) -> ReceiptsDamaged:
    details: dict[str, object] = {
        "path": segment.path,
        "first": segment.first,
        "last": segment.last,
        "readable_until": readable,
    }
    return ReceiptsDamaged(what, where=segment.path, remedy=_REMEDY, details=details)


def _follows(receipt: Receipt, update: int, tip: Digest | None) -> bool:
    return receipt.update == update + 1 and tip in {None, receipt.previous}


def _facts(receipt: Receipt) -> dict[str, Any]:
    return {name: getattr(receipt, name) for name in _FIELDS if name not in _OUTSIDE}


def _chained(facts: dict[str, Any]) -> Digest:
    return canonical.digest(facts)


def _line(receipt: Receipt) -> bytes:
    return canonical.dump({name: getattr(receipt, name) for name in _FIELDS}) + b"\n"
