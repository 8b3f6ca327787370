"""Sharing: the files of given-up generations that must stay, since kept ones refer to them.

Why it is enough to look at the generations that are kept *now*: a generation may only refer to
files of its base, or to those that the base refers to, and the log refuses to publish one whose
base is retired. A prune reads the log to its end after its own `retire` records. Whatever is
published behind that end rests on a generation that is live there, or on one that came later still;
so step by step it refers to nothing but files of these, which this prune has counted, and new ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import GenerationKey, History
from coherent_ray.errors import ManifestDamaged


@dataclass(slots=True)
class Shared:
    """What kept generations refer to."""

    paths: set[str] = field(default_factory=set)
    """Files of other generations."""
    unknown: list[str] = field(default_factory=list)
    """Generations whose manifest is damaged: nobody can tell what they refer to."""


class Sharing:
    """Reads what generations refer to, each once. For one thread at a time."""

    def __init__(self, generations: Generations) -> None:
        """Make a view; nothing is read yet.

        Args:
            generations: The run's.
        """
        self._generations = generations
        self._known: dict[GenerationKey, set[str]] = {}

    def of(self, history: History, gone: Collection[GenerationKey]) -> Shared:
        """Return what must stay.

        Args:
            history: The commit log, read to its end after the last `retire`.
            gone: The generations that are retired, and that no reader holds.

        Raises:
            StorageError: The storage could not be asked.
        """
        found = Shared()
        self._known = {key: paths for key, paths in self._known.items() if key not in gone}
        if not gone:
            return found
        for publish in history.publishes:
            key = publish.number, publish.attempt
            if publish.base is None or key in gone:
                continue
            try:
                if key not in self._known:
                    self._known[key] = self._generations.manifest(publish).files
            except ManifestDamaged:
                found.unknown.append(publish.name)
                continue
            found.paths |= self._known[key]
        return found
