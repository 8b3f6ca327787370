"""What a user gets wrong, or the machine does: one clear error, the right exit code, nothing lost.

What can be known before Ray starts is told before Ray starts; the rest ends the run at once, and
does not restart for ever. Most of it is looked at in this process; a few go the whole way, from the
command line to a worker and back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import yaml
from test_refusals import assert_nothing_is_held

from coherent_ray import config as config_
from coherent_ray.commit.generations import Generations
from coherent_ray.config import Config
from coherent_ray.errors import CoherentRayError, ConfigError, DataError, StorageError, TaskError
from coherent_ray.storage import open_storage
from coherent_ray.train.driver import Driver
from coherent_ray.train.events import Event
from coherent_ray.train.receipts import first_difference

if TYPE_CHECKING:
    from conftest import OwnRun

LIMIT_S = 280


def refused(config: Config) -> CoherentRayError:
    """What a driver process ends with; it must end before it has told anything, or started Ray."""
    told: list[Event] = []
    with pytest.raises(CoherentRayError) as caught:
        Driver(config, told.append).run()
    assert told == []
    error = caught.value
    assert error.what
    assert error.where, error
    assert error.remedy, error
    return error


def run_command(
    folder: Path, values: dict[str, Any], *more: str
) -> subprocess.CompletedProcess[str]:
    """Type ``coherent-ray run`` with a configuration."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return subprocess.run(
        [sys.executable, "-m", "coherent_ray", "run", str(path), *more],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def assert_one_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


# --- before Ray starts: the task ------------------------------------------------------------------

TASKS = {
    "no such module": ({"factory": "tinny:TinyTask"}, "there is no module tinny", "tiny"),
    "no such name": ({"factory": "tiny:TinyTusk"}, "tiny has no 'TinyTusk'", "'TinyTask'"),
    "wrong argument": (
        {"factory": "tiny:TinyTask", "args": {"facto": 2}},
        "it has no argument 'facto'",
        "did you mean 'factor'?",
    ),
    "it raises": (
        {"factory": "tiny:write_rows", "args": {"path": "/nowhere/at/all/rows.parquet"}},
        "calling it failed with ",
        "check its arguments",
    ),
    "it is no task": (
        {"factory": "tiny:published", "args": {"root": "/nowhere/at/all"}},
        "a list, has no method build_model()",
        "a task needs build_model()",
    ),
    "no class": ({"factory": "tiny:ROWS"}, "ROWS is a int, not a class", "name a class"),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_bad_task_is_refused_before_ray(name: str, tiny_data: Path, tmp_path: Path) -> None:
    task, what, remedy = TASKS[name]
    error = refused(tiny.configured(tmp_path / "run", tiny_data, task=task))
    assert isinstance(error, TaskError)
    assert error.exit_code == 2
    assert what in error.what
    assert remedy in error.remedy
    assert task["factory"] in error.where
    assert tiny.published(tmp_path / "run") == []


# --- before Ray starts: the data ------------------------------------------------------------------


def empty(path: Path) -> dict[str, Any]:
    tiny.write_rows(path, rows=0)
    return {}


def without_a_column(path: Path) -> dict[str, Any]:
    tiny.write_rows(path)
    pq.write_table(pq.read_table(path).drop_columns(["y"]), path)
    return {"data__source__columns": ["x", "y"]}


def with_a_mistyped_column(path: Path) -> dict[str, Any]:
    tiny.write_rows(path)
    return {"data__source__columns": ["x", "Y"]}


def missing(path: Path) -> dict[str, Any]:
    return {}


def torn(path: Path) -> dict[str, Any]:
    tiny.write_rows(path)
    path.write_bytes(path.read_bytes()[:-20])
    return {}


def of_another_format(path: Path) -> dict[str, Any]:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pa.schema([])):
        pass
    return {}


DATA: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "empty dataset": (empty, "the dataset is empty"),
    "missing column": (without_a_column, "'y'"),
    "mistyped column": (with_a_mistyped_column, "'Y'"),
    "missing file": (missing, "the file does not exist"),
    "torn file": (torn, "Parquet"),
    "another format": (of_another_format, "Parquet"),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data_is_refused_before_ray(name: str, tmp_path: Path) -> None:
    make, what = DATA[name]
    path = tmp_path / "rows.parquet"
    error = refused(tiny.configured(tmp_path / "run", path, **make(path)))
    assert isinstance(error, DataError)
    assert error.exit_code == 2
    assert what.lower() in error.what.lower()
    assert str(path) in error.where
    assert tiny.published(tmp_path / "run") == []


def test_the_nearest_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    error = refused(tiny.configured(tmp_path / "run", path, **with_a_mistyped_column(path)))
    assert "y" in error.remedy


# --- before Ray starts: the root ------------------------------------------------------------------


def test_a_file_where_the_root_should_be(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    error = refused(tiny.configured(tmp_path / "run", tiny_data))
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    assert str(tmp_path / "run") in error.where
    assert (tmp_path / "run").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_without_the_right_to_write(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    error = refused(tiny.configured(tmp_path / "locked" / "run", tiny_data))
    assert isinstance(error, StorageError)
    assert error.details["errno"] == "EACCES"


def mounted(place: Path, options: str) -> bool:
    """Mount a small file system in memory, where this user and machine allow it."""
    place.mkdir(exist_ok=True)
    if shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB; skips where there is no right to mount one."""
    place = tmp_path / "disk"
    if not mounted(place, "size=4m"):
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_read_only_disk_is_refused_and_keeps_its_run(
    small_disk: Path, reference: OwnRun, tiny_data: Path
) -> None:
    root = Path(shutil.copytree(reference.root, small_disk / "run"))
    config = tiny.configured(root, tiny_data)
    remount(small_disk, "ro")
    error = refused(config)
    assert isinstance(error, StorageError)
    assert error.exit_code == 1
    assert error.details["errno"] == "EROFS"
    assert "read-only" in error.remedy
    # Whoever only reads is not disturbed.
    assert tiny.selected(root) == "g4-a1"
    assert len(tiny.history(root)) == tiny.UPDATES


def test_bad_input_leaves_a_published_run_alone(
    reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(reference.root, tmp_path / "run"))
    before = contents(root)
    refused(tiny.configured(root, tiny_data, task={"factory": "tinny:TinyTask"}))
    refused(tiny.configured(root, tmp_path / "nothing.parquet"))
    assert contents(root) == before


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


# --- the whole way --------------------------------------------------------------------------------


def test_the_command_ends_with_2_for_a_missing_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    changes = without_a_column(path)
    done = run_command(tmp_path, tiny.values(tmp_path / "run", path, **changes))
    assert_one_error(done, 2, "'y'", str(path), "What to do: ")


def test_the_command_ends_with_2_for_a_root_that_cannot_be(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    done = run_command(tmp_path, tiny.values(tmp_path / "file" / "run", tiny_data))
    assert_one_error(done, 2, str(tmp_path / "file"), "What to do: ")


def test_a_task_that_raises_on_one_rank_ends_the_run_at_once(
    ray_cluster: str, tiny_data: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    values = tiny.values(root, tiny_data, task={"factory": "tiny:FailingTask"})
    done = run_command(tmp_path, values, "--address", ray_cluster)
    assert_one_error(
        done, 1, "update 5 failed on rank 1: ZeroDivisionError: the tiny task gives up", "tiny.py:"
    )
    # It was not started again, and what was published before is there.
    assert Generations(open_storage(str(root))).history().attempt == 1
    assert tiny.published(root) == ["g1-a1"]
    assert tiny.selected(root) == "g1-a1"
    assert_nothing_is_held()


def test_a_full_disk_keeps_what_is_published_and_a_larger_one_goes_on(
    small_disk: Path, ray_cluster: str, tiny_data: Path, tmp_path: Path
) -> None:
    """Of 2.7 MiB a generation, one fits."""
    root = small_disk / "run"
    values = tiny.values(
        root,
        tiny_data,
        task__args={"factor": 64},
        checkpoint__max_failed_saves=0,
        checkpoint__block_bytes=1 << 20,
        cluster__workers=1,
    )
    done = run_command(tmp_path, values, "--address", ray_cluster)
    assert_one_error(done, 1, "no space left", str(root / "generations"), "g2-a1")
    generations = Generations(open_storage(str(root)))
    assert tiny.published(root) == ["g1-a1"]
    assert tiny.selected(root) == "g1-a1"
    assert generations.verify(generations.find("latest")) == []
    assert [r.update for r in tiny.history(root)] == [1, 2, 3]
    before = tiny.history(root)

    remount(small_disk, "size=64m")
    done = run_command(tmp_path, values, "--address", ray_cluster)
    assert done.returncode == 0, done.stderr
    history = tiny.history(root)
    assert [r.update for r in history] == list(range(1, tiny.UPDATES + 1))
    assert first_difference(history[:3], before) is None
    assert tiny.published(root)[0] == "g1-a1"
    assert tiny.selected(root) == tiny.published(root)[-1]
    assert_nothing_is_held()


def test_the_configuration_of_these_tests_is_a_good_one(tiny_data: Path, tmp_path: Path) -> None:
    """Or every refusal above could be for another reason."""
    from coherent_ray.train import preflight

    found = preflight.check(config_.build(tiny.values(tmp_path / "run", tiny_data)))
    assert (found.updates, found.done, found.complete) == (tiny.UPDATES, 0, False)
