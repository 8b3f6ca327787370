"""What ``verify --all`` looks at beside the generations: receipts, datasets, files of no record.

None of it is needed to resume, so none of it hides what is found in the generations, and one part
that cannot be looked at hides no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from coherent_ray.cli.output import count_text, error_value, named, show_line, size_text
from coherent_ray.cli.receipts import read_receipts
from coherent_ray.commit.extras import Extra, Sort, extras
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.inventory import DIRECTORIES
from coherent_ray.commit.sharing import Sharing
from coherent_ray.errors import CoherentRayError, ManifestDamaged, ReceiptsDamaged, StorageError
from coherent_ray.storage import Storage
from coherent_ray.storage.base import Entry
from coherent_ray.storage.housekeeping import Housekeeping

#: Files that are listed by name before they are only counted.
_SHOWN = 10
_WORDS: dict[Sort, str] = {
    "leftover": "left over: `prune` collects {}",
    "temporary": "being written, or left by a killed writer: in an hour `prune` collects {}",
    "unpublished": "of the open attempt, not published: a later attempt collects {}",
    "foreign": "not of this run: nothing reads or deletes {}",
}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was found."""

    receipts: CoherentRayError | None
    """What breaks the chain of receipts; None: it is whole."""
    datasets: Sequence[CoherentRayError]
    """What is wrong with the manifests of the run's data."""
    extras: Sequence[Extra]
    """Files that no record of the log leads to, in order of path."""
    unlisted: CoherentRayError | None
    """Why the files could not be listed; None: they were."""

    @property
    def faults(self) -> list[CoherentRayError]:
        """What makes the answer bad. Leftovers and foreign files do not."""
        single = [error for error in (self.receipts, self.unlisted) if error]
        unknown = [extra.damage() for extra in self.extras if extra.sort == "unknown"]
        return [*single, *self.datasets, *unknown]

    def value(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "receipts": error_value(self.receipts) if self.receipts else None,
            "datasets": [error_value(error) for error in self.datasets],
            "extra": [
                {"path": extra.entry.path, "size": extra.entry.size, "sort": extra.sort}
                for extra in self.extras
            ],
            "unlisted": error_value(self.unlisted) if self.unlisted else None,
        }

    def show(self) -> None:
        """Tell it to people."""
        _show("receipts", [self.receipts] if self.receipts else [], "the chain is whole")
        _show("datasets", self.datasets, "as the generations were trained on")
        _show("files", [self.unlisted] if self.unlisted else [], "")
        _show("files", [e.damage() for e in self.extras if e.sort == "unknown"], "")
        for sort, words in _WORDS.items():
            _show_files([extra for extra in self.extras if extra.sort == sort], words)


def look_round(storage: Storage, generations: Generations) -> Surroundings:
    """Look at everything under a run's root that is no live generation's.

    Raises:
        LogDamaged: The log cannot be trusted.
        StorageError: The log could not be read.
    """
    found: list[Extra] = []
    unlisted: CoherentRayError | None = None
    try:
        entries = list(storage.list(""))  # before the log is read: see `extras`
        in_work = _temporaries(storage)
        history = generations.history()
        unnamed = {e.path for publish in history.live for e in generations.unnamed(publish)}
        shared = Sharing(generations).of(history, history.retired)
        found = [*extras(entries, history, unnamed, shared.paths), *in_work]
        found.sort(key=lambda extra: extra.entry.path)
    except StorageError as error:
        unlisted = error
    return Surroundings(
        receipts=_broken_chain(storage),
        datasets=_wrong_datasets(storage, generations),
        extras=found,
        unlisted=unlisted,
    )


def _temporaries(storage: Storage) -> list[Extra]:
    """Return the files that writers have not finished; only some storages have any."""
    if not isinstance(storage, Housekeeping):
        return []
    places = [*DIRECTORIES, "generations", "drivers"]
    places += [f"generations/{name}" for name in storage.directories("generations")]
    found = storage.temporaries(places)
    return [Extra("temporary", Entry(left.path, left.size)) for left in found]


def _broken_chain(storage: Storage) -> CoherentRayError | None:
    try:
        for _ in read_receipts(storage):
            pass
    except (ReceiptsDamaged, StorageError) as error:
        return error
    return None


def _wrong_datasets(storage: Storage, generations: Generations) -> list[CoherentRayError]:
    from coherent_ray.train import datasets  # late: it loads the readers of data files

    trained_on = set()
    for publish in generations.history().live:
        try:
            trained_on.add(generations.manifest(publish).header.plan.dataset_hash)
        except (ManifestDamaged, StorageError):
            continue  # told where the generation is
    try:
        return [*datasets.kept_damages(storage, trained_on)]
    except StorageError as error:
        return [error]


def _show(part: str, faults: Iterable[CoherentRayError], good: str) -> None:
    told = list(faults)
    for fault in told:
        show_line(f"{part}: {named(fault.where)}: {fault.what}", style="bad")
    for remedy in dict.fromkeys(fault.remedy for fault in told if fault.remedy):
        show_line(f"  What to do: {remedy}", style="faint")
    if not told and good:
        show_line(f"{part}: {good}", style="good")


def _show_files(found: Sequence[Extra], words: str) -> None:
    if not found:
        return
    size = size_text(sum(extra.entry.size for extra in found))
    told = words.format("it" if len(found) == 1 else "them")
    show_line(f"{count_text(len(found), 'file')}, {size}, {told}")
    for extra in found[:_SHOWN]:
        show_line(f"  {named(extra.entry.path)} ({size_text(extra.entry.size)})")
    if len(found) > _SHOWN:
        show_line(f"  and {len(found) - _SHOWN:,} more")
