"""Scrubbing: which generation is due, what a scrub reads and notes, and what it leaves alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from ranks import RUN
from retained_runs import damage, paths, prune, run_of

from coherent_ray.commit.findings import PATH, read_findings
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.pruning import Pruner
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.scrubbing import Schedule, Scrubber
from coherent_ray.errors import StorageError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

EVERY_S = 100.0
START = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


class Clock:
    """Both clocks of a coordinator."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.jumped = 0.0

    def seconds(self) -> float:
        return 5000.0 + self.passed

    def now(self) -> datetime:
        return START + timedelta(seconds=self.passed + self.jumped)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def scrubber(storage: Storage, clock: Clock, sizes: list[int] | None = None) -> Scrubber:
    pace = sizes.append if sizes is not None else lambda size: None
    return Scrubber(storage, EVERY_S, pace, clock=clock.seconds, now=clock.now)


def names(one: Scrubber, attempt: int = 1, most: int = 20) -> list[str]:
    """Scrub until nothing is due; return what was."""
    read = []
    while (found := one.next(attempt)) is not None:
        one.write_note()
        read.append(found[1].generation)
        assert len(read) < most, "the same is due for ever"
    return read


def test_what_was_never_read_is_read_newest_first_and_then_in_rounds(clock: Clock) -> None:
    storage = run_of(3).storage
    one = scrubber(storage, clock)
    assert names(one) == ["g3-a1", "g2-a1", "g1-a1"]
    clock.passed = EVERY_S - 1
    assert names(one) == []
    assert 0.0 < one.wait_s() <= 1.0
    clock.passed = EVERY_S
    assert sorted(names(one)) == ["g1-a1", "g2-a1", "g3-a1"]


def test_what_has_just_been_published_waits_for_its_round(clock: Clock) -> None:
    run = run_of(1)
    one = scrubber(run.storage, clock)
    assert names(one) == ["g1-a1"]
    clock.passed = 60.0
    run.publish()
    one.published((2, 1))
    assert names(one) == []
    clock.passed = 110.0
    assert names(one) == ["g1-a1"]
    clock.passed = 160.0
    assert names(one) == ["g2-a1"]


def test_the_next_coordinator_goes_on_where_the_last_one_was(clock: Clock) -> None:
    storage = run_of(3).storage
    first = scrubber(storage, clock)
    assert first.next(1) is not None
    first.write_note()
    clock.passed = 10.0
    assert names(scrubber(storage, clock)) == ["g2-a1", "g1-a1"]
    clock.passed = 105.0
    assert names(scrubber(storage, clock)) == ["g3-a1"]


@pytest.mark.parametrize("jump", [-1e6, 1e9])
def test_a_clock_that_jumps_makes_a_scrub_early_and_no_more(clock: Clock, jump: float) -> None:
    storage = run_of(2).storage
    one = scrubber(storage, clock)
    names(one)
    clock.jumped = jump
    assert names(one) == [], "within one coordinator the time of day decides nothing"
    assert names(scrubber(storage, clock)) == ["g2-a1", "g1-a1"]


def test_every_byte_is_read_at_the_given_pace(clock: Clock) -> None:
    run = run_of(1)
    sizes: list[int] = []
    spy = FaultyStorage(run.storage)
    names(scrubber(spy, clock, sizes))
    shards = [entry for entry in run.storage.list("generations/g1-a1") if "shard" in entry.path]
    assert {p for verb, p in spy.calls if verb == "read_into"} == {e.path for e in shards}
    assert sum(sizes) >= sum(entry.size for entry in run.storage.list("generations/g1-a1"))
    assert {verb for verb, path in spy.calls} <= {"read", "read_into", "size", "list", "replace"}
    assert {path for verb, path in spy.calls if verb == "replace"} == {PATH}


def test_damage_is_named_and_noted(clock: Clock) -> None:
    run = run_of(1)
    spoilt = run.publish()
    damage(run.storage, spoilt, rank=1)
    one = scrubber(run.storage, clock)
    found = one.next(1)
    assert found is not None
    assert found[0] == spoilt
    assert not found[1].whole
    assert "g2-a1 is damaged: generations/g2-a1/shard-00001-of-00002" in found[1].words()
    facts = found[1].faults[0].facts
    assert (facts["kind"], facts["block"], facts["rank"]) == ("block", 1, 1)
    assert facts["tensors"]
    assert names(one) == ["g1-a1"]
    noted = read_findings(run.storage)
    assert {name: note.whole for name, note in noted.items()} == {"g1-a1": True, "g2-a1": False}
    # Put back from a copy, it is whole at the next scrub.
    damage(run.storage, spoilt, rank=1)
    clock.passed = EVERY_S
    names(one)
    assert all(note.whole for note in read_findings(run.storage).values())


def test_what_is_retired_is_noted_no_more(clock: Clock) -> None:
    run = run_of(3)
    one = scrubber(run.storage, clock)
    names(one)
    prune(run, keep=1)
    run.publish()
    assert names(one) == ["g4-a1"]
    assert set(read_findings(run.storage)) == {"g3-a1", "g4-a1"}
    assert [finding.generation for finding in one.findings] == ["g3-a1", "g4-a1"]


class Pruned(MemoryStorage):
    """A storage that is pruned when a shard of the first generation is read."""

    def __init__(self) -> None:
        super().__init__()
        self.happens = False

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        if self.happens and "g1-a1" in path:
            self.happens = False
            Pruner(self, Policy(1)).prune()
        return super().read_into(path, start, target)


def test_what_is_pruned_while_it_is_read_is_no_damage(clock: Clock) -> None:
    storage = Pruned()
    run_of(2, storage=storage)
    storage.happens = True
    one = scrubber(storage, clock)
    assert names(one) == ["g2-a1"]
    assert not storage.happens, "the moment was not reached"
    assert one.next(1) is None
    assert set(read_findings(storage)) == {"g2-a1"}
    assert not any("g1-a1/" in path for path in paths(storage))


def test_a_run_that_has_gone_to_another_is_left_alone(clock: Clock) -> None:
    storage = run_of(2).storage
    CommitLog(storage).open_attempt(RUN, "rival")
    spy = FaultyStorage(storage)
    assert names(scrubber(spy, clock), attempt=1) == []
    assert not any(verb == "read_into" for verb, _ in spy.calls)
    assert names(scrubber(spy, clock), attempt=2) == ["g2-a1", "g1-a1"]


def test_a_storage_that_is_away_is_no_damage(clock: Clock) -> None:
    storage = FaultyStorage(run_of(1).storage, [Fault("refuse", verb="read_into")])
    one = scrubber(storage, clock)
    with pytest.raises(StorageError):
        one.next(1)
    assert read_findings(storage) == {}
    assert names(one) == ["g1-a1"], "it is due still"


def test_a_schedule_makes_sense() -> None:
    for wrong in ((0.0, 1), (-1.0, 1), (1.0, 0)):
        with pytest.raises(ValueError, match="above zero"):
            Schedule(*wrong)
