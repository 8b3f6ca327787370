"""Reading back: who reads whose shard, what is found, and that nothing is published before."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest
from ranks import BLOCK, RUN, Ranks, Shell, acknowledged, check_published_is_whole
from test_service import live

from coherent_ray.commit.events import AckWithdrawn, AppendPublish, CheckShards, Key, WriteManifest
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.manifest import Acknowledgement, ReadBack
from coherent_ray.commit.read_back import Request, read_back, reply_from_json
from coherent_ray.commit.service import Service
from coherent_ray.storage.testing.faults import Fault, FaultyStorage, flipped
from coherent_ray.storage.testing.memory import MemoryStorage

RANKS = Ranks(ranks=3)
KEY = Key(attempt=1, number=1)
PUBLISHED = Fate("published", 1, 1, seq=2)


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    Shell(storage).open("first")
    RANKS.write(storage)
    return storage


@pytest.fixture
def shell(storage: MemoryStorage) -> Shell:
    return Shell(storage, read_back=True, ack_timeout_s=60.0)


def flip(storage: MemoryStorage, rank: int, bit: int = 700) -> None:
    path = RANKS.shard(rank).path
    storage.files[path] = flipped(storage.files[path], bit)


def read_of(rank: int) -> ReadBack:
    """What the rank after says of a shard that is whole."""
    return ReadBack(rank, RANKS.shard(rank).digest, ())


def word(rank: int) -> Acknowledgement:
    """What a rank says that has read already."""
    return RANKS.ack(rank, read_back=read_of((rank - 1) % 3))


# --- one shard ------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found_and_named(storage: MemoryStorage) -> None:
    shard = RANKS.shard(1)
    assert read_back(storage, RANKS.header, shard) == read_of(1)
    assert len(shard.blocks) > 1
    for place in range(shard.size):
        with_damage = MemoryStorage()
        with_damage.files = {shard.path: flipped(storage.files[shard.path], 8 * place)}
        (problem,) = read_back(with_damage, RANKS.header, shard).problems
        assert problem.startswith(f"{shard.path}: block {place // BLOCK} (bytes ")
        assert "'model/" in problem or "header" in problem


def test_a_shard_that_is_gone_or_cannot_be_read_is_told(storage: MemoryStorage) -> None:
    shard = RANKS.shard(1)
    refusing = FaultyStorage(storage, [Fault("refuse", verb="read_into")])
    (problem,) = read_back(refusing, RANKS.header, shard).problems
    assert "cannot be read back: injected" in problem
    del storage.files[shard.path]
    (problem,) = read_back(storage, RANKS.header, shard).problems
    assert "is missing" in problem


def test_a_word_about_a_shard_of_which_nothing_holds_is_short(storage: MemoryStorage) -> None:
    many = Ranks(ranks=1)
    many.write(storage)
    blocks = -(-many.shard(0).size // 16)
    record = dataclasses.replace(many.shard(0), block_bytes=16, blocks=("0" * 32,) * blocks)
    found = read_back(storage, many.header, record).problems
    assert len(found) == 9
    assert f"{blocks + 1 - 8} more blocks are wrong" in found[-1]


def test_replies_cross_the_wire() -> None:
    for reply in (PUBLISHED, Request(RANKS.shard(2))):
        assert reply_from_json(reply.to_json()) == reply
    for wrong in ({"shard": {"rank": 1}}, {"kind": "published"}):
        with pytest.raises(ValueError, match=r"."):
            reply_from_json(wrong)


# --- the machine ----------------------------------------------------------------------------------


def test_each_rank_reads_the_shard_of_the_rank_before_once_all_are_there(shell: Shell) -> None:
    for rank in range(3):
        shell.acknowledge(RANKS.ack(rank))
    assert not shell.asked
    assert type(shell.step()) is CheckShards
    assert not shell.todo, "something is written before anything was read"
    assert [(shell.words[a.call - 1].rank, a.shard.rank) for a in shell.asked] == [
        (0, 2), (1, 0), (2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nothing_is_written_before_the_last_has_read(shell: Shell, order: tuple[int, ...]) -> None:
    calls = [shell.acknowledge(RANKS.ack(rank)) for rank in range(3)]
    shell.step()
    for rank in order:
        assert not shell.todo
        assert shell.machine.in_flight()["g1-a1"].startswith("the read-back by rank")
        reader = next(a for a in shell.asked if shell.words[a.call - 1].rank == rank)
        shell.asked.remove(reader)
        shell.asked.appendleft(reader)
        shell.read()
    assert [type(action) for action in shell.todo] == [WriteManifest]
    shell.run()
    assert [shell.answers[call] for call in calls] == [PUBLISHED] * 3


def test_of_one_rank_that_one_reads_its_own(storage: MemoryStorage) -> None:
    alone = Ranks(ranks=1, number=2)
    alone.write(storage)
    shell = Shell(storage, read_back=True)
    shell.acknowledge(alone.ack(0))
    shell.step()
    assert [asked.shard for asked in shell.asked] == [alone.shard(0)]
    shell.run()
    assert check_published_is_whole(storage).latest.name == "g2-a1"


@pytest.mark.parametrize("rank", range(3))
def test_a_bad_read_back_fails_the_generation_for_all_and_names_the_block(
    shell: Shell, storage: MemoryStorage, rank: int
) -> None:
    flip(storage, rank)
    fates = shell.save(RANKS)
    assert {fate.kind for fate in fates} == {"failed"}
    (reason,) = {fate.reason for fate in fates}
    assert f"read back by rank {(rank + 1) % 3}: {RANKS.shard(rank).path}: block 1 " in reason
    assert fates[0].details["problems"] == [reason]
    assert not check_published_is_whole(storage).publishes
    # Without the option nobody looks: this is what it is for.
    assert {f.kind for f in Shell(storage).save(RANKS)} == {"published"}


@pytest.mark.parametrize("have_read", range(4))
def test_a_new_coordinator_asks_only_those_who_have_not_read(
    storage: MemoryStorage, have_read: int
) -> None:
    shell = Shell(storage, read_back=True)
    calls = [shell.acknowledge(word(r) if r < have_read else RANKS.ack(r)) for r in range(3)]
    shell.step()
    assert [shell.words[a.call - 1].rank for a in shell.asked] == list(range(have_read, 3))
    shell.run()
    assert [shell.answers[call] for call in calls] == [PUBLISHED] * 3


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_calls_again_is_asked_again_until_it_has_read(
    shell: Shell, again: bool
) -> None:
    """The request was lost with its answer."""
    for rank in range(3):
        shell.acknowledge(RANKS.ack(rank))
    shell.step()
    before = len(shell.asked)
    shell.acknowledge(word(1) if again else RANKS.ack(1))
    assert len(shell.asked) == before + (not again)
    shell.run()
    assert {fate.kind for fate in shell.answers.values()} == {"published"}


def test_a_time_out_names_who_has_not_read(shell: Shell) -> None:
    calls = [shell.acknowledge(RANKS.ack(rank), now=10.0) for rank in range(3)]
    shell.step()  # at 0.0: the shell's own steps take no time
    assert shell.machine.deadline == 60.0
    shell.read(now=30.0)
    shell.tick(now=59.0)
    assert not shell.answers
    shell.tick(now=60.0)
    fate = shell.answers[calls[0]]
    assert fate.reason == (
        "ranks 1 and 2 did not read back the shard of the rank before within 60 s"
    )
    assert fate.details["missing"] == [1, 2]
    # Who comes too late hears the same.
    shell.run()
    assert {shell.answers[call].reason for call in calls} == {fate.reason}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_rank_that_gives_up_is_not_waited_for(shell: Shell, steps: int) -> None:
    calls = [shell.acknowledge(RANKS.ack(rank)) for rank in range(3)]
    for _ in range(steps):
        shell.step()
    shell.tell(AckWithdrawn(KEY, 1, "rank 1 could not save: it broke"))
    shell.run()
    assert {shell.answers[call].reason for call in calls} == {"rank 1 could not save: it broke"}


def test_an_attempt_that_opens_fences_those_who_read(shell: Shell, storage: MemoryStorage) -> None:
    calls = [shell.acknowledge(RANKS.ack(rank)) for rank in range(3)]
    shell.step()
    shell.open("second")
    shell.run()
    assert {shell.answers[call].kind for call in calls} == {"fenced"}
    assert not check_published_is_whole(storage).publishes


@pytest.mark.parametrize(
    "read", [read_of(1), ReadBack(0, "xxh3_128:" + "0" * 32, ())], ids=["rank", "digest"]
)
def test_what_was_not_asked_for_is_no_read_back(shell: Shell, read: ReadBack) -> None:
    call = shell.acknowledge(RANKS.ack(1, read_back=read))
    for rank in (0, 2):
        shell.acknowledge(word(rank))
    shell.run()
    assert shell.answers[call].reason == "rank 1 read back what it was not asked for"


def test_without_the_option_a_read_back_changes_nothing(storage: MemoryStorage) -> None:
    shell = Shell(storage)
    for rank in range(3):
        shell.acknowledge(word(rank))
    assert [type(shell.step()) for _ in range(3)] == [CheckShards, WriteManifest, AppendPublish]


# --- the service ----------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
def test_the_service_reads_no_shard_and_publishes_what_the_ranks_have_read(
    storage: MemoryStorage, damaged: bool
) -> None:
    spy = FaultyStorage(storage)
    if damaged:
        flip(storage, 1)

    async def play() -> list[Fate]:
        service = Service(RUN, lambda: spy, read_back=True)
        fates = await asyncio.gather(*(acknowledged(service, storage, RANKS, r) for r in range(3)))
        assert (service.last_error is not None) == damaged
        await service.close()
        return fates

    assert {fate.kind for fate in live(play)} == {"failed" if damaged else "published"}
    assert "read_into" not in {verb for verb, _ in spy.calls}
