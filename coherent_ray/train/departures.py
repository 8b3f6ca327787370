"""Departures: which ranks were told to leave, why, and whether they left in time.

The coordinator's side. Who tells is the rank itself (a signal) or Ray (its node is drained); `left`
is the ranks' word that a generation of the boundary they leave at is published. An attempt that is
over without that word was cut off: the generation before stands, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coherent_ray.commit.fates import name_ranks

#: Why, as people read it, before how many.
RESIZED = "there is room"


class Departures:
    """Of the newest attempt that ranks were heard of."""

    def __init__(self) -> None:
        self._attempt = 0
        self._homes: dict[int, str] = {}
        self._leave: dict[str, Any] | None = None

    def lives(self, attempt: int, rank: int, node: str) -> None:
        """Take down on which node a rank runs; a newer attempt replaces all."""
        if attempt < self._attempt:
            return
        if attempt > self._attempt:
            self._attempt, self._homes = attempt, {}
        self._homes[rank] = node

    def told(
        self,
        attempt: int,
        ranks: list[int],
        why: str,
        seconds: float | None,
        resized: int | None = None,
    ) -> bool:
        """Take down that ranks were told to leave.

        Args:
            attempt: Theirs.
            ranks: They.
            why: In words.
            seconds: That are left; None: nobody said.
            resized: How many there will be instead; None: nobody said.

        Returns:
            Whether that is news.
        """
        leave = self._leave
        if attempt < self._attempt or not ranks:
            return False
        if leave is None or leave["attempt"] != attempt:
            self._leave = {
                "attempt": attempt, "ranks": sorted(ranks), "why": why, "seconds": seconds,
                "left": None, "resized": resized,
            }  # fmt: skip
            return True
        leave["ranks"] = sorted({*leave["ranks"], *ranks})
        return False

    def drained(self, nodes: Mapping[str, float | None], why: str) -> bool:
        """Take down which nodes are drained; returns whether a rank lives on one: that is news."""
        ranks = [rank for rank, node in self._homes.items() if node in nodes]
        left = [nodes[self._homes[rank]] for rank in ranks]
        seconds = min((s for s in left if s is not None), default=None)
        return self.told(self._attempt, ranks, why, seconds)

    def resized(self, attempt: int, ranks: int) -> bool:
        """Take down that all ranks leave for a group of another size; returns whether it is news.

        Args:
            attempt: The newest.
            ranks: How many there will be.
        """
        homes = list(self._homes) if attempt == self._attempt else []
        return self.told(attempt, homes, RESIZED, None, ranks)

    def leaves(self, attempt: int) -> bool:
        """Return whether ranks of an attempt were told to leave."""
        return self._leave is not None and self._leave["attempt"] == attempt

    def left(self, attempt: int, generation: str | None) -> None:
        """Take down that the group has left, and what it published; None: it could not."""
        if self._leave is not None and self._leave["attempt"] == attempt:
            self._leave["left"] = generation or ""

    def summary(self) -> dict[str, Any] | None:
        """Return ``attempt``, ``ranks``, ``why``, ``seconds``, ``left`` and ``resized``.

        None: nobody leaves. ``left``: the generation; empty: it failed; None: nothing was heard of
        it.
        """
        return dict(self._leave) if self._leave is not None else None


def told_in_words(leave: Mapping[str, Any]) -> str:
    """Return that ranks were told to leave, for people."""
    if leave.get("resized"):
        return (
            f"{leave['why']} for {leave['resized']} workers instead of {len(leave['ranks'])}: they "
            "publish one more generation and start again"
        )
    seconds = leave["seconds"]
    within = f" within {seconds:.0f} s" if seconds is not None else ""
    were = "was" if len(leave["ranks"]) == 1 else "were"
    return (
        f"{name_ranks(leave['ranks'])} {were} told to leave{within} ({leave['why']}): the workers "
        "publish one more generation and start again where there is room"
    )


def end_in_words(leave: Mapping[str, Any], latest: str | None) -> str:
    """Return how a departure ended whose workers are gone, for people.

    Args:
        leave: A `Departures.summary`.
        latest: The newest published generation.
    """
    if leave["left"]:
        return f"the workers left with {leave['left']}; they start again"
    who = name_ranks(leave["ranks"])
    stands = f"{latest} stands, and what came after it is trained again" if latest else (
        "none is published yet, and the training begins again"
    )  # fmt: skip
    if leave["left"] is not None:
        return f"{who} had to leave, and the generation could not be saved: {stands}"
    seconds = leave["seconds"]
    had = f" within {seconds:.0f} s" if seconds is not None else ""
    return (
        f"{who} had to leave{had} ({leave['why']}), and that was too short: the workers were gone "
        f"before a generation was published; {stands}"
    )
