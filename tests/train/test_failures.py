"""How often a run has failed, from its own log and profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_run import Left, admit, config_for, coordinating, run_loop, train

from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.manifest import dump
from coherent_ray.commit.profiles import Profile, path_of, read_profile
from coherent_ray.commit.timings import Why
from coherent_ray.train.failures import Past, past_of

pytestmark = pytest.mark.usefixtures("one_process")


def rewritten(left: Left, name: str, why: Why, trained_s: float) -> None:
    """Let the last save of an attempt have been another one."""
    profile = read_profile(left.storage, name)
    assert profile is not None
    assert profile.about is not None
    about = replace(profile.about, why=why, trained_s=trained_s)
    left.storage.replace(path_of(name), dump(replace(profile, about=about)))


def past(left: Left, attempt: int) -> Past:
    return past_of(left.storage, CommitLog(left.storage).read(), attempt)


def test_every_save_of_a_run_leaves_its_times(folder: Path) -> None:
    left = Left(config_for(folder))
    profiles = [read_profile(left.storage, name) for name in left.generations]
    assert all(isinstance(profile, Profile) for profile in profiles)
    assert [(p.generation, p.update, p.ranks) for p in profiles if p] == [
        ("g1-a1", 2, 1), ("g2-a1", 4, 1),
    ]  # fmt: skip
    assert [p.about.why for p in profiles if p and p.about] == ["due", "stop"]
    for profile in profiles:
        assert profile is not None
        times = {name: part.median_s for name, part in profile.parts.items()}
        parts = times["wait_s"] + times["fingerprint_s"] + times["snapshot_s"]
        assert 0 < parts <= times["stall_s"]
        assert all(times[name] > 0 for name in ("write_s", "hash_s", "sync_s"))
        assert 0 < profile.appended_s <= profile.published_s


@pytest.mark.parametrize(("why", "failures"), [("due", 1), ("asked", 1), ("stop", 0), ("leave", 0)])
def test_an_attempt_that_did_not_end_by_its_own_will_has_failed(
    folder: Path, why: Why, failures: int
) -> None:
    left = Left(config_for(folder))
    rewritten(left, "g2-a1", why, trained_s=120.0)
    found = past(left, 2)
    assert (found.failures, found.trained_s) == (failures, 120.0)
    assert found.cost_s is not None
    assert found.durable_s is not None
    assert past(left, 1) == Past(), "the attempt that runs is no past one"


def test_what_nobody_has_told_counts_for_nothing(folder: Path) -> None:
    left = Left(config_for(folder))
    left.storage.replace(path_of("g2-a1"), b"{}")
    assert past(left, 2) == Past()
    left.storage.delete(path_of("g2-a1"))
    assert past(left, 2) == Past()


def test_a_run_whose_cadence_is_chosen_begins_with_what_it_has_seen(folder: Path) -> None:
    left = Left(config_for(folder))
    rewritten(left, "g2-a1", "due", trained_s=5_000.0)
    changes = {"every_updates": None, "every": "auto", "mtbf_s": 3_000.0}
    config = config_for(folder, **{f"checkpoint__{k}": v for k, v in changes.items()})
    with coordinating(config) as coordinator:
        admit(config, coordinator)
        run_loop(config, coordinator)
        told = coordinator.reports[-1]["cadence"]
    assert (told["failures"], told["prior_s"]) == (1, 3_000.0)
    assert told["mtbf_s"] == pytest.approx(4_000.0, rel=0.02)
    assert told["cost_s"] > 0
    assert told["text"].startswith("a save every ")
    profile = read_profile(left.storage, Left(config).generations[-1])
    assert profile is not None
    assert profile.about is not None
    assert profile.about.choice is not None
    assert profile.about.choice.failures == 1


def test_times_do_not_change_what_is_compared(tmp_path: Path) -> None:
    """Two runs of one job have other timings, and the same receipts to the byte."""
    one = train(config_for(tmp_path))
    other = train(config_for(tmp_path, run__root=str(tmp_path / "other")))
    names = [entry.path for entry in one.storage.list("receipts")]
    assert names == [entry.path for entry in other.storage.list("receipts")]
    assert all(one.storage.read(name) == other.storage.read(name) for name in names)
    assert one.manifest() == other.manifest()
