"""A run's id: the history's word first, then the configuration's, then a name made of the root."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from small_run import config_for

from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import RunId
from coherent_ray.config import Config
from coherent_ray.errors import LogDamaged, WrongRun
from coherent_ray.storage import open_storage
from coherent_ray.train.identity import derived, run_id_of


def with_id(tmp_path: Path, run_id: str | None, **changes: Any) -> Config:
    return config_for(tmp_path, run__run_id=run_id, **changes)


def open_run(tmp_path: Path, run_id: str) -> None:
    CommitLog(open_storage(str(tmp_path / "run"))).open_attempt(run_id, "token")


def test_a_new_run_takes_the_configured_name(tmp_path: Path) -> None:
    assert run_id_of(with_id(tmp_path, "mine")) == "mine"


def test_a_new_run_without_a_name_takes_one_from_its_root(tmp_path: Path) -> None:
    name = run_id_of(with_id(tmp_path, None))
    assert re.fullmatch(r"run-[0-9a-f]{8}", name)
    assert run_id_of(with_id(tmp_path, None)) == name
    other = with_id(tmp_path, None, run__root=str(tmp_path / "other" / "run"))
    assert run_id_of(other).startswith("run-")
    assert run_id_of(other) != name


def test_a_relative_root_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = with_id(tmp_path, None)
    relative = config.model_copy(update={"run": config.run.model_copy(update={"root": "run"})})
    assert run_id_of(relative) == run_id_of(config)


def test_the_history_has_the_last_word(tmp_path: Path) -> None:
    open_run(tmp_path, "first")
    assert run_id_of(with_id(tmp_path, None)) == "first"
    assert run_id_of(with_id(tmp_path, "first")) == "first"
    with pytest.raises(WrongRun, match=r"holds run 'first', but run\.run_id is 'second'") as caught:
        run_id_of(with_id(tmp_path, "second"))
    assert caught.value.where == str(tmp_path / "run")
    assert "set run.run_id: first" in caught.value.remedy


def test_a_damaged_log_is_no_new_run(tmp_path: Path) -> None:
    open_run(tmp_path, "first")
    [record] = (tmp_path / "run" / "log").iterdir()
    record.write_bytes(record.read_bytes()[:-3])
    with pytest.raises(LogDamaged):
        run_id_of(with_id(tmp_path, None))


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("/data/runs/first", "first"),
        ("/data/runs/first/", "first"),
        ("/data/runs/First Run (2)", "first-run-2"),
        ("/data/runs/v1.2_b", "v1.2_b"),
        ("/data/runs/-._", "run"),
        ("/data/runs/Größe", "gr-e"),
        ("/data/runs/模型", "run"),
        ("/", "run"),
        ("", "run"),
        ("file:///data/x", "x"),
        ("/data/" + "a" * 200, "a" * 64),
        ("/data/" + "a" * 63 + "-b", "a" * 63 + "-"),
    ],
)
def test_a_name_made_of_a_root_is_a_legal_one(root: str, name: str) -> None:
    made = derived(root)
    assert re.fullmatch(re.escape(name) + r"-[0-9a-f]{8}", made)
    assert TypeAdapter(RunId).validate_python(made) == made


def test_names_of_roots_that_end_alike_differ() -> None:
    roots = [f"/data/{n}/run" for n in range(100)]
    assert len({derived(root) for root in roots}) == 100
