"""Pruning: what goes, what stays, what is never touched; on a storage that does what it is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from runs import MadeRun, check_live_is_whole, damage, live_names, paths, run_of
from test_history import pin, retire

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.holds import LEASE_S, Hold
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.pruning import GRACE_S, Pruned, Pruner
from coherent_ray.commit.retention import Policy
from coherent_ray.errors import Fenced, Interrupted, LogDamaged, StorageError
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.base import Storage, Writer
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage


def files_of(storage: Storage, name: str) -> set[str]:
    return {path for path in paths(storage) if path.startswith(f"generations/{name}/")}


def prune(run: MadeRun, keep: int | None = 1, keep_every: int | None = None) -> Pruned:
    return Pruner(run.storage, Policy(keep, keep_every)).prune()


def deleted(pruned: Pruned) -> list[str]:
    return [entry.path for entry in pruned.deleted]


def foreign(pruned: Pruned) -> list[str]:
    return [entry.path for entry in pruned.foreign]


# --- generations ----------------------------------------------------------------------------------


def test_old_generations_go_with_all_their_files() -> None:
    run = run_of(2, 3)
    before = paths(run.storage)
    pruned = prune(run, keep=2)
    assert [body.name for body in pruned.retired] == ["g1-a1", "g2-a1", "g3-a2"]
    assert live_names(run.storage) == ["g4-a2", "g5-a2"]
    gone = before - paths(run.storage)
    assert gone == set(deleted(pruned))
    assert {path.split("/")[1] for path in gone} == {"g1-a1", "g2-a1", "g3-a2"}
    assert len(gone) == 9
    assert pruned.freed == sum(entry.size for entry in pruned.deleted) > 3000
    assert (pruned.held, pruned.foreign, pruned.problems) == ((), (), ())
    history = check_live_is_whole(run.storage)
    assert len(history.publishes) == 5, "history is not what goes"


def test_the_manifest_goes_after_the_shards_that_it_names() -> None:
    run = run_of(4)
    order = deleted(prune(run))
    for name in ("g1-a1", "g2-a1", "g3-a1"):
        mine = [path for path in order if f"/{name}/" in path]
        assert [path.endswith("manifest.json") for path in mine] == [False, False, True]


def test_pruning_again_finds_nothing() -> None:
    run = run_of(4)
    pruner = Pruner(run.storage, Policy(2))
    pruner.prune()
    left = paths(run.storage)
    for again in (pruner.prune(), prune(run, keep=2)):
        assert (again.retired, again.deleted) == ((), ())
        assert paths(run.storage) == left


def test_without_a_limit_no_generation_goes() -> None:
    run = run_of(2, 2)
    pruned = prune(run, keep=None)
    assert (pruned.retired, pruned.deleted) == ((), ())
    assert [kept.reason for kept in pruned.kept] == ["all"] * 4


def test_milestones_stay() -> None:
    run = run_of(7)
    prune(run, keep=1, keep_every=30)
    assert live_names(run.storage) == ["g3-a1", "g6-a1", "g7-a1"]


def test_pinned_generations_stay_whole() -> None:
    run = run_of(4)
    run.pin(run.log.read().publishes[0])
    pruned = prune(run)
    assert live_names(run.storage) == ["g1-a1", "g4-a1"]
    assert [(kept.publish.name, kept.reason) for kept in pruned.kept] == [
        ("g1-a1", "pinned"), ("g4-a1", "recent"),
    ]  # fmt: skip
    run.pin(run.log.read().publishes[0], pinned=False)
    assert [body.name for body in prune(run).retired] == ["g1-a1"]
    check_live_is_whole(run.storage)


def test_what_is_pinned_while_the_plan_is_made_stays() -> None:
    run = run_of(3)

    class PinsMeanwhile(FaultyStorage):
        def read_into(self, path: str, start: int, target: memoryview) -> int:
            run.log.append(pin(1), 1)
            return super().read_into(path, start, target)

    pruned = Pruner(PinsMeanwhile(run.storage), Policy(1)).prune()
    assert [body.name for body in pruned.retired] == ["g2-a1"]
    assert [(kept.publish.name, kept.reason) for kept in pruned.kept] == [
        ("g1-a1", "pinned"), ("g3-a1", "recent"),
    ]  # fmt: skip
    assert len(files_of(run.storage, "g1-a1")) == 3
    check_live_is_whole(run.storage)


def test_a_damaged_generation_replaces_no_other() -> None:
    run = run_of(3)
    assert isinstance(run.storage, MemoryStorage)
    damage(run.storage, run.log.read().publishes[2], rank=1)
    pruned = prune(run)
    assert live_names(run.storage) == ["g2-a1", "g3-a1"]
    assert [(kept.publish.name, kept.whole) for kept in pruned.kept] == [
        ("g2-a1", True), ("g3-a1", False),
    ]  # fmt: skip
    selected = Generations(run.storage).select()
    assert selected is not None
    assert selected.publish.name == "g2-a1"


@pytest.mark.parametrize("harm", ["manifest", "shard", "torn"])
def test_where_none_is_whole_nothing_goes(harm: str) -> None:
    run = run_of(3)
    assert isinstance(run.storage, MemoryStorage)
    for publish in run.log.read().publishes:
        path = f"generations/{publish.name}/shard-00000-of-00002.safetensors"
        if harm == "torn":
            run.storage.files[path] = run.storage.files[path][:-1]
        else:
            run.storage.delete(publish.manifest if harm == "manifest" else path)
    before = paths(run.storage)
    pruned = prune(run)
    assert (pruned.retired, pruned.deleted) == ((), ())
    assert paths(run.storage) == before


def test_a_storage_that_cannot_be_asked_is_no_damage() -> None:
    run = run_of(3)
    before = paths(run.storage)
    faulty = FaultyStorage(run.storage, [Fault("refuse", verb="read_into")])
    with pytest.raises(StorageError, match="refused"):
        Pruner(faulty, Policy(1)).prune()
    assert paths(run.storage) == before
    assert live_names(run.storage) == ["g1-a1", "g2-a1", "g3-a1"]


def test_each_generation_is_read_once_and_then_only_looked_at() -> None:
    run = run_of(3)
    spy = FaultyStorage(run.storage)
    pruner = Pruner(spy, Policy(2))

    def read() -> set[str]:
        found = {path.split("/")[1] for verb, path in spy.calls if verb == "read_into"}
        spy.calls.clear()
        return found

    pruner.prune()
    assert read() == {"g3-a1", "g2-a1"}
    run.publish()
    pruner.prune()
    assert read() == {"g4-a1"}
    pruner.trust((5, 1))
    run.publish()
    pruner.prune()
    assert read() == set()
    assert live_names(run.storage) == ["g4-a1", "g5-a1"]


def test_what_was_whole_and_lost_a_shard_does_not_count_any_more() -> None:
    run = run_of(2)
    pruner = Pruner(run.storage, Policy(1))
    pruner.prune()
    run.publish()
    pruner.trust((3, 1))
    run.storage.delete("generations/g3-a1/shard-00001-of-00002.safetensors")
    assert pruner.prune().retired == ()
    assert live_names(run.storage) == ["g2-a1", "g3-a1"]


# --- readers --------------------------------------------------------------------------------------


def test_a_generation_that_a_reader_holds_is_not_given_up() -> None:
    run = run_of(3)
    hold = Hold(run.storage, run.log.read().publishes[0])
    hold.take(run.log)
    pruned = prune(run)
    assert live_names(run.storage) == ["g1-a1", "g3-a1"]
    assert [held.generation for held in pruned.held] == [(1, 1)]
    assert [kept.reason for kept in pruned.kept] == ["held", "recent"]
    hold.release()
    assert [body.name for body in prune(run).retired] == ["g1-a1"]


def test_a_hold_that_comes_before_the_record_keeps_the_files() -> None:
    """Planned while nobody held it, held before it was retired: retired, but not deleted."""
    run = run_of(3)
    hold = Hold(run.storage, run.log.read().publishes[0])

    class HeldMeanwhile(FaultyStorage):
        def create(self, path: str, data: bytes) -> None:  # type: ignore[override]
            if not self.calls_of("create"):
                hold.take(run.log)
            super().create(path, data)

        def calls_of(self, verb: str) -> list[str]:
            return [path for called, path in self.calls if called == verb]

    pruner = Pruner(HeldMeanwhile(run.storage), Policy(1))
    pruned = pruner.prune()
    assert [body.name for body in pruned.retired] == ["g1-a1", "g2-a1"]
    assert [held.path for held in pruned.held] == [hold.path]
    assert len(files_of(run.storage, "g1-a1")) == 3
    assert files_of(run.storage, "g2-a1") == set()
    hold.release()
    assert len(pruner.prune().deleted) == 3
    assert files_of(run.storage, "g1-a1") == set()


def test_the_hold_of_a_dead_reader_expires_and_goes_first() -> None:
    run = run_of(3)
    now = [0.0]
    hold = Hold(run.storage, run.log.read().publishes[0])
    hold.take(run.log)
    pruner = Pruner(run.storage, Policy(1), clock=lambda: now[0])
    assert len(pruner.prune().held) == 1
    now[0] += LEASE_S - 1
    assert pruner.prune().retired == ()
    now[0] += 1
    pruned = pruner.prune()
    assert deleted(pruned)[0] == hold.path
    assert pruned.held == ()
    assert live_names(run.storage) == ["g3-a1"]
    assert not hold.renew()
    assert hold.lost


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
    of_nobody = run.leave(1, 7)
    prune(run)
    assert writing | of_nobody <= paths(run.storage)


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


# --- dry runs, stops, failures --------------------------------------------------------------------


def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    run = run_of(3, 2)
    run.leave(9, 1)
    spy = FaultyStorage(run.storage)
    assert isinstance(run.storage, MemoryStorage)
    before = dict(run.storage.files)
    dry = Pruner(spy, Policy(2)).prune(dry_run=True)
    assert run.storage.files == before
    assert {verb for verb, _ in spy.calls} <= {"read", "read_into", "size", "list"}
    real = prune(run, keep=2)
    assert (dry.retired, dry.kept) == (real.retired, real.kept)
    assert (dry.deleted, dry.foreign) == (real.deleted, real.foreign)
    assert len(dry.deleted) == 3 * 3 + 3


def test_a_file_that_cannot_be_deleted_keeps_no_other_from_going() -> None:
    run = run_of(3)
    path = "generations/g1-a1/shard-00001-of-00002.safetensors"
    faulty = FaultyStorage(run.storage, [Fault("refuse", verb="delete", path=path)])
    pruned = Pruner(faulty, Policy(1)).prune()
    (problem,) = pruned.problems
    assert path in problem
    assert len(pruned.deleted) == 5
    assert deleted(prune(run)) == [path]


def test_a_pruner_can_be_stopped_between_any_two_steps() -> None:
    reached = 0
    while True:
        run = run_of(3)
        left = [reached]

        def stopped(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        try:
            Pruner(run.storage, Policy(1), stopped=stopped).prune()
        except Interrupted:
            reached += 1
            check_live_is_whole(run.storage)
            prune(run)
            assert live_names(run.storage) == ["g3-a1"]
            continue
        break
    assert reached == 2 + 2 + 6, "two shards to read, two records, six files"


def test_a_pruner_of_an_older_attempt_is_fenced() -> None:
    run = run_of(3)
    pruner = Pruner(run.storage, Policy(1))
    run.open()
    before = paths(run.storage)
    with pytest.raises(Fenced):
        pruner.prune(attempt=1)
    assert paths(run.storage) == before
    assert [body.name for body in pruner.prune(attempt=2).retired] == ["g1-a1", "g2-a1"]


def test_a_pruner_for_whichever_attempt_is_open_goes_on() -> None:
    run = run_of(3)

    class OpensMeanwhile(FaultyStorage):
        def create(self, path: str, data: bytes) -> None:  # type: ignore[override]
            if run.attempt < 3:
                run.open()
            super().create(path, data)

    prune_log = CommitLog(OpensMeanwhile(run.storage))
    pruned = Pruner(run.storage, Policy(1), log=prune_log).prune()
    assert [body.name for body in pruned.retired] == ["g1-a1", "g2-a1"]
    assert run.attempt == 3
    check_live_is_whole(run.storage)


def test_a_damaged_log_stops_everything() -> None:
    run = run_of(3)
    assert isinstance(run.storage, MemoryStorage)
    run.leave(9, 1)
    run.storage.files[f"log/{2:020d}.json"] = b"{}"
    before = dict(run.storage.files)
    with pytest.raises(LogDamaged):
        prune(run)
    assert run.storage.files == before


def test_a_log_whose_end_was_cut_off_stops_everything() -> None:
    """Its records chain, but what they do not know would look like leftovers."""
    run = run_of(2, 2)
    assert isinstance(run.storage, MemoryStorage)
    run.log.refresh_hint(run.log.read())
    whole = dict(run.storage.files)
    del run.storage.files[f"log/{6:020d}.json"]
    before = dict(run.storage.files)
    with pytest.raises(LogDamaged, match="tells of record 6"):
        prune(run)
    # Nor does it help that another attempt has taken the number.
    CommitLog(run.storage).open_attempt("run-1", "token-9")
    with pytest.raises(LogDamaged, match="tells of record 6"):
        prune(run)
    del run.storage.files[f"log/{6:020d}.json"]
    assert run.storage.files == before
    run.storage.files = whole
    assert live_names(run.storage)[-1] == "g4-a2"
    assert len(prune(run).retired) == 3


@pytest.mark.parametrize(
    "hint", [None, b"", b"{}", b"[]", b'{"seq":1}', b'{"run_id":"other","seq":99}', b"\xff"]
)
def test_a_hint_that_says_nothing_hinders_nothing(hint: bytes | None) -> None:
    run = run_of(2)
    assert isinstance(run.storage, MemoryStorage)
    if hint is not None:
        run.storage.files["latest.json"] = hint
    assert len(prune(run).retired) == 1


def test_an_old_hint_hinders_nothing() -> None:
    run = run_of(2)
    run.log.refresh_hint(run.log.read())
    run.publish()
    assert len(prune(run).retired) == 2


def test_an_empty_root_is_pruned_to_nothing(tmp_path: Path) -> None:
    for storage in (MemoryStorage(), LocalStorage(tmp_path / "absent")):
        pruned = Pruner(storage, Policy(1)).prune(whole_root=True)
        assert pruned == Pruned((), (), (), (), (), ())
    assert not (tmp_path / "absent").exists()
