"""Holds: readers and pruners agree without a clock, and what is left of the dead expires."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from retained_runs import MadeRun, paths, run_of
from test_history import retire
from turns import interleave

from coherent_ray.commit import manifest
from coherent_ray.commit.holds import LEASE_S, Hold, HoldRecord, Watch, holding
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.records import PublishBody
from coherent_ray.errors import LogDamaged, NoGeneration
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run() -> MadeRun:
    return run_of(3)


@pytest.fixture
def first(run: MadeRun) -> PublishBody:
    return run.log.read().publishes[0]


def holds_of(storage: Storage) -> set[str]:
    return {path for path in paths(storage) if path.startswith("holds/")}


# --- a reader -------------------------------------------------------------------------------------


def test_a_hold_lies_there_while_the_reader_reads(run: MadeRun, first: PublishBody) -> None:
    with holding(run.storage, run.log, first) as hold:
        assert hold is not None
        assert holds_of(run.storage) == {hold.path}
        assert hold.path.startswith("holds/g1-a1-")
        (held,) = Watch(run.storage).look()
        assert (held.generation, held.expired, held.seen_alive) == ((1, 1), False, False)
        assert "process" in held.who
        assert not hold.lost
    assert holds_of(run.storage) == set()


def test_it_goes_when_the_reader_fails(run: MadeRun, first: PublishBody) -> None:
    with pytest.raises(ZeroDivisionError), holding(run.storage, run.log, first):
        raise ZeroDivisionError
    assert holds_of(run.storage) == set()


def test_no_thread_stays(run: MadeRun, first: PublishBody) -> None:
    with holding(run.storage, run.log, first):
        assert any(thread.name == "hold g1-a1" for thread in threading.enumerate())
    deadline = time.monotonic() + 5.0
    while any(thread.name == "hold g1-a1" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_many_readers_hold_one_generation(run: MadeRun, first: PublishBody) -> None:
    with holding(run.storage, run.log, first), holding(run.storage, run.log, first):
        assert len(holds_of(run.storage)) == 2
    assert holds_of(run.storage) == set()


def test_what_is_retired_is_not_held(run: MadeRun, first: PublishBody) -> None:
    view = CommitLog(run.storage)
    view.read()
    run.log.append(retire(1), 1)
    with (
        pytest.raises(NoGeneration, match="g1-a1 was retired before"),
        holding(run.storage, view, first),
    ):
        pytest.fail("it must not be read")
    assert holds_of(run.storage) == set()


def test_a_log_that_cannot_be_trusted_holds_nothing(run: MadeRun, first: PublishBody) -> None:
    assert isinstance(run.storage, MemoryStorage)
    run.storage.files[f"log/{2:020d}.json"] = b"{}"
    with pytest.raises(LogDamaged), holding(run.storage, CommitLog(run.storage), first):
        pytest.fail("it must not be read")
    assert holds_of(run.storage) == set()


@pytest.mark.parametrize("effect", ["refuse", "full", "lose_answer"])
def test_a_storage_that_cannot_be_written_is_read_all_the_same(
    run: MadeRun, first: PublishBody, effect: str
) -> None:
    faulty = FaultyStorage(run.storage, [Fault(effect, verb="create")])  # type: ignore[arg-type]
    with holding(faulty, CommitLog(faulty), first) as hold:
        assert hold is None
    assert len(faulty.struck) == 1


def test_a_hold_is_renewed_and_says_so(run: MadeRun, first: PublishBody) -> None:
    clock = Clock()
    watch = Watch(run.storage, clock)
    hold = Hold(run.storage, first)
    hold.take(run.log)
    for _ in range(5):
        watch.look()
        clock.now += LEASE_S - 1
        assert hold.renew()
        (held,) = watch.look()
        assert held.seen_alive
        assert held.expires_in_s == LEASE_S


def test_it_is_renewed_by_itself(run: MadeRun, first: PublishBody) -> None:
    with holding(run.storage, run.log, first, lease_s=0.02) as hold:
        assert hold is not None
        deadline = time.monotonic() + 10.0
        while manifest.load(HoldRecord, run.storage.read(hold.path)).beat < 3:
            assert time.monotonic() < deadline
            time.sleep(0.002)


def test_a_renewal_that_fails_is_made_up_for_by_the_next(run: MadeRun, first: PublishBody) -> None:
    for verb in ("size", "replace"):
        faulty = FaultyStorage(run.storage, [Fault("refuse", verb=verb)])  # type: ignore[arg-type]
        hold = Hold(faulty, first)
        hold.take(CommitLog(faulty))
        before = run.storage.read(hold.path)
        assert hold.renew()
        assert run.storage.read(hold.path) == before
        assert hold.renew()
        assert run.storage.read(hold.path) != before
        assert len(faulty.struck) == 1
        assert not hold.lost


def test_a_reader_that_was_called_dead_can_know(run: MadeRun, first: PublishBody) -> None:
    hold = Hold(run.storage, first)
    hold.take(run.log)
    run.storage.delete(hold.path)
    assert not hold.renew()
    assert hold.lost
    assert not hold.renew()
    assert holds_of(run.storage) == set(), "a dead hold does not come back"


def test_a_released_hold_does_not_come_back(run: MadeRun, first: PublishBody) -> None:
    hold = Hold(run.storage, first)
    hold.take(run.log)
    hold.release()
    assert not hold.renew()
    assert holds_of(run.storage) == set()
    hold.release()


def test_a_release_that_fails_leaves_a_hold_that_expires(run: MadeRun, first: PublishBody) -> None:
    clock = Clock()
    faulty = FaultyStorage(run.storage, [Fault("refuse", verb="delete")])
    with holding(faulty, CommitLog(faulty), first):
        pass
    watch = Watch(run.storage, clock)
    watch.look()
    clock.now += LEASE_S
    (held,) = watch.look()
    assert held.expired


# --- a watcher ------------------------------------------------------------------------------------


def test_only_what_a_watcher_saw_itself_makes_a_hold_dead(run: MadeRun, first: PublishBody) -> None:
    clock = Clock()
    Hold(run.storage, first).take(run.log)
    early = Watch(run.storage, clock)
    early.look()
    clock.now += LEASE_S / 2
    late = Watch(run.storage, clock)
    late.look()
    clock.now += LEASE_S / 2
    assert [held.expired for held in early.look()] == [True]
    assert [held.expired for held in late.look()] == [False]


def test_clocks_that_jump_change_nothing(
    run: MadeRun, first: PublishBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock goes anywhere: no hold dies of it, and none lives on."""
    clock = Clock()
    watch = Watch(run.storage, clock)
    alive, dead = Hold(run.storage, first), Hold(run.storage, first)
    for hold in (alive, dead):
        hold.take(run.log)
    watch.look()
    for wall in (0.0, 4e9, -1e9, 1e12):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        clock.now += LEASE_S / 4
        assert alive.renew()
        by_path = {held.path: held for held in watch.look()}
        assert not by_path[alive.path].expired
    assert by_path[dead.path].expired


def test_a_hold_that_is_gone_is_forgotten(run: MadeRun, first: PublishBody) -> None:
    clock = Clock()
    watch = Watch(run.storage, clock)
    hold = Hold(run.storage, first)
    hold.take(run.log)
    watch.look()
    data = run.storage.read(hold.path)
    hold.release()
    assert watch.look() == []
    clock.now += 10 * LEASE_S
    run.storage.create(hold.path, data)
    assert [held.expired for held in watch.look()] == [False]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b'{"format":2,"lease_s":1.0}', b"[" * 10_000]
)
def test_a_hold_that_cannot_be_read_holds_for_ever(run: MadeRun, data: bytes) -> None:
    clock = Clock()
    path = f"holds/g2-a1-{'0' * 32}.json"
    run.storage.create(path, data)
    watch = Watch(run.storage, clock)
    for _ in range(3):
        (held,) = watch.look()
        assert (held.generation, held.expired) == ((2, 1), False)
        assert path in held.who
        clock.now += 1e9


def test_a_lease_without_end_is_not_believed(run: MadeRun, first: PublishBody) -> None:
    hold = Hold(run.storage, first)
    with pytest.raises(ValueError, match="lease_s"):
        replace(hold._record, lease_s=1e30)
    for lease in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lease_s"):
            HoldRecord(format=1, number=1, attempt=1, who="x", lease_s=lease, beat=0)


def test_what_is_no_hold_is_not_looked_at(run: MadeRun) -> None:
    run.storage.create("holds/readme.txt", b"not ours")
    assert Watch(run.storage).look() == []


def test_a_hold_that_goes_between_list_and_read_is_gone(run: MadeRun, first: PublishBody) -> None:
    hold = Hold(run.storage, first)
    hold.take(run.log)

    class Vanishing(FaultyStorage):
        def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
            hold.release()
            return super().read(path, start, length)

    assert Watch(Vanishing(run.storage)).look() == []


# --- the order that makes it safe -----------------------------------------------------------------


def orders(first: int, second: int) -> Iterable[tuple[int, ...]]:
    for places in itertools.combinations(range(first + second), first):
        yield tuple(0 if place in places else 1 for place in range(first + second))


def outcomes(prune: Callable[[Storage], object]) -> set[tuple[object, object]]:
    """What a reader and a pruner come to, in every order of their verbs: reads, sees the hold."""
    seen = set()
    for order in orders(3, 9):
        run = run_of(2)
        body = run.log.read().publishes[0]

        def read(storage: Storage, run: MadeRun = run, body: PublishBody = body) -> bool:
            log = CommitLog(storage)
            log._known = run.log.read()  # it has read the log before, and so knows g1-a1
            try:
                Hold(storage, body).take(log)
            except NoGeneration:
                return False
            return True

        reads, sees = interleave([run.storage] * 2, [read, prune], order)
        assert isinstance(reads, bool), repr(reads)
        assert isinstance(sees, bool), repr(sees)
        seen.add((reads, sees))
    return seen


def test_in_every_order_the_reader_turns_away_or_the_pruner_sees_the_hold() -> None:
    def prune(storage: Storage) -> bool:
        CommitLog(storage).append(retire(1), 1)
        return bool(Watch(storage).look())

    seen = outcomes(prune)
    assert (True, False) not in seen, "files would be deleted under a reader"
    assert seen >= {(True, True), (False, False)}, "both outcomes must have been reached"


def test_the_other_order_would_not_be_safe() -> None:
    """That the check above can fail: it does, for a pruner that looks for holds first."""

    def prune(storage: Storage) -> bool:
        sees = bool(Watch(storage).look())
        CommitLog(storage).append(retire(1), 1)
        return sees

    assert (True, False) in outcomes(prune)
