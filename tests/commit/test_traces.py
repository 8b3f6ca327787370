"""A log that is gone, or cut off, is told by what else lies in the root: no crash does that."""

from __future__ import annotations

import pytest
from logs import started

from coherent_ray import canonical
from coherent_ray.commit.log import HINT, CommitLog, record_path
from coherent_ray.commit.traces import cut_off, log_gone, read_hint, read_whole
from coherent_ray.errors import LogDamaged
from coherent_ray.storage.testing.memory import MemoryStorage

LATER = [
    "generations/g1-a1/manifest.json",
    "generations/g1-a1/shard-00000-of-00002.safetensors",
    "receipts/000000000001-000000000002-g1-a1.jsonl",
    f"holds/g1-a1-{'0' * 32}.json",
]
BEFORE = [
    f"datasets/blake3-{'0' * 64}.json",
    f"probe/{'0' * 32}",
    "checkpoint_manager_snapshot.json",
    "generations/notes.txt",
    "receipts/mine.txt",
    "README.md",
]


def hinted(generations: int = 2) -> MemoryStorage:
    storage = started(generations)
    log = CommitLog(storage)
    assert log.refresh_hint(log.read())
    return storage


def test_a_whole_log_is_read() -> None:
    assert read_whole(hinted()).seq == 3
    assert read_whole(started()).seq == 2


@pytest.mark.parametrize("path", LATER)
def test_a_file_that_comes_after_the_log_tells_that_it_was_there(path: str) -> None:
    storage = MemoryStorage()
    storage.create(path, b"x")
    with pytest.raises(LogDamaged, match="the commit log is gone") as caught:
        read_whole(storage)
    assert path in caught.value.what
    assert caught.value.where.endswith("/log")
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("path", BEFORE)
def test_what_may_come_before_the_log_tells_nothing(path: str) -> None:
    storage = MemoryStorage()
    storage.create(path, b"x")
    assert read_whole(storage).records == ()


def test_a_hint_alone_tells_that_there_was_a_log() -> None:
    storage = hinted(0)
    storage.delete(record_path(1))
    with pytest.raises(LogDamaged, match=r"files of a run: latest\.json"):
        read_whole(storage)
    storage.replace(HINT, b"{")
    assert log_gone(storage) is None


def test_all_files_that_are_left_are_counted() -> None:
    storage = MemoryStorage()
    for path in LATER:
        storage.create(path, b"x")
    damage = log_gone(storage)
    assert damage is not None
    assert "and 3 more files" in damage.what
    assert damage.details["files"] == 4


@pytest.mark.parametrize("lost", [1, 2])
def test_a_log_without_its_end_is_refused(lost: int) -> None:
    storage = hinted()
    for seq in range(3, 3 - lost, -1):
        storage.delete(record_path(seq))
    with pytest.raises(LogDamaged, match=r"tells of record 3, after g2-a1, which") as caught:
        read_whole(storage)
    assert caught.value.where == HINT
    assert caught.value.details["readable_until"] == 3 - lost
    # The user has the last word.
    storage.delete(HINT)
    assert read_whole(storage).seq == 3 - lost


def test_a_log_that_went_on_differently_is_refused() -> None:
    storage = hinted()
    hint = read_hint(storage)
    storage.replace(HINT, canonical.dump({**hint, "digest": "blake3:" + "0" * 64}))
    with pytest.raises(LogDamaged):
        read_whole(storage)


@pytest.mark.parametrize(
    "hint",
    [
        {},
        {"seq": 0},
        {"seq": True},
        {"seq": "9"},
        {"seq": 9, "run_id": "another"},
        {"seq": 9},
    ],
)
def test_a_hint_that_says_nothing_of_this_run_changes_nothing(hint: dict[str, object]) -> None:
    assert cut_off(hint, CommitLog(started()).read()) is None


def test_an_old_hint_changes_nothing() -> None:
    storage = hinted(1)
    log = CommitLog(storage)
    log.open_attempt("run-1", "another")
    assert read_whole(storage).seq == 3
