"""What a verb has said is durable survives every power cut that a weak file system allows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coherent_ray.errors import AlreadyExists
from coherent_ray.storage import LocalStorage, directories, local
from coherent_ray.storage.base import TEMPORARY_PREFIX
from coherent_ray.storage.testing.power import Recorder, Tree


def record(monkeypatch: pytest.MonkeyPatch, root: Path, forget: str = "") -> Recorder:
    recorder = Recorder(root, forget)
    monkeypatch.setattr(local, "os", recorder)
    monkeypatch.setattr(directories, "os", recorder)
    return recorder


def visible(tree: Tree) -> Tree:
    return {path: data for path, data in tree.items() if TEMPORARY_PREFIX not in path}


ROOT = "a/run"


class Watched:
    """Runs verbs one after the other, and collects what breaks a promise at any cut."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.promised: Tree = {}
        self.broken: list[str] = []
        self.cuts = 0
        self._now: tuple[str, set[bytes | None]] | None = None
        recorder.after_step.append(self._cut)

    def run(self, path: str, verb: Callable[[], object], after: bytes | None) -> None:
        """Run a verb that leaves `after` under `path`; until it returns, the old is right too."""
        path = f"{ROOT}/{path}"
        self._now = (path, {self.promised.get(path), after})
        verb()
        self._now = None
        if after is None:
            self.promised.pop(path, None)
        else:
            self.promised[path] = after
        self._cut()

    def _cut(self) -> None:
        for tree in map(visible, self.recorder.survivors()):
            self.cuts += 1
            wanted = dict(self.promised)
            if self._now:
                path, right = self._now
                wanted.pop(path, None)
                if tree.pop(path, None) not in right:
                    self.broken.append(f"{path} is torn after {self.recorder.steps[-1]}")
            if tree != wanted:
                self.broken.append(f"{tree.keys()} instead of {wanted.keys()}")


def story(watched: Watched, root: Path) -> None:
    """Every verb that changes something, in directories that exist and that do not."""
    storage, other = LocalStorage(root / ROOT), LocalStorage(root / ROOT)

    def write_shard() -> None:
        with storage.open_writer("generations/g1-a1/shard") as writer:
            writer.write(b"0123")
            writer.write(b"4567")
            writer.finish()

    def create_again() -> None:
        with pytest.raises(AlreadyExists):
            other.create("log/1", b"other")

    watched.run("log/1", lambda: storage.create("log/1", b"record"), b"record")
    watched.run("log/1", create_again, b"record")
    watched.run("log/2", lambda: other.create("log/2", b"next"), b"next")
    watched.run("generations/g1-a1/shard", write_shard, b"01234567")
    watched.run("hint", lambda: storage.replace("hint", b"old"), b"old")
    watched.run("hint", lambda: other.replace("hint", b"newer"), b"newer")
    watched.run("log/2", lambda: storage.delete("log/2"), None)
    watched.run("log/2", lambda: storage.create("log/2", b"third"), b"third")


def test_every_promise_survives_every_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(record(monkeypatch, tmp_path))
    story(watched, tmp_path)
    assert watched.broken == []
    assert watched.cuts > 100
    assert {"mkdir", "link", "rename", "unlink"} <= set(watched.recorder.steps)


@pytest.mark.parametrize("forget", ["files", "directories"])
def test_the_judge_would_see_a_missing_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: str
) -> None:
    recorder = record(monkeypatch, tmp_path, forget)
    watched = Watched(recorder)
    storage = LocalStorage(tmp_path / ROOT)
    watched.run("log/1", lambda: storage.create("log/1", b"record"), b"record")
    assert watched.broken != []


@pytest.mark.parametrize("skipped", range(5), ids=["a", "a/run", "a/run/log", "file", "name"])
def test_the_judge_would_see_any_one_sync_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    """Above each new directory, the file, its directory: none of them is for show."""
    recorder = record(monkeypatch, tmp_path)
    real, seen = recorder.fsync, iter(range(100))

    def fsync(descriptor: int) -> None:
        if next(seen) != skipped:
            real(descriptor)

    monkeypatch.setattr(recorder, "fsync", fsync)
    watched = Watched(recorder)
    storage = LocalStorage(tmp_path / ROOT)
    watched.run("log/1", lambda: storage.create("log/1", b"record"), b"record")
    assert watched.broken != []


def test_a_file_is_synced_before_it_has_a_name_and_the_name_before_create_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("log/1", b"directories are there and synced")
    recorder = record(monkeypatch, tmp_path)
    storage.create("log/2", b"record")
    assert recorder.steps == ["create", "write", "sync file", "link", "unlink", "sync directory"]


def test_replace_syncs_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("first", b"")
    recorder = record(monkeypatch, tmp_path)
    storage.replace("hint", b"record")
    assert recorder.steps == ["create", "write", "sync file", "rename", "sync directory"]


def test_already_exists_is_said_only_after_the_directory_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever meets another's file may rely on it, even if that one died before its own sync."""
    (tmp_path / "taken").write_bytes(b"theirs, linked and not synced")
    storage = LocalStorage(tmp_path)
    recorder = record(monkeypatch, tmp_path)
    with pytest.raises(AlreadyExists):
        storage.create("taken", b"ours")
    assert recorder.steps[-1] == "sync directory"


def test_directories_that_others_made_are_synced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").mkdir()
    recorder = Recorder(tmp_path)
    monkeypatch.setattr(local, "os", recorder)
    monkeypatch.setattr(directories, "os", recorder)
    storage = LocalStorage(tmp_path)
    storage.create("log/1", b"x")
    assert recorder.steps.count("sync directory") == 3  # above the root, the root, the log
    storage.create("log/2", b"x")
    assert recorder.steps.count("sync directory") == 4


def test_delete_syncs_even_where_nothing_is_left_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    recorder = record(monkeypatch, tmp_path)
    storage.delete("removed-by-one-who-died")
    assert recorder.steps == ["sync directory"]
