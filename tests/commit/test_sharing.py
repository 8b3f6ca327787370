"""Sharing: files of given-up generations stay as long as a kept one refers to them, and no longer.

The race of a prune with a publish that refers is in `test_pruning_races` and, exhaustively, in
`tests/drill/test_exploration.py`.
"""

from __future__ import annotations

import pytest
from ranks import Ranks, Shell
from retained_runs import (
    MadeRun,
    check_live_is_whole,
    deleted,
    files_of,
    foreign,
    live_names,
    prune,
    run_of,
)
from test_history import retire

from coherent_ray.commit.extras import extras
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.holds import Hold
from coherent_ray.commit.pruning import Pruner
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.shard_records import Base
from coherent_ray.commit.sharing import Sharing
from coherent_ray.errors import NotFound, SaveFailed
from coherent_ray.storage.testing.faults import FaultyStorage, flipped
from coherent_ray.storage.testing.memory import MemoryStorage


def referring(whole: int = 1, more: int = 2) -> MadeRun:
    """Some whole generations, and then some each of which refers to the one before."""
    run = run_of(whole)
    for _ in range(more):
        run.publish(refers=True)
    return run


def test_what_a_kept_generation_refers_to_outlives_its_own_generation() -> None:
    run = referring(whole=2, more=2)  # g3 and g4 take all but their last blocks from g2
    pruned = prune(run, keep=1)
    assert live_names(run.storage) == ["g4-a1"]
    assert files_of(run.storage, "g1-a1") == set()
    assert files_of(run.storage, "g3-a1") == set(), "nothing of it is in g4"
    assert len(files_of(run.storage, "g2-a1")) == 3, "its shards, and the manifest that names them"
    assert {entry.path for entry in pruned.shared} == files_of(run.storage, "g2-a1")
    assert not pruned.problems
    check_live_is_whole(run.storage)
    assert foreign(prune(run, keep=1)) == []


def test_it_goes_with_the_last_that_refers_to_it() -> None:
    run = referring(whole=2, more=2)
    prune(run, keep=1)
    run.publish()  # whole
    pruned = prune(run, keep=1)
    assert live_names(run.storage) == ["g5-a1"]
    for name in ("g2-a1", "g4-a1"):
        assert files_of(run.storage, name) == set()
    order = [path for path in deleted(pruned) if "g2-a1" in path]
    assert order[-1].endswith("manifest.json"), "what names the shards goes last"
    check_live_is_whole(run.storage)


def test_a_dry_run_says_the_same() -> None:
    run = referring(whole=2, more=2)
    planned = Pruner(run.storage, Policy(1)).prune(dry_run=True)
    done = prune(run, keep=1)
    assert planned.deleted == done.deleted
    assert planned.shared == done.shared


def test_a_reader_of_a_given_up_generation_keeps_what_that_refers_to() -> None:
    run = referring(whole=1, more=1)
    hold = Hold(run.storage, run.log.read().publishes[1])
    hold.take(run.log)
    run.log.append(retire(2), 1)  # g2, whose reader came first
    run.publish()
    run.log.append(retire(1), 1)
    pruned = prune(run, keep=1)
    assert [held.generation for held in pruned.held] == [(2, 1)]
    assert len(files_of(run.storage, "g1-a1")) == len(files_of(run.storage, "g2-a1")) == 3
    hold.release()
    prune(run, keep=1)
    assert files_of(run.storage, "g1-a1") == files_of(run.storage, "g2-a1") == set()


def test_where_nobody_can_tell_what_is_needed_no_shard_goes() -> None:
    """The manifest of a kept generation is damaged: it may be put back, and then needs them."""
    run = referring(whole=2, more=2)
    assert isinstance(run.storage, MemoryStorage)
    path = "generations/g4-a1/manifest.json"
    run.publish()
    run.log.append(retire(1), 1)
    run.log.append(retire(2), 1)
    good = run.storage.files[path]
    run.storage.files[path] = good[:-1]
    pruned = Pruner(run.storage, Policy(2)).prune()
    assert deleted(pruned) == []
    assert ["g4-a1" in problem for problem in pruned.problems] == [True]
    run.storage.files[path] = good
    pruned = Pruner(run.storage, Policy(2)).prune()
    assert not pruned.problems
    assert files_of(run.storage, "g1-a1") == set()
    assert len(files_of(run.storage, "g2-a1")) == 3
    check_live_is_whole(run.storage)


def test_the_files_that_stay_are_not_called_left_over() -> None:
    run = referring(whole=2, more=2)
    prune(run, keep=1)
    history = run.log.read()
    sharing = Sharing(Generations(run.storage, run.log))
    shared = sharing.of(history, history.retired)
    found = extras(run.storage.list(""), history, (), shared.paths)
    assert [extra for extra in found if extra.sort == "leftover"] == []
    without = extras(run.storage.list(""), history)
    assert len([extra for extra in without if extra.sort == "leftover"]) == 3


def test_each_manifest_is_read_once_and_only_where_something_refers() -> None:
    run = referring(whole=2, more=2)
    spy = FaultyStorage(run.storage)
    sharing = Sharing(Generations(spy))
    history = run.log.read()
    assert sharing.of(history, ()).paths == set()
    assert not [path for _, path in spy.calls if "manifest" in path]
    for _ in range(2):
        sharing.of(history, {(1, 1)})
    read = [path for verb, path in spy.calls if verb == "read" and "manifest" in path]
    assert read == ["generations/g3-a1/manifest.json", "generations/g4-a1/manifest.json"]


def test_what_was_read_with_the_one_before_is_not_read_again() -> None:
    """Until somebody doubts it: then all of it is."""
    run = referring(whole=1, more=1)
    spy = FaultyStorage(run.storage)
    pruner = Pruner(spy, Policy(1))
    pruner.prune()
    run.publish(refers=True)
    spy.calls.clear()
    pruner.prune()
    read = {path for verb, path in spy.calls if verb == "read_into"}
    assert read == {f"generations/g3-a1/shard-{rank:05d}-of-00002.safetensors" for rank in (0, 1)}
    assert isinstance(run.storage, MemoryStorage)
    path = "generations/g1-a1/shard-00000-of-00002.safetensors"
    run.storage.files[path] = flipped(run.storage.files[path], 3)
    run.publish(refers=True)
    pruner.doubt((3, 1))
    pruner.doubt((4, 1))
    assert pruner.prune().damaged.keys() == {"g4-a1", "g3-a1"}
    assert live_names(run.storage) == ["g3-a1", "g4-a1"], "nothing goes in favour of these"


# --- the log's rule -------------------------------------------------------------------------------


def test_the_log_refuses_what_refers_to_a_retired_generation() -> None:
    run = run_of(2)
    run.log.append(retire(2), 1)
    with pytest.raises(SaveFailed, match="g3-a1 refers to g2-a1, which is retired"):
        run.publish(refers=True)
    assert live_names(run.storage) == ["g1-a1"]


def test_the_log_refuses_what_refers_to_a_generation_that_it_does_not_know() -> None:
    run = run_of(1)
    run.newest = Ranks(ranks=2, number=1, attempt=7)
    with pytest.raises(SaveFailed, match="refers to g1-a7, which was never published"):
        run.publish(refers=True)


def test_what_others_refer_to_may_be_given_up() -> None:
    run = referring(whole=1, more=1)
    run.log.append(retire(1), 1)
    prune(run, keep=None)
    assert len(files_of(run.storage, "g1-a1")) == 3
    check_live_is_whole(run.storage)


# --- the coordinator ------------------------------------------------------------------------------


def published(storage: MemoryStorage, *groups: Ranks) -> Shell:
    shell = Shell(storage)
    shell.open("token")
    for group in groups:
        group.write(storage)
        assert {fate.kind for fate in shell.save(group)} == {"published"}
    return shell


FIRST = Ranks(ranks=2, number=1)
SECOND = Ranks(ranks=2, number=2, update=20, base=FIRST)


def test_a_save_that_refers_is_published_with_its_base() -> None:
    shell = published(MemoryStorage(), FIRST, SECOND)
    first, second = shell.log.read().publishes
    assert (first.base, second.base) == (None, Base(1, 1))
    assert Generations(shell.storage).manifest(second).header.format == 3
    assert not [
        damage
        for damage in Generations(shell.storage).verify(second)
        if damage.details["kind"] != "receipts"
    ]


def test_a_save_that_refers_to_what_was_given_up_meanwhile_fails_and_says_why() -> None:
    storage = MemoryStorage()
    shell = published(storage, FIRST)
    SECOND.write(storage)
    shell.log.append(retire(1), 1)
    for fate in shell.save(SECOND):
        assert fate.kind == "failed"
        assert "g1-a1, to which the shards refer, is retired" in fate.reason


def test_it_fails_too_where_that_comes_after_the_look() -> None:
    storage = MemoryStorage()
    shell = published(storage, FIRST)
    SECOND.write(storage)
    calls = [shell.acknowledge(SECOND.ack(rank)) for rank in range(2)]
    while "AppendPublish" not in type(shell.todo[0]).__name__:
        shell.step()
    shell.log.append(retire(1), 1)
    shell.run()
    assert {shell.answers[call].kind for call in calls} == {"failed"}
    assert "g2-a1 refers to g1-a1, which is retired" in shell.answers[calls[0]].reason


def test_a_file_that_is_referred_to_and_gone_is_named_before_anything_is_published() -> None:
    storage = MemoryStorage()
    shell = published(storage, FIRST)
    SECOND.write(storage)
    path = FIRST.shard(1).path
    del storage.files[path]
    for fate in shell.save(SECOND):
        assert fate.kind == "failed"
        assert f"shard {path} of rank 1 is missing" in fate.reason
    with pytest.raises(NotFound):
        storage.read("generations/g2-a1/manifest.json")


def test_a_rank_that_refers_to_the_wrong_bytes_is_found_out() -> None:
    """It says that its base is g1, and takes what only another generation has."""
    storage = MemoryStorage()
    other = Ranks(ranks=2, number=1, attempt=2)
    shell = published(storage, FIRST)
    shell.open("again")
    stranger = Ranks(ranks=2, number=3, attempt=2, update=30, base=other)
    other.write(storage)
    stranger.write(storage)
    for fate in shell.save(stranger):
        assert fate.kind == "failed"
        assert "g1-a2, to which the shards refer, was never published" in fate.reason
