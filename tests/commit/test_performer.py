"""The coordinator's hands: what they do to the storage, and what they say when it fails."""

from __future__ import annotations

import pytest
from ranks import RUN, Ranks

from coherent_ray.commit.events import (
    AppendFailed,
    AppendPublish,
    CheckShards,
    Key,
    ManifestFailed,
    ManifestWritten,
    PublishAppended,
    RefreshHint,
    ShardsChecked,
    WriteManifest,
)
from coherent_ray.commit.log import CommitLog, record_path
from coherent_ray.commit.performer import perform
from coherent_ray.commit.records import PublishBody
from coherent_ray.digests import digest_of
from coherent_ray.storage.testing.faults import Effect, Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

RANKS = Ranks(ranks=3)
KEY = Key(attempt=1, number=1)
MANIFEST = WriteManifest(KEY, "generations/g1-a1/manifest.json", b"the manifest")


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    RANKS.write(storage)
    return storage


def checked(storage: object) -> tuple[str, ...]:
    action = CheckShards(KEY, tuple(RANKS.shard(rank) for rank in range(3)))
    event = perform(action, storage, CommitLog(storage))
    assert isinstance(event, ShardsChecked)
    assert event.key == KEY
    return event.problems


# --- shards ---------------------------------------------------------------------------------------


def test_whole_shards_have_no_problems_and_are_not_read(storage: MemoryStorage) -> None:
    spy = FaultyStorage(storage)
    assert checked(spy) == ()
    assert {verb for verb, _ in spy.calls} == {"size"}


@pytest.mark.parametrize("rank", range(3))
def test_a_missing_or_short_shard_is_named(storage: MemoryStorage, rank: int) -> None:
    path, size = RANKS.shard(rank).path, RANKS.shard(rank).size
    storage.files[path] = storage.files[path][:-1]
    assert checked(storage) == (
        f"shard {path} of rank {rank} has {size - 1} bytes instead of {size}",
    )
    del storage.files[path]
    assert checked(storage) == (f"shard {path} of rank {rank} is missing",)


def test_all_bad_shards_are_listed(storage: MemoryStorage) -> None:
    for rank in (0, 2):
        del storage.files[RANKS.shard(rank).path]
    assert checked(storage) == tuple(
        f"shard {RANKS.shard(rank).path} of rank {rank} is missing" for rank in (0, 2)
    )


def test_a_shard_that_cannot_be_looked_at_is_a_problem(storage: MemoryStorage) -> None:
    faulty = FaultyStorage(storage, [Fault("refuse", verb="size", path="shard-00001")])
    (problem,) = checked(faulty)
    assert "of rank 1 cannot be read" in problem
    assert len(faulty.struck) == 1


# --- the manifest ---------------------------------------------------------------------------------


def test_the_manifest_is_written_once_and_may_be_asked_for_twice(storage: MemoryStorage) -> None:
    for _ in range(2):
        assert perform(MANIFEST, storage, CommitLog(storage)) == ManifestWritten(KEY)
        assert storage.files[MANIFEST.path] == MANIFEST.data


def test_another_manifest_under_the_name_is_not_touched(storage: MemoryStorage) -> None:
    storage.create(MANIFEST.path, b"another")
    event = perform(MANIFEST, storage, CommitLog(storage))
    assert event == ManifestFailed(KEY, f"{MANIFEST.path} holds something else")
    assert storage.files[MANIFEST.path] == b"another"


@pytest.mark.parametrize(
    ("effect", "times", "written"),
    [
        ("lose_answer", 1, True),  # it is there; asking again says so
        ("refuse", 1, False),
        ("full", 1, False),
    ],
)
def test_a_failing_storage_and_the_manifest(
    storage: MemoryStorage, effect: Effect, times: int, written: bool
) -> None:
    faulty = FaultyStorage(storage, [Fault(effect, verb="create", times=times)])
    event = perform(MANIFEST, faulty, CommitLog(faulty))
    assert len(faulty.struck) == times
    assert isinstance(event, ManifestWritten if written else ManifestFailed)
    assert (MANIFEST.path in storage.files) == written


# --- the log --------------------------------------------------------------------------------------


def append(number: int = 1, attempt: int = 1) -> AppendPublish:
    path = f"generations/g{number}-a{attempt}/manifest.json"
    body = PublishBody(number, attempt, 10, 0, path, 12, digest_of(b"the manifest"), None)
    return AppendPublish(Key(attempt, number), body)


def test_a_publish_is_appended_once(storage: MemoryStorage) -> None:
    log = CommitLog(storage)
    log.open_attempt(RUN, "first")
    assert perform(append(), storage, log) == PublishAppended(KEY, 2)
    assert perform(append(), storage, CommitLog(storage)) == PublishAppended(KEY, 2)
    assert log.read().seq == 2


def test_an_older_attempt_is_told_that_it_is_fenced(storage: MemoryStorage) -> None:
    log = CommitLog(storage)
    log.open_attempt(RUN, "first")
    log.open_attempt(RUN, "second")
    event = perform(append(), storage, CommitLog(storage))
    assert event == AppendFailed(KEY, "attempt 1 is over: attempt 2 has opened", "fenced")


def test_a_generation_from_the_past_is_told_that_it_is_refused(storage: MemoryStorage) -> None:
    log = CommitLog(storage)
    log.open_attempt(RUN, "first")
    perform(append(number=2), storage, log)
    event = perform(append(number=1), storage, log)
    assert isinstance(event, AppendFailed)
    assert event.outcome == "refused"
    assert "g2-a1" in event.reason


@pytest.mark.parametrize("effect", ["refuse", "full"])
def test_a_failing_storage_leaves_the_append_unknown(
    storage: MemoryStorage, effect: Effect
) -> None:
    CommitLog(storage).open_attempt(RUN, "first")
    faulty = FaultyStorage(storage, [Fault(effect, verb="create", path=record_path(2))])
    event = perform(append(), faulty, CommitLog(faulty))
    assert isinstance(event, AppendFailed)
    assert event.outcome == "unknown"
    assert len(faulty.struck) == 1


def test_an_append_whose_answer_is_lost_is_found(storage: MemoryStorage) -> None:
    CommitLog(storage).open_attempt(RUN, "first")
    faulty = FaultyStorage(storage, [Fault("lose_answer", verb="create", path="log/")])
    assert perform(append(), faulty, CommitLog(faulty)) == PublishAppended(KEY, 2)
    assert len(faulty.struck) == 1


def test_a_hint_that_cannot_be_written_is_no_event(storage: MemoryStorage) -> None:
    log = CommitLog(storage)
    log.open_attempt(RUN, "first")
    for verb in ("replace", "read"):
        faulty = FaultyStorage(storage, [Fault("refuse", verb=verb)])
        assert perform(RefreshHint(), faulty, CommitLog(faulty)) is None
        assert len(faulty.struck) == 1
    assert "latest.json" not in storage.files
    assert perform(RefreshHint(), storage, log) is None
    assert "latest.json" in storage.files
