"""Pruning behind the coordinator's publishes: no save ever waits, or fails, for it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from ranks import RUN, Ranks, acknowledged
from retained_runs import MadeRun, live_names, paths
from test_service import live, until

from coherent_ray.commit import upkeep as upkeep_module
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.service import Service
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage


def service_of(storage: Storage, policy: Policy | None, **options: Any) -> Service:
    return Service(RUN, lambda: storage, retention=policy, **options)


async def save(service: Service, storage: Storage, number: int, attempt: int = 1) -> list[str]:
    group = Ranks(ranks=2, number=number, attempt=attempt, update=10 * number)
    group.write(storage)
    ranks = [acknowledged(service, storage, group, rank) for rank in range(2)]
    fates: list[Fate] = await asyncio.gather(*ranks)
    return [fate.kind for fate in fates]


async def settle(service: Service) -> None:
    assert service.upkeep is not None
    await service.upkeep.settled()


def test_each_publish_is_followed_by_a_prune() -> None:
    storage = MemoryStorage()

    async def play() -> None:
        service = service_of(storage, Policy(2))
        await service.open_attempt("first")
        for number in range(1, 6):
            assert await save(service, storage, number) == ["published"] * 2
            await settle(service)
            newest = range(max(1, number - 1), number + 1)
            assert live_names(storage) == [f"g{n}-a1" for n in newest]
        assert service.last_error is None
        assert service.upkeep is not None
        assert service.upkeep.last is not None
        assert [body.name for body in service.upkeep.last.retired] == ["g3-a1"]

    live(play)
    assert {path.split("/")[1] for path in paths(storage) if path.startswith("generations/")} == {
        "g4-a1", "g5-a1",
    }  # fmt: skip


def test_without_retention_nothing_is_pruned() -> None:
    storage = MemoryStorage()
    MadeRun(storage).open()
    MadeRun(storage).leave(7, 1)

    async def play() -> None:
        service = service_of(storage, None)
        await service.open_attempt("second")
        await save(service, storage, 1, attempt=2)
        assert service.upkeep is None

    live(play)
    assert any("g7-a1" in path for path in paths(storage))


def test_where_all_are_kept_only_leftovers_go_and_once_an_attempt() -> None:
    storage = MemoryStorage()
    run = MadeRun(storage)
    run.open()
    left = run.leave(7, 1)
    spy = FaultyStorage(storage)

    async def play() -> None:
        service = service_of(spy, Policy())
        await service.open_attempt("second")
        await save(service, spy, 1, attempt=2)
        await settle(service)
        assert left.isdisjoint(paths(storage))
        spy.calls.clear()
        await save(service, spy, 2, attempt=2)
        await settle(service)
        assert ("list", "generations") not in spy.calls
        await service.open_attempt("third")
        await save(service, spy, 3, attempt=3)
        await settle(service)
        assert ("list", "generations") in spy.calls

    live(play)
    assert live_names(storage) == ["g1-a2", "g2-a2", "g3-a3"]


@pytest.mark.parametrize("read_back", [True, False])
def test_each_generation_is_read_once_by_one_or_the_other(read_back: bool) -> None:
    spy = FaultyStorage(MemoryStorage())

    async def play() -> None:
        service = service_of(spy, Policy(1), read_back=read_back)
        await service.open_attempt("first")
        for number in (1, 2):
            await save(service, spy, number)
            await settle(service)

    live(play)
    shard = Ranks(ranks=2, number=2).shard(0)
    assert spy.calls.count(("read_into", shard.path)) == len(shard.blocks)
    assert live_names(spy.inner) == ["g2-a1"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("refuse", verb="list", path="generations", times=100), "injected: refused"),
        (Fault("refuse", verb="delete", times=100), "could not delete"),
        (Fault("refuse", verb="read_into", times=100), "injected: refused"),
    ],
)
def test_a_prune_that_fails_fails_no_save(fault: Fault, words: str) -> None:
    storage = FaultyStorage(MemoryStorage(), [fault])

    async def play() -> None:
        service = service_of(storage, Policy(1))
        await service.open_attempt("first")
        for number in (1, 2, 3):
            assert await save(service, storage, number) == ["published"] * 2
            await settle(service)
        assert service.last_error is not None
        assert "pruning" in service.last_error
        assert words in service.last_error
        # When the fault is gone, the next publish prunes all the same.
        storage.faults.clear()
        assert await save(service, storage, 4) == ["published"] * 2
        await settle(service)

    live(play)
    assert storage.struck
    assert live_names(storage.inner) == ["g4-a1"]
    assert {p.split("/")[1] for p in paths(storage.inner) if "generations/" in p} == {"g4-a1"}


def test_an_error_that_nobody_foresaw_fails_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()

    def explode(*_: object) -> None:
        raise ZeroDivisionError("really")

    monkeypatch.setattr(upkeep_module.Pruner, "prune", explode)

    async def play() -> None:
        service = service_of(storage, Policy(1))
        await service.open_attempt("first")
        for number in (1, 2):
            assert await save(service, storage, number) == ["published"] * 2
            await settle(service)
        assert service.last_error == "pruning failed: ZeroDivisionError: really"

    live(play)


class Slow(MemoryStorage):
    """Its reads of shards, which only prunes do here, wait for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waiting = 0

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        self.waiting += 1
        assert self.gate.wait(15.0)
        return super().read_into(path, start, target)


def test_saves_go_on_while_a_prune_takes_its_time() -> None:
    storage = Slow()

    async def play() -> None:
        service = service_of(storage, Policy(1))
        await service.open_attempt("first")
        await save(service, storage, 1)
        await save(service, storage, 2)
        await until(lambda: storage.waiting)
        begun = time.monotonic()
        for number in (3, 4, 5):
            assert await save(service, storage, number) == ["published"] * 2
        assert time.monotonic() - begun < 10.0
        assert len(live_names(storage)) == 5, "the prune has not even begun to give up"
        storage.gate.set()
        await settle(service)
        # What was published meanwhile made one more.
        assert live_names(storage) == ["g5-a1"]

    try:
        live(play)
    finally:
        storage.gate.set()


def test_closing_ends_a_prune_after_its_step() -> None:
    storage = Slow()

    async def play() -> None:
        service = service_of(storage, Policy(1))
        await service.open_attempt("first")
        await save(service, storage, 1)
        await save(service, storage, 2)
        await until(lambda: storage.waiting)
        closing = asyncio.create_task(service.close())
        await asyncio.sleep(0.05)
        storage.gate.set()
        await closing
        assert service.last_error is None

    try:
        live(play)
    finally:
        storage.gate.set()
    assert live_names(storage) == ["g1-a1", "g2-a1"], "it was stopped before it gave up anything"


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_module, "CLOSE_WAIT_S", 0.05)
    storage = Slow()

    async def play() -> None:
        service = service_of(storage, Policy(1))
        await service.open_attempt("first")
        await save(service, storage, 1)
        await save(service, storage, 2)
        await until(lambda: storage.waiting)
        await service.close()
        storage.gate.set()

    try:
        live(play)
    finally:
        storage.gate.set()


def test_a_fenced_coordinator_prunes_nothing_more() -> None:
    storage = Slow()

    async def play() -> None:
        service = service_of(storage, Policy(1))
        await service.open_attempt("first")
        await save(service, storage, 1)
        await save(service, storage, 2)
        await until(lambda: storage.waiting)
        CommitLog(storage).open_attempt(RUN, "rival")
        storage.gate.set()
        await settle(service)
        assert service.last_error is not None
        assert "attempt 1 is over" in service.last_error

    try:
        live(play)
    finally:
        storage.gate.set()
    assert live_names(storage) == ["g1-a1", "g2-a1"]
