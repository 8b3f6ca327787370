"""Syncs as they were seen from outside: what of each file, and which names, were ever synced.

Two witnesses, one question. `SyncSpy` stands in the process and watches ``os.fsync``; it sees what
the kernel sees at that moment, since it asks the kernel. `Traced` reads what ``strace`` wrote of
any process, and needs nobody's cooperation. `unsynced` asks either of them about files that are
said to be durable:

- was the file synced, at its final size, and not written since?
- was its directory synced after the file got its name there, and so on up to the root?
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

Identity = tuple[int, int]


class Witness(Protocol):
    """Who has seen syncs."""

    def synced(self, path: Path) -> tuple[int, bool] | None:
        """Return a file's size in bytes at its last sync, and whether it was written since."""

    def named(self, path: Path) -> bool:
        """Return whether a file's or directory's name was in its directory when that was synced."""


def unsynced(witness: Witness, root: Path, paths: Iterable[str]) -> list[str]:
    """Return what was not synced as it should have been, in words; nothing: all was.

    Args:
        witness: Who has seen the syncs.
        root: The storage's root, which itself was made under watch.
        paths: Files that are said to be durable, relative to the root.
    """
    return [fault for path in paths for fault in _faults(witness, root, root / path)]


def _faults(witness: Witness, root: Path, path: Path) -> Iterator[str]:
    name, size = path.relative_to(root), path.stat().st_size
    seen = witness.synced(path)
    if seen is None:
        yield f"{name} was never synced"
    elif seen[0] != size:
        yield f"{name} was synced at {seen[0]} bytes and has {size}"
    elif seen[1]:
        yield f"{name} was written after its last sync"
    for node in (path, *path.parents):
        if node == root.parent:
            break
        if not witness.named(node):
            yield f"the name {node.relative_to(root.parent)} was never synced"


# --- in the process -------------------------------------------------------------------------------


class SyncSpy:
    """Watches every ``os.fsync`` and ``os.fdatasync`` of this process inside a ``with`` block."""

    def __init__(self) -> None:
        self.syncs = 0
        self._files: dict[Identity, tuple[int, int]] = {}
        self._names: dict[Identity, dict[str, int]] = {}

    def __enter__(self) -> Self:
        self._real = os.fsync, os.fdatasync
        names: dict[str, Any] = vars(os)
        names["fsync"], names["fdatasync"] = self._watching(os.fsync), self._watching(os.fdatasync)
        return self

    def __exit__(self, *raised: object) -> None:
        names: dict[str, Any] = vars(os)
        names["fsync"], names["fdatasync"] = self._real

    def synced(self, path: Path) -> tuple[int, bool] | None:
        """See `Witness.synced`."""
        status = path.stat()
        seen = self._files.get((status.st_dev, status.st_ino))
        return None if seen is None else (seen[0], seen[1] != status.st_mtime_ns)

    def named(self, path: Path) -> bool:
        """See `Witness.named`."""
        above = path.parent.stat()
        seen = self._names.get((above.st_dev, above.st_ino), {})
        return seen.get(path.name) == path.lstat().st_ino

    def _watching(self, real: Any) -> Any:
        def sync(file: Any) -> None:
            descriptor = file if isinstance(file, int) else file.fileno()
            # What is there before the sync begins is what it makes durable.
            status = os.fstat(descriptor)
            identity = status.st_dev, status.st_ino
            names = _listed(descriptor) if stat.S_ISDIR(status.st_mode) else None
            real(descriptor)
            self.syncs += 1
            if names is None:
                self._files[identity] = status.st_size, status.st_mtime_ns
            else:
                self._names[identity] = names

        return sync


def _listed(directory: int) -> dict[str, int]:
    with os.scandir(directory) as entries:
        return {entry.name: entry.inode() for entry in entries}


# --- from outside ---------------------------------------------------------------------------------

#: What `Traced` understands; hand it to ``strace -f -y -s 0 -e trace=...``.
TRACED_CALLS = (
    "open,openat,creat,write,pwrite64,writev,pwritev,ftruncate,fsync,fdatasync,link,linkat,"
    "rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir"
)

_LINE = re.compile(r"^(\d+) +(.*)$")
_RESUMED = re.compile(r"^<\.\.\. (\w+) resumed>(.*)$")
_CALL = re.compile(r"^(\w+)\((.*)\) += (-?\d+)")
_DESCRIPTOR = re.compile(r"^(?:\d+|AT_FDCWD)<(.*?)(?: \(deleted\)|\(deleted\))?>$")
_UNFINISHED = " <unfinished ...>"


@dataclass(slots=True)
class _File:
    size: int = 0
    synced: int | None = None
    written: bool = False
    """Since the last sync."""


@dataclass(slots=True)
class _Seen:
    files: dict[str, _File] = field(default_factory=dict)
    """Where each path leads, at this moment."""
    names: dict[str, set[str]] = field(default_factory=dict)
    """Each directory's, at this moment."""
    synced: dict[str, set[str]] = field(default_factory=dict)
    """Each directory's, at its last sync."""


class Traced:
    """What ``strace`` saw of a process and all its threads."""

    def __init__(self, trace: str) -> None:
        """Read a trace.

        Args:
            trace: The output of ``strace -f -y -s 0 -e trace=`` `TRACED_CALLS`.
        """
        self._seen = _Seen()
        self.syncs = 0
        begun: dict[str, tuple[str, Any]] = {}
        for line in trace.splitlines():
            if (match := _LINE.match(line)) is None:
                continue
            thread, words = match.groups()
            if resumed := _RESUMED.match(words):
                start, before = begun.pop(thread)
                self._take(start + resumed[2], before)
            elif words.endswith(_UNFINISHED):
                start = words.removesuffix(_UNFINISHED)
                begun[thread] = start, self._before(start)
            else:
                self._take(words, self._before(words))

    def synced(self, path: Path) -> tuple[int, bool] | None:
        """See `Witness.synced`."""
        file = self._seen.files.get(str(path))
        return None if file is None or file.synced is None else (file.synced, file.written)

    def named(self, path: Path) -> bool:
        """See `Witness.named`."""
        return path.name in self._seen.synced.get(str(path.parent), set())

    def _before(self, words: str) -> Any:
        """Return what a sync that begins now makes durable."""
        call, _, rest = words.partition("(")
        if call not in {"fsync", "fdatasync"}:
            return None
        path = _path(rest.split(")")[0] if "<" not in rest else rest[: rest.rindex(">") + 1])
        if file := self._seen.files.get(path):
            return file, file.size
        return path, set(self._seen.names.get(path, set()))

    def _take(self, words: str, before: Any) -> None:
        match = _CALL.match(words)
        if match is None or int(match[3]) < 0:
            return  # it failed, or is none
        call, arguments, returned = match[1], match[2].split(", "), int(match[3])
        if before is not None:
            self._sync(*before)
        elif call in {"write", "writev", "pwrite64", "pwritev", "ftruncate"}:
            self._write(call, arguments, returned)
        elif call in {"open", "openat", "creat"}:
            self._open(call, arguments)
        else:
            self._rename(call, [_quoted(a) or _path(a) for a in arguments])

    def _sync(self, what: _File | str, then: Any) -> None:
        self.syncs += 1
        if isinstance(what, _File):
            what.synced, what.written = then, what.size != then
        else:
            self._seen.synced[what] = then

    def _write(self, call: str, arguments: list[str], returned: int) -> None:
        file = self._seen.files.get(_path(arguments[0]))
        if file is None:
            return
        file.written = True
        if call == "ftruncate":
            file.size = int(arguments[1])
        elif call in {"pwrite64", "pwritev"}:
            file.size = max(file.size, int(arguments[-1]) + returned)
        else:
            file.size += returned

    def _open(self, call: str, arguments: list[str]) -> None:
        path = _joined(arguments) if call == "openat" else _quoted(arguments[0])
        if call == "creat" or any("O_CREAT" in word for word in arguments):
            self._add(path, self._seen.files.get(path) or _File())
            if any("O_TRUNC" in word for word in arguments):
                self._seen.files[path].size = 0

    def _rename(self, call: str, words: list[str]) -> None:
        pairs = (
            words[:2] if call in {"link", "rename", "mkdir", "unlink", "rmdir"}
            else [f"{words[at]}/{words[at + 1]}" for at in range(0, len(words) - 1, 2)]
        )  # fmt: skip
        if call.startswith("mkdir"):
            self._add(pairs[0], None)
        elif call.startswith("link"):
            self._add(pairs[1], self._seen.files.get(pairs[0]))
        elif call.startswith("rename"):
            self._add(pairs[1], self._remove(pairs[0]))
            self._move(pairs[0], pairs[1])
        else:
            self._remove(pairs[0])

    def _add(self, path: str, file: _File | None) -> None:
        above, _, name = path.rpartition("/")
        self._seen.names.setdefault(above, set()).add(name)
        if file is not None:
            self._seen.files[path] = file

    def _move(self, old: str, new: str) -> None:
        """Let what lies under a directory follow its new name."""
        tables: tuple[dict[str, Any], ...] = (
            self._seen.files, self._seen.names, self._seen.synced,
        )  # fmt: skip
        for table in tables:
            for path in [path for path in table if f"{path}/".startswith(f"{old}/")]:
                table[new + path.removeprefix(old)] = table.pop(path)

    def _remove(self, path: str) -> _File | None:
        above, _, name = path.rpartition("/")
        self._seen.names.setdefault(above, set()).discard(name)
        return self._seen.files.pop(path, None)


def _path(argument: str) -> str:
    match = _DESCRIPTOR.match(argument)
    return match[1] if match else argument


def _quoted(argument: str) -> str:
    return argument[1:-1] if argument.startswith('"') else ""


def _joined(arguments: list[str]) -> str:
    name = _quoted(arguments[1])
    return name if name.startswith("/") else f"{_path(arguments[0])}/{name}"
