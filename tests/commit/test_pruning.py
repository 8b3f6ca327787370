"""Pruning: what goes, what stays, what is never touched; on a storage that does what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from retained_runs import (
    check_live_is_whole,
    damage,
    deleted,
    files_of,
    live_names,
    paths,
    prune,
    run_of,
)
from test_history import pin

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.holds import LEASE_S, Hold
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.pruning import Pruned, Pruner
from coherent_ray.commit.retention import Policy
from coherent_ray.errors import Fenced, Interrupted, LogDamaged, StorageError
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

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
