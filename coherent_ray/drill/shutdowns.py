"""Real power cuts: saves on a real file system, which the kernel shuts down at a random moment.

A round mounts the disk, lets a new attempt open and save generations, pruning behind itself, and
cuts the power at a random moment. Then the disk is mounted again, its journal is replayed, and
`judged` looks: the log's chain, every byte of every generation that is live, and that the latest is
no older than what any rank was told is published. Then the run must go on: an attempt opens, and
publishes.

Controls do the same with a backend that forgets to sync files, or directories. Each must be
caught, or the cuts would prove nothing.
"""

from __future__ import annotations

import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.retention import Policy
from coherent_ray.drill.saves import Saves, state_at
from coherent_ray.errors import CoherentRayError, StorageError
from coherent_ray.state.shards import load_state
from coherent_ray.storage import LocalStorage, directories, local
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.loop_device import Disk, Journal, Kind

Forgets = Literal["nothing", "files", "directories"]

RANKS = 2
KEEP = Policy(keep=3)
#: Cuts come within the first so many seconds of an attempt: it opens, and saves a few times.
LATEST_CUT_S = 0.5
#: Cuts after which a new file system is made, so that logs stay short.
CUTS_OF_A_DISK = 25


@dataclass(slots=True)
class Promises:
    """What somebody was told: what no cut may take back."""

    published: list[str] = field(default_factory=list)
    """Names of generations."""
    update: int = 0
    """The newest of their updates."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One power cut and what was found after it."""

    after_s: float
    """Seconds from the attempt's start."""
    promised: int
    """Generations that this attempt's ranks were told are published."""
    untold: bool
    """Whether the latest is newer than any rank was told: cut between commit and answer."""
    remains: int
    """Files that no live generation names: what the cut interrupted."""
    problems: tuple[str, ...]
    """What broke a promise."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Cuts of one kind."""

    kind: Kind
    journal: Journal
    forgets: Forgets
    cuts: tuple[Cut, ...]

    @property
    def failures(self) -> int:
        """Cuts after which a promise was broken."""
        return sum(bool(cut.problems) for cut in self.cuts)


def campaign(
    kind: Kind,
    journal: Journal,
    cuts: int,
    seed: int,
    folder: Path,
    *,
    forgets: Forgets = "nothing",
    told: Callable[[Cut], object] = lambda cut: None,
) -> Campaign:
    """Cut the power again and again.

    Args:
        kind: The file system.
        journal: What becomes of its journal's end.
        cuts: How many.
        seed: Decides the moments.
        folder: An existing directory for disks.
        forgets: Which syncs the backend only seems to make; anything but "nothing" is a control.
        told: Called with each cut.

    Raises:
        StorageError: The machine does not allow such disks.
    """
    draw, done = random.Random(f"{seed} {kind} {journal}"), list[Cut]()
    while len(done) < cuts:
        with tempfile.TemporaryDirectory(dir=folder) as scratch, Disk(kind, Path(scratch)) as disk:
            promises = Promises()
            for _ in range(min(CUTS_OF_A_DISK, cuts - len(done))):
                with forgetting(forgets):
                    cut = _round(disk, journal, draw.uniform(0, LATEST_CUT_S), promises)
                done.append(cut)
                told(cut)
                if cut.problems:
                    break  # what is broken is no place to go on from
    return Campaign(kind, journal, forgets, tuple(done))


def judged(storage: Storage, promises: Promises) -> list[str]:
    """Return which promises a root breaks, in words; nothing: none."""
    try:
        return list(_broken(storage, promises))
    except CoherentRayError as error:
        return [f"{type(error).__name__}: {error.where}: {error.what}"]


@contextmanager
def forgetting(what: Forgets) -> Iterator[None]:
    """Let the local backend only seem to sync, inside the block."""
    if what == "nothing":
        yield
        return
    backend = [vars(local), vars(directories)]
    for names in backend:
        names["os"] = _Careless(what)
    try:
        yield
    finally:
        for names in backend:
            names["os"] = os


class _Careless:
    """Stands in for ``os``, and leaves out syncs."""

    def __init__(self, forgets: Forgets) -> None:
        self._forgets = forgets

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        """Sync, or return as if it were done."""
        of_files = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if self._forgets != ("files" if of_files else "directories"):
            os.fsync(descriptor)


def _round(disk: Disk, journal: Journal, after_s: float, promises: Promises) -> Cut:
    root = disk.place / "run"
    before = len(promises.published)
    wrong: list[str] = []
    worker = threading.Thread(target=_save_until_it_fails, args=(root, promises, wrong))
    worker.start()
    time.sleep(after_s)
    disk.cut(journal)
    worker.join()
    disk.unmount()
    disk.mount()
    storage = LocalStorage(root)
    problems = wrong + judged(storage, promises)
    untold, remains = False, 0
    if not problems:
        history = CommitLog(storage).read()
        untold = bool(history.latest and history.latest.update > promises.update)
        remains = _remains(storage, root)
        problems = _goes_on(root, promises)
    promised = len(promises.published) - before - (not problems)
    return Cut(after_s, promised, untold, remains, tuple(problems))


def _save_until_it_fails(root: Path, promises: Promises, wrong: list[str]) -> None:
    saves = Saves(lambda: LocalStorage(root), RANKS, retention=KEEP)
    try:
        saves.open()
        while _promised(saves, promises):
            pass
    except StorageError:
        pass  # the cut came while the attempt opened
    except Exception as error:
        wrong.append(f"a cut is no error of the storage: {type(error).__name__}: {error}")
    finally:
        saves.close()


def _promised(saves: Saves, promises: Promises) -> bool:
    """Save once, note what was promised, and return whether all ranks heard the same good news."""
    saved = saves.save()
    good = [one for one in saved if one.fate.kind == "published"]
    if good:
        promises.published.append(good[0].name)
        promises.update = max(promises.update, good[0].update)
    return len(good) == len(saved)


def _goes_on(root: Path, promises: Promises) -> list[str]:
    """Let nothing fail any more: the run must go on from there."""
    saves = Saves(lambda: LocalStorage(root), RANKS, retention=KEEP)
    try:
        saves.open()
        if not _promised(saves, promises):
            return [f"the run does not go on: {saves.service.last_error}"]
    except CoherentRayError as error:
        return [f"the run does not go on: {error}"]
    finally:
        saves.close()
    return judged(LocalStorage(root), promises)


def _broken(storage: Storage, promises: Promises) -> Iterator[str]:
    generations = Generations(storage)
    history = generations.history()
    names = {publish.name for publish in history.publishes}
    for name in promises.published:
        if name not in names:
            yield f"{name} was called published, and is not in the log"
    for publish in history.live:
        for damage in generations.verify(publish):
            yield f"{publish.name}: {damage.where}: {damage.what}"
    selected = generations.select("refuse")
    if selected is None:
        if promises.published:
            yield "nothing can be selected"
        return
    if selected.publish != history.latest or selected.publish.update < promises.update:
        yield f"{selected.publish.name} is older than what was called published"
    wanted = state_at(selected.publish.update).tensors
    found = load_state(storage, selected.manifest)
    for name in wanted:
        if not torch.equal(found[name], wanted[name]):
            yield f"{selected.publish.name}: {name} is not what was saved"


def _remains(storage: Storage, root: Path) -> int:
    """Return how many files are there that no live generation names, temporary ones too."""
    live = {publish.name for publish in CommitLog(storage).read().live}
    files = [path for path in (root / "generations").rglob("*") if path.is_file()]
    named = [
        path for path in files if path.parent.name in live and not path.name.startswith(".tmp-")
    ]
    return len(files) - len(named)
