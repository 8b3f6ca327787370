"""Power cuts and deaths of processes, under the local backend, at every single system call.

`Recorder` stands in for the ``os`` module in the local backend: it passes every call on to the real
one, and tells a model of the disk (`coherent_ray.storage.testing.disk`) what each did. After any
call the model says what a power cut would leave; or the process dies there (`Recorder.kill`), and
another goes on in what the kernel still remembers, until the power goes for that one.
"""

# ruff: noqa: D102 (the functions that stand in mean what ``os`` says)

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coherent_ray.storage import directories, local
from coherent_ray.storage.base import TEMPORARY_PREFIX
from coherent_ray.storage.testing.disk import Directory, Disk, File, Image, Model, Node
from coherent_ray.storage.testing.faults import Crash

Tree = dict[str, bytes]
"""Files that survive: path relative to the observed directory, and content."""

Kind = str
"""``create``, ``mkdir``, ``write``, ``link``, ``rename``, ``unlink``, ``rmdir``, ``sync file`` or
``sync directory``."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call that changed or synced something."""

    kind: Kind
    path: str
    """Below the observed directory; of a sync, what was synced."""
    cause: str = ""
    """Of the sync of a directory: the name in it that was linked, renamed or made last."""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


class Recorder:
    """Stands in for ``os``; knows what a power cut would leave of one directory.

    Attributes:
        disk: The model.
        log: Every step, in order.
        steps: The kind of each of them.
        after_step: Functions that are called after each step: a cut may come here.
    """

    def __init__(
        self,
        root: Path,
        forget: str = "",
        model: Model = "weak",
        believe: Callable[[Step], bool] | None = None,
        unread: str = TEMPORARY_PREFIX,
    ) -> None:
        """Take what lies there as durable.

        Args:
            root: An existing directory.
            forget: Syncs that are passed on but not believed, to see that somebody would notice:
                ``"files"`` or ``"directories"``.
            model: What the disk promises.
            believe: The same, sync by sync: False where one is not believed.
            unread: Begins the names of files whose bytes nobody reads, see `Disk`.
        """
        self._syncs = {"files": "sync file", "directories": "sync directory"}
        self.forget(forget)
        self._believe = believe or (lambda step: True)
        self.disk = Disk(model, unread)
        self._nodes: dict[tuple[int, int], Node] = {}
        self._places: dict[int, str] = {}
        self._causes: dict[int, str] = {}
        self._adopt(root, self.disk.root, "")
        self.disk.settle()
        self._written: dict[int, File] = {}
        self._open: set[int] = set()
        self._dead = False
        self.log: list[Step] = []
        self.steps: list[str] = []
        self.after_step: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # --- what the local backend calls -------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            self._refuse_dead()
        descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
        self._open.add(descriptor)
        self._written.pop(descriptor, None)
        if flags & os.O_CREAT:
            file = self._written[descriptor] = File()
            directory = self._directory(dir_fd)
            self._name(file, directory, path, descriptor)
            self.disk.change(directory, {path: file})
            self._step("create", file)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        os.close(descriptor)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._refuse_dead()
        os.mkdir(path, mode, dir_fd=dir_fd)
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        above = Path(path).parent.stat() if dir_fd is None else os.fstat(dir_fd)
        directory = self._nodes[_identity(above)]
        assert isinstance(directory, Directory)
        made = Directory()
        self._nodes[_identity(status)] = made
        self._places[id(made)] = self._below(directory, Path(path).name)
        self._causes[id(directory)] = Path(path).name
        self.disk.change(directory, {Path(path).name: made})
        self._step("mkdir", made)

    def write(self, descriptor: int, data: Any) -> int:
        self._refuse_dead()
        written = os.write(descriptor, data)
        file = self._written[descriptor]
        file.content += bytes(data)[:written]
        self._step("write", file)
        return written

    def fsync(self, descriptor: int) -> None:
        self._refuse_dead()
        os.fsync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            node = self._nodes.get(_identity(os.fstat(descriptor)))
            if not isinstance(node, Directory):
                self._step("sync directory", None)  # above the observed one
                return
            if self._believed(Step("sync directory", self._places[id(node)], self._cause(node))):
                self.disk.sync_directory(node)
            self._step("sync directory", node)
        else:
            file = self._written[descriptor]
            if self._believed(Step("sync file", self._places[id(file)])):
                self.disk.sync_file(file)
            self._step("sync file", file)

    def link(self, source: str, target: str, *, src_dir_fd: int, **options: Any) -> None:
        self._refuse_dead()
        os.link(source, target, src_dir_fd=src_dir_fd, **options)
        directory = self._directory(src_dir_fd)
        self._move(directory, source, target)
        self.disk.change(directory, {target: directory.names[source]})
        self._step("link", directory.names[target])

    def rename(self, source: str, target: str, *, src_dir_fd: int, **options: Any) -> None:
        self._refuse_dead()
        os.rename(source, target, src_dir_fd=src_dir_fd, **options)
        directory = self._directory(src_dir_fd)
        self._move(directory, source, target)
        self.disk.change(directory, {source: None, target: directory.names[source]})
        self._step("rename", directory.names[target])

    def unlink(self, path: str, *, dir_fd: int) -> None:
        self._remove("unlink", os.unlink, path, dir_fd)

    def rmdir(self, path: str, *, dir_fd: int) -> None:
        self._remove("rmdir", os.rmdir, path, dir_fd)

    # --- what a test asks -------------------------------------------------------------------------

    def survivors(self, most: int | None = None) -> list[Tree]:
        """Return the sets of files that a power cut at this moment may leave, each one once.

        Args:
            most: As for `Disk.images`.
        """
        found = {
            tuple((path, data) for path, data in image.items() if data is not None)
            for image in self.disk.images(most)
        }
        return [dict(tree) for tree in sorted(found)]

    def forget(self, what: str) -> None:
        """From now on, believe no sync of ``"files"`` or ``"directories"``; ``""``: believe all."""
        self._forgotten = self._syncs[what] if what else ""

    def kill(self) -> None:
        """Let the process die here: from now on no call of its does anything. Call it in a hook.

        Raises:
            Crash: Always.
        """
        self._dead = True
        raise Crash

    def revive(self) -> None:
        """Let another process come: what the kernel knows is there, descriptors are closed."""
        self._dead = False
        for descriptor in list(self._open):
            self.close(descriptor)

    # --- leaves -----------------------------------------------------------------------------------

    def _adopt(self, path: Path, directory: Directory, place: str) -> None:
        self._nodes[_identity(path.stat())] = directory
        self._places[id(directory)] = place.rstrip("/")
        for entry in path.iterdir():
            node: Node
            if entry.is_dir():
                node = Directory()
                self._adopt(entry, node, f"{place}{entry.name}/")
            else:
                node = File(entry.read_bytes())
                self._nodes[_identity(entry.stat())] = node
                self._places[id(node)] = f"{place}{entry.name}"
            self.disk.change(directory, {entry.name: node})

    def _directory(self, descriptor: int | None) -> Directory:
        assert descriptor is not None, "the local backend names files by their directory"
        node = self._nodes[_identity(os.fstat(descriptor))]
        assert isinstance(node, Directory)
        return node

    def _name(self, file: File, directory: Directory, name: str, descriptor: int) -> None:
        self._nodes[_identity(os.fstat(descriptor))] = file
        self._places[id(file)] = self._below(directory, name)

    def _move(self, directory: Directory, source: str, target: str) -> None:
        self._places[id(directory.names[source])] = self._below(directory, target)
        self._causes[id(directory)] = target

    def _remove(self, kind: Kind, remove: Callable[..., None], path: str, dir_fd: int) -> None:
        self._refuse_dead()
        remove(path, dir_fd=dir_fd)
        directory = self._directory(dir_fd)
        node = directory.names[path]
        self.disk.change(directory, {path: None})
        self._step(kind, node)

    def _below(self, directory: Directory, name: str) -> str:
        place = self._places[id(directory)]
        return f"{place}/{name}" if place else name

    def _cause(self, directory: Directory) -> str:
        return self._causes.get(id(directory), "")

    def _believed(self, step: Step) -> bool:
        return step.kind != self._forgotten and self._believe(step)

    def _refuse_dead(self) -> None:
        if self._dead:
            raise Crash

    def _step(self, kind: Kind, node: Node | None) -> None:
        path = self._places[id(node)] if node is not None else ".."
        cause = self._cause(node) if isinstance(node, Directory) else ""
        self.log.append(Step(kind, path, cause))
        self.steps.append(kind)
        for function in self.after_step:
            function()


@contextmanager
def watched(recorder: Recorder) -> Iterator[Recorder]:
    """Put a recorder in the place of ``os`` in the local backend, for a while.

    Only one at a time, and only for what one process does: the backend's modules are changed.
    """
    modules: list[Any] = [local, directories]
    before = [module.os for module in modules]
    for module in modules:
        module.os = recorder
    try:
        yield recorder
    finally:
        for module, real in zip(modules, before, strict=True):
            module.os = real
        recorder.revive()


def materialise(image: Image, root: Path) -> None:
    """Write a state that a power cut left, as the real files of a directory that is empty."""
    for path, data in image.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
