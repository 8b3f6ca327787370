"""Before Ray starts: everything that is wrong is one clear error, and costs nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from small_run import Left, config_for, flip, stop_at, train, values_for, write_data

from coherent_ray import config as config_
from coherent_ray.errors import (
    ClaimRefused,
    CoherentRayError,
    ConfigError,
    Damage,
    DataError,
    LogDamaged,
    NoGeneration,
    TaskError,
    WrongRun,
)
from coherent_ray.storage import open_storage
from coherent_ray.train import datasets, resumable
from coherent_ray.train.admit import task_folders
from coherent_ray.train.preflight import check, check_resources


def make_data(path: str, note: str = "") -> None:
    """What a configuration's `data.prepare` names."""
    target = Path(path)
    if not target.exists():
        write_data(target)
        target.with_suffix(".note").write_text(note)


def leaves() -> None:
    """A script that was written to be a program of its own."""
    sys.exit(3)


def fails(path: str) -> None:
    raise LookupError("no source text")


def test_a_new_run(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    found = check(config)
    assert (found.run_id, found.updates, found.done, found.latest) == ("small", 6, 0, None)
    assert not found.complete
    # The dataset's manifest is kept, the probe is not, and no attempt was opened.
    paths = [entry.path for entry in open_storage(config.run.root).list()]
    assert paths == [datasets.path_of(datasets.scan_now(config).hash)]


def test_a_run_that_is_under_way_and_one_that_is_complete(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    train(config, stop_at(3))
    found = check(config)
    assert (found.done, found.latest, found.complete) == (3, "g2-a1", False)
    train(config)
    found = check(config)
    assert (found.done, found.updates, found.complete) == (6, 6, True)
    shorter = check(config_for(tmp_path, training__updates=5))
    assert shorter.complete


def test_another_job_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    train(config_for(tmp_path), stop_at(3))
    with pytest.raises(ClaimRefused, match=r"the job changed.*optimizer\.lr: 0\.\d+ -> 0\.5"):
        check(config_for(tmp_path, optimizer__lr=0.5))
    assert check(config_for(tmp_path, run__claim="statistical", optimizer__lr=0.5)).done == 3


def test_epochs_are_counted_in_updates(tmp_path: Path) -> None:
    assert check(config_for(tmp_path, training__epochs=4)).updates == 12


def test_data_is_prepared_once_where_the_configuration_says_how(tmp_path: Path) -> None:
    path = str(tmp_path / "made.parquet")
    values = values_for(tmp_path, data__source={"format": "parquet", "paths": [path]})
    args = {"path": path, "note": "first"}
    values["data"]["prepare"] = {"factory": "test_preflight:make_data", "args": args}
    assert check(config_.build(values)).updates == 6
    assert Path(path).with_suffix(".note").read_text() == "first"
    values["data"]["prepare"]["args"]["note"] = "second"
    check(config_.build(values))
    assert Path(path).with_suffix(".note").read_text() == "first"


def refused(kind: type[CoherentRayError], folder: Path, **changes: Any) -> CoherentRayError:
    config = config_for(folder, **changes)
    with pytest.raises(kind) as caught:
        check(config)
    assert type(caught.value) is kind
    assert caught.value.remedy
    return caught.value


def test_no_task(tmp_path: Path) -> None:
    config = config_for(tmp_path).model_copy(update={"task": None})
    with pytest.raises(ConfigError, match="no task is configured") as caught:
        check(config)
    assert caught.value.where == "task"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("factory", "args", "words"),
    [
        ("no_such_module:Task", {}, "there is no module no_such_module"),
        ("small_run:Tyni", {}, "Tyni"),
        ("small_run:Tiny", {"hiden": 3}, "it has no argument 'hiden'"),
        ("small_run:flip", {}, "cannot be called"),
        ("test_preflight:leaves", {}, "calling it failed with SystemExit: 3"),
        ("leaving_module:Task", {}, "importing leaving_module failed with SystemExit: read --help"),
    ],
)
def test_a_task_that_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factory: str,
    args: dict[str, Any],
    words: str,
) -> None:
    (tmp_path / "leaving_module.py").write_text("raise SystemExit('read --help')")
    monkeypatch.syspath_prepend(tmp_path)
    error = refused(TaskError, tmp_path, task__factory=factory, task__args=args)
    assert words in error.what
    assert error.where.startswith("task.factory")
    assert error.exit_code == 2


def test_data_that_is_not_there(tmp_path: Path) -> None:
    write_data(tmp_path / "data.parquet")
    source = {"format": "parquet", "paths": [str(tmp_path / "dta.parquet")]}
    error = refused(DataError, tmp_path, data__source=source)
    assert "did you mean" in error.remedy


def test_data_without_an_example(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "data.parquet")
    assert "empty" in refused(DataError, tmp_path).what


def test_data_without_a_column(tmp_path: Path) -> None:
    path = str(tmp_path / "data.parquet")
    source = {"format": "parquet", "paths": [path], "columns": ["x", "lable"]}
    assert "lable" in refused(DataError, tmp_path, data__source=source).what


def test_data_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_text("not Parquet")
    assert refused(DataError, tmp_path).where.endswith("data.parquet")


def test_data_that_cannot_be_prepared(tmp_path: Path) -> None:
    prepare = {"factory": "test_preflight:fails", "args": {"path": "x"}}
    error = refused(TaskError, tmp_path, data__prepare=prepare)
    assert "no source text" in error.what
    assert "data.prepare.factory" in error.where


@pytest.mark.parametrize("root", ["file", "file/run"])
def test_a_root_that_is_a_file_or_below_one(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("in the way")
    error = refused(ConfigError, tmp_path, run__root=str(tmp_path / root))
    assert error.where == str(tmp_path / root)
    assert "a root is a directory" in error.what
    assert "ove it away" not in error.remedy


def test_a_root_of_another_run(tmp_path: Path) -> None:
    train(config_for(tmp_path), stop_at(1))
    error = refused(WrongRun, tmp_path, run__run_id="another")
    assert "holds run 'small'" in error.what


def test_a_log_that_is_damaged(tmp_path: Path) -> None:
    train(config_for(tmp_path), stop_at(1))
    record = tmp_path / "run" / "log" / f"{2:020d}.json"
    record.write_bytes(b"{}")
    assert f"{2:020d}.json" in refused(LogDamaged, tmp_path).where


# --- a run that looks complete --------------------------------------------------------------------


def harm(shard: Path, how: str) -> None:
    match how:
        case "deleted":
            for file in shard.parent.iterdir():
                file.unlink()
        case "missing":
            shard.unlink()
        case "short":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "flipped":
            flip(shard)
        case "manifest":
            flip(shard.parent / "manifest.json", 100)


@pytest.mark.parametrize("how", ["deleted", "missing", "short", "flipped", "manifest"])
def test_a_damaged_end_is_trained_again(tmp_path: Path, how: str) -> None:
    config = config_for(tmp_path)
    before = train(config).chain()
    harm(Left(config).shard(), how)
    found = check(config)
    assert (found.done, found.latest, found.complete) == (4, "g2-a1", False)
    assert "passed over a damaged generation: generations/g3-a1/" in found.notes[0]
    left = train(config)
    assert left.generations[-1] == "g4-a2"
    assert left.chain() == before
    found = check(config)
    assert (found.latest, found.complete, found.notes) == ("g4-a2", True, ())


@pytest.mark.parametrize("how", ["missing", "flipped", "manifest"])
def test_a_damaged_end_is_refused_where_the_configuration_says_so(tmp_path: Path, how: str) -> None:
    config = config_for(tmp_path, checkpoint__on_damage="refuse")
    train(config)
    harm(Left(config).shard(), how)
    with pytest.raises(Damage, match="g3-a1 is not whole") as caught:
        check(config)
    assert caught.value.where.startswith("generations/g3-a1/")
    assert "fall_back" in caught.value.remedy
    assert caught.value.exit_code == 1


def test_nothing_that_is_whole_is_not_complete(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    left = train(config)
    for name in left.generations:
        flip(left.shard(name))
    error = refused(NoGeneration, tmp_path)
    assert "none of 3 published generations is whole" in error.what
    assert len(error.details["damages"]) == 3  # type: ignore[arg-type]


def test_the_generation_that_is_told_is_the_one_that_is_resumed(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    left = train(config, stop_at(3))
    assert left.generations == ["g1-a1", "g2-a1"]
    flip(left.shard())
    found = check(config)
    assert (found.done, found.latest) == (2, "g1-a1")


def test_a_huge_end_is_looked_at_by_size_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "READ_IF_COMPLETE", 0)
    config = config_for(tmp_path)
    left = train(config)
    found = check(config)
    assert found.complete
    assert "`coherent-ray verify` reads every byte" in found.notes[0]
    left.shard().write_bytes(b"short")
    assert check(config).latest == "g2-a1"


def test_a_large_state_to_go_on_from_is_left_to_admission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "SOON_READ", 0)
    config = config_for(tmp_path)
    flip(train(config, stop_at(3)).shard())
    found = check(config)
    assert (found.latest, found.notes) == ("g2-a1", ())


# --- what a local Ray can have --------------------------------------------------------------------


def short_of(folder: Path, **cluster: Any) -> CoherentRayError:
    error = refused(
        ConfigError, folder, **{f"cluster__{name}": value for name, value in cluster.items()}
    )
    assert error.exit_code == 2
    assert not (folder / "run").exists()
    return error


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
def test_gpus_that_are_not_here(tmp_path: Path) -> None:
    error = short_of(tmp_path, use_gpu=True, workers=2)
    assert error.what == "2 workers need 2 GPU, and a local Ray has 0 here"
    assert error.where == "cluster.use_gpu"
    assert "cluster.address" in error.remedy
    half = {"CPU": 1.0, "GPU": 0.5}
    error = short_of(tmp_path, use_gpu=True, workers=1, resources_per_worker=half)
    assert error.what == "1 worker needs 0.5 GPU, and a local Ray has 0 here"


def test_too_few_gpus_and_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "2 GPU, and a local Ray has 1 here" in short_of(tmp_path, use_gpu=True, workers=2).what
    half = {"CPU": 1.0, "GPU": 0.5}
    check_resources(config_for(tmp_path, cluster__use_gpu=True, cluster__workers=1))
    settings: dict[str, Any] = {"cluster__workers": 2, "cluster__resources_per_worker": half}
    check_resources(config_for(tmp_path, cluster__use_gpu=True, **settings))


@pytest.mark.usefixtures("no_gpu")
def test_another_cluster_may_have_what_is_not_here(tmp_path: Path) -> None:
    check_resources(config_for(tmp_path, cluster__use_gpu=True, cluster__address="auto"))


def test_cpus_are_counted_and_not_measured(tmp_path: Path) -> None:
    many = {"CPU": 4096.0}
    check_resources(config_for(tmp_path, cluster__resources_per_worker=many))
    error = short_of(tmp_path, resources_per_worker=many, num_cpus=8)
    assert (error.where, error.details["here"]) == ("cluster.num_cpus", 8.0)


def test_what_a_local_ray_does_not_portion(tmp_path: Path) -> None:
    error = short_of(tmp_path, resources_per_worker={"CPU": 1.0, "memory": 1e9})
    assert error.where == "cluster.resources_per_worker.memory"
    # Any other name is only a number to Ray, and a local one claims to have it.
    named = {"CPU": 1.0, "reader": 1.0}
    check_resources(config_for(tmp_path, cluster__resources_per_worker=named))


def test_a_task_beside_its_configuration_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "elsewhere" / "project"
    project.mkdir(parents=True)
    (project / "lies_beside.py").write_text("from small_run import Tiny as Task\n")
    write_data(tmp_path / "data.parquet")
    values = values_for(tmp_path, task__factory="lies_beside:Task")
    (project / "run.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert train(config_.load("elsewhere/project/run.yaml").resolved()).updates == [2, 4, 6]
    assert check(config_.load("elsewhere/project/run.yaml")).complete


def test_a_folder_that_was_sent_to_a_cluster_is_found_below_the_workers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_for(tmp_path, task__folder="/home/me/project/jobs")
    assert task_folders(config, "/home/me/project") == [
        "/home/me/project/jobs",
        str(tmp_path / "jobs"),
    ]
    assert task_folders(config, "/home/me/other") == ["/home/me/project/jobs"]
    assert task_folders(config, "") == ["/home/me/project/jobs"]
    assert task_folders(config_for(tmp_path), "/home/me") == []
