"""Scrubbing: published generations are read again, one at a time, before somebody needs them.

Bits rot while nobody looks, and a damaged generation that is found today can be put back from a
copy, or replaced by the next one; found at the resume it costs training. A `Scrubber` decides which
generation is due, reads every byte of it from the device, and notes what it found. It changes
nothing but its note: what a finding means for a resume or for retention, these find out by reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from coherent_ray.commit.findings import Finding, finding_of, read_findings, write_findings
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import GenerationKey, History
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.retention import key_of
from coherent_ray.storage.base import Storage
from coherent_ray.storage.paced import paced
from coherent_ray.storage.uncached import from_device

#: Bytes a second that are read at most, unless the user chooses.
BYTES_PER_S = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often, and how fast."""

    every_s: float
    """Seconds within which each live generation is read again."""
    bytes_per_s: int
    """Bytes that are read in a second, at most."""

    def __post_init__(self) -> None:
        if self.every_s <= 0 or self.bytes_per_s < 1:
            raise ValueError("a schedule needs seconds and bytes a second above zero")


class Scrubber:
    """One run's. For one thread; `published` may be called from another."""

    def __init__(
        self,
        storage: Storage,
        every_s: float,
        pace: Callable[[int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Make a scrubber; nothing is read yet.

        Args:
            storage: The run's root.
            every_s: Seconds within which each live generation is read again.
            pace: Called with a number of bytes; returns when these may be read.
            clock: Seconds, never going back; it decides what is due.
            now: The time of day, for people; and for what an earlier coordinator has read.
        """
        self._storage = storage
        self._every_s = every_s
        self._clock = clock
        self._now = now
        self._log = CommitLog(storage)
        self._generations = Generations(paced(from_device(storage), pace), self._log)
        self._read_at: dict[GenerationKey, float] = {}
        self._noted: dict[str, Finding] | None = None

    @property
    def findings(self) -> list[Finding]:
        """What is noted of live generations."""
        return list((self._noted or {}).values())

    def published(self, key: GenerationKey) -> None:
        """Take in that a generation was published just now: its round begins."""
        self._read_at[key] = self._clock()

    def next(self, attempt: int) -> tuple[PublishBody, Finding] | None:
        """Read the generation that is due; None: none is, or the run is another's by now.

        Args:
            attempt: The newest that the caller knows of.

        Raises:
            LogDamaged: The log cannot be trusted.
            StorageError: The storage could not be asked; the generation stays due.
        """
        history = self._log.read_on()
        if history.attempt != attempt:
            return None
        publish = self._due(history)
        if publish is None:
            return None
        damages = self._generations.verify(publish)
        self._read_at[key_of(publish)] = self._clock()
        history = self._log.read_on()
        if key_of(publish) in history.retired:
            return None  # pruned while it was read: what is missing is not missed
        finding = finding_of(publish.name, damages, self._now())
        noted = {**self._notes(), finding.generation: finding}
        live_names = [live.name for live in history.live]
        self._noted = {name: noted[name] for name in live_names if name in noted}
        return publish, finding

    def write_note(self) -> None:
        """Let others know what was found.

        Raises:
            StorageError: The storage failed; the next note has all of it.
        """
        write_findings(self._storage, self.findings)

    def wait_s(self) -> float:
        """Return the seconds until something can be due."""
        read_at = list(self._read_at.values())
        oldest = min(read_at, default=self._clock())
        return max(0.0, oldest + self._every_s - self._clock())

    def _due(self, history: History) -> PublishBody | None:
        """Return what was not read for longest and is due; of several never read, the newest."""
        noted = self._notes()
        live = {key_of(publish): publish for publish in history.live}
        for gone in history.retired:
            self._read_at.pop(gone, None)
        now = self._clock()
        for one, publish in live.items():
            if one not in self._read_at:
                self._read_at[one] = now - self._age_s(noted.get(publish.name))
        order = list(live)
        key = min(order, key=lambda key: (self._read_at[key], -order.index(key)), default=None)
        return live[key] if key and now - self._read_at[key] >= self._every_s else None

    def _age_s(self, finding: Finding | None) -> float:
        """Return how long ago a generation was read, as far as is known; at most a round."""
        age = finding.age_s(self._now()) if finding else None
        return self._every_s if age is None else min(age, self._every_s)

    def _notes(self) -> dict[str, Finding]:
        if self._noted is None:
            self._noted = read_findings(self._storage)
        return self._noted
