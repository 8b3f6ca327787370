"""A new run begins in a place of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import config_for, stop_at, train

from coherent_ray.commit.log import CommitLog
from coherent_ray.errors import ConfigError, LogDamaged
from coherent_ray.storage import open_storage
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.train import roots
from coherent_ray.train.identity import run_id_of


@pytest.mark.parametrize("below", ["generations/g1-a1/mine", "a/b/c", "log"])
def test_not_inside_another_run(tmp_path: Path, below: str) -> None:
    train(config_for(tmp_path), stop_at(1))
    inner = config_for(tmp_path, run__root=str(tmp_path / "run" / below), run__run_id=None)
    with pytest.raises(ConfigError, match="inside the root of another run") as caught:
        run_id_of(inner)
    assert str(tmp_path / "run") in caught.value.what
    assert caught.value.exit_code == 2


def test_nor_through_a_link(tmp_path: Path) -> None:
    train(config_for(tmp_path), stop_at(1))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    inner = config_for(tmp_path, run__root=str(tmp_path / "link" / "mine"), run__run_id=None)
    with pytest.raises(ConfigError, match="inside the root of another run"):
        run_id_of(inner)


def test_beside_another_run_and_below_a_folder_named_log(tmp_path: Path) -> None:
    train(config_for(tmp_path), stop_at(1))
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "driver.log").write_text("mine")
    assert run_id_of(config_for(tmp_path, run__root=str(tmp_path / "two"), run__run_id="two"))


def test_a_run_that_lies_there_already_goes_on(tmp_path: Path) -> None:
    inner = str(tmp_path / "run" / "old")
    CommitLog(open_storage(inner)).open_attempt("old", "token")
    train(config_for(tmp_path), stop_at(1))
    assert run_id_of(config_for(tmp_path, run__root=inner, run__run_id=None)) == "old"


def test_every_level_of_an_object_store_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    holder = MemoryStorage()
    CommitLog(holder).open_attempt("above", "token")

    def opened(root: str, options: object) -> MemoryStorage:
        asked.append(root)
        return holder if root == "s3://bucket" else MemoryStorage()

    monkeypatch.setattr(roots, "open_storage", opened)

    class Remote(MemoryStorage):
        uri = "s3://bucket/teams/vision/run"

    with pytest.raises(ConfigError, match=r"another run: s3://bucket\n"):
        roots.require_own(Remote(), None)
    assert asked == ["s3://bucket/teams/vision", "s3://bucket/teams", "s3://bucket"]


def test_a_log_that_is_gone_is_no_new_run(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    train(config, stop_at(3))
    log = tmp_path / "run" / "log"
    log.rename(tmp_path / "elsewhere")
    with pytest.raises(LogDamaged, match="the commit log is gone"):
        run_id_of(config)
    log.write_text("in the way")
    with pytest.raises(LogDamaged, match="the commit log is gone"):
        run_id_of(config)
    log.unlink()
    (tmp_path / "elsewhere").rename(log)
    assert run_id_of(config) == "small"


def test_a_log_that_lost_its_end_does_not_go_on(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    train(config, stop_at(3))
    storage = open_storage(config.run.root)
    log = CommitLog(storage)
    log.refresh_hint(log.read())
    max((tmp_path / "run" / "log").iterdir()).unlink()
    with pytest.raises(LogDamaged, match="missing at its end"):
        run_id_of(config)
