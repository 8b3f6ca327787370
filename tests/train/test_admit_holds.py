"""Admission holds what it loads, and a run that prunes behind itself is the same run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import (
    Left,
    admit,
    assert_same_state,
    config_for,
    coordinating,
    flip,
    found,
    open_attempt,
    refused,
    run_loop,
    train,
    working,
    write_data,
)

from coherent_ray.commit.log import CommitLog, RetireBody
from coherent_ray.commit.manifest import Manifest
from coherent_ray.commit.pruning import Pruned, Pruner
from coherent_ray.commit.retention import Policy
from coherent_ray.config import Config
from coherent_ray.errors import NoGeneration, ShardDamaged
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.train import admit as admit_

pytestmark = pytest.mark.usefixtures("one_process")


def holds(config: Config) -> list[str]:
    return [entry.path for entry in LocalStorage(config.run.root).list("holds")]


def live(config: Config) -> list[str]:
    return [publish.name for publish in CommitLog(LocalStorage(config.run.root)).read().live]


def retire(config: Config, *numbers: int) -> None:
    log = CommitLog(LocalStorage(config.run.root))
    for number in numbers:
        log.append(RetireBody(number, 1), log.read().attempt)


def meanwhile(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], object]) -> None:
    """Do something right before every load; it is told the generation's number."""
    real = admit_.load_state

    def load(storage: Storage, manifest: Manifest) -> Any:
        action(manifest.header.number)
        return real(storage, manifest)

    monkeypatch.setattr(admit_, "load_state", load)


# --- loading --------------------------------------------------------------------------------------


def test_what_is_loaded_is_held_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = config_for(folder), []
    meanwhile(monkeypatch, lambda _: seen.extend(holds(config)))
    assert found(config).selected is not None
    (path,) = seen
    assert path.startswith("holds/g2-a1-")
    assert holds(config) == []
    renewing = [thread for thread in threading.enumerate() if thread.name.startswith("hold ")]
    for thread in renewing:
        thread.join(10)
        assert not thread.is_alive()


def test_a_prune_in_the_middle_of_a_load_leaves_it_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is damaged, and who prunes does not know: he would give up the one before."""
    config, pruned = config_for(folder), []
    flip(Left(config).shard("g2-a1"))

    def prune(number: int) -> None:
        if number == 1:
            pruner = Pruner(LocalStorage(config.run.root), Policy(1))
            pruner.trust((2, 1))
            pruned.append(pruner.prune())

    meanwhile(monkeypatch, prune)
    admitted = found(config)
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g1-a1"
    assert admitted.state is not None
    (during,) = pruned
    assert isinstance(during, Pruned)
    assert (during.retired, during.deleted) == ((), ())
    assert [held.generation for held in during.held] == [(1, 1)]
    prune(1)
    assert [body.name for body in pruned[1].retired] == ["g1-a1"], "without the hold it would go"


def test_what_was_retired_before_it_could_be_held_is_passed_by(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(folder)
    real = admit_._history

    def history(*arguments: Any) -> Any:
        told = real(*arguments)
        retire(config, 2)
        return told

    monkeypatch.setattr(admit_, "_history", history)
    admitted = found(config)
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g1-a1"
    assert admitted.notes == (), "it is no damage"
    assert holds(config) == []


def test_where_all_went_meanwhile_nobody_starts_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(folder)
    real = admit_._history

    def history(*arguments: Any) -> Any:
        told = real(*arguments)
        retire(config, 1, 2)
        return told

    monkeypatch.setattr(admit_, "_history", history)
    error = refused(config, NoGeneration)
    assert "retired" in error.what


@pytest.mark.parametrize("effect", ["refuse", "full"])
def test_a_full_storage_is_loaded_from_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    config = config_for(folder)
    request = open_attempt(config)
    fault = Fault(effect, verb="create", path="holds/", times=9)  # type: ignore[arg-type]
    faulty = FaultyStorage(LocalStorage(config.run.root), [fault])
    monkeypatch.setattr(admit_, "open_storage", lambda uri, options: faulty)
    admitted = admit_.find_out(request, 0, 1, admit_._cpu())
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g2-a1"
    assert len(faulty.struck) == 1


@pytest.mark.parametrize("on_damage", ["fall_back", "refuse"])
def test_what_goes_under_a_reader_without_a_hold_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_damage: str
) -> None:
    config = config_for(folder, checkpoint__on_damage=on_damage)
    request = open_attempt(config)
    storage = LocalStorage(config.run.root)
    faulty = FaultyStorage(storage, [Fault("refuse", verb="create", path="holds/", times=9)])
    monkeypatch.setattr(admit_, "open_storage", lambda uri, options: faulty)
    went = []

    def go(number: int) -> None:
        assert number in {1, 2}
        if not went:
            retire(config, 2)
            went.append(Pruner(storage, Policy()).prune())

    meanwhile(monkeypatch, go)
    admitted = admit_.find_out(request, 0, 1, admit_._cpu())
    assert admitted.selected is not None
    assert admitted.selected.publish.name == "g1-a1"
    assert admitted.selected.skipped == ()
    assert len(went) == 1


def test_damage_is_damage_still(folder: Path) -> None:
    config = config_for(folder, checkpoint__on_damage="refuse")
    flip(Left(config).shard())
    refused(config, ShardDamaged)
    assert holds(config) == []


# --- a whole run ----------------------------------------------------------------------------------


def pruning_train(config: Config) -> None:
    policy = Policy(config.checkpoint.keep, config.checkpoint.keep_every)
    with working(), coordinating(config, retention=policy) as coordinator:
        admit(config, coordinator)
        run_loop(config, coordinator)
        assert coordinator.service.upkeep is not None
        coordinator.call(coordinator.service.upkeep.settled())
        assert coordinator.service.last_error is None


def test_a_run_that_prunes_behind_itself_is_the_same_run(tmp_path: Path) -> None:
    """Stopped in the middle, resumed from the one generation that is left."""
    plain, pruning = tmp_path / "plain", tmp_path / "pruning"
    for folder in (plain, pruning):
        folder.mkdir()
        write_data(folder / "data.parquet")
    settings = {"checkpoint__every_updates": 1, "training__updates": 6}
    reference = train(config_for(plain, **settings))
    config = config_for(pruning, checkpoint__keep=1, **settings)
    with working(), coordinating(config, retention=Policy(1)) as coordinator:
        coordinator.wishes = [0, 0, 2]
        admit(config, coordinator)
        run_loop(config, coordinator)
        assert coordinator.service.upkeep is not None
        coordinator.call(coordinator.service.upkeep.settled())
    assert len(live(config)) == 1
    pruning_train(config)
    left = Left(config)
    assert live(config) == [left.generations[-1]]
    assert len(left.generations) > 5
    assert left.chain() == reference.chain(), "the receipts of what is gone are all there"
    assert_same_state(left.state(), reference.state())
    directories = {path.name for path in (Path(config.run.root) / "generations").iterdir()}
    assert directories == set(live(config))
    assert holds(config) == []


def test_milestones_of_a_run_stay(tmp_path: Path) -> None:
    config = config_for(
        tmp_path, checkpoint__every_updates=1, training__updates=6, checkpoint__keep=1,
        checkpoint__keep_every=3,
    )  # fmt: skip
    pruning_train(config)
    history = CommitLog(LocalStorage(config.run.root)).read()
    assert [publish.update for publish in history.live] == [3, 6]
