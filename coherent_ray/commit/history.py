"""History: what the records of a commit log mean, taken together. No I/O.

`Standing.refusal` holds the protocol's rules, once: the log asks it before it writes a record, and
again for each record that it reads, so a rule that a writer broke is found by every reader.

A generation is *live* when it is published and not retired; *latest* is the live generation that
was published last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coherent_ray.commit.records import (
    AttemptBody,
    Body,
    PinBody,
    PublishBody,
    Record,
    RetireBody,
    kind_of,
)

GenerationKey = tuple[int, int]
"""A generation's number and attempt."""


class RecordRefused(ValueError):
    """A record does not follow from those before it; `seq` is its number."""

    def __init__(self, seq: int, reason: str) -> None:
        super().__init__(reason)
        self.seq = seq


@dataclass(slots=True)
class Standing:
    """What the records so far allow next: the rules, in one place."""

    run_id: str | None = None
    attempt: int = 0
    newest: PublishBody | None = None
    """What was published last, retired or not."""
    published: dict[GenerationKey, PublishBody] = field(default_factory=dict)
    retired: set[GenerationKey] = field(default_factory=set)
    pins: dict[GenerationKey, bool] = field(default_factory=dict)
    opened: dict[str, AttemptBody] = field(default_factory=dict)
    """By token."""
    whole: bool = True
    """Whether it began at the first record: else an old generation may be one not heard of."""

    def copy(self) -> Standing:
        """Return an independent copy."""
        return Standing(
            self.run_id,
            self.attempt,
            self.newest,
            dict(self.published),
            set(self.retired),
            dict(self.pins),
            dict(self.opened),
            self.whole,
        )

    def says(self, body: Body) -> bool:
        """Return whether this was said and holds, so that saying it again would change nothing."""
        match body:
            case AttemptBody():
                return self.opened.get(body.token) == body
            case PublishBody():
                return self.published.get((body.number, body.attempt)) == body
            case RetireBody():
                return (body.number, body.attempt) in self.retired
            case PinBody():
                return self.pins.get((body.number, body.attempt)) == body.pinned

    def refusal(self, body: Body) -> str | None:
        """Return why this cannot be said next; None: it can."""
        match body:
            case AttemptBody():
                return self._refuse_attempt(body)
            case PublishBody():
                return self._refuse_publish(body)
            case RetireBody() | PinBody():
                return self._refuse_mark(body)

    def apply(self, body: Body) -> None:
        """Take in what was said; the caller has asked `refusal`."""
        match body:
            case AttemptBody():
                self.run_id, self.attempt = body.run_id, body.attempt
                self.opened[body.token] = body
            case PublishBody():
                self.newest = self.published[body.number, body.attempt] = body
            case RetireBody():
                self.retired.add((body.number, body.attempt))
            case PinBody():
                self.pins[body.number, body.attempt] = body.pinned

    def _refuse_attempt(self, body: AttemptBody) -> str | None:
        if body.attempt <= self.attempt:
            return f"attempt {body.attempt} cannot open after attempt {self.attempt}"
        if body.token in self.opened:
            return f"token {body.token!r} has opened attempt {self.opened[body.token].attempt}"
        if self.run_id not in {None, body.run_id}:
            return f"an attempt of run {body.run_id!r} cannot open in run {self.run_id!r}"
        return None

    def _refuse_publish(self, body: PublishBody) -> str | None:
        if body.attempt != self.attempt:
            return f"{body.name} cannot be published while attempt {self.attempt} is open"
        if (body.number, body.attempt) in self.published:
            return f"{body.name} is published already, with other content"
        # An older state that arrives late must not become latest. From one attempt to the next
        # numbers may fall: a resume that fell back goes on from there.
        newest = self.newest
        if newest and newest.attempt == body.attempt and newest.number > body.number:
            return f"{body.name} cannot be published after {newest.name}"
        return self._refuse_base(body)

    def _refuse_base(self, body: PublishBody) -> str | None:
        """Say why a generation cannot refer to another one's files: they may be gone."""
        if body.base is None:
            return None
        if body.base.key not in self.published:
            return f"{body.name} refers to {body.base.name}, which was never published"
        if body.base.key in self.retired:
            return f"{body.name} refers to {body.base.name}, which is retired"
        return None

    def _refuse_mark(self, body: RetireBody | PinBody) -> str | None:
        key = (body.number, body.attempt)
        if key not in self.published and self.whole:
            return f"{body.name} was never published"
        if key in self.retired:
            return f"{body.name} is retired already"
        if isinstance(body, RetireBody) and self.pins.get(key):
            return f"{body.name} is pinned, so it cannot be retired"
        return None


@dataclass(frozen=True, slots=True)
class History:
    """Every record from the first up to some point, and what follows from them.

    Or of a long log its end alone (`of_end`), which begins at the publish of a live generation:
    enough to know the attempt, the latest generation and what comes next.
    """

    records: tuple[Record, ...] = ()
    attempts: tuple[AttemptBody, ...] = ()
    """In log order; their numbers grow."""
    publishes: tuple[PublishBody, ...] = ()
    """In log order, retired ones too."""
    standing: Standing = field(default_factory=Standing, repr=False, compare=False)
    omitted: int = 0
    """Records before the first of these: 0 unless this is the end of a log alone."""

    @classmethod
    def of_end(cls, records: Sequence[Record], run_id: str) -> History:
        """Return what the end of a log tells, of which the beginning was not read.

        Args:
            records: The first one is the publish of a generation that the others do not retire.
            run_id: Whose log it is.

        Raises:
            RecordRefused: The first one publishes nothing, or a record does not follow from those
                before it.
        """
        first = records[0]
        if not isinstance(first.body, PublishBody):
            raise RecordRefused(first.seq, "it publishes nothing, and a log's end begins with it")
        standing = Standing(run_id, first.body.attempt, whole=False)
        standing.apply(first.body)
        begun = cls((first,), (), (first.body,), standing, first.seq - 1)
        return begun.extended(records[1:])

    @classmethod
    def of(cls, records: Iterable[Record]) -> History:
        """Return the history that some records tell, the first one first.

        Raises:
            RecordRefused: A record does not follow from those before it.
        """
        return cls().extended(records)

    @property
    def seq(self) -> int:
        """The last record's number; 0 where there is none."""
        return self.omitted + len(self.records)

    @property
    def run_id(self) -> str | None:
        """Whose history it is; None where there is none."""
        return self.standing.run_id

    @property
    def attempt(self) -> int:
        """The attempt that is open; 0 where none ever was."""
        return self.standing.attempt

    @property
    def retired(self) -> frozenset[GenerationKey]:
        """The generations that were given up."""
        return frozenset(self.standing.retired)

    @property
    def pinned(self) -> frozenset[GenerationKey]:
        """The generations that retention must keep."""
        return frozenset(key for key, pinned in self.standing.pins.items() if pinned)

    @property
    def live(self) -> tuple[PublishBody, ...]:
        """The generations that are published and not retired, in log order."""
        return tuple(p for p in self.publishes if not self._is_retired(p))

    @property
    def latest(self) -> PublishBody | None:
        """The live generation that was published last."""
        return next((p for p in reversed(self.publishes) if not self._is_retired(p)), None)

    @property
    def next_number(self) -> int:
        """The number of the generation that comes next: higher than any that was published."""
        return max((p.number for p in self.publishes), default=0) + 1

    def publish_of(self, number: int, attempt: int) -> PublishBody | None:
        """Return what published a generation, retired or not; None where nothing did."""
        return self.standing.published.get((number, attempt))

    def record_of(self, body: Body) -> Record | None:
        """Return the record that says this already and still holds, or None.

        It makes appending idempotent for a writer that has lost its memory.
        """
        if not self.standing.says(body):
            return None
        return next((record for record in reversed(self.records) if record.body == body), None)

    def refusal(self, body: Body) -> str | None:
        """Return why this cannot be the next record's body; None: it can."""
        return self.standing.refusal(body)

    def successor(self, body: Body, writer: str) -> Record:
        """Return the record that would say this next."""
        previous = self.records[-1].digest if self.records else None
        return Record(
            seq=self.seq + 1, previous=previous, writer=writer, kind=kind_of(body), body=body
        )

    def extended(self, records: Iterable[Record]) -> History:
        """Return the history with more records at its end.

        Raises:
            RecordRefused: A record does not follow from those before it.
        """
        all_records, standing = list(self.records), self.standing.copy()
        attempts, publishes = list(self.attempts), list(self.publishes)
        previous = all_records[-1].digest if all_records else None
        for record in records:
            _check_link(record, self.omitted + len(all_records) + 1, previous)
            if reason := standing.refusal(record.body):
                raise RecordRefused(record.seq, reason)
            standing.apply(record.body)
            all_records.append(record)
            if isinstance(record.body, AttemptBody):
                attempts.append(record.body)
            elif isinstance(record.body, PublishBody):
                publishes.append(record.body)
            previous = record.digest
        return History(
            tuple(all_records), tuple(attempts), tuple(publishes), standing, self.omitted
        )

    def _is_retired(self, publish: PublishBody) -> bool:
        return (publish.number, publish.attempt) in self.standing.retired


def _check_link(record: Record, seq: int, previous: str | None) -> None:
    if record.seq != seq:
        raise RecordRefused(seq, f"it says that it is record {record.seq}")
    if record.previous != previous:
        raise RecordRefused(seq, "it does not name the record before it: the chain is broken")
