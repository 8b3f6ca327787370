"""What the driver's display shows: rank 0's latest numbers, sent without waiting."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coherent_ray.train.boundaries import Boundaries
from coherent_ray.train.coordination import Line
from coherent_ray.train.saving import describe

if TYPE_CHECKING:
    from coherent_ray.train.update import Update

#: Weight of the newest update in the moving rate.
_NEWEST = 0.2
#: Notes of an attempt that are kept for whoever looks.
_NOTES = 16

logger = logging.getLogger(__name__)


class Progress:
    """Rank 0's progress; every other rank's does nothing."""

    def __init__(self, line: Line, attempt: int, rank: int, total: int, done: int) -> None:
        self._line = line
        self._attempt = attempt
        self._rank = rank
        self._total = total
        self._resumed_at = done
        self._last = time.monotonic()
        self._rate = 0.0
        self._is_poisoned = False
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self.metrics: dict[str, Any] = {"update": done, "updates": total}
        """Of the last update; what Ray Train gets at the end."""

    def note(self, notes: Iterable[str]) -> None:
        """Take in what the user should know of this attempt."""
        for note in notes:
            self._notes.append(note)
            if self._rank == 0:
                logger.warning(note)

    def not_finite(self, update: int, what: str) -> None:
        """Take in what is not finite in an update; empty: nothing. The first of a row is told."""
        if what and not self._is_poisoned:
            self.note(
                [f"update {update} is not finite: {what}; training goes on (on_nonfinite: go_on)"]
            )
        self._is_poisoned = bool(what)

    def update(self, update: Update, tip: str, boundaries: Boundaries, *, ended: bool) -> None:
        """Take in a finished update.

        Args:
            update: It.
            tip: Digest of its receipt.
            boundaries: For the newest generation and its stall.
            ended: Whether it is the last of this attempt.
        """
        now = time.monotonic()
        rate = update.examples / max(now - self._last, 1e-9)
        self._last = now
        self._rate = rate if self._rate == 0.0 else self._rate + _NEWEST * (rate - self._rate)
        self.metrics = {
            "attempt": self._attempt,
            "update": update.number,
            "updates": self._total,
            "epoch": update.epoch,
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "examples_per_s": self._rate,
            "generation": boundaries.published,
            "receipt": tip,
            "resumed_at": self._resumed_at,
        }
        if self._rank == 0:
            boundaries.note_loss()
            self.note(boundaries.cadence.news())
            lost, choice = boundaries.lost_s, boundaries.cadence.choice()
            shown = {
                **self.metrics,
                "saves": [describe(s) | {"lost_s": lost.get(s.name)} for s in boundaries.saves],
                "stalls_s": list(boundaries.stalls_s),
                "skipped": boundaries.cadence.skipped,
                "cadence": asdict(choice) | {"text": choice.in_words()} if choice else None,
                "saving": boundaries.saving,
                "ended": ended,
                "notes": list(self._notes),
            }
            self._line.report(shown, now=ended)
