"""Extras: the files under a run's root that no record of the log leads to. Pure; no I/O.

Told by name and by the log alone. Most are harmless: a killed attempt leaves files, and a prune
collects them. But an attempt is in the log before any file of it exists, so a file of an attempt
that the log does not know says that the log has lost its end, or that the file came from another
run. Of what lies in the directory of a live generation, its manifest knows which files are its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from coherent_ray.commit.history import GenerationKey, History
from coherent_ray.commit.inventory import Item, generation_of, item_of
from coherent_ray.commit.retention import can_never_be_published, key_of
from coherent_ray.errors import Damage
from coherent_ray.storage.base import Entry

Sort = Literal["leftover", "temporary", "unpublished", "foreign", "unknown"]
"""
| sort | what it is |
|---|---|
| leftover | of a retired generation, or of a save that never was published: a prune collects it |
| temporary | a file that somebody is, or was, writing: a prune collects it in an hour |
| unpublished | of the open attempt, and not published: a save is under way, or was given up |
| foreign | no name that this software gives, or none that its generation's manifest knows |
| unknown | of ours by name, but of an attempt or a place that the log has never had |
"""


@dataclass(frozen=True, slots=True)
class Extra:
    """A file that no record leads to."""

    sort: Sort
    entry: Entry

    def damage(self) -> Damage:
        """Return it as a fault, which an unknown one is."""
        return Damage(
            "the commit log knows nothing that this file can be of",
            where=self.entry.path,
            remedy="The log was there before any file of it: either records are missing at its "
            "end, and must be put back from a copy, or the file is another run's: move it away.",
            details={"kind": "unknown", "found": self.entry.size},
        )


def extras(
    entries: Iterable[Entry],
    history: History,
    unnamed: Collection[str] = (),
    shared: Collection[str] = (),
) -> Iterator[Extra]:
    """Yield the files that no record leads to.

    Args:
        entries: Every file under the root, listed *before* the log was read: so the log knows the
            attempt of each, however busy the run is.
        history: The commit log.
        unnamed: Paths in directories of live generations that their manifests do not name.
        shared: Paths to which live generations refer, in whatever directory.
    """
    homes = {path.rpartition("/")[0] for path in shared}
    live = {key_of(publish) for publish in history.live}
    segments = {p.receipts.path for p in history.publishes if p.receipts}
    for entry in entries:
        if entry.path in unnamed:
            yield Extra("foreign", entry)
            continue
        if entry.path in segments or _directory_of(entry.path) in live:
            continue
        home, _, name = entry.path.rpartition("/")
        if entry.path in shared or (home in homes and name == "manifest.json"):
            continue
        item = item_of(entry.path)
        sort = "foreign" if item is None else _sort(history, entry.path, item)
        if sort is not None:
            yield Extra(sort, entry)


def _sort(history: History, path: str, item: Item) -> Sort | None:
    """Return what a file with a name of ours is; None: it has its place in the run."""
    if item.kind == "record":
        number = int(path.rpartition("/")[2].removesuffix(".json"))
        return None if 1 <= number <= history.seq else "unknown"
    if item.generation is None or item.kind == "hold":
        return None
    if item.generation[1] > history.attempt:
        return "unknown"
    published = history.publish_of(*item.generation) is not None
    if item.kind == "timings":
        return None if published else "unknown"  # nothing is timed that was not published
    if item.kind == "receipts" and published:
        return "unknown"  # the record that published the generation names another segment
    over = published or can_never_be_published(history, item.generation)
    return "leftover" if over else "unpublished"


def _directory_of(path: str) -> GenerationKey | None:
    """Return the generation in whose directory a file lies."""
    names = path.split("/")
    return generation_of(names[1]) if names[0] == "generations" and len(names) > 2 else None
