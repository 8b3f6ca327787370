"""Verdicts: the errors in which readers of generations tell what they found. Words only."""

from __future__ import annotations

from coherent_ray.commit.history import History
from coherent_ray.commit.inspection import REMEDY, REMEDY_OF_OLDER
from coherent_ray.commit.manifest import ReceiptSegment
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.references import Reference
from coherent_ray.errors import (
    Damage,
    ManifestDamaged,
    NewerFormat,
    NoGeneration,
    StorageError,
)


def manifest_damaged(publish: PublishBody, kind: str, what: str) -> ManifestDamaged:
    """A manifest is not what the log says."""
    return ManifestDamaged(
        what,
        where=publish.manifest,
        remedy=REMEDY,
        details={"kind": kind, "generation": publish.name},
    )


def newer_manifest(publish: PublishBody, what: str) -> NewerFormat:
    """A manifest was published as it is, by a later version."""
    return NewerFormat(
        what,
        where=publish.manifest,
        remedy="Use the version of coherent-ray that wrote it.",
        details={"kind": "newer", "generation": publish.name},
    )


def receipts_damaged(publish: PublishBody, segment: ReceiptSegment, what: str) -> Damage:
    """The receipts that led to a generation are not what the log says."""
    return Damage(
        f"the receipts of updates {segment.first} to {segment.last} {what}",
        where=segment.path,
        remedy="The state is not affected; put the file back from a copy to have the history.",
        details={"kind": "receipts", "generation": publish.name},
    )


def not_readable(publish: PublishBody, error: StorageError) -> Damage:
    """A file of a generation may not be read by this user, so nobody knows what it holds."""
    return Damage(
        f"it cannot be read: {error.what}",
        where=error.where,
        remedy=error.remedy,
        details={**error.details, "kind": "refused", "generation": publish.name},
    )


def of_older(damage: Damage) -> Damage:
    """The same damage in a generation that is not latest, where another thing is to be done."""
    if damage.remedy != REMEDY:
        return damage
    return type(damage)(
        damage.what, where=damage.where, remedy=REMEDY_OF_OLDER, details=damage.details
    )


def refused(publish: PublishBody, damages: list[Damage]) -> Damage:
    """The first damage, as the refusal to go on with anything older."""
    first = damages[0]
    return type(first)(
        f"{publish.name} is not whole: {first.what}",
        where=first.where,
        remedy="Put the file back from a copy, or set checkpoint.on_damage to 'fall_back'.",
        details={**first.details, "damages": _as_json(damages)},
    )


def _as_json(damages: list[Damage]) -> list[dict[str, object]]:
    return [{"what": d.what, "where": d.where, **d.details} for d in damages]


def none_whole(history: History, skipped: list[Damage]) -> NoGeneration:
    """There is nothing left to fall back to."""
    count = len(history.live)
    what = f"none of {count} published generations is whole" if count else "all are retired"
    return NoGeneration(
        what,
        where=f"run {history.run_id}",
        remedy="Put the files back from a copy, or start a new run under another root.",
        details={"damages": _as_json(skipped)},
    )


def is_meant(publish: PublishBody, wanted: Reference) -> bool:
    """Return whether a reference names this generation, if it names a number at all."""
    return publish.number == wanted.number and wanted.attempt in {None, publish.attempt}


def absent(wanted: Reference, history: History) -> NoGeneration:
    """A generation that a user named is not there."""
    if any(is_meant(publish, wanted) for publish in history.publishes):
        return _no_such(wanted.generation, f"{wanted.generation} is retired", history)
    if not history.live:
        return _no_such(wanted.generation, "there is no published generation", history)
    return _no_such(wanted.generation, f"{wanted.generation} was never published", history)


def no_name(text: str, history: History) -> NoGeneration:
    """What a user typed is no generation's name."""
    return _no_such(text, f"{text!r} is no name of a generation", history)


def _no_such(wanted: str, what: str, history: History) -> NoGeneration:
    names = [publish.name for publish in history.live]
    newest = ", ".join(reversed(names[-5:]))
    return NoGeneration(
        what,
        where=f"run {history.run_id}" if history.run_id else "",
        remedy=f"Choose one that is there; the newest are {newest}." if names else "",
        details={"wanted": wanted, "published": names},
    )
