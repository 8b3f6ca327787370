"""Scrubbing behind the coordinator: it yields to saves, tells what it finds, and stops at once."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator

import pytest
from ranks import RUN, Ranks, acknowledged
from retained_runs import damage, live_names, run_of
from test_service import live, until

from coherent_ray.commit import rounds as rounds_module
from coherent_ray.commit.findings import PATH, Finding, read_findings
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.rounds import Rounds
from coherent_ray.commit.scrubbing import Schedule
from coherent_ray.commit.service import Service
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

FAST = Schedule(3600.0, 2**40)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "YIELD_S", 0.01)
    monkeypatch.setattr(rounds_module, "LOOK_S", 0.01)
    monkeypatch.setattr(rounds_module, "RETRY_S", 0.01)


class Scene:
    """Rounds of one attempt, and what they told."""

    def __init__(self, schedule: Schedule = FAST) -> None:
        self.told: list[str] = []
        self.doubted: list[tuple[int, int]] = []
        self.busy = False
        self.rounds = Rounds(
            schedule,
            attempt=lambda: 1,
            busy=lambda: self.busy,
            tell=self.told.append,
            doubt=self.doubted.append,
        )

    def until(self, condition: object) -> None:
        deadline = time.monotonic() + 15.0
        assert callable(condition)
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.rounds.close()


def test_damage_is_told_in_the_log_in_the_status_and_to_retention(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(1)
    spoilt = run.publish()
    damage(run.storage, spoilt)
    with caplog.at_level(logging.INFO):
        scene.rounds.begin(run.storage)
        scene.until(lambda: len(read_findings(run.storage)) == 2)
        scene.until(lambda: scene.rounds.damaged and len(caplog.messages) == 2)
    assert scene.doubted == [(2, 1)]
    (words,) = scene.told
    assert words.startswith("scrubbed: g2-a1 is damaged: generations/g2-a1/shard-00000-of-00002")
    assert [r.levelname for r in caplog.records] == ["ERROR", "INFO"]
    (shown,) = scene.rounds.status()["damaged"]
    assert shown["generation"] == "g2-a1"
    assert shown["faults"][0]["facts"]["block"] == 1


def test_nothing_is_read_while_a_save_is_under_way(scene: Scene) -> None:
    spy = FaultyStorage(run_of(2).storage)
    scene.busy = True
    scene.rounds.begin(spy)
    time.sleep(0.1)
    assert not any(verb == "read_into" for verb, _ in spy.calls)
    scene.busy = False
    scene.until(lambda: len(read_findings(spy.inner)) == 2)


class Counted(MemoryStorage):
    """A storage that counts the bytes of shards that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        self.read_bytes += target.nbytes
        return super().read_into(path, start, target)


def test_no_more_is_read_in_a_second_than_the_schedule_says() -> None:
    scene = Scene(Schedule(3600.0, 1000))
    storage = Counted()
    run_of(20, storage=storage)
    begun = time.monotonic()
    scene.rounds.begin(storage)
    scene.until(lambda: storage.read_bytes > 500)
    scene.rounds.close()
    # What is read at once, a block of 64 bytes here, is paid for afterwards.
    assert storage.read_bytes <= 1000 * (time.monotonic() - begun) + 64


def test_what_goes_wrong_is_said_and_tried_again(scene: Scene) -> None:
    storage = FaultyStorage(run_of(1).storage, [Fault("refuse", verb="read_into", times=2)])
    scene.rounds.begin(storage)
    scene.until(lambda: read_findings(storage.inner))
    assert [words.partition(":")[0] for words in scene.told] == ["scrubbing failed"] * 2


def test_a_note_that_cannot_be_written_hides_no_damage(scene: Scene) -> None:
    run = run_of(1)
    damage(run.storage, CommitLog(run.storage).read().live[0])
    storage = FaultyStorage(run.storage, [Fault("full", verb="replace", times=1000)])
    scene.rounds.begin(storage)
    scene.until(lambda: scene.doubted)
    assert PATH not in run.storage.files
    assert scene.rounds.damaged


class Stuck(MemoryStorage):
    """A storage that hangs in the first read of a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.gate = threading.Event(), threading.Event()

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        self.reached.set()
        assert self.gate.wait(15.0)
        return super().read_into(path, start, target)


def test_closing_waits_for_no_storage_that_hangs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds_module, "CLOSE_WAIT_S", 0.05)
    storage = Stuck()
    run_of(1, storage=storage)
    scene.rounds.begin(storage)
    assert storage.reached.wait(15.0)
    scene.rounds.close()
    storage.gate.set()


# --- in the service -------------------------------------------------------------------------------


async def save(service: Service, storage: Storage, number: int) -> set[str]:
    group = Ranks(ranks=2, number=number, update=10 * number)
    group.write(storage)
    ranks = (acknowledged(service, storage, group, rank) for rank in range(2))
    return {fate.kind for fate in await asyncio.gather(*ranks)}


def kinds(finding: Finding) -> set[str]:
    """What is wrong; these ranks write no receipts."""
    return {fault.facts["kind"] for fault in finding.faults}


def service_of(storage: Storage, schedule: Schedule, keep: int | None = None) -> Service:
    return Service(RUN, lambda: storage, retention=Policy(keep), scrub=schedule)


def test_generations_are_scrubbed_behind_saves() -> None:
    storage = MemoryStorage()

    async def play() -> None:
        service = service_of(storage, Schedule(0.05, 2**40))
        await service.open_attempt("first")
        for number in (1, 2):
            assert await save(service, storage, number) == {"published"}
        await until(lambda: len(read_findings(storage)) == 2)
        await service.close()

    live(play)
    assert all(kinds(finding) == {"receipts"} for finding in read_findings(storage).values())


def test_while_ranks_write_or_wait_nothing_is_scrubbed() -> None:
    spy = FaultyStorage(MemoryStorage())

    async def play() -> None:
        service = service_of(spy, Schedule(0.02, 2**40))
        await service.open_attempt("first")
        service.saving = True
        assert await save(service, spy, 1) == {"published"}
        await asyncio.sleep(0.1)
        assert not any(verb == "read_into" for verb, _ in spy.calls)
        group = Ranks(ranks=2, number=2, update=20)
        group.write(spy)
        waits = asyncio.create_task(acknowledged(service, spy, group, 0))
        await until(service.in_flight)
        service.saving = False
        await asyncio.sleep(0.1)
        assert not any(verb == "read_into" for verb, _ in spy.calls)
        await acknowledged(service, spy, group, 1)
        await waits
        await until(lambda: read_findings(spy.inner))
        await service.close()

    live(play)


@pytest.mark.parametrize("scrubbed", [True, False])
def test_a_generation_that_rots_after_it_was_counted_replaces_no_other(scrubbed: bool) -> None:
    """Retention reads each generation once; what it cannot see from sizes, a scrub tells it."""
    storage = MemoryStorage()

    async def play() -> None:
        service = service_of(storage, Schedule(0.02, 2**40) if scrubbed else FAST, keep=2)
        upkeep, rounds = service.upkeep, service.rounds
        assert upkeep is not None
        assert rounds is not None
        await service.open_attempt("first")
        for number in (1, 2, 3):
            await save(service, storage, number)
            await upkeep.settled()
        assert live_names(storage) == ["g2-a1", "g3-a1"]
        damage(storage, CommitLog(storage).read().live[-1])
        if scrubbed:
            await until(lambda: any("block" in kinds(finding) for finding in rounds.damaged))
        await save(service, storage, 4)
        await upkeep.settled()
        await service.close()

    live(play)
    # Two whole ones are kept; where nobody looked, one of these two is not.
    kept = ["g2-a1", "g3-a1", "g4-a1"] if scrubbed else ["g3-a1", "g4-a1"]
    assert live_names(storage) == kept
