"""The cadence: at which boundaries all ranks save, and where a save that is due is left out.

`checkpoint.every_updates` needs no word: every rank counts. What a clock decides (`every_seconds`,
`every: auto`) rank 0 decides alone, and what depends on a rank's own save (`on_busy: skip`) that
rank: each says so with the bits that travel with the reduction's counts, and all ranks do what the
union of the bits says. So they save at the same boundary, without one message more. No bit changes
what an update computes.

The interval of ``auto`` is Daly's [1]_: with a cost of C seconds a save and M seconds from one
failure to the next, and x = C / 2M, it is ``sqrt(2 C M) (1 + sqrt(x) / 3 + x / 9) - C`` where
C < 2M, and M elsewhere. C is what training loses: its stall but for waiting, and how much longer
updates take beside the save. M is ``(prior + seconds trained) / (1 + failures)``: the prior counts
as one failure in its length, and what the run itself has seen outweighs it in time. The interval is
never shorter than a save takes to be durable, for there is one in flight at most.

.. [1] J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
   Future Generation Computer Systems 22 (2006), eq. 37.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Protocol

from coherent_ray.commit.timings import About, Choice, Loss, Why
from coherent_ray.config.sections import Checkpoint
from coherent_ray.train.failures import Past
from coherent_ray.train.pace import Pace
from coherent_ray.train.saving import Saved
from coherent_ray.train.wishes import BUSY, DUE, WISH_LEAVE, WISH_SAVE, WISH_STOP

#: Seconds until the first save of a run of which nothing was measured.
FIRST_S = 30.0
#: What `checkpoint.mtbf_s` is where the user says nothing.
MTBF_S = 86_400.0
#: Saves whose cost counts, the newest ones.
_COUNTED = 5
#: A change of the interval that is told again, as a factor.
_NEWS = 1.25


class Saves(Protocol):
    """What the cadence must know of this rank's saves."""

    @property
    def saving(self) -> bool:
        """Whether a save is in flight."""

    @property
    def patient(self) -> bool:
        """Whether one is in flight that nobody has to give up."""

    @property
    def landed(self) -> Saved | None:
        """The newest save whose fate is known."""


def interval_of(cost_s: float, mtbf_s: float) -> float:
    """Return the best seconds between the ends of two saves.

    Args:
        cost_s: Seconds that a save costs training.
        mtbf_s: Seconds from one failure to the next, more than 0.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


class Cadence:
    """One rank's. For the training thread."""

    def __init__(
        self,
        options: Checkpoint,
        rank: int,
        saves: Saves,
        past: Past | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin before the first update.

        Args:
            options: The configuration's checkpoint section.
            rank: This rank.
            saves: Its saves.
            past: What earlier attempts have seen; for rank 0, where the interval is chosen.
            clock: Seconds, never going back.
        """
        self._options = options
        self._rank = rank
        self._saves = saves
        self._past = past or Past()
        self._clock = clock
        self._pace = Pace(clock)
        self._since: float | None = None
        self._stalls: deque[float] = deque(maxlen=_COUNTED)
        self._losses: deque[float] = deque(maxlen=_COUNTED)
        self._durables: deque[float] = deque(maxlen=_COUNTED)
        self._last: Saved | None = None
        self._name = ""
        self._told_s = 0.0
        self._news: list[str] = []
        self.skipped = 0
        """Saves of this attempt that were due and left out."""

    def begins(self) -> None:
        """Take in that an update begins."""
        if self._since is None:
            self._since = self._clock()
        self._pace.begins(beside=self._saves.saving)

    def ended(self) -> None:
        """Take in that an update has ended."""
        self._pace.ended()

    def bits(self) -> int:
        """Return what this rank's vote says of the cadence."""
        bits = BUSY if self._options.on_busy == "skip" and self._saves.patient else 0
        interval = self._interval() if self._rank == 0 else None
        if interval is not None and self._since is not None:
            bits |= DUE if self._clock() - self._since >= interval else 0
        return bits

    def why(self, update: int, wishes: int, *, last: bool) -> Why | None:
        """Return why all ranks save after an update; None: they do not.

        Args:
            update: Its number.
            wishes: The union of all ranks' bits.
            last: Whether it is the last of the run.
        """
        must: tuple[tuple[object, Why], ...] = (
            (wishes & WISH_STOP, "stop"),
            (last, "end"),
            (wishes & WISH_LEAVE, "leave"),
            (wishes & WISH_SAVE, "asked"),
        )
        for wanted, why in must:
            if wanted:
                return why
        apart = self._options.updates_apart
        if not (update % apart == 0 if apart else wishes & DUE):
            return None
        if wishes & BUSY:
            self.skipped += 1
            self._since = self._clock()
            return None
        return "due"

    def news(self) -> list[str]:
        """Return what the user should know of the interval, each sentence once."""
        told, self._news = self._news, []
        return told

    def about(self, why: Why) -> About | None:
        """Return what rank 0 tells of the save that begins now; None: this is another."""
        if self._rank != 0:
            return None
        lost = self._pace.lost()
        before = Loss(self._name, *lost) if lost and self._name else None
        return About(why, self._pace.trained_s, before, self.choice())

    def saved(self, name: str, stall_s: float) -> None:
        """Take in that a save has begun.

        Args:
            name: The generation's.
            stall_s: Seconds that training stood still for it, but for waiting for the one before.
        """
        self._count_loss()
        self._stalls.append(stall_s)
        self._name = name
        self._since = self._clock()
        self._pace.saved()

    def lost(self) -> tuple[str, float] | None:
        """Return the save of which it is known what was lost beside it, and seconds; or None."""
        lost = self._pace.lost()
        return (self._name, lost[0]) if lost and self._name and not self._saves.saving else None

    def choice(self) -> Choice | None:
        """Return the interval that is chosen now, and why; None: the user has fixed it."""
        if self._options.every is None:
            return None
        prior = self._options.mtbf_s or MTBF_S
        watched = self._past.trained_s + self._pace.trained_s
        mtbf = (prior + watched) / (1 + self._past.failures)
        cost, durable = self._cost(), self._durable()
        best = FIRST_S if cost is None else interval_of(cost, mtbf)
        interval = max(best, durable or 0.0)
        return Choice(interval, cost, durable, mtbf, prior, self._past.failures, watched)

    def _interval(self) -> float | None:
        """Return the seconds between two saves; None: no clock decides."""
        if self._options.every_seconds is not None:
            return self._options.every_seconds
        choice = self.choice()
        if choice is None:
            return None
        if choice.cost_s is not None and not _alike(choice.interval_s, self._told_s):
            self._told_s = choice.interval_s
            self._news.append(choice.in_words())
        return choice.interval_s

    def _count_loss(self) -> None:
        lost = self._pace.lost()
        if lost and self._name:
            self._losses.append(max(lost[0], 0.0))

    def _cost(self) -> float | None:
        """Return what a save costs training; None: nothing was measured yet."""
        if not self._stalls:
            return self._past.cost_s
        lost = self._pace.lost()
        running = [max(lost[0], 0.0)] if lost and not self._saves.saving else []
        losses = [*self._losses, *running]
        return median(self._stalls) + (median(losses) if losses else 0.0)

    def _durable(self) -> float | None:
        landed = self._saves.landed
        if landed is not None and landed is not self._last and landed.fate.kind == "published":
            self._last = landed
            self._durables.append(landed.durable_s)
        return median(self._durables) if self._durables else self._past.durable_s


def _alike(one: float, other: float) -> bool:
    return other > 0 and 1 / _NEWS <= one / other <= _NEWS
