"""Which generation a start would go on from, found out before anything is started.

What a user is told first ("complete", "resumes at g12-a3") must be what then happens. So the driver
looks at the files and not only at the log, as admission will, and by the same policy. How deep it
looks is a matter of seconds: sizes always; every byte of a run that would be called complete, which
nobody reads again, and of a state so small that it costs no time. A larger state that training goes
on from is left to admission, which reads every byte of it anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.inspection import shard_damage
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Manifest
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.verdicts import none_whole, refused
from coherent_ray.errors import Damage, ManifestDamaged
from coherent_ray.storage.base import Storage
from coherent_ray.storage.sizes import Sizes

#: Bytes of state that are read at any start: about a second.
SOON_READ = 2**30
#: Bytes of state that are read before a run is called complete: about a minute at most.
READ_IF_COMPLETE = 64 * 2**30


@dataclass(frozen=True, slots=True)
class Resumable:
    """The generation to go on from; None: a fresh start."""

    publish: PublishBody | None
    manifest: Manifest | None
    """Its own."""
    notes: tuple[str, ...]
    """What the user should know: what was passed over, and what was not looked at."""


def find(storage: Storage, log: CommitLog, on_damage: str, updates: int) -> Resumable:
    """Return the newest generation that is whole, as far as it is worth looking.

    Args:
        storage: The run's root.
        log: Its commit log; what this view has read and checked is not read again.
        on_damage: ``checkpoint.on_damage``: go on from the one before, or ``refuse``.
        updates: Updates of the whole run; a generation that holds them all is read in full.

    Raises:
        Damage: The newest generation is damaged, and the policy is to refuse.
        NoGeneration: The run published generations, and none is whole or none is left.
        LogDamaged: The log cannot be trusted.
        StorageError: The storage could not be asked.
    """
    history = log.read_on()
    if not history.publishes:
        return Resumable(None, None, ())
    generations = Generations(storage, log)
    skipped: list[Damage] = []
    for publish in reversed(history.live):
        manifest, damages, note = _look(storage, generations, publish, publish.update >= updates)
        if not damages:
            return Resumable(publish, manifest, (*map(passed_over, skipped), *note))
        if (publish.number, publish.attempt) in log.read_on().retired:
            continue  # retired and deleted while it was read
        if on_damage == "refuse":
            raise refused(publish, damages)
        skipped += damages
    raise none_whole(history, skipped)


def passed_over(damage: Damage) -> str:
    """Return in words that a generation was passed over, and what of it is damaged."""
    return f"passed over a damaged generation: {damage.where}: {damage.what}"


def _look(
    storage: Storage, generations: Generations, publish: PublishBody, complete: bool
) -> tuple[Manifest | None, list[Damage], list[str]]:
    """Return its manifest; what is wrong with it; or what the user should know of a whole one."""
    try:
        manifest = generations.manifest(publish)
    except ManifestDamaged as damage:
        return None, [damage], []
    found: list[Damage] = list(_damages(storage, manifest, deep=False))
    if found:
        return manifest, found, []
    size = manifest.header.layout.nbytes
    if size > (READ_IF_COMPLETE if complete else SOON_READ):
        if not complete:
            return manifest, [], []
        told = (
            f"{publish.name} has every file in its full size; {size / 2**30:,.0f} GiB were not "
            "read: `coherent-ray verify` reads every byte"
        )
        return manifest, [], [told]
    return manifest, list(_damages(storage, manifest, deep=True)), []


def _damages(storage: Storage, manifest: Manifest, *, deep: bool) -> Iterator[Damage]:
    sizes = Sizes(storage, manifest.files)
    for shard in manifest.shards:
        yield from shard_damage(storage, manifest.header, shard, deep=deep, sizes=sizes)
