"""Profiles: what ranks tell of their times, gathered, stored and read, and believed by nobody."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from ranks import RUN, Ranks
from slow_clock import SlowClock

from coherent_ray.commit.events import Key
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.manifest import Acknowledgement, dump
from coherent_ray.commit.profiles import (
    Part,
    Profile,
    Timekeeper,
    path_of,
    read_profile,
    write_profile,
)
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.service import Service
from coherent_ray.commit.timings import PARTS, About, Timings
from coherent_ray.errors import StorageError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

RANKS = Ranks(ranks=3)
BODY = PublishBody(
    number=1, attempt=1, update=7, epoch=0, manifest="generations/g1-a1/manifest.json",
    manifest_size=9, manifest_digest="blake3:" + "0" * 64, receipts=None,
)  # fmt: skip
KEY = Key(1, 1)


def timed(rank: int, seconds: float) -> Acknowledgement:
    times = dict.fromkeys(PARTS, seconds)
    about = About("due", 12.5) if rank == 0 else None
    return replace(RANKS.ack(rank), timings=Timings(**times, about=about))


def gathered() -> Profile:
    clock = SlowClock()
    keeper = Timekeeper(clock)
    for rank, seconds in enumerate((0.5, 3.0, 1.0)):
        keeper.acknowledged(timed(rank, seconds))
        clock.pass_by(2.0)
    begun = clock()
    clock.pass_by(0.25)
    keeper.checked(KEY, begun)
    clock.pass_by(0.5)
    begun = clock()
    clock.pass_by(0.125)
    profile = keeper.published(BODY, begun)
    assert profile is not None
    keeper.settled(KEY)
    assert keeper.published(BODY, begun) is None
    return profile


def test_ranks_are_compared_and_the_slowest_is_named() -> None:
    profile = gathered()
    assert (profile.generation, profile.update, profile.ranks) == ("g1-a1", 7, 3)
    assert profile.parts == {name: Part(1.0, 3.0, 1) for name in PARTS}
    assert (profile.acknowledged_s, profile.checked_s, profile.appended_s) == (6.0, 0.25, 0.125)
    assert profile.published_s == 6.875
    assert profile.about == About("due", 12.5)


def test_what_was_written_is_read_and_stays() -> None:
    storage, profile = MemoryStorage(), gathered()
    assert read_profile(storage, "g1-a1") is None
    write_profile(storage, profile)
    assert read_profile(storage, "g1-a1") == profile
    write_profile(storage, replace(profile, update=8))
    assert read_profile(storage, "g1-a1") == profile


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b"{" * 70_000])
def test_a_note_that_is_none_is_none(data: bytes) -> None:
    storage = MemoryStorage()
    storage.create(path_of("g1-a1"), data)
    assert read_profile(storage, "g1-a1") is None


def test_a_note_of_another_generation_is_none() -> None:
    storage = MemoryStorage()
    storage.create(path_of("g2-a1"), dump(gathered()))
    assert read_profile(storage, "g2-a1") is None


def test_a_storage_that_fails_is_an_error_for_who_reads_and_none_for_who_writes() -> None:
    inner = MemoryStorage()
    write_profile(FaultyStorage(inner, [Fault("full", verb="create")]), gathered())
    assert not list(inner.list())
    write_profile(inner, gathered())
    with pytest.raises(StorageError):
        read_profile(FaultyStorage(inner, [Fault("refuse", verb="read")]), "g1-a1")


def served(storage: Storage) -> list[Fate]:
    """Publish one generation by the service, and return the ranks' answers."""

    async def play() -> list[Fate]:
        service = Service(RUN, lambda: storage, ack_timeout_s=60.0)
        await service.open_attempt("token")
        words = [dump(timed(rank, 1.0)) for rank in range(3)]
        fates = await asyncio.gather(*map(service.acknowledge, words))
        await service.close()
        return [fate for fate in fates if isinstance(fate, Fate)]

    return asyncio.run(play())


def test_the_coordinator_leaves_one_behind_each_publish() -> None:
    storage = MemoryStorage()
    RANKS.write(storage)
    assert [fate.kind for fate in served(storage)] == ["published"] * 3
    profile = read_profile(storage, "g1-a1")
    assert profile is not None
    assert profile.parts["hash_s"] == Part(1.0, 1.0, 0)
    assert profile.published_s >= profile.appended_s > 0


def test_a_profile_that_cannot_be_stored_hurts_no_publish() -> None:
    inner = MemoryStorage()
    RANKS.write(inner)
    storage = FaultyStorage(inner, [Fault("full", verb="create", path="timings/")])
    assert [fate.kind for fate in served(storage)] == ["published"] * 3
    assert storage.struck
    assert read_profile(inner, "g1-a1") is None
