"""No path leads out of the root, and nothing odd under it is mistaken for a file."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from coherent_ray.errors import AlreadyExists, NotAFile, StorageError
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


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a directory": lambda path: path.mkdir(),
    "a named pipe": lambda path: os.mkfifo(path),
    "a symbolic link": lambda path: path.symlink_to("/dev/null"),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
}


@pytest.mark.parametrize("found", NO_FILES)
def test_what_is_no_file_is_called_what_it_is_and_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    NO_FILES[found](Path("odd"))
    storage = LocalStorage(tmp_path)
    opened: list[object] = []
    real = os.open

    def watched(path: str, *args: int, **options: int) -> int:
        opened.append(path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", watched)
    target = memoryview(bytearray(4))
    verbs: list[Callable[[], object]] = [
        lambda: storage.read("odd"),
        lambda: storage.size("odd"),
        lambda: storage.read_into("odd", 0, target),
        lambda: storage.written_at("odd"),
    ]
    for verb in verbs[:3]:
        with pytest.raises(NotAFile) as caught:
            verb()
        assert caught.value.what == f"{found} lies here, and no file"
        assert caught.value.details["found"] == found
        assert caught.value.where == str(tmp_path / "odd")
    assert verbs[3]() is None
    assert "odd" not in opened
    assert [entry.path for entry in storage.list()] == []


def test_a_pipe_that_is_put_there_after_the_look_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "odd")
    monkeypatch.setattr("coherent_ray.storage.local.refuse_no_file", lambda *_: None)
    with pytest.raises(NotAFile, match="a named pipe lies here"):
        LocalStorage(tmp_path).read("odd")
