"""Exhaustive exploration: every world that the protocol can come to within bounds, each one judged.

Breadth first, so that the way to a broken property is a shortest one. The properties are named
functions of one world; liveness is asked of every storage that was met, by letting a run go on
from it where nothing fails any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coherent_ray import canonical
from coherent_ray.commit.records import AttemptBody, PublishBody
from coherent_ray.commit.testing.invariants import Broken, Witness, the_log_chain_holds
from coherent_ray.drill.power_cuts import check_recovery
from coherent_ray.drill.world import Bounds, World
from coherent_ray.storage.testing.memory import MemoryStorage

Property = Callable[[World], str | None]
"""Returns what is wrong with a world; None: nothing."""


def a_generation_is_published_once(world: World) -> str | None:
    """No number of an attempt has two publish records."""
    names = [publish.name for publish in _publishes(world)]
    return next((name for name in names if names.count(name) > 1), None)


def a_fenced_attempt_publishes_nothing(world: World) -> str | None:
    """Every publish record is of the attempt that was open where it stands."""
    attempt = 0
    for record in world.history.records:
        body = record.body
        if isinstance(body, AttemptBody):
            attempt = body.attempt
        elif isinstance(body, PublishBody) and body.attempt != attempt:
            return f"{body.name} while attempt {attempt} is open"
    return None


def what_is_published_is_whole(world: World) -> str | None:
    """Manifest and shards are there before the record, and as long as nothing gives them up.

    Also the files of earlier generations that the manifest refers to, whatever became of these.
    """
    for publish in world.history.live:
        if publish.manifest not in world.files:
            return f"{publish.name} has no manifest"
        shards = canonical.load(world.files[publish.manifest])["shards"]
        needed = [shard["path"] for shard in shards]
        needed += [f["path"] for s in shards if "reuse" in s for f in s["reuse"]["files"]]
        if len(shards) != world.bounds.ranks or not set(needed) <= world.files.keys():
            return f"{publish.name} lacks one of {needed}"
    return None


def an_answered_fate_never_changes(world: World) -> str | None:
    """Published is said of what is in the log; fenced and diverged of what never is."""
    published = {(p.attempt, p.number) for p in _publishes(world)}
    for key, kind in world.told:
        if kind == "published" and key not in published:
            return f"{key} was answered as published, and is not in the log"
        if kind in {"fenced", "diverged"} and key in published:
            return f"{key} was answered as {kind}, and is in the log"
    return None


def nothing_is_decided_before_the_last_word(world: World) -> str | None:
    """A coordinator asks for nothing before every rank has told it of its shard."""
    return next((asked for asked in world.asked if asked.startswith("early")), None)


def a_fenced_generation_is_not_worked_on(world: World) -> str | None:
    """A coordinator that knows of a later attempt asks for nothing on behalf of an older one."""
    return next((asked for asked in world.asked if asked.startswith("fenced")), None)


def nothing_is_written_down_unread(world: World) -> str | None:
    """Where shards are read back, a manifest is asked for when every rank has read."""
    return next((asked for asked in world.asked if asked.startswith("unread")), None)


def what_is_published_is_what_was_acknowledged(world: World) -> str | None:
    """Where shards are read back, a bit that turned on the way is in no published generation."""
    if not world.bounds.reads_back:
        return None
    damaged = world.damaged
    return next((p.name for p in _publishes(world) if (p.attempt, p.number) in damaged), None)


def nothing_fails_without_a_cause(world: World) -> str | None:
    """A generation fails by a time-out or a turned bit, and by nothing that becomes of words."""
    if world.bounds.timeouts:
        failed = (key for key, kind in world.told if kind == "failed")
        return next((str(key) for key in failed if key not in world.damaged), None)
    return None


PROPERTIES: tuple[Property, ...] = (
    a_generation_is_published_once,
    a_fenced_attempt_publishes_nothing,
    what_is_published_is_whole,
    an_answered_fate_never_changes,
    nothing_is_decided_before_the_last_word,
    a_fenced_generation_is_not_worked_on,
    nothing_is_written_down_unread,
    what_is_published_is_what_was_acknowledged,
    nothing_fails_without_a_cause,
)


@dataclass(slots=True)
class Explored:
    """What was met."""

    worlds: int = 0
    moves: int = 0
    storages: int = 0
    """Different storages, from each of which a run was made to go on."""
    broken: str | None = None
    """The first property, or invariant, that did not hold."""
    example: str = ""
    """How it came to that, move by move."""
    complete: bool = False
    """Whether every world within the bounds was met."""
    fates: set[str] = field(default_factory=set)
    """Kinds of fates that were answered somewhere."""


def explore(bounds: Bounds, most: int | None = None, finish: bool = True) -> Explored:
    """Meet every world within bounds, or the nearest ones, until a property does not hold.

    Args:
        bounds: How much may happen.
        most: Stop after so many worlds; None: never.
        finish: Let a run go on from each storage that was met.
    """
    start = World(bounds)
    came: dict[tuple[object, ...], tuple[tuple[object, ...], str] | None] = {start.identity: None}
    queue = deque([start])
    storages: dict[frozenset[tuple[str, bytes]], dict[str, bytes]] = {}
    result = Explored()
    while queue:
        world = queue.popleft()
        result.worlds += 1
        result.fates |= {kind for _, kind in world.told}
        storages.setdefault(frozenset(world.files.items()), world.files)
        if _judged(world, result):
            result.example = _way(came, world.identity)
            return result
        if most is not None and result.worlds >= most:
            break
        here = world.identity
        for what, after in world.next():
            result.moves += 1
            there = after.identity
            if there not in came:
                came[there] = (here, what)
                queue.append(after)
    result.complete = not queue
    if finish:
        _finish(storages, bounds, result)
    return result


def _judged(world: World, result: Explored) -> bool:
    for check in PROPERTIES:
        wrong = check(world)
        if wrong is not None:
            result.broken = f"{check.__name__}"
            return True
    return False


def _finish(
    storages: dict[frozenset[tuple[str, bytes]], dict[str, bytes]],
    bounds: Bounds,
    result: Explored,
) -> None:
    for files in storages.values():
        storage = MemoryStorage()
        storage.files = dict(files)
        result.storages += 1
        try:
            the_log_chain_holds(storage, Witness())
            check_recovery(storage, Witness())
        except Broken as broken:
            result.broken, result.example = broken.invariant, str(broken)
            return


def _publishes(world: World) -> list[PublishBody]:
    bodies = [record.body for record in world.history.records]
    return [body for body in bodies if isinstance(body, PublishBody)]


def _way(
    came: dict[tuple[object, ...], tuple[tuple[object, ...], str] | None],
    identity: tuple[object, ...],
) -> str:
    moves: list[str] = []
    step = came[identity]
    while step is not None:
        moves.append(step[1])
        step = came[step[0]]
    return "; ".join(reversed(moves))
