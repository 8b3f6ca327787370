"""What one node holds: whole, hashed, of the newest attempt, and no more than it may."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from held_runs import copy
from shelved import LAYOUT, data_of, header, put, words

from coherent_ray.commit.manifest import shard_path
from coherent_ray.digests import digest_of, new_hasher
from coherent_ray.errors import ClusterError, Fenced, NotFound
from coherent_ray.train.memory.shelf import Entry, Shelf
from coherent_ray.train.memory.slots import HEAD_BYTES, open_slot
from coherent_ray.train.memory.words import Words, unpack


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def shelf() -> Shelf:
    return Shelf("small", keeper="keeper-a", node="a")


def updates(shelf: Shelf) -> list[tuple[int, int, int]]:
    """Attempt, rank and update of all that is held."""
    return sorted((e.facts.attempt, e.facts.rank, e.facts.update) for e in shelf.entries())


def test_an_entry_says_all_that_a_manifest_needs(shelf: Shelf) -> None:
    about = words(1, header(5))
    name, digest = put(shelf, about)
    entry = shelf.written(name, digest)
    assert entry is not None
    assert (entry.keeper, entry.node, entry.digest, entry.facts) == (
        "keeper-a", "a", digest, about.facts
    )  # fmt: skip
    shard, data = entry.shard, data_of(about)
    assert shard.path == shard_path("generations/g7-a1", 1, 2)
    assert (shard.start, shard.stop, shard.size) == (LAYOUT.cut(1, 2), LAYOUT.nbytes, len(data))
    expected = []
    for at in range(0, len(data), 1024):
        hasher = new_hasher("xxh3_128")
        hasher.update(data[at : at + 1024])
        expected.append(hasher.hexdigest())
    assert list(shard.blocks) == expected
    assert shard.digest == digest_of(b"".join(map(bytes.fromhex, expected)), "xxh3_128")
    assert shelf.entries() == [entry]
    assert shelf.words(name, digest) == about.pack()
    assert shelf.read(name, digest, 0, 10**6) == data
    assert shelf.read(name, digest, 4100, 7) == data[4100:4107]
    assert shelf.read(name, digest, len(data) + 1, 7) == b""


def test_what_was_written_unheard_is_held_all_the_same(shelf: Shelf) -> None:
    put(shelf, words(0, header(5)))
    assert updates(shelf) == [(1, 0, 5)]


def test_a_slot_that_is_being_written_holds_nothing(shelf: Shelf) -> None:
    put(shelf, words(0, header(5)), slot=0)
    name, digest = put(shelf, words(0, header(6)), slot=1)
    reserved = shelf.reserve(1, 0, words(0, header(6)).facts.size, 2)[1]
    slot = open_slot(reserved.pid, reserved.file, reserved.name)
    slot.begin()
    assert updates(shelf) == [(1, 0, 5)]
    assert shelf.written(name, digest) is None
    with pytest.raises(NotFound, match="does not hold that snapshot"):
        shelf.read(name, digest, 0, 1)
    slot.close()


def test_the_same_rank_gets_the_same_slots_again(shelf: Shelf) -> None:
    first = shelf.reserve(1, 0, 1000, 2)
    assert shelf.reserve(1, 0, 1000, 2) == first
    assert shelf.reserve(1, 1, 1000, 2) != first
    assert shelf.nbytes() == 4 * (HEAD_BYTES + 1000)


def test_a_slot_that_nobody_knows_is_an_error(shelf: Shelf) -> None:
    """So the rank of a keeper that was started again hears that it needs others."""
    with pytest.raises(NotFound):
        shelf.written("0" * 16, digest_of(b""))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda w: replace(w, facts=replace(w.facts, run_id="other")),
        lambda w: replace(w, facts=replace(w.facts, attempt=2)),
        lambda w: replace(w, facts=replace(w.facts, rank=1)),
        lambda w: replace(w, header=w.header + b" "),
        lambda w: replace(w, receipts=b"more"),
    ],
)
def test_words_that_are_not_of_this_slot_hold_nothing(shelf: Shelf, wrong) -> None:
    about = words(0, header(5))
    reserved = shelf.reserve(1, 0, about.facts.size, 2)[0]
    slot = open_slot(reserved.pid, reserved.file, reserved.name)
    slot.begin()
    slot.memory(about.facts.size)[:] = data_of(about)
    slot.end(about.facts.size, wrong(about).pack())
    slot.close()
    assert shelf.entries() == []


def test_words_are_what_was_packed_or_refused() -> None:
    about = words(0, header(5))
    packed = about.pack()
    assert unpack(packed) == about
    assert unpack(packed).read_header() == header(5)
    for cut in (0, 3, 23, 24, len(packed) - 1):
        with pytest.raises(ValueError, match=r"short|length"):
            unpack(packed[:cut])
    with pytest.raises(ValueError, match="length"):
        unpack(packed + b"x")
    facts = replace(about.facts, rank=0, ranks=1, start=5, stop=5)
    with pytest.raises(ValueError, match="no such rank"):
        replace(facts, rank=1)
    with pytest.raises(ValueError, match="no such rank"):
        replace(facts, stop=4)
    nothing = replace(about.facts, header_digest=digest_of(b"no header"))
    with pytest.raises(ValueError, match="JSON"):
        unpack(Words(nothing, b"no header", b"").pack()).read_header()


# --- which attempt, and how much ------------------------------------------------------------------


def test_an_older_attempt_gets_no_memory(shelf: Shelf) -> None:
    shelf.reserve(3, 0, 1000, 2)
    with pytest.raises(Fenced, match="attempt 3 has opened"):
        shelf.reserve(2, 0, 1000, 2)
    shelf.settle(5, [])
    with pytest.raises(Fenced, match="attempt 5 has opened"):
        shelf.reserve(4, 0, 1000, 2)


def test_what_an_admission_passed_over_is_let_go(shelf: Shelf) -> None:
    _, chosen = put(shelf, words(0, header(5)), slot=0)
    put(shelf, words(0, header(6)), slot=1)
    put(shelf, words(1, header(6)), slot=1)
    shelf.settle(2, [chosen])
    assert updates(shelf) == [(1, 0, 5)]
    assert shelf.nbytes() < 2 * (HEAD_BYTES + words(0, header(5)).facts.size)
    shelf.settle(3, [])
    assert updates(shelf) == []
    assert shelf.nbytes() == 0


def test_what_an_attempt_goes_on_from_stays_until_it_has_two(shelf: Shelf) -> None:
    for rank in (0, 1):
        put(shelf, words(rank, header(5)))
    shelf.settle(2, [e.digest for e in shelf.entries()])
    shelf.written(*put(shelf, words(0, header(6, 2)), slot=0))
    assert updates(shelf) == [(1, 0, 5), (1, 1, 5), (2, 0, 6)]
    shelf.written(*put(shelf, words(1, header(6, 2)), slot=0))
    assert updates(shelf) == [(1, 0, 5), (1, 1, 5), (2, 0, 6), (2, 1, 6)]
    # By now rank 0 knows that rank 1 has update 6 as well.
    shelf.written(*put(shelf, words(0, header(7, 2)), slot=1))
    assert updates(shelf) == [(2, 0, 6), (2, 0, 7), (2, 1, 6)]


def test_more_than_there_is_is_refused_before_it_is_taken() -> None:
    shelf = Shelf("small", available=lambda: 20_000)
    shelf.reserve(1, 0, 3_000, 2)
    before = open_files()
    with pytest.raises(ClusterError, match="for rank 1 on this node") as caught:
        shelf.reserve(1, 1, 4_000, 2)
    assert caught.value.details == {"wanted": 2 * (HEAD_BYTES + 4_000), "free": 16_000}
    assert open_files() == before


def test_letting_go_gives_all_back(shelf: Shelf) -> None:
    before = open_files()
    for rank in range(3):
        put(shelf, words(rank, header(5, ranks=3)))
    assert len(shelf.entries()) == 3
    shelf.clear()
    assert (shelf.entries(), shelf.nbytes()) == ([], 0)
    assert open_files() == before


# --- copies on another node -----------------------------------------------------------------------


def held(shelf: Shelf, about: Words, slot: int = 0) -> Entry:
    entry = shelf.written(*put(shelf, about, slot))
    assert entry is not None
    return entry


def test_a_copy_is_the_same_snapshot_elsewhere(shelf: Shelf) -> None:
    other = Shelf("small", keeper="keeper-b", node="b")
    entry = held(shelf, words(1, header(5)))
    assert copy(shelf, entry, other)
    (found,) = other.entries()
    assert (found.keeper, found.node) == ("keeper-b", "b")
    assert (found.digest, found.facts, found.shard) == (entry.digest, entry.facts, entry.shard)
    name = found.at.name
    assert other.read(name, found.digest, 0, 10**6) == data_of(words(1, header(5)))
    assert other.words(name, found.digest) == words(1, header(5)).pack()


def test_while_a_copy_comes_the_one_before_stays(shelf: Shelf) -> None:
    other = Shelf("small")
    for update in range(5, 9):
        entry = held(shelf, words(0, header(update)), slot=update % 2)
        other.receive(entry.facts, 0, b"the beginning")
        assert update == 5 or (1, 0, update - 1) in updates(other)
        assert copy(shelf, entry, other)
        assert (1, 0, update) in updates(other)
    assert updates(other) == [(1, 0, 7), (1, 0, 8)]


def test_a_copy_that_was_changed_on_the_way_is_none(shelf: Shelf) -> None:
    other = Shelf("small")
    entry = held(shelf, words(0, header(5)))
    data = bytearray(shelf.read(entry.at.name, entry.digest, 0, entry.facts.size))
    data[-1] ^= 1
    other.receive(entry.facts, 0, bytes(data))
    assert not other.received(words(0, header(5)).pack(), entry.shard)
    assert updates(other) == []


def test_a_copy_of_an_older_attempt_is_refused(shelf: Shelf) -> None:
    other = Shelf("small")
    other.settle(2, [])
    with pytest.raises(Fenced):
        copy(shelf, held(shelf, words(0, header(5))), other)
    assert not other.received(words(0, header(5)).pack(), held(shelf, words(0, header(5))).shard)
