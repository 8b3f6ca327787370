"""Addresses: what names a place, and what does not."""

from pathlib import Path

import pytest

from coherent_ray.errors import ConfigError
from coherent_ray.storage import LocalStorage, open_storage


def test_a_path_is_a_local_root(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    assert isinstance(storage, LocalStorage)
    assert storage.uri == str(tmp_path / "run")


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_file_address_is_its_path(tmp_path: Path, host: str) -> None:
    assert open_storage(f"file://{host}{tmp_path}/a%20b").uri == f"{tmp_path}/a b"


def test_what_an_address_says_opens_the_same_place(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/run")
    storage.create("file", b"x")
    assert open_storage(storage.uri).read("file") == b"x"


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_storage("runs/one").uri == str(tmp_path / "runs" / "one")
    assert open_storage("./a:b/../c").uri == str(tmp_path / "c")
    assert open_storage("~/run").uri == str(tmp_path / "home" / "run")


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "abfs", "https", "hdfs", "S3", "memory"])
def test_object_stores_are_refused_by_name(scheme: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(f"{scheme}://bucket/run")
    assert caught.value.what == "object stores are not supported by this version"
    assert caught.value.where == f"{scheme}://bucket/run"
    assert caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "uri", ["", "  ", "a\0b", "file://host/path", "file://relative", "file:///"[:7]]
)
def test_what_names_no_place_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(uri)
