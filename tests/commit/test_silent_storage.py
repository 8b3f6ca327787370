"""A storage that owes the coordinator an answer: who waits for it is told, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from ranks import RUN, Ranks
from slow_clock import SlowClock
from test_service import live, until, words

from coherent_ray.commit import service as service_module
from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import (
    AckReceived,
    Answer,
    AppendPublish,
    CheckShards,
    HistoryRead,
    Key,
    ManifestWritten,
    PublishAppended,
    RefreshHint,
    ShardsChecked,
    StorageSilent,
    WriteManifest,
)
from coherent_ray.commit.history import History
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.service import Service
from coherent_ray.digests import Buffer
from coherent_ray.errors import StorageError
from coherent_ray.storage.testing.memory import MemoryStorage

KEY = Key(1, 1)
SILENT = StorageSilent("a/file: no answer")
RANKS = Ranks(ranks=3)
SHORT_S = 0.3


# --- the machine ----------------------------------------------------------------------------------


@pytest.fixture
def machine() -> Coordinator:
    storage = MemoryStorage()
    log = CommitLog(storage)
    log.open_attempt(RUN, "first")
    return Coordinator(RUN, log.read())


def acknowledged(machine: Coordinator) -> CheckShards:
    [*none, check] = [
        action
        for call, rank in enumerate(range(3))
        for action in machine.handle(AckReceived(RANKS.ack(rank), call), 0.0)
    ]
    assert not none
    assert isinstance(check, CheckShards)
    return check


def fates(actions: list[object]) -> list[tuple[str, str, dict[str, object]]]:
    answers = [action for action in actions if isinstance(action, Answer)]
    assert len(answers) == len(actions)
    return [(a.fate.kind, a.fate.reason, a.fate.details) for a in answers]


def test_a_generation_that_waits_for_the_storage_fails_at_every_stage(machine: Coordinator) -> None:
    asked = [acknowledged(machine)]
    asked += machine.handle(ShardsChecked(KEY, ()), 0.0)
    asked += machine.handle(ManifestWritten(KEY), 0.0)
    assert [type(action) for action in asked] == [CheckShards, WriteManifest, AppendPublish]
    assert all(machine.wants(action) for action in asked)
    for stage in range(3):
        again = Coordinator(RUN)
        again.handle(HistoryRead(_opened()), 0.0)
        acknowledged(again)
        if stage > 0:
            again.handle(ShardsChecked(KEY, ()), 0.0)
        if stage > 1:
            again.handle(ManifestWritten(KEY), 0.0)
        told = fates(again.handle(SILENT, 0.0))
        assert told == [("failed", SILENT.reason, {"uncertain": stage == 2})] * 3
        assert not any(again.wants(action) for action in asked)
        assert again.wants(RefreshHint())


def _opened() -> History:
    storage = MemoryStorage()
    CommitLog(storage).open_attempt(RUN, "first")
    return CommitLog(storage).read()


def test_ranks_that_are_still_writing_do_not_wait_for_the_coordinator_s_storage(
    machine: Coordinator,
) -> None:
    machine.handle(AckReceived(RANKS.ack(1), 1), 0.0)
    assert machine.handle(SILENT, 0.0) == []
    assert machine.in_flight() == {"g1-a1": "the acknowledgement of ranks 0 and 2"}


def test_an_append_that_comes_through_at_last_is_published(machine: Coordinator) -> None:
    """It was called uncertain; whoever asks again is told what the log says."""
    acknowledged(machine)
    machine.handle(ShardsChecked(KEY, ()), 0.0)
    machine.handle(ManifestWritten(KEY), 0.0)
    machine.handle(SILENT, 0.0)
    assert machine.handle(PublishAppended(KEY, 2), 0.0) == [RefreshHint()]
    [answer] = machine.handle(AckReceived(RANKS.ack(0), 9), 0.0)
    assert isinstance(answer, Answer)
    assert answer.fate.kind == "published"


def test_what_comes_of_the_rest_changes_nothing(machine: Coordinator) -> None:
    acknowledged(machine)
    machine.handle(SILENT, 0.0)
    assert machine.handle(ShardsChecked(KEY, ()), 0.0) == []
    assert machine.handle(ManifestWritten(KEY), 0.0) == []
    [answer] = machine.handle(AckReceived(RANKS.ack(0), 9), 0.0)
    assert fates([answer]) == [("failed", SILENT.reason, {"uncertain": False})]


# --- in a live loop -------------------------------------------------------------------------------


class Hanging(MemoryStorage):
    """Hangs where it is told to, until the gate opens."""

    def __init__(self, clock: SlowClock) -> None:
        super().__init__()
        self.hangs = ""
        self.gate = threading.Event()
        self._clock = clock

    def _wait(self, verb: str, path: str) -> None:
        if self.hangs and self.hangs in f"{verb} {path}":
            self._clock.pass_by(SHORT_S)
            self.gate.wait(20)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self._wait("read", path)
        return super().read(path, start, length)

    def size(self, path: str) -> int:
        self._wait("size", path)
        return super().size(path)

    def create(self, path: str, data: Buffer) -> None:
        self._wait("create", path)
        super().create(path, data)

    def replace(self, path: str, data: Buffer) -> None:
        self._wait("replace", path)
        super().replace(path, data)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(service_module, "LOOK_AGAIN_S", 0.02)
    clock = SlowClock()
    clock.rule(monkeypatch)
    storage = Hanging(clock)
    for number in (1, 2, 3):
        Ranks(ranks=3, number=number).write(storage)
    yield storage
    storage.gate.set()


def service_of(storage: Hanging) -> Service:
    return Service(RUN, lambda: storage, ack_timeout_s=60.0, storage_timeout_s=SHORT_S)


@pytest.mark.parametrize(
    ("hangs", "doing"),
    [
        ("size generations/g1-a1", "asking for the size"),
        ("create generations/g1-a1/manifest", "writing"),
        ("create log/00000000000000000002", "writing"),
        ("read log/00000000000000000002", "reading"),
    ],
)
def test_ranks_are_told_and_the_next_generation_is_published(
    hanging: Hanging, hangs: str, doing: str
) -> None:
    async def play() -> None:
        service = service_of(hanging)
        await service.open_attempt("first")
        hanging.hangs = hangs
        for number in (1, 2):  # the second waits behind the call of the first
            group = words(0, 1, 2, group=Ranks(ranks=3, number=number))
            fates = await asyncio.gather(*map(service.acknowledge, group))
            assert {fate.kind for fate in fates} == {"failed"}
            assert all(f"while {doing}" in fate.reason for fate in fates)
            assert all(hangs.partition(" ")[2] in fate.reason for fate in fates)
        assert "no answer from the storage" in str(service.last_error)
        hanging.gate.set()
        group = words(0, 1, 2, group=Ranks(ranks=3, number=3))
        fates = await asyncio.gather(*map(service.acknowledge, group))
        assert {fate.kind for fate in fates} == {"published"}, fates[0].reason
        await service.close()

    live(play)
    names = [publish.name for publish in CommitLog(hanging).read().publishes]
    # The append that was on its way when it was given up came through; nothing else did.
    assert names == (["g1-a1", "g3-a1"] if " log/" in hangs else ["g3-a1"])


def test_a_hint_that_hangs_is_no_matter_of_the_generation_that_it_tells_of(
    hanging: Hanging,
) -> None:
    async def play() -> None:
        service = service_of(hanging)
        await service.open_attempt("first")
        hanging.hangs = "replace"
        fates = await asyncio.gather(*map(service.acknowledge, words(0, 1, 2)))
        assert {fate.kind for fate in fates} == {"published"}
        group = words(0, 1, 2, group=Ranks(ranks=3, number=2))
        fates = await asyncio.gather(*map(service.acknowledge, group))
        assert {fate.kind for fate in fates} == {"failed"}
        assert "latest.json: no answer" in fates[0].reason
        hanging.gate.set()
        await service.close()

    live(play)


def test_a_coordinator_that_cannot_read_the_log_says_so_to_ranks_that_wait(
    hanging: Hanging,
) -> None:
    CommitLog(hanging).open_attempt(RUN, "first")

    async def play() -> None:
        service = service_of(hanging)
        hanging.hangs = "read log/"
        fate = await service.acknowledge(words(0)[0])
        assert fate.kind == "failed"
        assert "there is no commit log: " in fate.reason
        assert "no answer from the storage for 0 s while reading" in fate.reason
        hanging.gate.set()
        await until(lambda: service.degraded is None)
        fates = await asyncio.gather(*map(service.acknowledge, words(0, 1, 2)))
        assert {fate.kind for fate in fates} == {"published"}

    live(play)


def test_an_opening_that_hangs_says_why_and_may_be_asked_again(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "OPEN_WAIT_S", SHORT_S)

    async def play() -> None:
        service = service_of(hanging)
        hanging.hangs = "create log/"
        with pytest.raises(StorageError, match="no answer from the storage") as caught:
            await service.open_attempt("first")
        assert caught.value.where.endswith("log/00000000000000000001.json")
        hanging.gate.set()
        monkeypatch.setattr(service_module, "OPEN_WAIT_S", 60.0)
        assert await service.open_attempt("first") == 1

    live(play)
    assert len(CommitLog(hanging).read().attempts) == 1
