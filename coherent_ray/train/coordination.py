"""A rank's line to the coordinator actor: acknowledge, withdraw, and report without waiting.

Only acknowledging waits, and it waits behind training. Progress is sent at most every
`REPORT_EVERY_S` seconds and its answer (a wish to save or to stop) is looked at when it happens to
be there, so the update path never waits for the actor.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.read_back import Reply, reply_from_json
from coherent_ray.errors import ClusterError
from coherent_ray.train import coordinators

REPORT_EVERY_S = 0.25

#: Bits of the wishes that travel with the reduction's counts.
WISH_SAVE = 1
WISH_STOP = 2
_BITS = {"none": 0, "save": WISH_SAVE, "stop": WISH_STOP | WISH_SAVE}


class Line:
    """One rank's line. `wish` and `report` are for the training thread."""

    def __init__(self, run_id: str, attempt: int, rank: int) -> None:
        handle = coordinators.find(run_id)
        if handle is None:
            raise ClusterError(
                f"run {run_id!r} has no coordinator",
                remedy="it was stopped while the workers started; run again",
            )
        self._handle = handle
        self._attempt = attempt
        self._rank = rank
        self._sent_at = 0.0
        self._answer: Any = None
        self._wish = 0

    def acknowledge(self, word: Acknowledgement) -> Reply:
        """Hand in that a shard is durable, and wait for what the coordinator replies."""
        return reply_from_json(ray.get(self._handle.acknowledge.remote(records.dump(word))))

    def withdraw(self, number: int, reason: str) -> None:
        """Say that this rank will never acknowledge a generation; does not wait."""
        self._handle.withdraw.remote(self._attempt, number, self._rank, reason)

    def report(self, progress: dict[str, Any], *, now: bool = False) -> None:
        """Send progress, unless the last is too young or still on its way.

        Args:
            progress: JSON values.
            now: Send in any case.
        """
        self._look()
        young = time.monotonic() - self._sent_at < REPORT_EVERY_S
        if not now and (young or self._answer is not None):
            return
        self._answer = self._handle.report.remote(progress)
        self._sent_at = time.monotonic()

    def stand(self, ranks: int, update: int, phase: str) -> None:
        """Tell where this rank is; does not wait. For the beacon's thread."""
        self._handle.stand.remote(self._attempt, self._rank, ranks, [update, phase])

    def take_wish(self) -> int:
        """Return what is wished of the training, as bits. A wish to save is returned once."""
        self._look()
        wish = self._wish
        self._wish &= WISH_STOP
        if self._wish:
            self._wish |= WISH_SAVE
        return wish

    def _look(self) -> None:
        if self._answer is None:
            return
        ready, _ = ray.wait([self._answer], timeout=0)
        if not ready:
            return
        answer, self._answer = self._answer, None
        try:
            self._wish |= _BITS[ray.get(answer)["wish"]]
        except ray.exceptions.RayError:
            return  # progress is worth nothing once it is old
