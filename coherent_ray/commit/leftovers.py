"""Leftovers: which files under a root may go, given what the log says. Reads, and changes nothing.

Everything is decided by name and by the log. What has a name of ours and still means something
stays without a word; what has none is foreign, and is only ever reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import GenerationKey, History
from coherent_ray.commit.holds import Held
from coherent_ray.commit.inventory import DIRECTORIES, generation_of, item_of
from coherent_ray.commit.manifest import generation_directory
from coherent_ray.commit.retention import can_never_be_published
from coherent_ray.commit.sharing import Shared, Sharing
from coherent_ray.errors import ManifestDamaged
from coherent_ray.storage.base import Entry, Storage
from coherent_ray.storage.housekeeping import Housekeeping

_GENERATIONS = "generations"


@dataclass(slots=True)
class Leftovers:
    """What a survey found."""

    files: list[Entry] = field(default_factory=list)
    """May go, in this order."""
    held: list[Held] = field(default_factory=list)
    """Live holds that keep files of retired generations from going."""
    shared: list[Entry] = field(default_factory=list)
    """Files of retired generations that stay, since others refer to them, in order of path."""
    unknown: list[str] = field(default_factory=list)
    """Generations of which nobody can tell what they refer to: so no retired shard goes."""
    foreign: list[Entry] = field(default_factory=list)
    """Not ours, in order of path."""
    directories: list[str] = field(default_factory=list)
    """Where temporary files of ours may lie."""
    emptied: list[str] = field(default_factory=list)
    """Directories that may go once they are empty."""


def survey(
    storage: Storage,
    generations: Generations,
    history: History,
    doomed: Collection[GenerationKey],
    held: Sequence[Held],
    *,
    sharing: Sharing | None = None,
    whole_root: bool = False,
) -> Leftovers:
    """Look through the run's directories.

    Args:
        storage: The run's root.
        generations: Its generations.
        history: Its commit log.
        doomed: The generations that are retired.
        held: Every hold, looked at after the last of them was retired.
        sharing: Reads what generations refer to; None: a new one.
        whole_root: Report foreign files of the whole root, not only of our directories.

    Raises:
        StorageError: The storage could not be asked.
    """
    found = Leftovers()
    in_the_way = [hold for hold in held if not hold.expired and hold.generation in doomed]
    waiting = {hold.generation for hold in in_the_way}
    for hold in held:
        if hold.expired:
            found.files.append(Entry(hold.path, 0))
    shared = (sharing or Sharing(generations)).of(history, set(doomed) - waiting)
    found.unknown = shared.unknown
    for key, entries in _by_generation(storage, found).items():
        if key in doomed:
            if key in waiting:
                found.held += [hold for hold in in_the_way if hold.generation == key]
                continue
            named = _named(generations, history, key)
            _take(found, _unshared(found, entries, shared), named)
        elif can_never_be_published(history, key):
            _take(found, entries, None)
        elif whole_root and (publish := history.publish_of(*key)):
            found.foreign += generations.unnamed(publish)
    _segments(storage, history, found)
    _foreign(storage, history, found, whole_root=whole_root)
    _directories(storage, history, doomed, waiting, found)
    return found


def _by_generation(storage: Storage, found: Leftovers) -> dict[GenerationKey, list[Entry]]:
    """Return the files of each generation; what has no name of ours is noted as foreign."""
    grouped: dict[GenerationKey, list[Entry]] = {}
    for entry in storage.list(_GENERATIONS):
        item = item_of(entry.path)
        if item is None or item.generation is None:
            found.foreign.append(entry)
        else:
            grouped.setdefault(item.generation, []).append(entry)
    return grouped


def _named(generations: Generations, history: History, key: GenerationKey) -> set[str] | None:
    """Return the files that a published generation's manifest names; None: it cannot be read."""
    publish = history.publish_of(*key)
    assert publish is not None
    try:
        manifest = generations.manifest(publish)
    except ManifestDamaged:
        # Only its name is left to tell whose a file is.
        return None
    return {publish.manifest, *(shard.path for shard in manifest.shards)}


def _unshared(found: Leftovers, entries: list[Entry], shared: Shared) -> list[Entry]:
    """Return the files of a retired generation that nobody refers to.

    Its manifest stays with the last of its shards: it says what these are.
    """
    shards = [entry for entry in entries if not entry.path.endswith("/manifest.json")]
    stay = [entry for entry in shards if entry.path in shared.paths or shared.unknown]
    if stay:
        stay += [entry for entry in entries if entry not in shards]
    found.shared += stay
    return [entry for entry in entries if entry not in stay]


def _take(found: Leftovers, entries: list[Entry], named: set[str] | None) -> None:
    """Take a generation's files: shards first, the manifest, which names them, last."""
    mine = [entry for entry in entries if named is None or entry.path in named]
    found.foreign += [entry for entry in entries if entry not in mine]
    found.files += sorted(mine, key=lambda entry: entry.path.endswith("/manifest.json"))


def _segments(storage: Storage, history: History, found: Leftovers) -> None:
    """Find the receipts that no publish names, and none ever will.

    Those of retired generations stay: the history of a run is told by all of them.
    """
    named = _published_segments(history)
    for entry in storage.list("receipts"):
        if entry.path in named:
            continue
        item = item_of(entry.path)
        if item is None or item.generation is None or history.publish_of(*item.generation):
            found.foreign.append(entry)
        elif can_never_be_published(history, item.generation):
            found.files.append(entry)


def _foreign(storage: Storage, history: History, found: Leftovers, *, whole_root: bool) -> None:
    named = _published_segments(history)
    for directory in [""] if whole_root else ["holds"]:
        found.foreign += [
            entry
            for entry in storage.list(directory)
            if item_of(entry.path) is None and entry.path not in named
        ]
    found.foreign = sorted(set(found.foreign), key=lambda entry: entry.path)


def _published_segments(history: History) -> set[str]:
    return {publish.receipts.path for publish in history.publishes if publish.receipts}


def _directories(
    storage: Storage,
    history: History,
    doomed: Collection[GenerationKey],
    waiting: Collection[GenerationKey],
    found: Leftovers,
) -> None:
    found.directories += DIRECTORIES
    if not isinstance(storage, Housekeeping):
        return
    for key in _generation_keys(storage):
        directory = generation_directory(*key)
        found.directories.append(directory)
        over = key in doomed or can_never_be_published(history, key)
        if over and key not in waiting:
            found.emptied.append(directory)


def _generation_keys(storage: Housekeeping) -> Iterator[GenerationKey]:
    for name in storage.directories(_GENERATIONS):
        key = generation_of(name)
        if key is not None:
            yield key
