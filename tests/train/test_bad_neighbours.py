"""Storages that fail under a run: which call, for whom, with which error; and all that must hold.

For every cell of the table: the save fails with path and reason, what is latest stays whole, both
ranks count the same, and the first save after the fault is published. Ranks, coordinator, log and
files are the product's.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken_disk import NUMBERS, BrokenDisk, Call, Who, disk, in_words
from test_stalled_saves import wait_until

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.retention import Policy
from coherent_ray.config.sections import Checkpoint
from coherent_ray.drill.saves import Saves
from coherent_ray.errors import SaveFailed
from coherent_ray.storage import LocalStorage
from coherent_ray.train.saving import Saved

__all__ = ["disk"]

OPTIONS = Checkpoint(block_bytes=4096, max_failed_saves=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def saves(root: Path, disk: BrokenDisk) -> Iterator[Saves]:
    """Two ranks that have published g1."""
    saves = Saves(lambda: LocalStorage(root), items=3000, options=OPTIONS)
    assert saves.open() == 0
    assert kinds(saves.save()) == ["published"] * 2
    yield saves
    saves.close()


def kinds(saved: list[Saved]) -> list[str]:
    return [one.fate.kind for one in saved]


def latest_of(root: Path) -> str:
    """The latest generation, which is whole to its last byte."""
    found = Generations(LocalStorage(root)).select("refuse")
    assert found is not None
    return found.publish.name


# --- the table ------------------------------------------------------------------------------------

WRITING: list[Call] = ["begin", "write", "sync", "link", "unlink", "sync directory", "close"]
WRITERS: list[Who] = ["shard", "receipts", "manifest", "record"]
CHECKING: list[tuple[Call, Who]] = [
    ("open", "check"), ("status", "check"), ("open", "record"), ("status", "record"),
    ("read", "record"),
]  # fmt: skip
CELLS = [(call, who) for who in WRITERS for call in WRITING] + CHECKING


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("call", "who"), CELLS)
def test_the_save_fails_with_path_and_reason_and_the_next_one_works(
    call: Call, who: Who, number: int, saves: Saves, disk: BrokenDisk, root: Path
) -> None:
    with disk.breaks(call, who, number):
        saved = saves.save()
    assert disk.struck
    assert kinds(saved) == ["failed"] * 2
    for reason in (one.fate.reason for one in saved):
        assert f"{root}/" in reason
        assert in_words(number) in reason
        assert "Error" not in reason, "one of our own, not the operating system's"
    # Seen though never called durable, it is found by whoever reads: then it is whole, too.
    unsure = who == "record" and call in {"unlink", "sync directory", "close"}
    assert latest_of(root) == ("g2-a1" if unsure else "g1-a1")
    assert kinds(saves.save()) == ["published"] * 2
    assert latest_of(root) == "g3-a1"
    # The hint is refreshed behind the answer, by a file of its own: not all at once.
    wait_until(lambda: not list(root.rglob(".tmp-*")) or call == "unlink")


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["begin", "write", "sync", "rename", "sync directory", "close"])
def test_a_hint_that_cannot_be_written_costs_nothing(
    call: Call, number: int, saves: Saves, disk: BrokenDisk, root: Path
) -> None:
    with disk.breaks(call, "hint", number):
        assert kinds(saves.save()) == ["published"] * 2
        end = time.monotonic() + 30
        while not disk.struck and time.monotonic() < end:  # the hint comes behind the answers
            time.sleep(0.005)
    assert disk.struck
    assert kinds(saves.save()) == ["published"] * 2
    assert latest_of(root) == "g3-a1"


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["delete", "sync directory", "list"])
def test_a_retired_generation_that_cannot_be_deleted_goes_later(
    call: Call, number: int, root: Path, disk: BrokenDisk
) -> None:
    def settled(saves: Saves) -> None:
        upkeep = saves.service.upkeep
        assert upkeep is not None
        saves._loop.call(upkeep.settled())

    saves = Saves(lambda: LocalStorage(root), items=3000, options=OPTIONS, retention=Policy(keep=1))
    saves.open()
    saves.save()
    settled(saves)
    upkeep = saves.service.upkeep
    assert upkeep is not None
    # Only what is done behind a publish: the save itself must not meet the fault.
    published = upkeep.published
    with pytest.MonkeyPatch.context() as patch:

        def break_behind(*told: object, **more: object) -> None:
            patch.setattr(disk, "_rule", (call, "deletion", number))
            published(*told, **more)  # type: ignore[arg-type]

        patch.setattr(upkeep, "published", break_behind)
        assert kinds(saves.save()) == ["published"] * 2
        settled(saves)
        assert disk.struck
    error = saves.service.last_error or ""
    assert str(root) in error
    assert in_words(number) in error
    assert latest_of(root) == "g2-a1"
    assert kinds(saves.save()) == ["published"] * 2
    settled(saves)
    saves.close()
    assert latest_of(root) == "g3-a1"
    assert [path.name for path in (root / "generations").iterdir()] == ["g3-a1"]


# --- how long training goes on --------------------------------------------------------------------


def test_training_goes_on_until_more_saves_in_a_row_fail_than_may(
    saves: Saves, disk: BrokenDisk, root: Path
) -> None:
    with disk.breaks("write", "shard", errno.EDQUOT):
        assert [kinds(saves.save()) for _ in range(2)] == [["failed"] * 2] * 2
    assert kinds(saves.save()) == ["published"] * 2
    with disk.breaks("write", "shard", errno.EIO):
        assert [kinds(saves.save()) for _ in range(2)] == [["failed"] * 2] * 2
        saves.begin()
        for saver in saves.savers:
            with pytest.raises(SaveFailed, match="3 saves in a row failed") as caught:
                saver.settle()
            assert in_words(errno.EIO) in caught.value.what
            assert str(root) in caught.value.what
    assert latest_of(root) == "g4-a1"
