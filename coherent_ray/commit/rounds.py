"""Rounds: scrubbing behind the coordinator, in a thread of its own and in nobody's way.

While a rank writes, or a generation waits for its fate, nothing is read; else no more than the
schedule's bytes a second. What goes wrong in it is said, and tried again later. The thread dies
with its process, since nothing that it does must be finished.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from coherent_ray.commit.events import Key
from coherent_ray.commit.findings import Finding
from coherent_ray.commit.history import GenerationKey
from coherent_ray.commit.retention import key_of
from coherent_ray.commit.scrubbing import Schedule, Scrubber
from coherent_ray.errors import CoherentRayError, Interrupted
from coherent_ray.storage.base import Storage

#: Seconds between two looks at whether a save is still under way.
YIELD_S = 0.25
#: Seconds after something went wrong, and between two looks at the log where nothing is due.
RETRY_S = 60.0
LOOK_S = 30.0
#: Seconds that `close` lets the read take that is on its way.
CLOSE_WAIT_S = 3.0

logger = logging.getLogger(__name__)


class Rounds:
    """One run's. `begin`, `published` and `close` are for one thread; they never wait for a read.

    Attributes:
        damaged: The live generations of which the last scrub found that they are not whole.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        attempt: Callable[[], int],
        busy: Callable[[], bool],
        tell: Callable[[str], None],
        doubt: Callable[[GenerationKey], None],
    ) -> None:
        """Remember the schedule; nothing is read before `begin`.

        Args:
            schedule: How often and how fast.
            attempt: Returns the newest attempt that the coordinator knows of.
            busy: Returns whether a save is under way.
            tell: Called with what was found or went wrong, in words.
            doubt: Called with a generation that is damaged.
        """
        self._schedule = schedule
        self._attempt = attempt
        self._busy = busy
        self._tell = tell
        self._doubt = doubt
        self._stop = threading.Event()
        self._free_at = 0.0
        self._scrubber: Scrubber | None = None
        self._thread: threading.Thread | None = None
        self.damaged: tuple[Finding, ...] = ()

    def begin(self, storage: Storage) -> None:
        """Begin to scrub a run's root; a second call changes nothing."""
        if self._thread is not None:
            return
        self._scrubber = Scrubber(storage, self._schedule.every_s, self._pace)
        self._thread = threading.Thread(target=self._run, name="coherent-scrub", daemon=True)
        self._thread.start()

    def published(self, key: Key) -> None:
        """Take in that a generation was published."""
        if self._scrubber is not None:
            self._scrubber.published((key.number, key.attempt))

    def close(self) -> None:
        """End the thread after the read that is on its way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)

    def status(self) -> dict[str, Any]:
        """Return what a progress display shows: ``damaged``, findings as JSON values."""
        return {"damaged": [finding.to_json() for finding in self.damaged]}

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._scrubber is not None
        while not self._stop.is_set():
            wait_s = RETRY_S
            try:
                found = self._scrubber.next(self._attempt())
                self.damaged = tuple(f for f in self._scrubber.findings if not f.whole)
                if found is not None:
                    self._take(key_of(found[0]), found[1])
                    self._scrubber.write_note()
                    continue
                wait_s = min(LOOK_S, max(self._scrubber.wait_s(), YIELD_S))
            except Interrupted:
                return
            except CoherentRayError as error:
                self._tell(f"scrubbing failed: {error}")
            except Exception as error:
                self._tell(f"scrubbing failed: {type(error).__name__}: {error}")
            self._stop.wait(wait_s)

    def _take(self, key: GenerationKey, finding: Finding) -> None:
        if finding.whole:
            logger.info("scrubbed: %s", finding.words())
            return
        self._doubt(key)
        logger.error("scrubbed: %s", finding.words())
        self._tell(f"scrubbed: {finding.words()}")

    def _pace(self, size: int) -> None:
        """Return when so many bytes may be read.

        Raises:
            Interrupted: The rounds are over.
        """
        while not self._stop.is_set():
            wait_s = YIELD_S if self._busy() else self._free_at - time.monotonic()
            if wait_s <= 0:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + size / self._schedule.bytes_per_s
                return
            self._stop.wait(wait_s)
        raise Interrupted("scrubbing was stopped")
