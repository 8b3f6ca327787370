"""A rank's line to the coordinator actor: acknowledge, withdraw, and report without waiting.

Only acknowledging waits, and it waits behind training. Progress is sent at most every
`REPORT_EVERY_S` seconds, places by the beacon's thread, and the answers (a wish to save, to stop or
to leave) are looked at when they happen to be there, so the update path never waits for the actor.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
from ray.exceptions import RayError

from coherent_ray.commit import manifest as records
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.read_back import Reply, reply_from_json
from coherent_ray.errors import ClusterError
from coherent_ray.train import coordinators
from coherent_ray.train.wishes import Wish, Wishes

REPORT_EVERY_S = 0.25
#: Seconds that the last word of a group that leaves may take to arrive.
_LAST_WORD_S = 5.0
#: Seconds that the beacon waits to hear what is wished.
_ANSWER_S = 0.5


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
        self._node = str(ray.get_runtime_context().get_node_id())
        self._sent_at = 0.0
        self._answer: Any = None
        self._wishes = Wishes()

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
        self._answer = self._look(self._answer)
        young = time.monotonic() - self._sent_at < REPORT_EVERY_S
        if not now and (young or self._answer is not None):
            return
        told = {**progress, "settled": self._wishes.settled}
        self._answer = self._handle.report.remote(told)
        self._sent_at = time.monotonic()

    def stand(self, ranks: int, update: int, phase: str) -> None:
        """Tell where this rank is, and hear what is wished. For the beacon's thread."""
        place = [update, phase, self._node]
        answer = self._handle.stand.remote(self._attempt, self._rank, ranks, place)
        with contextlib.suppress(RayError):  # the next word is answered, too
            self._wishes.hear(ray.get(answer, timeout=_ANSWER_S))

    def wish(self) -> Wish:
        """Return what is wished of the training."""
        self._answer = self._look(self._answer)
        return self._wishes.now()

    def settle(self, tokens: tuple[int, ...]) -> None:
        """Take in which wishes to save a vote has brought to all ranks."""
        self._wishes.settle(tokens)

    def leave(self, why: str) -> None:
        """Wish that the group leaves, since this process must end; tells the coordinator."""
        self._wishes.leave()
        self._handle.leave.remote(self._attempt, self._rank, why)

    def left(self, generation: str | None) -> None:
        """Say that the group leaves now, with a generation or without one; waits a moment."""
        with contextlib.suppress(RayError):
            ray.get(self._handle.left.remote(self._attempt, generation), timeout=_LAST_WORD_S)

    def _look(self, answer: Any) -> Any:
        """Take in an answer, if it is there; returns it if it is not."""
        if answer is None:
            return None
        ready, _ = ray.wait([answer], timeout=0)
        if not ready:
            return answer
        with contextlib.suppress(RayError):  # what was said is worth nothing once it is old
            self._wishes.hear(ray.get(answer))
        return None
