"""The coordinator in a live event loop, without Ray: waiting, time, degraded starts, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from ranks import RUN, Ranks, check_published_is_whole

from coherent_ray.commit import service as service_module
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import dump
from coherent_ray.commit.service import Service
from coherent_ray.errors import ConfigError, LogDamaged, StorageError, WrongRun
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

RANKS = Ranks(ranks=3)
PUBLISHED = Fate("published", 1, 1, seq=2)
Result = TypeVar("Result")


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    RANKS.write(storage)
    return storage


def service_of(storage: Storage, ack_timeout_s: float = 60.0, read_back: bool = False) -> Service:
    return Service(RUN, lambda: storage, ack_timeout_s=ack_timeout_s, read_back=read_back)


def live(play: Callable[[], Awaitable[Result]]) -> Result:
    """Run a test's own coroutine; nothing here takes long, so a hang is a failure."""

    async def limited() -> Result:
        async with asyncio.timeout(20.0):
            return await play()

    return asyncio.run(limited())


def words(*ranks: int, group: Ranks = RANKS) -> list[bytes]:
    return [dump(group.ack(rank)) for rank in ranks]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_all_calls_return_once_the_last_rank_has_called(storage: MemoryStorage) -> None:
    async def play() -> list[Fate]:
        service = service_of(storage)
        assert await service.open_attempt("first") == 1
        calls = [asyncio.create_task(service.acknowledge(word)) for word in words(0, 1)]
        await until(service.in_flight)
        assert service.in_flight() == {"g1-a1": "the acknowledgement of rank 2"}
        assert not any(call.done() for call in calls)
        last = await service.acknowledge(words(2)[0])
        assert service.generation is not None
        assert service.generation["name"] == "g1-a1"
        assert service.generation["timings"]["published_s"] >= 0
        assert service.last_error is None
        return [*await asyncio.gather(*calls), last]

    assert live(play) == [PUBLISHED] * 3
    check_published_is_whole(storage)


def test_a_new_service_knows_what_the_log_knows(storage: MemoryStorage) -> None:
    async def play() -> None:
        first = service_of(storage)
        await first.open_attempt("first")
        await asyncio.gather(*(first.acknowledge(word) for word in words(0, 1, 2)))
        second = service_of(storage)
        assert await second.acknowledge(words(1)[0]) == PUBLISHED
        assert second.attempt == 1
        assert second.generation is not None
        assert (second.generation["name"], second.generation["timings"]) == ("g1-a1", {})

    live(play)


def test_opening_an_attempt_refreshes_the_hint(storage: MemoryStorage) -> None:
    async def play() -> None:
        service = service_of(storage)
        assert await service.open_attempt("first") == 1
        assert b'"attempt":1' in storage.files["latest.json"]
        assert await service.open_attempt("second") == 2
        assert await service.open_attempt("first") == 1
        assert service.attempt == 2

    live(play)


def test_time_runs_out_by_itself(storage: MemoryStorage) -> None:
    async def play() -> Fate:
        service = service_of(storage, ack_timeout_s=0.05)
        await service.open_attempt("first")
        begun = time.monotonic()
        fate = await service.acknowledge(words(1)[0])
        assert time.monotonic() - begun >= 0.05
        assert service.last_error == f"g1-a1: {fate.reason}"
        return fate

    assert live(play).details == {"missing": [0, 2]}


def test_before_ranks_are_called_missing_the_log_is_asked(storage: MemoryStorage) -> None:
    """Another process had all the words, and published."""

    async def play() -> None:
        orphan = service_of(storage, ack_timeout_s=2.0)
        await orphan.open_attempt("first")
        call = asyncio.create_task(orphan.acknowledge(words(1)[0]))
        await until(orphan.in_flight)
        other = service_of(storage)
        await asyncio.gather(*(other.acknowledge(word) for word in words(0, 1, 2)))
        assert await call == PUBLISHED

    live(play)


def test_a_storage_that_hangs_does_not_stop_the_clock(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "LOG_WAIT_S", 0.1)
    gate = threading.Event()

    class Hanging(MemoryStorage):
        hangs = False

        def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
            if self.hangs:
                gate.wait(10.0)
            return super().read(path, start, length)

    async def play() -> None:
        hanging = Hanging()
        service = service_of(hanging, ack_timeout_s=0.05)
        await service.open_attempt("first")
        hanging.hangs = True
        fate = await service.acknowledge(words(0)[0])
        assert fate.details == {"missing": [1, 2]}
        other = service_of(hanging)
        await other.settle_in()  # says what it knows, though the log is not read
        assert "not read yet" in str(other.degraded)
        gate.set()

    try:
        live(play)
    finally:
        gate.set()


# --- degraded -------------------------------------------------------------------------------------


def test_a_root_that_cannot_be_opened_is_said_in_every_answer() -> None:
    def refuse() -> Storage:
        raise ConfigError("object stores are not supported by this version")

    async def play() -> None:
        service = Service(RUN, refuse, ack_timeout_s=1.0, read_back=False)
        await service.settle_in()
        assert isinstance(service.degraded, ConfigError)
        fate = await service.acknowledge(words(0)[0])
        assert (fate.kind, fate.name) == ("failed", "g1-a1")
        assert "object stores are not supported" in fate.reason
        with pytest.raises(ConfigError):
            await service.open_attempt("first")
        assert service.attempt == 0

    live(play)


def test_an_error_that_nobody_foresaw_degrades_too() -> None:
    def explode() -> Storage:
        raise ZeroDivisionError("really")

    async def play() -> None:
        service = Service(RUN, explode, ack_timeout_s=1.0, read_back=False)
        with pytest.raises(StorageError, match="ZeroDivisionError: really"):
            await service.open_attempt("first")

    live(play)


def test_a_damaged_log_degrades_and_heals(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "RETRY_S", 0.05)
    CommitLog(storage).open_attempt(RUN, "first")
    path = f"log/{1:020d}.json"
    whole = storage.files[path]
    storage.files[path] = whole[:-1]

    async def play() -> None:
        service = service_of(storage)
        await service.settle_in()
        assert isinstance(service.degraded, LogDamaged)
        assert service.last_error == str(service.degraded)
        storage.files[path] = whole
        await asyncio.sleep(0.06)
        fates = await asyncio.gather(*(service.acknowledge(word) for word in words(0, 1, 2)))
        assert fates == [PUBLISHED] * 3
        assert service.degraded is None

    live(play)


def test_many_who_wait_share_one_reading() -> None:
    async def play() -> None:
        faulty = FaultyStorage(MemoryStorage(), [Fault("refuse", verb="list", times=100)])
        service = service_of(faulty)
        crowd = Ranks(ranks=50)
        calls = [service.acknowledge(dump(crowd.ack(rank))) for rank in range(50)]
        assert {fate.kind for fate in await asyncio.gather(*calls)} == {"failed"}
        assert len(faulty.struck) == 1
        # Nor does a storm of repeated calls become a storm on the storage.
        for word in words(0, 1, 2):
            await service.acknowledge(word)
        assert len(faulty.struck) == 1

    live(play)


def test_another_run_s_root_is_refused(storage: MemoryStorage) -> None:
    CommitLog(storage).open_attempt("another-run", "theirs")

    async def play() -> None:
        with pytest.raises(WrongRun, match="holds run 'another-run'"):
            await service_of(storage).open_attempt("first")

    live(play)


# --- attempts, damage, the end --------------------------------------------------------------------


def test_being_fenced_teaches_the_attempt_that_fenced(storage: MemoryStorage) -> None:
    async def play() -> None:
        service = service_of(storage)
        await service.open_attempt("first")
        CommitLog(storage).open_attempt(RUN, "rival")
        fates = await asyncio.gather(*(service.acknowledge(word) for word in words(0, 1, 2)))
        assert [fate.kind for fate in fates] == ["fenced"] * 3
        await until(lambda: service.attempt == 2)

    live(play)


def test_an_attempt_opened_elsewhere_is_looked_up(storage: MemoryStorage) -> None:
    async def play() -> None:
        service = service_of(storage)
        await service.settle_in()
        CommitLog(storage).open_attempt(RUN, "elsewhere")
        fates = await asyncio.gather(*(service.acknowledge(word) for word in words(0, 1, 2)))
        assert fates == [PUBLISHED] * 3
        stranger = await service.acknowledge(words(0, group=Ranks(attempt=5))[0])
        assert "attempt 5 has not been opened" in stranger.reason

    live(play)


@pytest.mark.parametrize("data", [b"", b"\xff", b"{}", b"[1]", words(0)[0][:-1]])
def test_a_damaged_word_is_answered(storage: MemoryStorage, data: bytes) -> None:
    async def play() -> Fate:
        return await service_of(storage).acknowledge(data)

    fate = live(play)
    assert (fate.kind, fate.number) == ("failed", 0)
    assert fate.reason.startswith("the acknowledgement is damaged: ")


def test_a_caller_that_goes_away_hurts_nobody(storage: MemoryStorage) -> None:
    async def play() -> None:
        service = service_of(storage)
        await service.open_attempt("first")
        gone = asyncio.create_task(service.acknowledge(words(0)[0]))
        await until(service.in_flight)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        fates = await asyncio.gather(*(service.acknowledge(word) for word in words(1, 2)))
        assert fates == [PUBLISHED] * 2

    live(play)


def test_closing_answers_all_who_wait_and_all_who_come(storage: MemoryStorage) -> None:
    async def play() -> None:
        service = service_of(storage)
        await service.open_attempt("first")
        calls = [asyncio.create_task(service.acknowledge(word)) for word in words(0, 1)]
        await until(service.in_flight)
        await service.close()
        late = await service.acknowledge(words(2)[0])
        for fate in [*await asyncio.gather(*calls), late]:
            assert (fate.kind, fate.reason) == ("failed", "the coordinator was stopped")

    live(play)
    assert not check_published_is_whole(storage).publishes


def test_points_before_and_after_the_record_that_counts(storage: MemoryStorage) -> None:
    """Reached in the storage's thread: who waits there keeps the record from being written."""
    heard: list[tuple[str, int]] = []

    def hook(point: str) -> None:
        heard.append((point, len(CommitLog(storage).read().publishes)))

    async def play() -> None:
        service = Service(RUN, lambda: storage, hook=hook)
        await service.open_attempt("first")
        await asyncio.gather(*(service.acknowledge(word) for word in words(0, 1, 2)))

    live(play)
    assert heard == [("publish:begin@10", 0), ("publish:end@10", 1)]


def test_a_publish_that_was_refused_has_no_end(storage: MemoryStorage) -> None:
    heard: list[str] = []
    faulty = FaultyStorage(storage, [Fault("refuse", verb="create", path="log/", at=2, times=9)])

    async def play() -> list[Fate]:
        service = Service(RUN, lambda: faulty, hook=heard.append)
        await service.open_attempt("first")
        return await asyncio.gather(*(service.acknowledge(word) for word in words(0, 1, 2)))

    assert {fate.kind for fate in live(play)} == {"failed"}
    assert heard
    assert set(heard) == {"publish:begin@10"}


def test_who_is_fenced_says_so_in_the_log_of_its_process(
    storage: MemoryStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """A coordinator that was cut off may have nobody left to tell."""

    async def play() -> None:
        old = service_of(storage)
        await old.open_attempt("first")
        await service_of(storage).open_attempt("second")
        await asyncio.gather(*(old.acknowledge(word) for word in words(0, 1, 2)))

    live(play)
    said = [record.getMessage() for record in caplog.records]
    assert "fenced, and publishes nothing more: attempt 1 is over: attempt 2 has opened" in said
    late = [text for text in said if "is too late with g1-a1: attempt 1 is over" in text]
    assert sorted(text[:6] for text in late) == ["rank 0", "rank 1", "rank 2"]
