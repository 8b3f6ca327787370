"""Housekeeping: the local backend clears away what is its own, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coherent_ray.errors import StorageError
from coherent_ray.storage import LocalStorage, directories, local
from coherent_ray.storage.base import Writer
from coherent_ray.storage.housekeeping import Housekeeping
from coherent_ray.storage.testing.faults import FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.storage.testing.power import Recorder

OURS = ".tmp-" + "0123456789abcdef" * 2


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run")


def begun(storage: LocalStorage, path: str, data: bytes = b"half") -> Writer:
    writer = storage.open_writer(path)
    writer.write(data)
    return writer


def without_lock(writer: Writer) -> None:
    """Leave a writer as on a file system that has no locks."""
    fcntl.flock(writer._file, fcntl.LOCK_UN)  # type: ignore[attr-defined]


def test_who_offers_it(storage: LocalStorage) -> None:
    assert isinstance(storage, Housekeeping)
    assert not isinstance(MemoryStorage(), Housekeeping)
    assert not isinstance(FaultyStorage(storage), Housekeeping)


# --- temporaries ----------------------------------------------------------------------------------


def test_temporaries_are_found_where_they_are_looked_for(
    storage: LocalStorage, tmp_path: Path
) -> None:
    writers = [begun(storage, path) for path in ("a", "log/a", "log/b", "log/deep/a")]
    storage.create("log/named", b"x")
    found = storage.temporaries(["", "log", "absent"])
    assert [left.path.rpartition("/")[0] for left in found] == ["", "log", "log"]
    assert {left.size for left in found} == {4}
    assert all(0 <= left.idle_s < 60 for left in found)
    assert storage.temporaries([]) == []
    assert len(writers) == 4
    assert not list((tmp_path / "run").glob(".tmp-*.*")), "the clock's file is gone"


@pytest.mark.parametrize(
    "name", [".tmp-mine", ".tmp-" + "0" * 31, ".tmp-" + "0" * 33, ".tmp-" + "A" * 32, OURS + "~"]
)
def test_what_only_begins_like_ours_is_not(
    storage: LocalStorage, tmp_path: Path, name: str
) -> None:
    storage.create("log/x", b"")
    (tmp_path / "run/log" / name).write_bytes(b"mine")
    assert storage.temporaries(["log"]) == []
    with pytest.raises(StorageError, match="no temporary file"):
        storage.drop_temporary(f"log/{name}")
    assert (tmp_path / "run/log" / name).read_bytes() == b"mine"


def test_only_files_are_temporary_files(storage: LocalStorage, tmp_path: Path) -> None:
    storage.create("log/x", b"")
    (tmp_path / "run/log" / OURS).mkdir()
    (tmp_path / "run" / OURS).symlink_to(tmp_path)
    assert storage.temporaries(["", "log"]) == []


def test_ages_are_told_by_the_file_system(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(storage, "log/x")
    (path,) = (tmp_path / "run/log").glob(".tmp-*")
    # Whoever sets a file's time back, or this machine's clock forward, does not make it old.
    os.utime(path, (0, 0))
    monkeypatch.setattr(time, "time", lambda: 1e12)
    (left,) = storage.temporaries(["log"])
    assert 0 <= left.idle_s < 60


def test_a_file_from_the_future_has_no_age(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(storage, "log/x")
    monkeypatch.setattr(directories.Directories, "now", lambda self: 5.0)
    (left,) = storage.temporaries(["log"])
    assert left.idle_s == 0.0


def test_where_the_file_system_does_not_tell_the_time_nothing_is_old(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(storage, "log/x")

    class ReadOnly:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return os.open(path, flags, *args, **options)

    monkeypatch.setattr(directories, "os", ReadOnly())
    monkeypatch.setattr(time, "time", lambda: 1e12)
    (left,) = storage.temporaries(["log"])
    assert left.idle_s == 0


def test_a_dropped_temporary_is_gone_and_its_writer_fails(
    storage: LocalStorage, tmp_path: Path
) -> None:
    writer = begun(storage, "log/x")
    without_lock(writer)
    (left,) = storage.temporaries(["log"])
    assert storage.drop_temporary(left.path)
    assert storage.drop_temporary(left.path)
    assert storage.drop_temporary(f"absent/{OURS}")
    assert storage.temporaries(["log"]) == []
    writer.write(b"the other half")
    with pytest.raises(StorageError):
        writer.finish()
    assert list((tmp_path / "run/log").iterdir()) == []


def test_a_writer_that_lives_keeps_its_file_however_old_that_seems(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """Also in another process; the kernel takes the lock back when that dies, by whatever."""
    writer = begun(storage, "log/x")
    (left,) = storage.temporaries(["log"])
    assert not storage.drop_temporary(left.path)
    writer.finish()
    assert storage.read("log/x") == b"half"
    script = (
        "import os, sys; from coherent_ray.storage import LocalStorage\n"
        "writer = LocalStorage(sys.argv[1]).open_writer('log/y'); print(flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (left,) = storage.temporaries(["log"])
        assert not storage.drop_temporary(left.path)
        other.kill()
        other.wait(10)
        assert storage.drop_temporary(left.path)
    assert [path.name for path in (tmp_path / "run/log").iterdir()] == ["x"]


@pytest.mark.parametrize("path", [f"../{OURS}", f"/{OURS}", f"a//{OURS}", f"a/../{OURS}"])
def test_no_path_leads_out_of_the_root(storage: LocalStorage, tmp_path: Path, path: str) -> None:
    storage.create("a/x", b"")
    (tmp_path / OURS).write_bytes(b"theirs")
    with pytest.raises(StorageError, match="plain names"):
        storage.drop_temporary(path)
    assert (tmp_path / OURS).read_bytes() == b"theirs"


# --- directories ----------------------------------------------------------------------------------


def test_directories_are_listed(storage: LocalStorage, tmp_path: Path) -> None:
    assert storage.directories("generations") == []
    storage.create("generations/g2-a1/x", b"")
    storage.create("generations/file", b"")
    (tmp_path / "run/generations/empty").mkdir()
    (tmp_path / "run/generations/link").symlink_to(tmp_path)
    assert storage.directories("generations") == ["empty", "g2-a1"]
    assert storage.directories("") == ["generations"]
    assert storage.directories("generations/file") == []


def test_only_an_empty_directory_is_dropped(storage: LocalStorage, tmp_path: Path) -> None:
    storage.create("generations/full/x", b"")
    begun(storage, "generations/writing/x")
    (tmp_path / "run/generations/empty").mkdir()
    assert storage.drop_directory("generations/empty")
    assert not storage.drop_directory("generations/empty")
    assert not storage.drop_directory("generations/full")
    assert not storage.drop_directory("generations/writing")
    assert not storage.drop_directory("absent/empty")
    assert storage.directories("generations") == ["full", "writing"]


def test_a_file_or_a_link_is_no_directory(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    storage.create("file", b"x")
    (tmp_path / "run/link").symlink_to(tmp_path / "outside")
    for path in ("file", "link"):
        with pytest.raises(StorageError):
            storage.drop_directory(path)
    with pytest.raises(StorageError, match="plain names"):
        storage.drop_directory("../outside")
    assert (tmp_path / "outside").is_dir()
    assert (tmp_path / "run/link").is_symlink()


def test_a_dropped_directory_can_be_made_again(storage: LocalStorage) -> None:
    storage.create("generations/a/x", b"1")
    storage.delete("generations/a/x")
    assert storage.drop_directory("generations/a")
    storage.create("generations/a/x", b"2")
    assert storage.read("generations/a/x") == b"2"


def test_what_is_dropped_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path)
    monkeypatch.setattr(local, "os", recorder)
    monkeypatch.setattr(directories, "os", recorder)
    storage = LocalStorage(tmp_path / "run")
    without_lock(begun(storage, "a/x"))
    (left,) = storage.temporaries(["a"])
    recorder.steps.clear()
    storage.drop_temporary(left.path)
    assert recorder.steps == ["unlink", "sync directory"]
    recorder.steps.clear()
    assert storage.drop_directory("a")
    assert recorder.steps == ["rmdir", "sync directory"]
    assert recorder.survivors() == [{}]
