"""Leftovers: what dead attempts and killed writers left goes, and no file that is not the run's."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from retained_runs import (
    MadeRun,
    check_live_is_whole,
    deleted,
    files_of,
    foreign,
    live_names,
    paths,
    prune,
    run_of,
)
from test_history import retire

from coherent_ray.commit.pruning import GRACE_S, Pruner
from coherent_ray.commit.retention import Policy
from coherent_ray.errors import LogDamaged, StorageError
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.base import Storage, Writer
from coherent_ray.storage.testing.memory import MemoryStorage

# --- leftovers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, 1])
def test_what_dead_attempts_left_goes(keep: int | None) -> None:
    run = run_of(1, 1)
    left = run.leave(2, 1) | run.leave(9, 1, manifest=True)
    pruned = prune(run, keep)
    assert left <= set(deleted(pruned))
    assert left.isdisjoint(paths(run.storage))
    check_live_is_whole(run.storage)


def test_what_the_open_attempt_is_writing_stays() -> None:
    run = run_of(1, 1)
    writing = run.leave(3, 2) | run.leave(4, 2, manifest=True)
    prune(run)
    assert writing <= paths(run.storage)


def test_where_an_attempt_is_not_in_the_log_nothing_is_deleted() -> None:
    """The log has lost its end, or the files are another run's: nobody knows what is left over."""
    run = run_of(2, 1)
    run.leave(9, 1)
    of_nobody = run.leave(1, 7)
    before = paths(run.storage)
    with pytest.raises(LogDamaged, match="generations/g1-a7, receipts/") as caught:
        prune(run)
    assert paths(run.storage) == before
    receipts = next(path for path in of_nobody if path.startswith("receipts"))
    assert caught.value.details["unknown"] == ["generations/g1-a7", receipts]


def test_a_failed_save_of_the_open_attempt_goes_once_a_later_one_is_published() -> None:
    run = run_of(1)
    left = run.leave(2, 1)
    prune(run)
    assert left <= paths(run.storage)
    run.number = 2
    run.publish()
    prune(run)
    assert left.isdisjoint(paths(run.storage))
    check_live_is_whole(run.storage)


def test_receipts_of_retired_generations_are_history() -> None:
    run = run_of(3)
    segments = {publish.receipts.path for publish in run.log.read().publishes if publish.receipts}
    prune(run)
    assert len(segments) == 3
    assert segments <= paths(run.storage)


def test_what_a_crash_left_of_retired_generations_goes() -> None:
    run = run_of(3)
    run.log.append(retire(1), 1)
    run.log.append(retire(2), 1)
    run.storage.delete("generations/g1-a1/shard-00000-of-00002.safetensors")
    pruned = prune(run, keep=None)
    assert len(pruned.deleted) == 5
    assert files_of(run.storage, "g1-a1") | files_of(run.storage, "g2-a1") == set()


@pytest.mark.parametrize("harm", ["missing", "torn"])
def test_a_retired_generation_whose_manifest_is_lost_goes_by_its_names(harm: str) -> None:
    run = run_of(2)
    assert isinstance(run.storage, MemoryStorage)
    run.log.append(retire(1), 1)
    if harm == "missing":
        run.storage.delete("generations/g1-a1/manifest.json")
    else:
        run.storage.files["generations/g1-a1/manifest.json"] = b"{"
    run.storage.create("generations/g1-a1/mine.txt", b"mine")
    pruned = prune(run, keep=None)
    assert files_of(run.storage, "g1-a1") == {"generations/g1-a1/mine.txt"}
    assert foreign(pruned) == ["generations/g1-a1/mine.txt"]


# --- what is not ours -----------------------------------------------------------------------------

FOREIGN = {
    "notes.txt", "data/part-0.parquet", "log/readme.md", "datasets/raw.bin",
    "receipts/plot.png", "holds/readme", "generations/readme.md", "generations/best/weights.pt",
    "generations/g1-a1/notes.txt", "generations/g1-a1/shard-00000-of-00002.safetensors.bak",
    "generations/g1-a1/sub/manifest.json", "generations/g9-a1/notes.txt",
    "generations/g3-a2/notes.txt", "generations/g01-a1/manifest.json",
    # Named as ours, but the manifest of g1-a1 does not know it, nor does a publish.
    "generations/g1-a1/shard-00007-of-00009.safetensors",
    f"receipts/{1:012d}-{99:012d}-g1-a1.jsonl",
}  # fmt: skip


def with_foreign_files(storage: Storage) -> MadeRun:
    run = run_of(2, 1, storage=storage)
    run.leave(9, 1)
    for path in FOREIGN:
        storage.create(path, path.encode())
    return run


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_foreign_files_survive_and_are_named(kind: str, tmp_path: Path) -> None:
    storage = MemoryStorage() if kind == "memory" else LocalStorage(tmp_path / "run")
    run = with_foreign_files(storage)
    pruned = Pruner(storage, Policy(1)).prune(whole_root=True)
    for path in FOREIGN:
        assert storage.read(path) == path.encode()
    assert foreign(pruned) == sorted(FOREIGN)
    assert live_names(storage) == ["g3-a2"]
    ours = {path for path in paths(storage) if path.startswith("generations/")} - FOREIGN
    assert {path.split("/")[1] for path in ours} == {"g3-a2"}
    assert run.log.read().latest is not None


def test_a_prune_behind_a_publish_looks_only_where_the_run_writes() -> None:
    run = with_foreign_files(MemoryStorage())
    assert {path.split("/")[0] for path in foreign(prune(run))} == {
        "generations", "receipts", "holds",
    }  # fmt: skip


def test_what_is_linked_into_the_root_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("theirs")
    (outside / ".tmp-0123456789abcdef0123456789abcdef").write_text("theirs")
    os.utime(outside / ".tmp-0123456789abcdef0123456789abcdef", (0, 0))
    root = tmp_path / "run"
    run = run_of(1, 1, storage=LocalStorage(root))
    (root / "generations/g7-a1").symlink_to(outside)
    (root / "generations/g1-a1/link").symlink_to(outside / "manifest.json")
    Pruner(run.storage, Policy(1), grace_s=0.0).prune()
    assert {path.name for path in outside.iterdir()} == {
        "manifest.json", ".tmp-0123456789abcdef0123456789abcdef",
    }  # fmt: skip
    assert (root / "generations/g7-a1").is_symlink()
    assert (root / "generations/g1-a1/link").is_symlink()
    assert [path.name for path in (root / "generations/g1-a1").iterdir()] == ["link"]


# --- temporaries and directories ------------------------------------------------------------------


def abandoned(storage: Storage, path: str) -> Writer:
    """A file whose writer was killed in the middle."""
    writer = storage.open_writer(path)
    writer.write(b"half of a sha")
    if isinstance(storage, LocalStorage):
        fcntl.flock(writer._file, fcntl.LOCK_UN)  # type: ignore[attr-defined]
    return writer


def temporaries(root: Path) -> list[Path]:
    return sorted(root.rglob(".tmp-*"))


def make_old(path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass for the file system, whose clock cannot be set."""
    from coherent_ray.storage.directories import Directories

    now = path.stat().st_mtime + seconds
    monkeypatch.setattr(Directories, "now", lambda self: now)


def test_temporary_files_of_killed_writers_go_after_a_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(1, 1, storage=LocalStorage(tmp_path))
    places = ["generations/g5-a1/shard-x", "generations/g2-a2/x", "log/x", "latest", "holds/x"]
    writers = [abandoned(run.storage, place) for place in places]
    left = temporaries(tmp_path)
    assert len(left) == 5
    foreign_one = tmp_path / ".tmp-mine"
    foreign_one.write_text("mine")

    make_old(left[0], monkeypatch, GRACE_S - 60)
    assert prune(run, keep=None).deleted == ()
    make_old(left[0], monkeypatch, GRACE_S + 60)
    pruned = Pruner(run.storage, Policy()).prune(dry_run=True)
    assert len(temporaries(tmp_path)) == 6
    assert prune(run, keep=None).deleted == pruned.deleted
    assert {entry.size for entry in pruned.deleted} == {len(b"half of a sha")}
    assert temporaries(tmp_path) == [foreign_one]
    # A writer that was only slow fails; nothing torn is ever named.
    with pytest.raises(StorageError):
        writers[1].finish()
    assert not (tmp_path / "generations/g2-a2/x").exists()
    check_live_is_whole(run.storage)


def test_a_writer_that_lives_keeps_its_file_though_the_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage's own clock, in the middle of a save: what it wrote seems to be hours old."""
    run = run_of(1, storage=LocalStorage(tmp_path))
    writer = run.storage.open_writer("generations/g2-a1/shard")
    writer.write(b"half of a sha")
    make_old(temporaries(tmp_path)[0], monkeypatch, 10 * GRACE_S)
    assert prune(run, keep=None).deleted == ()
    writer.finish()
    assert run.storage.read("generations/g2-a1/shard") == b"half of a sha"


def test_a_wall_clock_that_jumps_does_not_make_files_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(1, storage=LocalStorage(tmp_path))
    writer = abandoned(run.storage, "generations/g2-a1/shard")
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert prune(run, keep=None).deleted == ()
    writer.finish()
    assert run.storage.read("generations/g2-a1/shard") == b"half of a sha"


def test_empty_directories_of_what_is_over_go(tmp_path: Path) -> None:
    run = run_of(2, 1, storage=LocalStorage(tmp_path))
    run.leave(9, 1)
    (tmp_path / "generations/g8-a1").mkdir()
    (tmp_path / "generations/mine").mkdir()
    (tmp_path / "generations/g4-a2").mkdir()
    prune(run)
    assert sorted(path.name for path in (tmp_path / "generations").iterdir()) == [
        "g3-a2", "g4-a2", "mine",
    ]  # fmt: skip
