"""Findings: what the last scrub of each generation came to. A note, and nobody's source of truth.

``scrub.json`` lies beside the log for people, for dashboards, and for the coordinator that scrubs
next, who goes on where the last one was. It is never believed: whoever must know whether a
generation is whole reads it. A file that is missing, torn or forged makes a scrub come early or
late by one round, and that is all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.commit.inspection import unreadable_here
from coherent_ray.commit.manifest import FORMAT, Count, Format, dump, load
from coherent_ray.errors import Damage, NotFound, StorageError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.bounded import TooLong, read_bounded

PATH = "scrub.json"
#: Of one generation: damages that are noted, and tensors of each. `verify` tells all.
MOST_DAMAGES = 8
MOST_TENSORS = 8
#: A longer file is not read.
_BYTES = 16 * 2**20

_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class Fault:
    """One thing that does not hold."""

    where: str
    """The file."""
    what: str
    facts: dict[str, Any]
    """As the `details` of a `Damage`: kind, and where known rank, block and tensors."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class Finding:
    """What one scrub of one generation came to."""

    generation: Annotated[str, Field(max_length=64)]
    """``g12-a3``."""
    at: str
    """When it was read to its end: ISO 8601, UTC, by the coordinator's clock. For people."""
    faults: tuple[Fault, ...]
    """The first ones; empty: every byte held what its digest says."""
    more: Count
    """Faults that are not told."""

    @property
    def whole(self) -> bool:
        """Whether nothing was wrong."""
        return not self.faults

    def words(self) -> str:
        """Return it as one sentence."""
        if self.whole:
            return f"{self.generation} is whole"
        first = self.faults[0]
        others = len(self.faults) + self.more - 1
        more = f"; and {others:,} more fault{'s' if others > 1 else ''}" if others else ""
        return f"{self.generation} is damaged: {first.where}: {first.what}{more}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return dict(TypeAdapter(Finding).dump_python(self, mode="json"))

    def age_s(self, now: datetime) -> float | None:
        """Return seconds since then; None where clocks or the file make no sense."""
        try:
            age = (now - datetime.fromisoformat(self.at)).total_seconds()
        except (ValueError, TypeError):
            return None
        return age if age >= 0 else None


@dataclass(frozen=True, slots=True, config=_STRICT)
class _File:
    format: Format
    generations: tuple[Finding, ...]


def finding_of(generation: str, damages: Sequence[Damage], now: datetime) -> Finding:
    """Return what a scrub came to.

    Args:
        generation: Its name.
        damages: All that is wrong with it.
        now: When.
    """
    told = tuple(_fault(damage) for damage in damages[:MOST_DAMAGES])
    at = now.astimezone(UTC).isoformat(timespec="seconds")
    return Finding(generation, at, told, max(0, len(damages) - MOST_DAMAGES))


def finding_from_json(value: dict[str, Any]) -> Finding:
    """Return the finding that `Finding.to_json` gave.

    Raises:
        ValueError: The value is none.
    """
    return TypeAdapter(Finding).validate_json(canonical.dump(value))


def read_findings(storage: Storage) -> dict[str, Finding]:
    """Return the note, by generation; nothing where there is none that can be read.

    Raises:
        StorageError: The storage could not be asked.
    """
    try:
        file = load(_File, read_bounded(storage, PATH, _BYTES))
    except (NotFound, TooLong, ValueError):
        return {}
    except StorageError as error:
        if not unreadable_here(error):
            raise
        return {}
    return {finding.generation: finding for finding in file.generations}


def write_findings(storage: Storage, findings: Iterable[Finding]) -> None:
    """Replace the note.

    Raises:
        StorageError: The storage failed.
    """
    storage.replace(PATH, dump(_File(FORMAT, tuple(findings))))


def _fault(damage: Damage) -> Fault:
    facts = dict(damage.details)
    if isinstance(tensors := facts.get("tensors"), list):
        facts["tensors"] = tensors[:MOST_TENSORS]
    return Fault(damage.where, damage.what, facts)
