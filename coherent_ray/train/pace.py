"""The pace: how long updates take while a save is in flight, and while none is.

The difference is what a save costs training behind the snapshot: cores, memory and disks that it
shares. It is an estimate, and none where it cannot be one: the usual update is the median of those
that began with no save in flight, and there must be `ENOUGH` of them. All ranks wait for one
another in each update, so one rank's pace is the group's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

#: Updates beside no save that make a usual one.
ENOUGH = 3
#: Of which the newest count.
_REMEMBERED = 64


class Pace:
    """One rank's. For the training thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin before the first update.

        Args:
            clock: Seconds, never going back.
        """
        self._clock = clock
        self._first: float | None = None
        self._begun: float | None = None
        self._beside = False
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED)
        self._disturbed: list[float] = []

    @property
    def trained_s(self) -> float:
        """Seconds since the first update began."""
        return 0.0 if self._first is None else self._clock() - self._first

    def begins(self, *, beside: bool) -> None:
        """Take in that an update begins.

        Args:
            beside: Whether a save is in flight.
        """
        self._begun, self._beside = self._clock(), beside
        self._first = self._begun if self._first is None else self._first

    def ended(self) -> None:
        """Take in that it has ended, before anything is done at its boundary."""
        if self._begun is None:
            return
        lasted, self._begun = self._clock() - self._begun, None
        (self._disturbed if self._beside else self._quiet).append(lasted)

    def saved(self) -> None:
        """Take in that a save has begun: what was lost is counted from here on.

        In the middle of an update the rest of that one belongs to neither kind.
        """
        self._disturbed.clear()
        self._begun = None

    def lost(self) -> tuple[float, int] | None:
        """Return seconds lost beside the last save so far, and in how many updates.

        None where it cannot be told: no whole update began beside it, or too few beside none. By
        chance it may be below 0.
        """
        if not self._disturbed or len(self._quiet) < ENOUGH:
            return None
        usual = median(self._quiet)
        return sum(self._disturbed) - len(self._disturbed) * usual, len(self._disturbed)
