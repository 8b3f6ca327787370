"""Addresses: what names a place, and what does not."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from coherent_ray.errors import ConfigError
from coherent_ray.storage import LocalStorage, StorageOptions, open_storage
from coherent_ray.storage.object_store import ObjectStorage


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


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


@pytest.mark.parametrize("scheme", ["abfs", "https", "hdfs", "S3", "memory"])
def test_other_kinds_of_storage_are_refused_by_name(scheme: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(f"{scheme}://bucket/run")
    assert caught.value.what == f"{scheme} is no kind of storage that this version knows"
    assert caught.value.where == f"{scheme}://bucket/run"
    assert "s3://BUCKET/PREFIX" in caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_object_stores_address_is_a_root_there(scheme: str, account: None) -> None:
    storage = open_storage(f"{scheme}://bucket/runs/one/", StorageOptions(retries=3))
    assert isinstance(storage, ObjectStorage)
    assert storage.uri == f"{scheme}://bucket/runs/one"
    copy = pickle.loads(pickle.dumps(storage))
    assert isinstance(copy, ObjectStorage)
    assert copy.uri == storage.uri
    assert copy.__reduce__() == storage.__reduce__()
    assert open_storage(f"{scheme}://bucket").uri == f"{scheme}://bucket"


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError) as caught:
        open_storage("az://container/run")
    assert "AZURE_" in caught.value.remedy
    assert open_storage("az://container/run", StorageOptions(account="mine")).uri


def test_who_stays_in_directories_loads_no_client() -> None:
    program = (
        "import sys; from coherent_ray.storage import open_storage; open_storage('/tmp'); "
        "print('obstore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"False"


@pytest.mark.parametrize(
    "uri",
    ["", "  ", "a\0b", "file://host/path", "file://relative", "file:///"[:7], "s3:/bucket/run"],
)
def test_what_names_no_place_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(uri)
