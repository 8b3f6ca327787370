"""The local backend as a judge in the process hears it: the same backend, call for call."""

from __future__ import annotations

import builtins
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_conformance

from coherent_ray.errors import AlreadyExists, StorageFull
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.testing.buffered import Buffered, buffered
from coherent_ray.storage.testing.power import Recorder, watched

CALLS = ("link", "rename", "mkdir", "unlink", "rmdir")


@pytest.fixture(autouse=True)
def _buffered() -> Iterator[None]:
    with buffered():
        yield


class TestBufferedLocalStorage(test_conformance.TestLocalStorage):
    """It passes the suite of the backend whose calls it says."""


def hear(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[str]:
    """Return what a judge hears from now on of what is under a root: it knows whole paths only."""
    heard: list[str] = []

    def hearing(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            result = real(path, *arguments, **options)
            if kind != "create" or arguments == ("xb",):
                assert Path(path).is_relative_to(root)
                heard.append(kind)
            return result

        return call

    def fsync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
        of_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        heard.append("sync directory" if of_directory else "sync file")
        real(descriptor)

    monkeypatch.setattr(builtins, "open", hearing("create", open))
    monkeypatch.setattr(os, "fsync", fsync)
    for name in CALLS:
        monkeypatch.setattr(os, name, hearing(name, getattr(os, name)))
    return heard


def story(root: Path) -> None:
    """Every verb that changes something."""
    storage = LocalStorage(root / "a" / "run")
    storage.create("log/1", b"record")
    with pytest.raises(AlreadyExists):
        storage.create("log/1", b"other")
    with storage.open_writer("generations/g1-a1/shard") as writer:
        writer.write(b"0123")
        writer.write(b"4567")
        writer.finish()
    with storage.open_writer("generations/g1-a1/given-up") as writer:
        writer.write(b"0123")
    storage.replace("hint", b"old")
    storage.replace("hint", b"new")
    storage.delete("log/1")
    assert storage.drop_directory("log")


def test_the_judge_hears_each_call_of_the_backend_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").mkdir()
    with watched(Recorder(tmp_path / "plain")) as recorder:
        story(tmp_path / "plain")
    said = [kind for kind in recorder.steps if kind != "write"]
    heard = hear(monkeypatch, tmp_path)
    story(tmp_path / "judged")
    assert heard.pop(0) == "mkdir"  # of the root's parent, which the recorder cannot be without
    assert heard.pop(0) == "sync directory"
    told = "\n".join(heard)
    assert told.replace("link\nrename\nunlink", "link\nunlink").split("\n") == said
    assert {"create", "sync file", *CALLS} <= set(heard)


def test_a_synced_file_is_closed_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judges cut a file where it is closed: there it must not have its name yet."""
    files: list[Any] = []
    real = open

    def keep(*arguments: Any) -> Any:
        files.append(real(*arguments))
        return files[-1]

    def link(*arguments: Any, **options: Any) -> None:
        seen.append(files[0].closed)

    seen: list[bool] = []
    monkeypatch.setattr(builtins, "open", keep)
    monkeypatch.setattr(Buffered, "link", link)
    LocalStorage(tmp_path).create("record", b"whole")
    assert seen == [True]


def test_a_full_disk_is_told_as_ever_and_leaves_nothing(tmp_path: Path) -> None:
    class Full(Buffered):
        def fsync(self, descriptor: int) -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().fsync(descriptor)

    before = len(list(Path("/proc/self/fd").iterdir()))
    with buffered(Full()), pytest.raises(StorageFull):
        LocalStorage(tmp_path).create("log/1", b"x")
    assert [path.name for path in tmp_path.rglob("*")] == ["log"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
