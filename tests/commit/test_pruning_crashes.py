"""A prune that dies, at every verb and at every system call: nothing that counts is lost by it.

Two phases, as for saves. First the prune may end anywhere: what is live must be whole, readers take
what they took before, foreign files stay. Then nothing fails: the next prune must finish the work,
to the last file as if nothing had happened.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from retained_runs import check_live_is_whole, damage, live_names, paths, run_of
from test_crash_windows import recorded
from test_history import retire

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.holds import Hold
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.pruning import Pruner
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.retention import Policy
from coherent_ray.errors import CoherentRayError, NoGeneration, StorageError
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.base import TEMPORARY_PREFIX, Storage
from coherent_ray.storage.directories import Directories
from coherent_ray.storage.testing.faults import Crash, Effect, Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

POLICY = Policy(2, 30)
FOREIGN = {"notes.txt": b"mine", "generations/g1-a1/notes.txt": b"mine", "receipts/plot": b"mine"}


@functools.cache
def _messy() -> dict[str, bytes]:
    run = run_of(4, 3)
    run.log.append(retire(1), 2)
    run.pin(run.log.read().publishes[1])
    run.leave(8, 1)
    run.leave(9, 1, manifest=True)
    for path, data in FOREIGN.items():
        run.storage.create(path, data)
    Hold(run.storage, run.log.read().publishes[3]).take(run.log)
    assert isinstance(run.storage, MemoryStorage)
    return run.storage.files


def messy() -> MemoryStorage:
    """Retired ones with files left, dead attempts' leftovers, a pin, a hold, foreign files."""
    return loaded(_messy())


def loaded(files: dict[str, bytes]) -> MemoryStorage:
    storage = MemoryStorage()
    storage.files = dict(files)
    return storage


def check(storage: Storage) -> None:
    """The invariant: what is live is whole; pinned, held, foreign, history: all is there."""
    history = check_live_is_whole(storage)
    assert {"g2-a1", "g4-a1", "g6-a2", "g7-a2"} <= {publish.name for publish in history.live}
    for path, data in FOREIGN.items():
        assert storage.read(path) == data


def prune(storage: Storage) -> None:
    Pruner(storage, POLICY).prune(whole_root=True)


def finished() -> set[str]:
    """The files that a prune which nothing disturbs leaves."""
    disk = messy()
    prune(disk)
    check(disk)
    return {path for path in paths(disk) if not path.startswith("holds/")}


def verbs_of_a_prune() -> list[tuple[str, str]]:
    storage = FaultyStorage(messy())
    prune(storage)
    return list(storage.calls)


def test_a_prune_touches_what_it_must_and_no_more() -> None:
    calls = verbs_of_a_prune()
    assert {verb for verb, _ in calls} == {"read", "read_into", "size", "list", "create", "delete"}
    assert live_names(messy()) == ["g2-a1", "g3-a1", "g4-a1", "g5-a2", "g6-a2", "g7-a2"]
    changes = [(verb, path) for verb, path in calls if verb in {"create", "delete"}]
    records = [index for index, (verb, _) in enumerate(changes) if verb == "create"]
    # The last record that is there is settled, and then the one that gives up g5-a2 is made.
    assert [path in messy().files for _, path in changes[: len(records)]] == [True, False]
    assert [path.startswith("log/") for _, path in changes[: len(records)]] == [True, True]
    assert records == [0, 1], "what is given up is on record before a file goes"
    assert len(changes) == 2 + 3 + 3 + 4 + 3


@pytest.mark.parametrize("effect", ["crash_before", "crash_after", "refuse", "lose_answer", "full"])
def test_every_verb_of_a_prune_may_be_the_last(effect: Effect) -> None:
    total, wanted = len(verbs_of_a_prune()), finished()
    died = 0
    for at in range(1, total + 1):
        disk = messy()
        storage = FaultyStorage(disk, [Fault(effect, at=at)])
        try:
            prune(storage)
        except (Crash, StorageError):
            died += 1
        assert len(storage.struck) == 1
        check(disk)
        prune(disk)
        check(disk)
        left = {path for path in paths(disk) if not path.startswith("holds/")}
        assert left == wanted, f"after {effect} at {storage.calls[at - 1]}"
    assert total > 50
    if effect == "crash_before":
        assert died == total
    if effect == "crash_after":
        # After a read that finds nothing, or a name that is taken, nobody dies: that is the answer.
        assert died >= total - 7


def test_two_crashes_in_a_row_at_every_pair_of_changes() -> None:
    there = messy().files
    changes = [
        at
        for at, (verb, path) in enumerate(verbs_of_a_prune(), 1)
        if verb == "delete" or (verb == "create" and path not in there)
    ]
    wanted = finished()
    for first in changes:
        for second in range(1, 4):
            disk = messy()
            with pytest.raises(Crash):
                prune(FaultyStorage(disk, [Fault("crash_after", at=first)]))
            faulty = FaultyStorage(disk, [Fault("crash_after", at=second, verb="delete")])
            try:
                prune(faulty)
            except Crash:
                check(disk)
            prune(disk)
            check(disk)
            assert {p for p in paths(disk) if not p.startswith("holds/")} == wanted


def test_a_record_whose_answer_is_lost_is_found() -> None:
    disk = messy()
    storage = FaultyStorage(disk, [Fault("lose_answer", verb="create", path="log/")])
    pruned = Pruner(storage, POLICY).prune()
    assert [body.name for body in pruned.retired] == ["g5-a2"]
    assert len(storage.struck) == 1
    bodies = [repr(record.body) for record in CommitLog(disk).read().records]
    assert len(set(bodies)) == len(bodies), "a record is there twice"


class DeletesFirst(Pruner):
    """Does it in the wrong order: files first, the record after."""

    def _retire(
        self, wanted: tuple[PublishBody, ...], attempt: int | None
    ) -> tuple[PublishBody, ...]:
        for publish in wanted:
            for entry in list(self._storage.list(f"generations/{publish.name}")):
                self._storage.delete(entry.path)
        return super()._retire(wanted, attempt)


class SkipsTheReading(Pruner):
    """Counts what nobody has read."""

    def _is_whole(self, publish: PublishBody) -> bool:
        return True


def test_the_wrong_order_would_be_found() -> None:
    """That the check above can fail: it does, for a pruner that deletes before the record."""
    disk = messy()
    faulty = FaultyStorage(disk, [Fault("crash_after", verb="delete")])
    with pytest.raises(Crash):
        DeletesFirst(faulty, POLICY).prune()
    with pytest.raises(AssertionError):
        check(disk)


def test_counting_what_was_not_read_would_be_found() -> None:
    run = run_of(2)
    assert isinstance(run.storage, MemoryStorage)
    damage(run.storage, run.log.read().publishes[1])
    kept = loaded(run.storage.files)
    Pruner(kept, Policy(1)).prune()
    selected = Generations(kept).select()
    assert selected is not None
    assert selected.publish.name == "g1-a1"
    SkipsTheReading(run.storage, Policy(1)).prune()
    with pytest.raises(NoGeneration):
        Generations(run.storage).select()


# --- power cuts, under the local backend ----------------------------------------------------------


def survivors_of_a_prune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: str = ""
) -> list[dict[str, bytes]]:
    """Return every set of files that a power cut may leave, at every system call of a prune.

    Args:
        tmp_path: Where the run is made.
        monkeypatch: To stand in for ``os``.
        forget: Syncs of the prune that are not believed.
    """
    recorder = recorded(monkeypatch, tmp_path)
    storage = LocalStorage(tmp_path / "run")
    run = run_of(2, 1, storage=storage)
    run.leave(9, 1)
    storage.create("generations/g1-a1/notes.txt", b"mine")
    writer = storage.open_writer("generations/g2-a1/killed")
    writer.write(b"half")
    os.close(writer._file)  # a killed process has no file open, and so no lock
    monkeypatch.setattr(Directories, "now", lambda self: 1e12)
    seen: dict[tuple[object, ...], dict[str, bytes]] = {}

    def cut() -> None:
        for tree in recorder.survivors(4096 if forget else None):
            files = {
                path.removeprefix("run/"): data
                for path, data in tree.items()
                if TEMPORARY_PREFIX not in path
            }
            seen[tuple(sorted(files.items()))] = files

    recorder.forget(forget)
    if not forget:
        recorder.after_step.append(cut)
    Pruner(storage, Policy(1)).prune()
    cut()
    assert not list((tmp_path / "run").rglob(".tmp-*"))
    assert not (tmp_path / "run/generations/g2-a1").exists()
    return list(seen.values())


def test_after_every_power_cut_of_a_prune_what_is_live_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = survivors_of_a_prune(tmp_path, monkeypatch)
    retired = set()
    for files in states:
        storage = loaded(files)
        history = check_live_is_whole(storage)
        assert storage.read("generations/g1-a1/notes.txt") == b"mine"
        retired.add(len(history.retired))
        Pruner(storage, Policy(1)).prune()
        assert live_names(storage) == ["g3-a2"]
        assert {p.split("/")[1] for p in paths(storage) if p.startswith("generations/")} == {
            "g1-a1", "g3-a2",
        }  # fmt: skip
        check_live_is_whole(storage)
    assert retired == {0, 1, 2}, "every window must have been reached"
    assert len(states) == 1 + 2 + 6 + 2 + 1, "nothing, two records, six files, leftovers, receipts"


def test_without_syncs_of_directories_the_promise_would_be_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the check above can fail: a record may then be lost whose deletions were not."""
    broken = 0
    for files in survivors_of_a_prune(tmp_path, monkeypatch, forget="directories"):
        try:
            check_live_is_whole(loaded(files))
        except (AssertionError, CoherentRayError):
            broken += 1
    assert broken > 0
