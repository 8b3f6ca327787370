"""The vote: the one small message by which all ranks learn what the update was, and how it went.

Each rank fills its own slots of one float64 vector and leaves the others 0.0, so the sum over ranks
only brings the slots together: no slot's value depends on the order in which a collective adds.
Integers are exact below 2**53. A rank that failed votes too: its failure is a slot, so that no
rank is left waiting in a collective for one that raised.

No collectives here: vectors in, records out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coherent_ray.errors import TrainingFailed
from coherent_ray.train.wishes import TOKENS

#: Wishes are the bits of an integer below ``2 ** WISH_BITS``; what each means is the caller's.
WISH_BITS = 16


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank says."""

    update: int
    contents: int
    """Names what this rank will exchange, below 2**53: all ranks must say the same."""
    losses: Mapping[int, float]
    """Sum of the loss over each lane that this rank carried."""
    counts: Mapping[int, int]
    """Examples or tokens that each lane's sum was over."""
    present: Collection[int]
    """The lanes that brought a gradient."""
    touched: Sequence[bool]
    """For each parameter, whether any lane of this rank brought a gradient for it."""
    wishes: int
    failed: bool
    token: int = 0
    """Of the wish to save, below 2**53; 0: of none."""
    begun: int = 0
    """Buckets whose exchange this rank has begun before the vote."""
    again: bool = False
    """Whether a gradient changed after it was sent, so that all must be exchanged again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks said together; equal on every rank."""

    losses: tuple[float, ...]
    counts: tuple[int, ...]
    present: tuple[bool, ...]
    touched: tuple[bool, ...]
    wishes: int
    """The union of all ranks' wishes."""
    failed: tuple[int, ...]
    """Ranks that failed."""
    updates: tuple[int, ...]
    contents: tuple[int, ...]
    tokens: tuple[int, ...]
    """By rank."""
    begun: int
    """Buckets whose exchange some rank has begun before the vote."""
    again: bool
    """Whether all must be exchanged again."""


@dataclass(frozen=True, slots=True)
class VoteShape:
    """Where everything lies in the vector; equal on every rank."""

    lanes: int
    parameters: int
    ranks: int

    @property
    def length(self) -> int:
        """Items of the vector."""
        return 3 * self.lanes + self.parameters + WISH_BITS + 6 * self.ranks

    def encode(self, ballot: Ballot, rank: int) -> list[float]:
        """Return a rank's vector, `length` float64 items.

        Raises:
            ValueError: A lane, the number of parameters or the wishes are out of range.
        """
        if not 0 <= ballot.wishes < 1 << WISH_BITS:
            raise ValueError(f"wishes {ballot.wishes:#x} do not fit into {WISH_BITS} bits")
        if not 0 <= ballot.token < TOKENS:
            raise ValueError(f"token {ballot.token} is no number below {TOKENS}")
        if len(ballot.touched) != self.parameters:
            raise ValueError(f"{len(ballot.touched)} flags for {self.parameters} parameters")
        # Adding 0.0 makes -0.0 positive, as the sum over ranks would at any rank count but one.
        losses = self._by_lane({lane: loss + 0.0 for lane, loss in ballot.losses.items()})
        counts = self._by_lane({lane: float(count) for lane, count in ballot.counts.items()})
        present = self._by_lane(dict.fromkeys(ballot.present, 1.0))
        touched = [float(flag) for flag in ballot.touched]
        wishes = [float(ballot.wishes >> bit & 1) for bit in range(WISH_BITS)]
        own: list[float] = []
        facts = (ballot.failed, ballot.update, ballot.contents, ballot.token)
        for value in (*facts, ballot.begun, ballot.again):
            slots = [0.0] * self.ranks
            slots[rank] = float(value)
            own += slots
        return losses + counts + present + touched + wishes + own

    def decode(self, values: Sequence[float]) -> Outcome:
        """Return what the sum of all ranks' vectors says."""
        at = 0

        def take(items: int) -> Sequence[float]:
            nonlocal at
            at += items
            return values[at - items : at]

        losses, counts, present = take(self.lanes), take(self.lanes), take(self.lanes)
        touched, wishes = take(self.parameters), take(WISH_BITS)
        failed, updates, contents = take(self.ranks), take(self.ranks), take(self.ranks)
        tokens, begun, again = take(self.ranks), take(self.ranks), take(self.ranks)
        return Outcome(
            losses=tuple(losses),
            counts=tuple(map(int, counts)),
            present=tuple(value > 0 for value in present),
            touched=tuple(value > 0 for value in touched),
            wishes=sum(1 << bit for bit, voters in enumerate(wishes) if voters > 0),
            failed=tuple(rank for rank, value in enumerate(failed) if value > 0),
            updates=tuple(map(int, updates)),
            contents=tuple(map(int, contents)),
            tokens=tuple(map(int, tokens)),
            begun=int(max(begun)),
            again=any(value > 0 for value in again),
        )

    def _by_lane(self, values: Mapping[int, float]) -> list[float]:
        slots = [0.0] * self.lanes
        for lane, value in values.items():
            if not 0 <= lane < self.lanes:
                raise ValueError(f"there is no lane {lane} of {self.lanes}")
            slots[lane] = value
        return slots


def failure(update: int, reasons: Mapping[int, str]) -> TrainingFailed:
    """Return the error that every rank raises when some failed.

    Args:
        update: The update that they failed in.
        reasons: By rank, what happened there; not empty.
    """
    ranks = ", ".join(map(str, reasons))
    first = next(iter(reasons.values()))
    return TrainingFailed(
        f"update {update} failed on rank {ranks}: {first}",
        where=f"rank {ranks}",
        remedy="see the log of the first of these ranks; mend that, and run again",
        details={"update": update, "ranks": {str(rank): text for rank, text in reasons.items()}},
    )


def disagreement(what: str, said: Sequence[int]) -> TrainingFailed:
    """Return the error that names the ranks that do not say what most say.

    Args:
        what: What it is about.
        said: By rank; on a tie the smaller value counts as usual.
    """
    usual = max(sorted(set(said)), key=said.count)
    others = {rank: value for rank, value in enumerate(said) if value != usual}
    ranks = ", ".join(map(str, others))
    return TrainingFailed(
        f"the ranks do not reduce the same {what}: most have {usual}, "
        + ", ".join(f"rank {rank} has {value}" for rank, value in others.items()),
        where=f"rank {ranks}",
        remedy="every rank must take the same updates and freeze the same parameters",
        details={"what": what, "usual": usual, "ranks": {str(r): v for r, v in others.items()}},
    )
