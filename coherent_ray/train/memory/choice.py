"""The choice: which snapshot an attempt may go on from, of all that the keepers hold. Pure.

A snapshot is *whole* when each rank's part is held somewhere, all of one attempt and one update,
with one header and one fingerprint of the replica: ranks that had silently diverged have none in
common. Of these only such count as the commit log allows:

| held is | used |
|---|---|
| of an attempt that this log has not opened: another run's, root's or log's | no |
| of an attempt older than the latest generation's | no: the run went on without it |
| of an update that the latest generation has, too | no: that is what was promised |
| of an attempt whose ranks diverged | no |
| of the newest attempt of those left, its newest update | **yes** |

So the newest attempt decides before the newest update: a later attempt is the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from coherent_ray.commit.history import History
from coherent_ray.train.memory.shelf import Entry
from coherent_ray.train.memory.words import Facts


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole snapshot."""

    facts: Facts
    """Of rank 0; what all ranks have in common counts."""
    holders: tuple[tuple[Entry, ...], ...]
    """By rank, who holds its part."""

    @property
    def name(self) -> str:
        """What it is called: no generation has such a name."""
        return name_of(self.facts.update, self.facts.attempt)


def name_of(update: int, attempt: int) -> str:
    """Return what a snapshot in memory is called."""
    return f"update {update} of attempt {attempt} in memory"


def candidates(entries: Iterable[Entry], history: History, diverged: int = 0) -> list[Choice]:
    """Return the whole snapshots that the log allows, the best first.

    Args:
        entries: All that the keepers hold.
        history: The commit log.
        diverged: The newest attempt whose ranks diverged; 0: none.
    """
    groups: dict[tuple[object, ...], dict[int, dict[str, Entry]]] = defaultdict(dict)
    for entry in entries:
        if refusal(entry.facts, history) is None and entry.facts.attempt > diverged:
            groups[_common(entry.facts)].setdefault(entry.facts.rank, {})[entry.at.name] = entry
    whole = [_whole(group) for group in groups.values()]
    found = [choice for choice in whole if choice is not None]
    return sorted(found, key=lambda c: (c.facts.attempt, c.facts.update, c.name), reverse=True)


def refusal(facts: Facts, history: History) -> str | None:
    """Return why the log does not allow a snapshot; None: it does."""
    opened = history.standing.opened.get(facts.token)
    latest = history.latest
    if facts.run_id != history.run_id:
        return f"it is of run {facts.run_id}"
    if opened is None or opened.attempt != facts.attempt or facts.attempt >= history.attempt:
        return f"the log has opened no such attempt {facts.attempt} before"
    if latest is None:
        return "every generation is retired" if history.publishes else None
    if facts.attempt < latest.attempt:
        return f"{latest.name} is of a later attempt"
    return f"{latest.name} has update {latest.update}" if facts.update <= latest.update else None


def _common(facts: Facts) -> tuple[object, ...]:
    return (
        facts.attempt, facts.token, facts.update, facts.number, facts.ranks,
        facts.header_digest, facts.fingerprint,
    )  # fmt: skip


def _whole(group: dict[int, dict[str, Entry]]) -> Choice | None:
    if sorted(group) != list(range(next(iter(group[min(group)].values())).facts.ranks)):
        return None
    holders = []
    for rank in sorted(group):
        # Copies of one part may have been hashed alike or not: most of them, the first of a tie.
        entries = list(group[rank].values())
        records = [entry.shard for entry in entries]
        common = max(records, key=records.count)
        holders.append(tuple(entry for entry in entries if entry.shard == common))
    return Choice(holders[0][0].facts, tuple(holders))
