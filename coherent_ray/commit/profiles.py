"""Profiles: where the time of each published generation went. Notes, and nobody's source of truth.

``timings/g12-a3.json`` is written by the coordinator behind the publish: what each rank has said
of itself, and its own part. It serves people, and the cadence that is chosen by measure. It is
never believed: one that is missing (the coordinator died in between), torn or forged changes no
generation, and no receipt tells of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from statistics import median
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from coherent_ray.commit.events import Key
from coherent_ray.commit.inspection import unreadable_here
from coherent_ray.commit.manifest import (
    FORMAT,
    Acknowledgement,
    Count,
    Format,
    Positive,
    dump,
    load,
)
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.timings import PARTS, About, Seconds, Timings
from coherent_ray.errors import AlreadyExists, NotFound, StorageError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.bounded import TooLong, read_bounded

DIRECTORY = "timings"
#: A longer file is not read.
_BYTES = 64 * 2**10
_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class Part:
    """One time, over all ranks."""

    median_s: Seconds
    longest_s: Seconds
    rank: Count
    """Whose the longest is."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class Profile:
    """Where the time of one generation's save went."""

    format: Format
    generation: Annotated[str, Field(max_length=64)]
    """``g12-a3``."""
    update: Count
    ranks: Positive
    parts: dict[str, Part]
    """By the names of `Timings`; empty where no rank has told."""
    acknowledged_s: Seconds
    """From the first acknowledgement to the last."""
    checked_s: Seconds
    """Until the storage had shown every shard."""
    appended_s: Seconds
    """For the record that publishes."""
    published_s: Seconds
    """From the first acknowledgement until that record was durable."""
    about: About | None
    """What rank 0 has told besides."""


def path_of(name: str) -> str:
    """Return where the profile of a generation lies, relative to the run's root."""
    return f"{DIRECTORY}/{name}.json"


def write_profile(storage: Storage, profile: Profile) -> None:
    """Store a profile, if that can be done; the one of a generation that has one stays."""
    try:
        storage.create(path_of(profile.generation), dump(profile))
    except (AlreadyExists, StorageError):
        return  # only a note


def read_profile(storage: Storage, name: str) -> Profile | None:
    """Return a generation's profile; None where there is none that can be read.

    Args:
        storage: The run's root.
        name: The generation, ``g12-a3``.

    Raises:
        StorageError: The storage could not be asked.
    """
    try:
        profile = load(Profile, read_bounded(storage, path_of(name), _BYTES))
    except (NotFound, TooLong, ValueError):
        return None
    except StorageError as error:
        if not unreadable_here(error):
            raise
        return None
    return profile if profile.generation == name else None


@plain_dataclass(slots=True)
class _Open:
    """A generation that is not settled yet."""

    first: float
    total: int
    ranks: dict[int, Timings] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


class Timekeeper:
    """The coordinator's: when what happened to the generations that are not settled yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none.

        Args:
            clock: Seconds, never going back.
        """
        self._clock = clock
        self._open: dict[Key, _Open] = {}

    def acknowledged(self, ack: Acknowledgement) -> None:
        """Take down that a rank has acknowledged, and what it tells of its times."""
        key, fresh = Key(ack.attempt, ack.number), _Open(self._clock(), ack.ranks)
        found = self._open.setdefault(key, fresh)
        if ack.timings is not None:
            found.ranks[ack.rank] = ack.timings

    def checked(self, key: Key, begun: float) -> None:
        """Take down that the storage has shown every shard."""
        if found := self._open.get(key):
            found.times["acknowledged_s"] = max(begun - found.first, 0.0)
            found.times["checked_s"] = self._clock() - begun

    def published(self, body: PublishBody, begun: float) -> Profile | None:
        """Return the profile of a generation that was just published; None: it was settled."""
        found = self._open.get(Key(body.attempt, body.number))
        if found is None:
            return None
        now = self._clock()
        first = found.ranks.get(0)
        return Profile(
            format=FORMAT,
            generation=body.name,
            update=body.update,
            ranks=found.total,
            parts=_parts(found.ranks),
            acknowledged_s=found.times.get("acknowledged_s", 0.0),
            checked_s=found.times.get("checked_s", 0.0),
            appended_s=now - begun,
            published_s=now - found.first,
            about=first.about if first else None,
        )

    def settled(self, key: Key) -> None:
        """Forget a generation whose fate is known."""
        self._open.pop(key, None)


def _parts(ranks: Mapping[int, Timings]) -> dict[str, Part]:
    parts = {}
    for name in PARTS if ranks else ():
        times = {rank: getattr(told, name) for rank, told in ranks.items()}
        slowest = max(sorted(times), key=times.__getitem__)
        parts[name] = Part(median(times.values()), times[slowest], slowest)
    return parts
