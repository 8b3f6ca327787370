"""A log that is gone, or cut off, is told by what else lies in the root: no crash does that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from logs import started

from coherent_ray import canonical
from coherent_ray.commit.log import HINT, CommitLog, record_path
from coherent_ray.commit.traces import cut_off, log_gone, read_hint, read_whole
from coherent_ray.errors import LogDamaged
from coherent_ray.storage.base import Entry
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


ELSE = "blake3:" + "0" * 64


def test_a_log_that_went_on_differently_is_refused() -> None:
    storage = hinted()
    hint = read_hint(storage)
    for other in ({"generation": "g3-a1"}, {"attempt": 2}):
        storage.replace(HINT, canonical.dump({**hint, "digest": ELSE, **other}))
        with pytest.raises(LogDamaged, match="missing at its end"):
            read_whole(storage)


@pytest.mark.parametrize("other", [{"digest": ELSE}, {"seq": 2}, {"seq": 11}, {"generation": "x"}])
def test_a_hint_in_which_one_thing_is_wrong_is_not_believed(other: dict[str, object]) -> None:
    """A bit that flips in a hint must not stop a run whose log is whole."""
    storage = hinted()
    storage.replace(HINT, canonical.dump({**read_hint(storage), **other}))
    assert read_whole(storage).seq == 3


def without_its_end(*made: str, hint: bool = False) -> MemoryStorage:
    """A log of one attempt and one generation, and files that were made later."""
    storage = started()
    if hint:
        log = CommitLog(storage)
        log.refresh_hint(log.read())
    for path in made:
        storage.create(path, b"x")
    return storage


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize(
    "path",
    [
        "generations/g2-a2/shard-00000-of-00002.safetensors",
        "generations/g2-a2/manifest.json",
        "generations/g1-a9/of-no-name-of-ours",
        "receipts/000000000011-000000000020-g2-a2.jsonl",
        f"holds/g2-a2-{'0' * 32}.json",
    ],
)
def test_a_file_of_an_attempt_that_the_log_does_not_know(path: str, hint: bool) -> None:
    with pytest.raises(LogDamaged, match="later than 1, the last that the log knows") as caught:
        read_whole(without_its_end(path, hint=hint))
    place = path.rpartition("/")[0] if path.startswith("generations") else path
    assert caught.value.details["unknown"] == [place]
    assert caught.value.exit_code == 1
    assert "Put the missing records back" in caught.value.remedy


@pytest.mark.parametrize(
    "path",
    [
        "generations/g9-a1/shard-00000-of-00002.safetensors",
        "generations/g2-a1/manifest.json",
        "receipts/000000000011-000000000020-g2-a1.jsonl",
        "generations/mine-a9/x",
        "generations/g2-a2",
        "receipts/g2-a2.jsonl",
        "g2-a2/manifest.json",
    ],
)
def test_what_an_attempt_in_the_log_may_have_left_is_no_trace(path: str) -> None:
    assert read_whole(without_its_end(path)).seq == 2


def test_an_attempt_that_opens_while_somebody_looks_is_no_damage() -> None:
    storage = started()

    class OpensMeanwhile(MemoryStorage):
        def list(self, prefix: str = "") -> Iterator[Entry]:
            found = [*super().list(prefix)]
            if prefix == "holds":  # the last listing before the log is read
                CommitLog(self).open_attempt("run-1", "another")
                self.create("generations/g2-a2/manifest.json", b"x")
            return iter(found)

    busy = OpensMeanwhile()
    busy.files = storage.files
    assert read_whole(busy).attempt == 2
    assert read_whole(storage).attempt == 2


def test_many_places_are_counted() -> None:
    made = [f"generations/g{number}-a2/manifest.json" for number in range(2, 10)]
    with pytest.raises(LogDamaged, match=r"generations/g6-a2 and 3 more; records") as caught:
        read_whole(without_its_end(*made))
    assert len(cast("list[str]", caught.value.details["unknown"])) == 8


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
