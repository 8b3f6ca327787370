"""A disk that breaks below the storage: stands where ``os`` does in the local backend.

Every call is known by its kind, by whom it serves and by what it is about, and a rule says which of
them fail, with which of the operating system's errors, for as long as the rule stands. Nothing is
synced: no test that uses it cuts the power.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from coherent_ray.storage import directories, local

Who = Literal["shard", "receipts", "manifest", "record", "hint", "deletion", "check", "reading"]
Call = Literal[
    "begin", "write", "sync", "link", "rename", "unlink", "sync directory", "close", "open",
    "status", "read", "list", "delete",
]  # fmt: skip


class BrokenDisk:
    """Fails the calls that `breaks` names, inside its block."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rule: tuple[Call, Who, int] | None = None
        self.struck = 0
        self.hang: Callable[[], object] | None = None
        """Called instead of raising: for calls that come back late."""

    @contextmanager
    def breaks(self, call: Call, who: Who, number: int = 0) -> Iterator[None]:
        """Let one kind of call fail with an error, for one of those who make it."""
        self.struck, self._rule = 0, (call, who, number)
        try:
            yield
        finally:
            self._rule = None

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # --- what the local backend calls -------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_DIRECTORY:
            self._strike("begin" if flags & os.O_CREAT else "open", self._path(dir_fd, path))
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def write(self, file: int, data: Any) -> int:
        self._strike("write", self._path(file))
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        directory = stat.S_ISDIR(os.fstat(file).st_mode)
        self._strike("sync directory" if directory else "sync", self._path(file))

    def link(self, source: str, target: str, *, src_dir_fd: int, **options: Any) -> None:
        self._strike("link", self._path(src_dir_fd, target))
        os.link(source, target, src_dir_fd=src_dir_fd, **options)

    def rename(self, source: str, target: str, *, src_dir_fd: int, **options: Any) -> None:
        self._strike("rename", self._path(src_dir_fd, target))
        os.rename(source, target, src_dir_fd=src_dir_fd, **options)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        ours = path.startswith(".tmp-")
        self._strike("unlink" if ours else "delete", self._path(dir_fd, path))
        os.unlink(path, dir_fd=dir_fd)

    def close(self, file: int) -> None:
        """As Linux does it: the descriptor is gone, whatever the answer."""
        path, directory = self._path(file), stat.S_ISDIR(os.fstat(file).st_mode)
        os.close(file)
        if not directory:
            self._strike("close", path)

    def fstat(self, file: int) -> os.stat_result:
        self._strike("status", self._path(file))
        return os.fstat(file)

    def preadv(self, file: int, buffers: Any, offset: int) -> int:
        self._strike("read", self._path(file))
        return os.preadv(file, buffers, offset)

    def listdir(self, directory: int) -> list[str]:
        self._strike("list", self._path(directory))
        return os.listdir(directory)

    # --- the rule ---------------------------------------------------------------------------------

    def _strike(self, call: Call, path: Path) -> None:
        if self._rule is None:
            return
        broken, who, number = self._rule
        if call != broken or not serves(path.relative_to(self._root).as_posix(), call, who):
            return
        self.struck += 1
        if self.hang is not None:
            self.hang()
            return
        raise OSError(number, os.strerror(number))

    def _path(self, descriptor: int | None, name: Any = "") -> Path:
        at = Path(f"/proc/self/fd/{descriptor}").readlink() if descriptor is not None else "/"
        path = Path(str(at).removesuffix(" (deleted)"), str(name))
        return path if path.is_relative_to(self._root) else self._root


def serves(path: str, call: Call, who: Who) -> bool:
    """Whether a call about a path is made for somebody."""
    rank = threading.current_thread().name == "coherent-ray-writer"
    match who:
        case "shard":
            return rank and path.startswith("generations/")
        case "manifest" | "check" | "deletion":
            return not rank and path.startswith("generations/")
        case "record":
            return path.startswith("log")
        case "receipts":
            return path.startswith("receipts")
        case "hint":
            return not rank and "/" not in path and path.startswith((".tmp-", "latest", "."))
        case "reading":
            return True


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BrokenDisk:
    """A broken disk below every local storage of this process, which breaks nothing yet."""
    disk = BrokenDisk(tmp_path / "run")
    monkeypatch.setattr(local, "os", disk)
    monkeypatch.setattr(directories, "os", disk)
    return disk


def in_words(number: int) -> str:
    """What a message says of an error."""
    return os.strerror(number).lower()


NUMBERS = [
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE,
]  # fmt: skip
