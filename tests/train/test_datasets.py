"""The run's dataset: kept once, compared on a resume, and what changed is said in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import EXAMPLES, WIDTH, config_for, write_data

from coherent_ray.config import Config
from coherent_ray.data import order
from coherent_ray.errors import AdmissionRefused, DataError, StorageFull
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.train import datasets
from coherent_ray.train.datasets import check_same, identity_of, keep, path_of, scan_now


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_for(tmp_path)


@pytest.fixture
def storage(config: Config) -> MemoryStorage:
    """A root that keeps what the data was."""
    memory = MemoryStorage()
    keep(memory, scan_now(config))
    return memory


def refusal(config: Config, storage: Any, now: Config | None = None) -> AdmissionRefused:
    """Return why a run of `config` cannot go on with what its files hold `now`."""
    before = datasets.identity_of(config, datasets.scan_now(config))
    return compare(before, storage, now or config)


def compare(before: Any, storage: Any, now: Config) -> AdmissionRefused:
    dataset = scan_now(now)
    with pytest.raises(AdmissionRefused) as caught:
        check_same(storage, before, identity_of(now, dataset), dataset)
    return caught.value


def test_what_is_scanned(config: Config) -> None:
    dataset = scan_now(config)
    assert (dataset.rows, dataset.level) == (EXAMPLES, "content")
    assert [name for name, _ in dataset.columns] == ["x", "y"]
    structure = scan_now(config_for(Path(config.run.root).parent, data__verify="structure"))
    assert structure.level == "structure"
    assert structure.hash != dataset.hash


def test_only_the_configured_columns_count(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    write_data(path)
    source = {"format": "parquet", "paths": [str(path)], "columns": ["y"]}
    config = config_for(tmp_path, data__source=source)
    dataset = scan_now(config)
    assert [name for name, _ in dataset.columns] == ["y"]
    rows = datasets.open_configured(config, dataset).rows(np.arange(3))
    assert list(rows) == ["y"]


def test_tokens_are_cut_as_configured(tmp_path: Path) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "tokens.bin")
    source = {"format": "tokens", "paths": [str(tmp_path / "tokens.bin")]}
    source |= {"window": 9, "dtype": "uint16"}
    config = config_for(tmp_path, data__source=source)
    dataset = scan_now(config)
    assert dataset.rows == 11
    rows = datasets.open_configured(config, dataset).rows(np.array([10]))
    assert rows["tokens"].tolist() == [list(range(90, 99))]


def test_the_identity_is_what_decides_the_updates(config: Config) -> None:
    dataset = scan_now(config)
    identity = identity_of(config, dataset)
    assert identity.dataset_hash == dataset.hash
    assert (identity.examples, identity.order) == (EXAMPLES, order.NAME)
    assert (identity.seed, identity.global_batch, identity.lanes, identity.microbatch) == (
        0,
        8,
        4,
        1,
    )


def test_the_files_are_read_in_the_order_asked_for(config: Config) -> None:
    source = datasets.open_configured(config, scan_now(config))
    assert len(source) == EXAMPLES
    rows = source.rows(np.array([5, 0, 5]))
    assert np.shape(np.stack(list(rows["x"]))) == (3, WIDTH)
    assert np.array_equal(rows["x"][0], rows["x"][2])
    assert not np.array_equal(rows["x"][0], rows["x"][1])


def test_files_that_change_between_the_scan_and_the_opening(config: Config) -> None:
    dataset = scan_now(config)
    write_data(Path(config.data.source.paths[0]), examples=EXAMPLES + 1)
    with pytest.raises(DataError, match=f"{EXAMPLES} examples when they were scanned"):
        datasets.open_configured(config, dataset)


# --- kept -----------------------------------------------------------------------------------------


def test_a_manifest_is_kept_once_under_its_hash(config: Config) -> None:
    storage, dataset = MemoryStorage(), scan_now(config)
    keep(storage, dataset)
    before = dict(storage.files)
    keep(storage, dataset)
    assert storage.files == before
    assert list(before) == [path_of(dataset.hash)]
    assert ":" not in path_of(dataset.hash)


def test_a_manifest_that_cannot_be_kept_is_an_error(config: Config) -> None:
    storage = FaultyStorage(MemoryStorage(), [Fault("full", verb="create")])
    with pytest.raises(StorageFull):
        keep(storage, scan_now(config))


# --- compared -------------------------------------------------------------------------------------


def test_the_same_data_and_plan_pass(config: Config, storage: MemoryStorage) -> None:
    dataset = scan_now(config)
    identity = identity_of(config, dataset)
    check_same(storage, identity, identity, dataset)
    # Nothing is looked up for that: the kept manifest may be gone.
    check_same(MemoryStorage(), identity, identity, dataset)


def test_a_copy_of_the_data_is_the_same_data(
    config: Config, storage: MemoryStorage, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    write_data(moved / "data.parquet")
    now = config_for(moved)
    dataset = scan_now(now)
    check_same(storage, identity_of(config, scan_now(config)), identity_of(now, dataset), dataset)


def test_other_bytes_in_a_file_of_the_same_size(config: Config, storage: MemoryStorage) -> None:
    before = identity_of(config, scan_now(config))
    write_data(Path(config.data.source.paths[0]), seed=1)
    error = compare(before, storage, config)
    assert error.what.startswith("the data is not the data that this run was trained on: data.parq")
    assert "same size and other bytes" in error.what
    assert error.details == {"stored": before.dataset_hash, "now": scan_now(config).hash}


def test_a_file_that_is_gone_or_new(config: Config, storage: MemoryStorage, tmp_path: Path) -> None:
    before = identity_of(config, scan_now(config))
    (tmp_path / "data.parquet").rename(tmp_path / "renamed.parquet")
    paths = [str(tmp_path / "renamed.parquet")]
    now = config_for(tmp_path, data__source={"format": "parquet", "paths": paths})
    error = compare(before, storage, now)
    assert "data.parquet is gone; renamed.parquet is new" in error.what


def test_many_changes_are_counted(tmp_path: Path) -> None:
    storage, paths = MemoryStorage(), []
    for number in range(8):
        paths.append(str(tmp_path / f"{number}.parquet"))
        write_data(Path(paths[-1]), seed=number)
    config = config_for(tmp_path, data__source={"format": "parquet", "paths": paths})
    keep(storage, scan_now(config))
    before = identity_of(config, scan_now(config))
    for number, path in enumerate(paths):
        write_data(Path(path), seed=number + 100)
    error = compare(before, storage, config)
    assert error.what.endswith("; and 3 more changes")
    assert error.what.count("same size and other bytes") == 5


def damage_nothing(storage: MemoryStorage, path: str) -> None:
    del storage.files[path]


def damage_bytes(storage: MemoryStorage, path: str) -> None:
    storage.files[path] = storage.files[path][:-5]


def damage_content(storage: MemoryStorage, path: str) -> None:
    storage.files[path] = storage.files[path].replace(b'"rows":21', b'"rows":22')


@pytest.mark.parametrize("damage", [damage_nothing, damage_bytes, damage_content])
def test_without_a_trusted_manifest_the_hashes_speak(
    config: Config, storage: MemoryStorage, damage: Any
) -> None:
    before = identity_of(config, scan_now(config))
    untouched = dict(storage.files)
    damage(storage, path_of(before.dataset_hash))
    assert storage.files != untouched
    write_data(Path(config.data.source.paths[0]), seed=1)
    error = compare(before, storage, config)
    now = scan_now(config).hash
    assert error.what.endswith(f"its hash was {before.dataset_hash} and is {now}")


def test_a_storage_that_fails_does_not_hide_the_refusal(config: Config) -> None:
    inner = MemoryStorage()
    keep(inner, scan_now(config))
    before = identity_of(config, scan_now(config))
    write_data(Path(config.data.source.paths[0]), seed=1)
    storage = FaultyStorage(inner, [Fault("refuse", verb="read")])
    assert "its hash was" in compare(before, storage, config).what
    assert storage.struck


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 5), ("lanes", 2), ("global_batch", 4), ("microbatch", 2)]
)
def test_another_plan_is_refused_by_name(
    config: Config, storage: MemoryStorage, name: str, value: int
) -> None:
    folder = Path(config.run.root).parent
    error = refusal(config, storage, config_for(folder, **{f"data__{name}": value}))
    stored = getattr(config.data, name)
    assert error.what.startswith(f"data.{name} is {value}, but this run was started with {stored}")
    assert error.where == f"data.{name}"
    assert error.details == {"stored": stored, "now": value}


def test_another_order_is_refused_before_the_rest(config: Config, storage: MemoryStorage) -> None:
    """A run of an older version: its order is not one that this version computes."""
    dataset = scan_now(config)
    now = identity_of(config, dataset)
    stored = replace(now, order="feistel-v0", seed=9)
    with pytest.raises(AdmissionRefused, match=r"data\.order is feistel-v1.*feistel-v0"):
        check_same(storage, stored, now, dataset)
