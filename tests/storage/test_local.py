"""The local backend: what the system refuses, what leads out of the root, what is left behind."""

import errno
import os
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coherent_ray.errors import AlreadyExists, NotFound, StorageError, StorageFull
from coherent_ray.storage import LocalStorage, directories, local
from coherent_ray.storage.base import TEMPORARY_PREFIX, Dated


class Refusing:
    """Stands in for ``os``; one function raises, from its n-th call on, or once."""

    def __init__(self, function: str, number: int, *, nth: int = 1, once: bool = False) -> None:
        self._function, self._number, self._nth, self._once = function, number, nth, once
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._refuse(real) if name == self._function else real

    def _refuse(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._nth or (self.calls > self._nth and not self._once):
                raise OSError(self._number, os.strerror(self._number))
            return real(*args, **options)

        return call


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Refusing]:
    def install(*args: Any, **options: Any) -> Refusing:
        stand_in = Refusing(*args, **options)
        monkeypatch.setattr(local, "os", stand_in)
        monkeypatch.setattr(directories, "os", stand_in)
        return stand_in

    return install


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- refusals of the operating system -------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("function", ["open", "write", "fsync", "link"])
@pytest.mark.parametrize("verb", ["create", "writer", "replace"])
def test_a_full_disk_is_said_with_the_path_and_leaves_nothing(
    tmp_path: Path, refuse: Callable[..., Refusing], verb: str, function: str, number: int
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("log/1", b"before")
    if (verb, function) == ("replace", "link"):
        function = "rename"
    refuse(function, number)
    open_before = descriptors()

    def write(path: str, data: bytes) -> None:
        with storage.open_writer(path) as writer:
            writer.write(data)
            writer.finish()

    with pytest.raises(StorageFull) as caught:
        (write if verb == "writer" else getattr(storage, verb))("log/2", b"some")
    assert caught.value.where == str(tmp_path / "log" / "2")
    assert "Free some space" in caught.value.remedy
    assert caught.value.details == {"errno": errno.errorcode[number]}
    assert files(tmp_path) == ["log/1"]
    assert descriptors() == open_before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO, errno.ENAMETOOLONG])
@pytest.mark.parametrize("verb", ["create", "replace", "read", "size", "delete", "list"])
def test_every_other_refusal_is_said_with_path_and_reason(
    tmp_path: Path, refuse: Callable[..., Refusing], verb: str, number: int
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("log/1", b"before")
    refuse("open", number)
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: storage.create("log/1", b"x"),
        "replace": lambda: storage.replace("log/1", b"x"),
        "read": lambda: storage.read("log/1"),
        "size": lambda: storage.size("log/1"),
        "delete": lambda: storage.delete("log/1"),
        "list": lambda: list(storage.list("log")),
    }
    open_before = descriptors()
    with pytest.raises(StorageError) as caught:
        calls[verb]()
    assert type(caught.value) is StorageError
    assert str(tmp_path / "log") in caught.value.where
    assert caught.value.what == os.strerror(number).lower()
    assert caught.value.details["errno"] == errno.errorcode[number]
    assert (tmp_path / "log" / "1").read_bytes() == b"before"
    assert descriptors() == open_before


def test_the_device_fails_in_mid_read(tmp_path: Path, refuse: Callable[..., Refusing]) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("shard", b"0123")
    refuse("preadv", errno.EIO)
    target = memoryview(bytearray(4))
    for verb in (lambda: storage.read("shard"), lambda: storage.read_into("shard", 0, target)):
        with pytest.raises(StorageError) as caught:
            verb()
        assert caught.value.details["errno"] == "EIO"


def test_short_writes_and_reads_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, descriptor: int, data: memoryview) -> int:
            return os.write(descriptor, data[:3])

        def preadv(self, descriptor: int, buffers: list[memoryview], at: int) -> int:
            return os.preadv(descriptor, [buffers[0][:2]], at)

    monkeypatch.setattr(local, "os", Short())
    storage = LocalStorage(tmp_path)
    storage.create("file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    assert storage.read("file", 1, 8) == b"12345678"


def test_the_device_is_asked_to_begin_early_and_may_decline(
    tmp_path: Path, refuse: Callable[..., Refusing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_WRITE_BEHIND", 10)
    storage = LocalStorage(tmp_path)
    advice = refuse("posix_fadvise", errno.EINVAL)
    with storage.open_writer("shard") as writer:
        for _ in range(10):
            writer.write(b"0123")
        writer.finish()
    assert advice.calls == 3
    assert (tmp_path / "shard").read_bytes() == b"0123" * 10


def test_a_sync_that_failed_is_not_asked_again(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    """The kernel drops what it could not write, and would say yes the second time."""
    storage = LocalStorage(tmp_path)
    storage.create("first", b"directories are known")
    fsync = refuse("fsync", errno.EIO, once=True)
    with storage.open_writer("shard") as writer:
        writer.write(b"some")
        with pytest.raises(StorageError):
            writer.finish()
    assert fsync.calls == 1
    assert files(tmp_path) == ["first"]


def test_a_name_that_was_not_synced_is_an_error_and_the_second_asking_syncs_it(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("first", b"directories are known")
    fsync = refuse("fsync", errno.EIO, nth=2, once=True)
    with pytest.raises(StorageError):
        storage.create("record", b"whole")
    assert (tmp_path / "record").read_bytes() == b"whole"  # seen, but nobody was promised it
    with pytest.raises(AlreadyExists):
        storage.create("record", b"whole")
    assert fsync.calls == 4


def test_a_new_directory_that_cannot_be_synced_is_an_error(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    storage = LocalStorage(tmp_path)
    open_before = descriptors()
    refuse("fsync", errno.EIO, once=True)
    with pytest.raises(StorageError):
        storage.create("log/1", b"x")
    assert files(tmp_path) == []
    assert descriptors() == open_before
    storage.create("log/1", b"x")
    assert files(tmp_path) == ["log/1"]


def test_a_root_whose_parent_is_not_ours_to_sync_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(path: Path) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(directories, "_sync", no)
    LocalStorage(tmp_path).create("file", b"x")
    with pytest.raises(StorageError):
        LocalStorage(tmp_path / "new").create("file", b"x")


def test_a_filesystem_without_hard_links_says_so(
    tmp_path: Path, refuse: Callable[..., Refusing]
) -> None:
    refuse("link", errno.EPERM)
    with pytest.raises(StorageError) as caught:
        LocalStorage(tmp_path).create("file", b"x")
    assert "hard links" in caught.value.remedy
    assert files(tmp_path) == []


def test_a_link_whose_answer_was_lost_is_known_by_its_second_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does it: the server linked, the client asked again and heard that it is taken."""

    class AskedTwice:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def link(self, *args: Any, **options: Any) -> None:
            os.link(*args, **options)
            os.link(*args, **options)

    monkeypatch.setattr(local, "os", AskedTwice())
    LocalStorage(tmp_path).create("file", b"ours")
    assert files(tmp_path) == ["file"]


# --- the root, and what is left behind ------------------------------------------------------------


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "a" / "b")
    assert list(storage.list()) == []
    assert list(tmp_path.iterdir()) == []
    storage.create("c", b"x")
    assert files(tmp_path) == ["a/b/c"]


def test_a_relative_root_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    storage.create("file", b"x")
    assert storage.uri == str(tmp_path / "run")
    assert files(tmp_path) == ["run/file"]


def test_it_travels_to_another_process_and_forgets_what_it_knew(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("log/1", b"x")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.uri == storage.uri
    assert copy.read("log/1") == b"x"
    assert copy._directories._durable == set()


def test_a_root_that_was_removed_is_made_again(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.create("log/1", b"x")
    for path in [tmp_path / "run" / "log" / "1"]:
        path.unlink()
    (tmp_path / "run" / "log").rmdir()
    (tmp_path / "run").rmdir()
    storage.create("log/1", b"y")
    assert files(tmp_path) == ["run/log/1"]


def test_what_the_dead_leave_is_not_listed_and_in_nobodys_way(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    writer = storage.open_writer("g1/shard")
    writer.write(b"half a shard")
    left = files(tmp_path)
    assert len(left) == 1
    assert left[0].startswith(f"g1/{TEMPORARY_PREFIX}")
    assert list(storage.list()) == []
    storage.create("g1/shard", b"whole")
    assert [(e.path, e.size) for e in storage.list()] == [("g1/shard", 5)]
    with writer, pytest.raises(AlreadyExists):
        writer.finish()
    assert files(tmp_path) == ["g1/shard"]


def test_descriptors_are_closed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    open_before = descriptors()
    storage.create("a/b/c", b"x")
    storage.replace("a/b/d", b"x")
    storage.read("a/b/c")
    storage.size("a/b/c")
    list(storage.list())
    storage.delete("a/b/c")
    storage.delete("a/x/c")
    with pytest.raises(NotFound):
        storage.read("a/b/c")
    with storage.open_writer("a/e") as writer:
        writer.finish()
    with storage.open_writer("a/f"):
        pass
    assert descriptors() == open_before


def test_files_get_the_rights_that_the_user_asks_for(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        LocalStorage(tmp_path).create("file", b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_when_a_file_was_written_is_for_people(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert isinstance(storage, Dated)
    storage.create("log/1", b"x")
    os.utime(tmp_path / "log" / "1", (1e9, 1e9))
    assert storage.written_at("log/1") == datetime.fromtimestamp(1e9, UTC)
    for path in ("log/2", "log", "nothing/1"):
        assert storage.written_at(path) is None


@pytest.mark.parametrize("verb", ["read", "read_into", "size", "written_at"])
def test_a_device_that_fails_once_the_file_is_open_is_said_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Seen after real power cuts: opening came from memory, the next call from the device."""
    storage = LocalStorage(tmp_path)
    storage.create("shard", b"x")
    asked: dict[str, Callable[[], object]] = {
        "read": lambda: storage.read("shard"),
        "read_into": lambda: storage.read_into("shard", 0, memoryview(bytearray(1))),
        "size": lambda: storage.size("shard"),
        "written_at": lambda: storage.written_at("shard"),
    }

    def fstat(descriptor: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(StorageError, match="input/output error") as caught:
        asked[verb]()
    monkeypatch.undo()
    assert caught.value.where == str(tmp_path / "shard")
    assert caught.value.details["errno"] == "EIO"
    assert len(list(Path("/proc/self/fd").iterdir())) == before
