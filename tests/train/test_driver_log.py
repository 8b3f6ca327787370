"""Where the drivers' output lies, and what is left of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from coherent_ray.commit.inventory import item_of
from coherent_ray.train import driver_log


def test_a_root_keeps_its_logs_and_they_are_the_run_s(tmp_path: Path) -> None:
    path = driver_log.place(str(tmp_path))
    item = item_of(path.relative_to(tmp_path).as_posix())
    assert item is not None
    assert item.kind == "driver_log"
    path.write_text("one\n\ntwo\n")
    driver_log.leave(path)
    assert driver_log.last_words(path) == ["one", "two"]


def test_a_driver_that_said_nothing_leaves_nothing(tmp_path: Path) -> None:
    path = driver_log.place(str(tmp_path))
    assert not driver_log.has_words(path)
    driver_log.leave(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", ["s3://bucket/run", "absent"])
def test_other_roots_leave_the_temporary_directory(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = driver_log.place(root)
    assert path.parent == tmp_path
    driver_log.leave(path)
    assert list(tmp_path.iterdir()) == []


def test_old_logs_give_way(tmp_path: Path) -> None:
    directory = tmp_path / driver_log.DIRECTORY
    directory.mkdir()
    for day in range(10, 30):
        (directory / f"202601{day}T000000Z-1.log").write_text("old")
    (directory / "mine.txt").write_text("mine")
    driver_log.place(str(tmp_path))
    assert len(list(directory.glob("*.log"))) == driver_log.KEPT + 1
    assert (directory / "mine.txt").exists()


def test_a_clock_that_was_put_back_does_not_make_the_newest_log_the_oldest(tmp_path: Path) -> None:
    directory = tmp_path / driver_log.DIRECTORY
    directory.mkdir()
    for day in range(10, 30):
        (directory / f"220001{day}T235959Z-1.log").write_text("by a clock that was ahead")
    mine = driver_log.place(str(tmp_path))
    assert mine.name.startswith("22000130T000000Z-")
    mine.write_text("words")
    for _ in range(driver_log.KEPT):
        driver_log.place(str(tmp_path)).write_text("words")
    assert mine.exists()


def test_a_name_that_tells_no_time_is_no_trouble(tmp_path: Path) -> None:
    directory = tmp_path / driver_log.DIRECTORY
    directory.mkdir()
    (directory / "99999999T999999Z-1.log").write_text("?")
    assert item_of(driver_log.place(str(tmp_path)).relative_to(tmp_path).as_posix()) is not None
