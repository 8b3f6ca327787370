"""A rank's side of reading back: whose shard it reads, and what it says when a byte is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from small_run import Coordinator
from test_saving import WAIT_S, ScriptedLine, both, save, saver, state

from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.read_back import Reply, Request
from coherent_ray.storage.testing.faults import FaultyStorage, flipped
from coherent_ray.storage.testing.memory import MemoryStorage


class Rotting(MemoryStorage):
    """A storage in which a bit of one shard turns before anybody looks at it again."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def size(self, path: str) -> int:
        if self.part in path:
            self.files[path] = flipped(self.files[path], -3)
            self.part = "never again"
        return super().size(path)


@contextmanager
def reading_back(storage: MemoryStorage) -> Iterator[Coordinator]:
    """Run a coordinator that has shards read back."""
    alive = Coordinator("small", lambda: storage, ack_timeout_s=WAIT_S, read_back=True)
    assert alive.open_attempt() == 1
    yield alive
    alive.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_read_back_each_rank_reads_the_shard_of_the_rank_before(ranks: int) -> None:
    storage = MemoryStorage()
    spies = [FaultyStorage(storage) for _ in range(ranks)]
    with reading_back(storage) as alive:
        saved = both(alive, spies, [state()] * ranks)
    assert {s.fate.kind for s in saved} == {"published"}
    for rank, spy in enumerate(spies):
        read = {path for verb, path in spy.calls if verb == "read_into"}
        before = (rank - 1) % ranks
        assert read == {f"generations/g1-a1/shard-{before:05d}-of-{ranks:05d}.safetensors"}


def test_a_shard_that_the_storage_has_spoilt_is_not_published_and_the_next_save_is() -> None:
    storage = Rotting("shard-00001")
    with reading_back(storage) as alive:
        first = both(alive, [storage] * 2, [state()] * 2)
        assert {s.fate.kind for s in first} == {"failed"}
        (reason,) = {s.fate.reason for s in first}
        assert "read back by rank 0: generations/g1-a1/shard-00001-of-00002" in reason
        assert "block" in reason
        assert "'model/weight'" in reason
        again = both(alive, [storage] * 2, [state()] * 2, number=2)
        assert {s.fate.kind for s in again} == {"published"}
    assert [p.name for p in CommitLog(storage).read().publishes] == ["g2-a1"]


def test_a_coordinator_that_asks_for_ever_is_a_failed_save() -> None:
    class Insisting(ScriptedLine):
        def acknowledge(self, word: Acknowledgement) -> Reply:  # type: ignore[override]
            self.words.append(word)
            return Request(word.shard)

    insisting = Insisting()
    saved = save(saver(insisting))
    assert "asked for the same read-back twice" in saved.fate.reason
    assert [word.read_back is not None for word in insisting.words] == [False, True]
