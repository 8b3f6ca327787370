"""Power cuts: every state that a cut may leave behind, under a file system that promises little.

`Recorder` stands in for the ``os`` module in the local backend, passes every call on, and writes
down what each would do to a disk. `Recorder.survivors` then lists what may be found after a cut, by
the weak reading of POSIX, which no common file system is as bad as:

- bytes that were not synced are there, in part, or not at all;
- each change of a name (created, linked, renamed, removed) that was not synced by a sync of *its
  directory* has happened or not, whatever happened to its neighbours; a rename is one change.

Real file systems order more than that, so code that is wrong can pass on them for years.
"""

# ruff: noqa: D102 (the functions that stand in mean what ``os`` says)

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = dict[str, bytes]
"""Files that survive: path relative to the observed directory, and content."""


@dataclass(slots=True)
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def possible(self) -> list[bytes]:
        """What may be found of its bytes; the worst first."""
        now = bytes(self.content)
        if now == self.synced:
            return [now]
        middle = (len(self.synced) + len(now)) // 2
        return [self.synced, now[:middle], now]


Change = dict[str, "_File | _Directory | None"]
"""Names with what they lead to from now on; all of it happens, or nothing."""


@dataclass(slots=True)
class _Directory:
    names: dict[str, _File | _Directory] = field(default_factory=dict)
    """As a running system sees it."""
    synced: dict[str, _File | _Directory] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        self.pending.append(change)
        _apply(self.names, change)

    def possible(self) -> Iterator[dict[str, _File | _Directory]]:
        """What may be found of its names; the worst first."""
        for happened in itertools.product([False, True], repeat=len(self.pending)):
            names = dict(self.synced)
            for change in itertools.compress(self.pending, happened):
                _apply(names, change)
            yield names


def _apply(names: dict[str, _File | _Directory], change: Change) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Recorder:
    """Stands in for ``os``; knows what a power cut would leave of one directory.

    Args:
        root: An existing directory, taken as durable and empty.
        forget: Syncs that are passed on but not believed, to see that somebody would notice:
            ``"files"`` or ``"directories"``.
    """

    def __init__(self, root: Path, forget: str = "") -> None:
        self._forget = forget
        self._root = _Directory()
        self._directories = {_identity(root.stat()): self._root}
        self._files: dict[int, _File] = {}
        self.steps: list[str] = []
        """Every call that changes or syncs something, in order."""
        self.after_step: list[Any] = []
        """Functions that are called after each of them: a cut may come here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # --- what the local backend calls -------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            file = self._files[descriptor] = _File()
            self._directory(dir_fd).change({path: file})
            self._step("create")
        else:
            self._files.pop(descriptor, None)
        return descriptor

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        os.mkdir(path, mode, dir_fd=dir_fd)
        made = _Directory()
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        self._directories[_identity(status)] = made
        above = Path(path).parent.stat() if dir_fd is None else os.fstat(dir_fd)
        self._directories[_identity(above)].change({Path(path).name: made})
        self._step("mkdir")

    def write(self, descriptor: int, data: Any) -> int:
        written = os.write(descriptor, data)
        self._files[descriptor].content += bytes(data)[:written]
        self._step("write")
        return written

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            directory = self._directories.get(_identity(os.fstat(descriptor)))
            if directory is not None and self._forget != "directories":
                directory.synced, directory.pending = dict(directory.names), []
            self._step("sync directory")
        else:
            if self._forget != "files":
                file = self._files[descriptor]
                file.synced = bytes(file.content)
            self._step("sync file")

    def link(self, source: str, target: str, *, src_dir_fd: int, **options: Any) -> None:
        os.link(source, target, src_dir_fd=src_dir_fd, **options)
        directory = self._directory(src_dir_fd)
        directory.change({target: directory.names[source]})
        self._step("link")

    def rename(self, source: str, target: str, *, src_dir_fd: int, **options: Any) -> None:
        os.rename(source, target, src_dir_fd=src_dir_fd, **options)
        directory = self._directory(src_dir_fd)
        directory.change({source: None, target: directory.names[source]})
        self._step("rename")

    def unlink(self, path: str, *, dir_fd: int) -> None:
        os.unlink(path, dir_fd=dir_fd)
        self._directory(dir_fd).change({path: None})
        self._step("unlink")

    def rmdir(self, path: str, *, dir_fd: int) -> None:
        os.rmdir(path, dir_fd=dir_fd)
        self._directory(dir_fd).change({path: None})
        self._step("rmdir")

    # --- what a test asks -------------------------------------------------------------------------

    def survivors(self, most: int | None = None) -> list[Tree]:
        """Return the sets of files that a power cut at this moment may leave, each one once.

        Args:
            most: Stop after so many outcomes, of which the first has lost all that can be lost;
                None: all of them, whose number is exponential in what was not synced.
        """
        outcomes = itertools.islice(_trees(self._root, ""), most)
        found = {tuple(sorted(tree.items())) for tree in outcomes}
        return [dict(tree) for tree in sorted(found)]

    def _directory(self, descriptor: int | None) -> _Directory:
        assert descriptor is not None, "the local backend names files by their directory"
        return self._directories[_identity(os.fstat(descriptor))]

    def _step(self, what: str) -> None:
        self.steps.append(what)
        for function in self.after_step:
            function()


def _trees(directory: _Directory, above: str) -> Iterator[Tree]:
    for names in directory.possible():
        choices: list[list[Tree]] = []
        for name, node in names.items():
            path = above + name
            if isinstance(node, _Directory):
                choices.append(list(_trees(node, path + "/")))
            else:
                choices.append([{path: content} for content in node.possible()])
        for combination in itertools.product(*choices):
            yield {path: content for tree in combination for path, content in tree.items()}


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
