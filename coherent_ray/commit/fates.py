"""A generation's fate: what every rank's acknowledgement call answers, and nothing else.

A fate is a value, because most of its readers are other processes: it crosses Ray as plain JSON and
becomes an error only where somebody asks for it (`Fate.raise_for_error`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.commit.manifest import generation_name
from coherent_ray.errors import Fenced, ReplicaDiverged, SaveFailed

Kind = Literal["published", "failed", "diverged", "fenced"]

#: Ranks that a sentence names before it says how many more there are.
NAMED_RANKS = 16


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class Fate:
    """What became of one generation.

    | kind | the generation is | training |
    |---|---|---|
    | published | in the log, for ever | goes on |
    | failed | not known to be in the log; if it is, it is whole | goes on, to the next save |
    | diverged | not in the log: replicas differ | must stop: its state is no longer one state |
    | fenced | not in the log: a later attempt has opened | must stop: it is no longer the run |
    """

    kind: Kind
    number: int
    attempt: int
    reason: str = ""
    """One or more sentences; empty for a published generation."""
    seq: int | None = None
    """The commit log's record that published it."""
    details: dict[str, Any] = Field(default_factory=dict)
    """Machine-readable facts, JSON values only."""

    @property
    def name(self) -> str:
        """The generation's name as users see it."""
        return generation_name(self.number, self.attempt)

    def to_json(self) -> dict[str, Any]:
        """Return the fate as plain JSON values."""
        return dict(TypeAdapter(Fate).dump_python(self, mode="json"))

    @staticmethod
    def from_json(value: object) -> Fate:
        """Return the fate that `to_json` gave.

        Raises:
            ValueError: The value is not such a fate.
        """
        try:
            return TypeAdapter(Fate).validate_json(canonical.dump(value))
        except ValidationError as error:
            raise ValueError(f"not a fate: {error.errors()[0]['msg']}") from error

    def raise_for_error(self) -> None:
        """Return if the generation is published.

        Raises:
            ReplicaDiverged: The ranks do not hold the same state.
            Fenced: A later attempt has opened.
            SaveFailed: Anything else stood in the way.
        """
        where = f"generation {self.name}"
        match self.kind:
            case "published":
                return
            case "diverged":
                remedy = "resume from the last published generation; look at the ranks named here"
                raise ReplicaDiverged(
                    self.reason, where=where, remedy=remedy, details=dict(self.details)
                )
            case "fenced":
                remedy = "nothing: another process carries the run on; see what started it"
                raise Fenced(self.reason, where=where, remedy=remedy, details=dict(self.details))
            case "failed":
                remedy = "the generation before it is still latest; the next save tries again"
                raise SaveFailed(
                    self.reason, where=where, remedy=remedy, details=dict(self.details)
                )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words: ``rank 3``, ``ranks 3, 4 and 17``, ``ranks 0, 1, ... and 96 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > NAMED_RANKS:
        shown = ", ".join(str(rank) for rank in ranks[:NAMED_RANKS])
        return f"ranks {shown} and {len(ranks) - NAMED_RANKS} more"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def groups_of(values: Mapping[int, object]) -> list[list[int]]:
    """Return the ranks that say the same, the largest group first; rank 0's first among equals."""
    by_value: dict[object, list[int]] = {}
    for rank in sorted(values):
        by_value.setdefault(values[rank], []).append(rank)
    return sorted(by_value.values(), key=lambda group: (-len(group), group[0]))


def against(groups: list[list[int]], thing: str) -> str:
    """Return who differs from whom, as words; of groups that do not agree."""
    odd = sorted(rank for group in groups[1:] for rank in group)
    verb = "has" if len(odd) == 1 else "have"
    # With no majority nobody can say which side is right, and the sentence must not.
    tie = ", and neither is a majority" if len(groups[0]) == len(groups[1]) else ""
    return f"{name_ranks(odd)} {verb} another {thing} than {name_ranks(groups[0])}{tie}"
