"""No path leads out of the root, and nothing odd under it is mistaken for a file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coherent_ray.errors import AlreadyExists, NotFound, StorageError
from coherent_ray.storage import LocalStorage


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    place = tmp_path / "outside"
    (place / "deep").mkdir(parents=True)
    (place / "file").write_bytes(b"secret")
    return place


@pytest.mark.parametrize("path", ["link/file", "link/deep/new", "a/link/file", "filelink"])
def test_a_symbolic_link_is_never_followed(tmp_path: Path, outside: Path, path: str) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "a" / "link").symlink_to(outside)
    (root / "filelink").symlink_to(outside / "file")
    storage = LocalStorage(root)
    verbs: list[Callable[[], object]] = [lambda: storage.read(path), lambda: storage.size(path)]
    if path != "filelink":
        verbs += [
            lambda: storage.create(path, b"x"),
            lambda: storage.replace(path, b"x"),
            lambda: storage.delete(path),
            lambda: storage.open_writer(path),
            lambda: list(storage.list(path.rpartition("/")[0])),
        ]
    for verb in verbs:
        with pytest.raises(StorageError) as caught:
            verb()
        assert caught.value.details["errno"] == "ELOOP"
        assert "Symbolic links" in caught.value.remedy
    assert files(outside) == ["file"]
    assert [entry.path for entry in storage.list()] == []


def test_replace_and_delete_act_on_a_link_and_not_on_its_target(
    tmp_path: Path, outside: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("one", "two"):
        (root / name).symlink_to(outside / "file")
    storage = LocalStorage(root)
    storage.replace("one", b"new")
    storage.delete("two")
    (root / "three").symlink_to(outside / "nowhere")
    with pytest.raises(AlreadyExists):
        storage.create("three", b"x")
    assert (outside / "file").read_bytes() == b"secret"
    assert (root / "one").read_bytes() == b"new"
    assert not (root / "two").exists()
    assert not (outside / "nowhere").exists()


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    LocalStorage(tmp_path / "run").create("log/1", b"x")
    assert files(tmp_path / "disk") == ["log/1"]


def test_a_root_that_is_a_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")
    storage = LocalStorage(tmp_path / "run")
    for verb in (
        lambda: storage.read("a"),
        lambda: storage.create("a", b""),
        lambda: [*storage.list()],
    ):
        with pytest.raises(StorageError) as caught:
            verb()
        assert caught.value.details["errno"] == "ENOTDIR"


def test_what_is_no_file_is_not_found_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    storage = LocalStorage(tmp_path)
    with pytest.raises(NotFound):
        storage.read("pipe")
    assert list(storage.list()) == []
