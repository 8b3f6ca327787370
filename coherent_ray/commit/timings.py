"""Timings: where one rank's time went in one save. They ride on its acknowledgement.

They are no part of what ranks must agree on, of a manifest, or of a receipt: two runs of one job
have other timings and the same history.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Why = Literal["due", "asked", "stop", "leave", "end"]
"""Why a generation was saved: the cadence, somebody's wish, or one of three ways to end."""

_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class Choice:
    """The interval that ``checkpoint.every: auto`` has chosen, and why."""

    interval_s: Seconds
    """From one save to the next."""
    cost_s: Seconds | None
    """What one save costs training; None: nothing was measured yet."""
    durable_s: Seconds | None
    """From one snapshot until it is published: there is no shorter interval."""
    mtbf_s: Seconds
    """From one failure to the next."""
    prior_s: Seconds
    """What that would be without a failure that was seen, or a second that was trained."""
    failures: Annotated[int, Field(ge=0)]
    """That the run's attempts ended with."""
    watched_s: Seconds
    """That the run has trained."""

    def in_words(self) -> str:
        """Return what was chosen, and why, in one sentence."""
        why = "nothing was measured yet"
        if self.cost_s is not None:
            why = f"one costs training {_text(self.cost_s)}"
        if self.durable_s is not None and self.interval_s <= self.durable_s:
            why += f" and takes {_text(self.durable_s)} to be durable"
        failures = f"{self.failures:,} failure{'' if self.failures == 1 else 's'}"
        return (
            f"a save every {_text(self.interval_s)}: {why}, and the run is taken to fail once in "
            f"{_text(self.mtbf_s)} (a prior of {_text(self.prior_s)}, and {failures} in "
            f"{_text(self.watched_s)} of training)"
        )


@dataclass(frozen=True, slots=True, config=_STRICT)
class Loss:
    """What training lost behind a save that is over, beyond standing still for its snapshot."""

    generation: Annotated[str, Field(max_length=64)]
    """The save's."""
    lost_s: Annotated[float, Field(allow_inf_nan=False)]
    """Seconds that the updates beside it took longer than usual; below 0 by chance."""
    updates: Annotated[int, Field(ge=1)]
    """That began while it was in flight."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class About:
    """What rank 0 tells of a save besides its own times."""

    why: Why
    trained_s: Seconds
    """Since the attempt's first update began."""
    before: Loss | None = None
    """Of the save before, which was not known when that one was acknowledged."""
    choice: Choice | None = None
    """The cadence, where it was chosen."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class Timings:
    """One rank's. Writing and hashing go on at the same time."""

    stall_s: Seconds
    """That training stood still: the next three, and what lies between."""
    wait_s: Seconds
    """For the save before to land."""
    fingerprint_s: Seconds
    """Of the whole replica, but for this rank's part where that is read from the copy."""
    snapshot_s: Seconds
    """The copy of this rank's part."""
    write_s: Seconds
    hash_s: Seconds
    """Of the shard's blocks, and of the fingerprint what this rank's part adds: in threads of their
    own."""
    sync_s: Seconds
    """Until the shard was durable under its name."""
    about: About | None = None
    """Of rank 0."""


#: The times of a rank that are compared between ranks, in order.
PARTS = ("stall_s", "wait_s", "fingerprint_s", "snapshot_s", "write_s", "hash_s", "sync_s")


def _text(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
