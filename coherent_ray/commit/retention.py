"""Retention: which generations go. Pure planning, no I/O.

Only generations that were read and found whole count. A generation is given up only in favour of
newer whole ones that stay, so the newest whole generation is never given up: not by one plan, and
not by any number of plans that are made and carried out at once, each on its own. For suppose one
of them gave it up: it would have had to know a newer whole one.

A plan never guesses: where it depends on a generation that nobody has verified, it says which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from coherent_ray.commit.history import GenerationKey, History
from coherent_ray.commit.records import PublishBody

Reason = Literal["all", "recent", "every", "pinned", "held"]
"""
| reason | a generation stays because |
|---|---|
| all | nothing is given up: no limit is set, or fewer whole generations are there than it says |
| recent | it is one of the newest `keep` whole ones, or newer than the oldest of these |
| every | it is the last whole one of `keep_every` updates |
| pinned | the user has pinned it |
| held | a reader holds it; it goes when the reader is done |
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user wants to keep."""

    keep: int | None = None
    """The newest so many whole generations; None: all."""
    keep_every: int | None = None
    """Besides, for ever, the last generation of each so many updates; None: no more."""

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError("at least one generation must be kept")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError("keep_every must be at least 1 update")


@dataclass(frozen=True, slots=True)
class Kept:
    """A generation that stays."""

    publish: PublishBody
    reason: Reason
    whole: bool | None
    """None: the plan did not depend on it, so nobody has looked."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes and what stays, both in log order."""

    retire: tuple[PublishBody, ...]
    kept: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class Unverified:
    """There is no plan until somebody has found out whether this generation is whole."""

    publish: PublishBody


def plan(
    history: History,
    policy: Policy,
    verdicts: Mapping[GenerationKey, bool],
    held: Collection[GenerationKey] = (),
) -> Plan | Unverified:
    """Decide which live generations are given up.

    Args:
        history: The commit log.
        policy: What the user wants to keep.
        verdicts: Whether a generation is whole, as far as anybody has looked.
        held: The generations that readers hold.

    Returns:
        The plan, or the one generation whose verdict it needs next.
    """
    live = history.live
    oldest = _oldest_recent(live, policy.keep, verdicts)
    if isinstance(oldest, Unverified):
        return oldest
    if oldest is None:
        return Plan((), tuple(Kept(p, "all", verdicts.get(key_of(p))) for p in live))
    reasons: dict[GenerationKey, Reason] = {key_of(p): "recent" for p in live[oldest:]}
    pinned = history.pinned
    for publish in live[:oldest]:
        key = key_of(publish)
        if key in pinned:
            reasons[key] = "pinned"
        elif key in held:
            reasons[key] = "held"
    if policy.keep_every is not None:
        for window in _windows(live, policy.keep_every):
            if all(key_of(p) in reasons for p in window):
                continue
            last = _last_whole(window, verdicts)
            if isinstance(last, Unverified):
                return last
            reasons.setdefault(key_of(last), "every")
    return Plan(
        tuple(p for p in live if key_of(p) not in reasons),
        tuple(
            Kept(p, reasons[key], verdicts.get(key)) for p in live if (key := key_of(p)) in reasons
        ),
    )


def can_never_be_published(history: History, key: GenerationKey) -> bool:
    """Return whether a generation is not published, and no record can ever publish it.

    Its attempt is over, or has published a later one already: the log refuses it for good, so what
    lies in its directory is left over.
    """
    number, attempt = key
    if history.publish_of(number, attempt) is not None:
        return False
    if attempt < history.attempt:
        return True
    newest = history.publishes[-1] if history.publishes else None
    return newest is not None and newest.attempt == attempt and newest.number > number


def key_of(publish: PublishBody) -> GenerationKey:
    """Return a generation's number and attempt."""
    return publish.number, publish.attempt


def _oldest_recent(
    live: Sequence[PublishBody], keep: int | None, verdicts: Mapping[GenerationKey, bool]
) -> int | Unverified | None:
    """Return the index of the oldest of the newest `keep` whole generations.

    None: all stay. What is newer than that one stays too, damaged or not: it may be mended.
    """
    if keep is None or len(live) <= keep:
        return None
    found = 0
    for index in reversed(range(len(live))):
        verdict = verdicts.get(key_of(live[index]))
        if verdict is None:
            return Unverified(live[index])
        found += verdict
        if found == keep:
            return index
    return None


def _windows(live: Sequence[PublishBody], every: int) -> Iterator[list[PublishBody]]:
    """Yield the generations of each `every` updates; one at a multiple ends its window."""
    windows: dict[int, list[PublishBody]] = {}
    for publish in live:
        windows.setdefault(-(-publish.update // every), []).append(publish)
    yield from windows.values()


def _last_whole(
    window: Sequence[PublishBody], verdicts: Mapping[GenerationKey, bool]
) -> PublishBody | Unverified:
    """Return the newest whole generation of a window; the newest where none is whole.

    So a window keeps one for ever, and one that is alone need not be read again and again.
    """
    if len(window) == 1:
        return window[0]
    for publish in reversed(window):
        verdict = verdicts.get(key_of(publish))
        if verdict is None:
            return Unverified(publish)
        if verdict:
            return publish
    return window[-1]
