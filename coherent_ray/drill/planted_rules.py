"""Planted bugs in the machine and in the log's rules: each is found by a property of a world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coherent_ray.commit.ballot import Checked, Staged, Verified
from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import Action, Key
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.history import History, Standing
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.sharing import Shared, Sharing
from coherent_ray.drill.exploration import explore
from coherent_ray.drill.patching import Patch, planted
from coherent_ray.drill.planted import answer_first, any_attempt, never, no_fence
from coherent_ray.drill.world import Bounds, word_of

#: Worlds among which a planted bug must be found.
MOST = 6000


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule that is left out."""

    name: str
    found_by: str
    bounds: Bounds
    patches: tuple[Patch, ...]


def find(rule: Rule) -> str | None:
    """Return the property by which a bug is found; None: it is not."""
    with planted(rule.patches):
        return explore(rule.bounds, MOST, finish=False).broken


def _counted_twice(original: Callable[..., Fate | None]) -> Callable[..., Fate | None]:
    def add(stage: Staged, ack: Acknowledgement) -> Fate | None:
        if ack.rank in stage.votes and stage.missing:
            stage.votes[stage.missing[0]] = stage.votes[ack.rank]
        return original(stage, ack)

    return add


def _last_one_guessed(original: Callable[..., Fate | None]) -> Callable[..., Fate | None]:
    def add(stage: Staged, ack: Acknowledgement) -> Fate | None:
        fate = original(stage, ack)
        if len(stage.missing) == 1 and ack.rank == 0:
            original(stage, word_of(stage.missing[0], *stage.key, stage.ranks))
        return fate

    return add


def _old_ones_welcome(original: Any) -> Callable[[Coordinator, Key], Fate | None]:
    def known(machine: Coordinator, key: Key) -> Fate | None:
        if key in machine._published:
            return machine._published_fate(key)
        return machine._refused.get(key)

    return known


def _fence_first(original: Callable[..., Fate | None]) -> Callable[..., Fate | None]:
    def known(machine: Coordinator, key: Key) -> Fate | None:
        if key.attempt < machine.attempt:
            return machine._fenced_fate(key)
        return original(machine, key)

    return known


def _unwritten(original: Callable[..., list[Action]]) -> Callable[..., list[Action]]:
    def write(machine: Coordinator, key: Key, verified: Verified) -> list[Action]:
        original(machine, key, verified)
        return machine._manifest_written(key)

    return write


def _at_every_word(original: Callable[..., list[Action]]) -> Callable[..., list[Action]]:
    def repeated(machine: Coordinator, key: Key, stage: Any, ack: Acknowledgement) -> list[Action]:
        return machine._settle(key, "failed", "it was said before")

    return repeated


def _all_there(original: Any) -> property:
    return property(lambda stage: True)


def _all_well(original: Callable[..., Any]) -> Callable[[Checked], Verified | Fate | None]:
    def decide(stage: Checked, new: int | None = None) -> Verified | Fate | None:
        read = {rank: replace(word, problems=()) for rank, word in stage.read.items()}
        result: Verified | Fate | None = original(replace(stage, read=read))
        return result

    return decide


_REPEATED: tuple[Patch, ...] = (
    (History, "record_of", never(None)),
    (Standing, "_refuse_publish", any_attempt),
)
#: Two attempts, the second of which refers to what the first has published; one is given up.
_PRUNED = Bounds(
    ranks=1, attempts=2, crashes=0, losses=0, doubles=0, timeouts=0, refers=True, prunes=1
)
RULES: tuple[Rule, ...] = (
    Rule(
        "an acknowledgement is counted twice",
        "nothing_fails_without_a_cause",
        Bounds(attempts=1, crashes=0, losses=0, doubles=1),
        ((Staged, "add", _counted_twice),),
    ),
    Rule(
        "the last rank's word is guessed",
        "nothing_is_decided_before_the_last_word",
        Bounds(attempts=1, crashes=0, losses=0, doubles=0),
        ((Staged, "add", _last_one_guessed),),
    ),
    Rule(
        "an acknowledgement of an old attempt is accepted",
        "a_fenced_generation_is_not_worked_on",
        Bounds(crashes=0, losses=0, doubles=0),
        ((Coordinator, "_known", _old_ones_welcome),),
    ),
    Rule(
        "the fence is asked before the log",
        "an_answered_fate_never_changes",
        Bounds(ranks=1, crashes=0, losses=0, doubles=1),
        ((Coordinator, "_known", _fence_first),),
    ),
    Rule(
        "a fate is answered before the append",
        "an_answered_fate_never_changes",
        Bounds(attempts=1, crashes=0, losses=0, doubles=0),
        ((Coordinator, "_manifest_written", answer_first),),
    ),
    Rule(
        "the manifest is left out",
        "what_is_published_is_whole",
        Bounds(attempts=1, crashes=0, losses=0, doubles=0),
        ((Coordinator, "_write", _unwritten),),
    ),
    Rule(
        "a word that comes again while its generation is checked fails it",
        "nothing_fails_without_a_cause",
        Bounds(attempts=1, crashes=0, losses=0, doubles=1),
        ((Coordinator, "_repeated", _at_every_word),),
    ),
    Rule(
        "the manifest does not wait for the last read-back",
        "nothing_is_written_down_unread",
        Bounds(attempts=1, crashes=0, losses=0, doubles=0, reads_back=True),
        ((Checked, "complete", _all_there),),
    ),
    Rule(
        "what was read back is not looked at",
        "what_is_published_is_what_was_acknowledged",
        Bounds(attempts=1, crashes=0, losses=0, doubles=0, reads_back=True, flips=1),
        ((Checked, "decide", _all_well),),
    ),
    Rule(
        "a publish record is not looked for before it is written",
        "a_generation_is_published_once",
        Bounds(attempts=1, crashes=1, losses=0, doubles=0),
        _REPEATED,
    ),
    Rule(
        "the log lets a fenced attempt publish",
        "a_fenced_attempt_publishes_nothing",
        Bounds(ranks=1, crashes=0, losses=0, doubles=0),
        ((Standing, "_refuse_publish", any_attempt), (CommitLog, "_check", no_fence)),
    ),
    Rule(
        "the log lets a generation refer to a retired one",
        "what_is_published_is_whole",
        _PRUNED,
        ((Standing, "_refuse_base", never(None)),),
    ),
    Rule(
        "a prune deletes what others refer to",
        "what_is_published_is_whole",
        _PRUNED,
        ((Sharing, "of", never(Shared())),),
    ),
)
