"""Failures: how often a run has failed so far, as its own log and profiles tell.

An attempt that ended otherwise than by its own will (the end of the run, a wish to stop or to
leave) has failed. How long it had trained by its last generation stands in that one's profile, by
a monotonic clock: no time of day is asked, and none is compared between machines. An attempt that
published nothing, or nothing with a profile, counts for nothing: it may never have trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from coherent_ray.commit.history import History
from coherent_ray.commit.profiles import Profile, read_profile
from coherent_ray.storage.base import Storage

#: Attempts that are looked at, the newest ones.
ATTEMPTS = 32
_BY_ITS_OWN_WILL = {"stop", "leave", "end"}


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier attempts have seen."""

    failures: int = 0
    trained_s: float = 0.0
    """Seconds, until the last generation of each."""
    cost_s: float | None = None
    """What the newest save with a profile cost training; None: nobody knows."""
    durable_s: float | None = None
    """How long it took from its snapshot until it was published."""


def past_of(storage: Storage, history: History, attempt: int) -> Past:
    """Return what the attempts before one have seen.

    Args:
        storage: The run's root.
        history: Its commit log.
        attempt: The one that begins now.

    Raises:
        StorageError: The storage could not be asked.
    """
    last = {p.attempt: p.name for p in history.publishes if p.attempt < attempt}
    names = [last[number] for number in sorted(last)[-ATTEMPTS:]]
    found = [profile for name in names if (profile := read_profile(storage, name))]
    told = [(profile, profile.about) for profile in found if profile.about is not None]
    newest = told[-1][0] if told else None
    return Past(
        failures=sum(about.why not in _BY_ITS_OWN_WILL for _, about in told),
        trained_s=sum(about.trained_s for _, about in told),
        cost_s=_cost(newest) if newest else None,
        durable_s=_durable(newest) if newest else None,
    )


def _cost(profile: Profile) -> float:
    before = profile.about.before if profile.about else None
    stall = profile.parts["stall_s"].median_s - profile.parts["wait_s"].median_s
    return max(stall, 0.0) + max(before.lost_s if before else 0.0, 0.0)


def _durable(profile: Profile) -> float:
    own = sum(profile.parts[name].longest_s for name in ("stall_s", "write_s", "sync_s"))
    return own + profile.published_s
