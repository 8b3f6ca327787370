"""Prunes against everything that may happen meanwhile, verb by verb, in orders drawn from a seed.

A reader holds and reads a generation; a coordinator publishes; an attempt opens; a user pins; other
pruners with other ideas do their own. Whatever the order: a reader that got its hold reads whole
files, nothing published is lost that should stay, and the newest whole generation is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from ranks import RUN, Ranks, Shell
from retained_runs import MadeRun, check_live_is_whole, damage, live_names, paths, run_of
from test_history import pin, retire
from turns import interleave

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.holds import Hold
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.pruning import Pruned, Pruner
from coherent_ray.commit.records import Record
from coherent_ray.commit.retention import Policy
from coherent_ray.errors import ConfigError, Fenced, NoGeneration
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.memory import MemoryStorage

SEEDS = range(40)
Action = Callable[[Storage], object]


def orders(seed: int, writers: int) -> Iterator[Sequence[int]]:
    """A few orders: even, and in runs, so that one is far ahead of the other."""
    draw = random.Random(seed)
    yield [draw.randrange(writers) for _ in range(300)]
    runs: list[int] = []
    while len(runs) < 300:
        runs += [draw.randrange(writers)] * draw.randrange(1, 25)
    yield runs


def race(run: MadeRun, seed: int, *actions: Action) -> Iterator[list[object]]:
    """Run the actions at once, each time from the same start; yield what they came to.

    The run is put back to its start when all orders are through.
    """
    assert isinstance(run.storage, MemoryStorage)
    start = dict(run.storage.files)
    for order in orders(seed, len(actions)):
        run.storage.files = dict(start)
        yield interleave([run.storage] * len(actions), actions, order)
    run.storage.files = start


def prunes(keep: int = 1, keep_every: int | None = None, attempt: int | None = None) -> Action:
    return lambda storage: Pruner(storage, Policy(keep, keep_every)).prune(attempt)


def reads(number: int, of: int = 1) -> Action:
    """Hold a generation, verify every byte of it, let go; None: it turned away."""

    def read(storage: Storage) -> list[object] | None:
        log = CommitLog(storage)
        publish = log.read().publish_of(number, of)
        assert publish is not None
        hold = Hold(storage, publish)
        try:
            hold.take(log)
        except NoGeneration:
            return None
        damages = Generations(storage, log).verify(publish)
        hold.release()
        return list(damages)

    return read


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_reads_all_of_it_or_turns_away(seed: int) -> None:
    run = run_of(3)
    for read, pruned in race(run, seed, reads(1), prunes()):
        assert read in (None, []), "files went under a reader"
        assert isinstance(pruned, Pruned), repr(pruned)
        # A hold that came behind the record is seen too, though its reader turns away.
        given_up = "g1-a1" in [body.name for body in pruned.retired]
        if pruned.held and not given_up:
            assert read == []
        prunes()(run.storage)
        assert live_names(run.storage) == ["g3-a1"]
        assert not [path for path in paths(run.storage) if "g1-a1/" in path]


def test_every_outcome_of_that_race_is_reached() -> None:
    run, seen = run_of(3), set()
    for seed in SEEDS:
        for read, pruned in race(run, seed, reads(1), prunes()):
            assert isinstance(pruned, Pruned)
            given_up = "g1-a1" in [body.name for body in pruned.retired]
            seen.add((read is not None, given_up, bool(pruned.held)))
    assert {
        (True, False, True),  # held before the plan: it stays
        (True, True, True),  # held between plan and record: it goes, its files wait
        (False, True, False),  # retired first: the reader turns away
    } <= seen


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_a_publish_comes_through_whole(seed: int) -> None:
    def publishes(storage: Storage) -> list[str]:
        shell = Shell(storage)
        group = Ranks(ranks=2, number=4, attempt=1, update=40)
        group.write(storage)
        return [fate.kind for fate in shell.save(group)]

    run = run_of(3)
    for fates, pruned in race(run, seed, publishes, prunes(attempt=1)):
        assert fates == ["published"] * 2
        assert isinstance(pruned, Pruned), repr(pruned)
        history = CommitLog(run.storage).read()
        assert history.latest is not None
        assert history.latest.name == "g4-a1"
        generations = Generations(run.storage)
        for publish in history.live:
            found = {damage.details["kind"] for damage in generations.verify(publish)}
            assert found <= {"receipts"}  # `Ranks` writes none
        assert {"g3-a1", "g4-a1"} <= {publish.name for publish in history.live} | {
            body.name for body in pruned.retired
        }


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("seed", SEEDS[::4])
def test_a_publish_that_refers_is_whole_or_refused(seed: int, keep: int) -> None:
    """Against a user who gives up what it refers to, and a prune of what is left over."""

    def publishes(storage: Storage) -> list[str]:
        shell = Shell(storage)
        group = Ranks(ranks=2, number=4, attempt=1, update=40, base=run.newest)
        group.write(storage)
        return [fate.kind for fate in shell.save(group)]

    def gives_up(storage: Storage) -> Pruned:
        log = CommitLog(storage)
        log.append(retire(3), 1)
        return Pruner(storage, Policy(keep), log=log).prune(1)

    run = run_of(3)
    for fates, pruned in race(run, seed, publishes, gives_up):
        assert fates in (["published"] * 2, ["failed"] * 2), fates
        assert isinstance(pruned, Pruned), repr(pruned)
        generations = Generations(run.storage)
        for publish in generations.history().live:
            found = {damage.details["kind"] for damage in generations.verify(publish)}
            assert found <= {"receipts"}, publish.name
        assert ("g4-a1" in live_names(run.storage)) == (fates[0] == "published")


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_an_attempt_that_opens_fences_the_older_one_s_pruner(seed: int) -> None:
    run, seen = run_of(3), set()
    run.leave(9, 1)
    for opened, pruned in race(
        run,
        seed,
        lambda storage: CommitLog(storage).open_attempt(RUN, "token-2"),
        prunes(attempt=1),
    ):
        assert isinstance(opened, Record), repr(opened)
        assert isinstance(pruned, (Pruned, Fenced)), repr(pruned)
        check_live_is_whole(run.storage)
        if isinstance(pruned, Fenced):
            # What it had retired before stays so; the next prune finishes.
            assert "g3-a1" in live_names(run.storage)
        seen.add(type(pruned))
        prunes(attempt=2)(run.storage)
        assert live_names(run.storage) == ["g3-a1"]
        assert not [path for path in paths(run.storage) if "g9-a1" in path]
    assert seen


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_a_pin_comes_first_or_is_refused(seed: int) -> None:
    run = run_of(3)

    def pins(storage: Storage) -> object:
        try:
            return CommitLog(storage).append(pin(1), 1)
        except ConfigError as error:
            return error

    for pinned, pruned in race(run, seed, pins, prunes()):
        assert isinstance(pruned, Pruned), repr(pruned)
        assert isinstance(pinned, (Record, ConfigError)), repr(pinned)
        live = live_names(run.storage)
        assert live == (["g1-a1", "g3-a1"] if isinstance(pinned, Record) else ["g3-a1"])
        check_live_is_whole(run.storage)


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_pruners_of_different_minds_leave_the_newest_whole_one(seed: int) -> None:
    run = run_of(3, 3)
    assert isinstance(run.storage, MemoryStorage)
    damage(run.storage, run.log.read().publishes[5])
    run.leave(9, 1)
    actions = [prunes(1), prunes(2, 20), prunes(3)]
    for results in race(run, seed, *actions):
        assert all(isinstance(result, Pruned) for result in results), results
        live = live_names(run.storage)
        assert {"g5-a2", "g6-a2"} <= set(live)
        selected = Generations(run.storage).select()
        assert selected is not None
        assert selected.publish.name == "g5-a2"
        prunes(1)(run.storage)
        assert live_names(run.storage) == ["g5-a2", "g6-a2"]
        bodies = [repr(record.body) for record in CommitLog(run.storage).read().records]
        assert len(set(bodies)) == len(bodies), "a record is there twice"
