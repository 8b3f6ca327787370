"""Deaths, rivals and failing storage: the machine, its hands and the log together, without Ray.

All is enumerated: every call on the storage, times every effect. Safety is
`check_published_is_whole`; it must hold at every point, and once the faults stop, the generation
must complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from ranks import Ranks, Shell, check_published_is_whole

from coherent_ray.commit.events import AppendPublish
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.manifest import Acknowledgement, manifest_path
from coherent_ray.storage.testing.faults import Crash, Effect, Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

RANKS = Ranks(ranks=3)
PUBLISHED = Fate("published", 1, 1, seq=2)


def prepared() -> MemoryStorage:
    """A run whose first attempt is open, and whose ranks have written their shards."""
    storage = MemoryStorage()
    Shell(storage).open("first")
    RANKS.write(storage)
    return storage


def calls_of_a_save() -> list[bool]:
    """Of every call, from the start of a coordinator to the hint, whether it changes something."""
    faulty, there = FaultyStorage(prepared()), prepared().files
    Shell(faulty, read_back=True).save(RANKS)
    return [verb == "replace" or (verb == "create" and p not in there) for verb, p in faulty.calls]


#: Every call, by its place.
CALLS = range(1, len(calls_of_a_save()) + 1)
#: Every moment to die in: before each call, and after each that changes something.
DEATHS: list[tuple[int, Effect]] = [(at, "crash_before") for at in CALLS]
DEATHS += [
    (at, "crash_after") for at, changes in zip(CALLS, calls_of_a_save(), strict=True) if changes
]  # fmt: skip
#: How many of them read the log at the start, and settle its end.
AT_START = 5


# --- one coordinator, killed anywhere -------------------------------------------------------------


def save_and_listen(
    storage: FaultyStorage, answered: dict[int, Fate], said: dict[int, Acknowledgement]
) -> None:
    """Let all ranks call, and note each rank's last word, and its answer as soon as it is there."""
    shell = Shell(storage, read_back=True)
    calls = {rank: shell.acknowledge(RANKS.ack(rank)) for rank in range(3)}
    while shell.todo or shell.asked:
        if shell.asked:
            word = shell.read()
            said[word.rank] = word
        else:
            shell.step()
        answered |= {r: shell.answers[c] for r, c in calls.items() if c in shell.answers}


@pytest.mark.parametrize(("at", "effect"), DEATHS)
def test_killed_at_any_call_the_same_generation_completes(at: int, effect: Effect) -> None:
    storage = prepared()
    faulty = FaultyStorage(storage, [Fault(effect, at=at)])
    answered: dict[int, Fate] = {}
    said = {rank: RANKS.ack(rank) for rank in range(3)}
    with pytest.raises(Crash):
        save_and_listen(faulty, answered, said)
    before = check_published_is_whole(storage)

    # Ray calls again whatever was not answered; the new process knows only the log.
    second = Shell(storage, read_back=True)
    repeated = {rank: second.acknowledge(said[rank]) for rank in range(3) if rank not in answered}
    second.run()
    assert all(second.answers[call] == PUBLISHED for call in repeated.values())
    assert all(fate == PUBLISHED for fate in answered.values())
    after = check_published_is_whole(storage)
    assert [p.name for p in after.publishes] == ["g1-a1"]
    assert after.records[: before.seq] == before.records


@pytest.mark.parametrize("first", DEATHS)
def test_killed_twice_the_same_generation_completes(first: tuple[int, Effect]) -> None:
    for second in DEATHS:
        storage = prepared()
        deaths = 0
        for at, effect in (first, second):
            faulty = FaultyStorage(storage, [Fault(effect, at=at)])
            try:
                Shell(faulty, read_back=True).save(RANKS)
            except Crash:
                deaths += 1
            check_published_is_whole(storage)
        assert deaths >= 1
        check_completes(storage)


def check_completes(storage: MemoryStorage) -> None:
    assert Shell(storage).save(RANKS) == [PUBLISHED] * 3
    assert len(check_published_is_whole(storage).publishes) == 1


@pytest.mark.parametrize("repeat", list(itertools.product((False, True), repeat=3)))
def test_after_publish_every_rank_hears_it_whoever_calls_again(repeat: tuple[bool, ...]) -> None:
    """Killed with the record in the log and some answers on the way: no other rank is needed."""
    storage = prepared()
    first = Shell(storage)
    for rank in range(3):
        first.acknowledge(RANKS.ack(rank))
    while not isinstance(first.step(lose_event=isinstance(first.todo[0], AppendPublish)),
                         AppendPublish):  # fmt: skip
        pass
    assert not first.answers
    second = Shell(storage)
    calls = [second.acknowledge(RANKS.ack(rank)) for rank in range(3) if repeat[rank]]
    assert [second.answers[call] for call in calls] == [PUBLISHED] * len(calls)
    assert not second.todo


@pytest.mark.parametrize("steps", range(3))
def test_killed_before_publish_the_previous_generation_stays_latest(steps: int) -> None:
    storage = prepared()
    Shell(storage).save(RANKS)
    following = Ranks(number=2, update=20)
    following.write(storage)
    shell = Shell(storage)
    for rank in range(3):
        shell.acknowledge(following.ack(rank))
    for _ in range(steps):
        shell.step()
    # It never comes back. A manifest may lie there: only the log says what is published.
    assert (manifest_path(2, 1) in storage.files) == (steps == 2)
    assert check_published_is_whole(storage).latest.name == "g1-a1"


def test_a_failed_generation_is_not_revived_by_a_restart() -> None:
    """Who was told "failed" does not call again, and without all ranks nothing is published."""
    storage = prepared()
    storage.delete(RANKS.shard(1).path)
    first = Shell(storage)
    assert {fate.kind for fate in first.save(RANKS)} == {"failed"}
    with storage.open_writer(RANKS.shard(1).path) as writer:
        writer.write(RANKS.content(1))
        writer.finish()
    for heard in range(3):
        second = Shell(storage, ack_timeout_s=60.0)
        calls = [second.acknowledge(RANKS.ack(rank)) for rank in range(3) if rank != heard]
        second.run()
        second.tick(now=60.0)
        assert {second.answers[call].details["missing"][0] for call in calls} == {heard}
    assert not check_published_is_whole(storage).publishes


# --- a storage that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("effect", ["refuse", "lose_answer", "full"])
@pytest.mark.parametrize("at", CALLS[AT_START:])
def test_a_failing_call_never_hurts_and_the_next_save_succeeds(at: int, effect: Effect) -> None:
    storage = prepared()
    faulty = FaultyStorage(storage, [Fault(effect, at=at)])
    before = Shell(faulty, read_back=True)
    fates = before.save(RANKS)
    assert len(faulty.struck) == 1
    assert len(set(map(str, fates))) == 1, "ranks heard different fates"
    history = check_published_is_whole(storage)
    if fates[0].kind == "published":
        assert history.latest.name == "g1-a1"
    else:
        assert fates[0].kind == "failed"
        assert "injected" in fates[0].reason
        assert fates[0].details.get("uncertain") or history.latest is None

    following = Ranks(number=2, update=20)
    following.write(storage)
    assert {fate.kind for fate in before.save(following)} == {"published"}
    assert check_published_is_whole(storage).latest.name == "g2-a1"


def test_every_effect_was_reached() -> None:
    """The enumeration above is only worth what it reaches: each step's calls are among them."""
    faulty = FaultyStorage(prepared())
    Shell(faulty, read_back=True).save(RANKS)
    reached = {(verb, path.split("/")[0]) for verb, path in faulty.calls}
    assert {
        ("list", "log"), ("read", "log"), ("size", "generations"), ("read_into", "generations"),
        ("create", "generations"), ("create", "log"), ("replace", "latest.json"),
    } <= reached  # fmt: skip


# --- rivals ---------------------------------------------------------------------------------------


def interleavings(left: int, right: int) -> list[str]:
    """Every order of ``left`` steps of A and ``right`` steps of B."""
    places = itertools.combinations(range(left + right), left)
    return ["".join("A" if i in a else "B" for i in range(left + right)) for a in places]


@pytest.mark.parametrize("order", interleavings(4, 4))
def test_two_processes_of_one_attempt_publish_once(order: str) -> None:
    """Ray thought one dead, restarted it, and it was not: both have every word."""
    storage = prepared()
    twins = {"A": Shell(storage), "B": Shell(storage)}
    calls = {
        name: [shell.acknowledge(RANKS.ack(rank)) for rank in range(3)]
        for name, shell in twins.items()
    }
    for name in order:
        if twins[name].todo:
            twins[name].step()
        check_published_is_whole(storage)
    for name, shell in twins.items():
        assert [shell.answers[call] for call in calls[name]] == [PUBLISHED] * 3
    assert len(check_published_is_whole(storage).publishes) == 1


class Meanwhile:
    """A storage before one of whose calls something else happens."""

    def __init__(self, inner: MemoryStorage, at: int, happens: Callable[[], object]) -> None:
        self._inner, self._at, self._happens = inner, at, happens
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._inner, name)
        if not callable(verb):
            return verb

        def called(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                self._happens()
            return verb(*arguments)

        return called


@pytest.mark.parametrize("at", CALLS)
def test_an_attempt_that_opens_at_any_call_fences_the_older_one(at: int) -> None:
    """The two coordinators share nothing but the storage."""
    storage = prepared()
    rival = Shell(storage)
    meanwhile = Meanwhile(storage, at, lambda: rival.open("second"))
    older = Shell(meanwhile, read_back=True)
    fates = older.save(RANKS)
    assert meanwhile.calls >= at
    history = check_published_is_whole(storage)
    (kind,) = {fate.kind for fate in fates}
    assert kind in {"published", "fenced"}
    assert bool(history.publishes) == (kind == "published")
    if kind == "published":
        # The log's order decides: the record came before the attempt that would have fenced it.
        assert history.records[1].kind == "publish"
        assert history.records[2].kind == "attempt"
    newer = Ranks(attempt=2, number=2, update=20)
    newer.write(storage)
    assert {fate.kind for fate in rival.save(newer)} == {"published"}
    assert check_published_is_whole(storage).latest.name == "g2-a2"


def test_both_outcomes_of_that_race_were_reached() -> None:
    seen = set()
    for at in CALLS:
        storage = prepared()
        rival = Shell(storage)
        older = Shell(Meanwhile(storage, at, lambda rival=rival: rival.open("second")),
                      read_back=True)  # fmt: skip
        seen |= {fate.kind for fate in older.save(RANKS)}
    assert seen == {"published", "fenced"}
