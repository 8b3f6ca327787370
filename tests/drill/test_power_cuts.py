"""Power cuts of a run in miniature: in short here; in full in benchmarks/crash_states.py."""

from __future__ import annotations

import random

import pytest

from coherent_ray.commit.log import CommitLog
from coherent_ray.drill.miniature import Run
from coherent_ray.drill.planted import BUGS, Bug, find
from coherent_ray.drill.power_cuts import (
    SCENES,
    SHORT_SCENES,
    Cutter,
    check_recovery,
    explore,
)
from coherent_ray.storage.testing.disk import Model
from coherent_ray.storage.testing.memory import MemoryStorage

MODELS: list[Model] = ["weak", "ordered"]


def test_the_play_reaches_every_scene_s_end() -> None:
    run = Run(MemoryStorage())
    run.play(SCENES)
    assert [fate.kind for fate in run.heard] == [
        "published", "published", "published", "published",  # two ranks, two generations
        "failed", "failed",  # a shard is short
        "fenced", "fenced",  # a rival opened
        "published", "published",
        "fenced",  # a rank comes late
        "failed", "failed",  # what it refers to was given up
        "published", "published",
        "published", "published",
    ]  # fmt: skip
    assert run.witness.published == ["g1-a1", "g2-a1", "g5-a2", "g7-a2", "g8-a3"]
    bases = {p.name: p.base and p.base.name for p in CommitLog(run.storage).read().publishes}
    assert bases == {
        "g1-a1": None, "g2-a1": "g1-a1", "g5-a2": None, "g7-a2": None, "g8-a3": "g7-a2",
    }  # fmt: skip
    check_recovery(run.storage, run.witness)


@pytest.mark.parametrize("model", MODELS)
def test_after_every_power_cut_the_invariants_hold_and_the_run_goes_on(model: Model) -> None:
    cutter = Cutter(model)
    states = cutter.play(SCENES)
    cutter.judge(states)
    assert cutter.tally.examples == {}
    assert cutter.tally.drawn == 0, "all outcomes were enumerated"
    assert cutter.tally.states > 100
    acts = {step.kind for step in cutter.steps_of(SCENES)}
    assert acts == {
        "create", "write", "sync file", "link", "rename", "unlink", "mkdir", "rmdir",
        "sync directory",
    }  # fmt: skip


def test_a_second_power_cut_while_a_run_recovers_changes_nothing() -> None:
    cutter = Cutter()
    states = cutter.play(SHORT_SCENES)
    for state in random.Random(7).sample(states, 8):
        cutter.judge(cutter.recover(state))
    assert cutter.tally.examples == {}
    assert cutter.tally.states > 50


def test_what_a_dead_process_left_in_memory_is_not_built_upon() -> None:
    """Its record can be read and is not durable: who answers by it must make it so first."""
    cutter = Cutter()
    steps = cutter.steps_of(SHORT_SCENES)
    after_links = [
        call
        for call, step in enumerate(steps, 1)
        if step.kind in {"link", "rename"} and "/generations/" not in step.path
    ]
    tally = explore(cutter, SHORT_SCENES, after_links)
    assert tally.examples == {}
    assert tally.deaths == len(after_links) >= 6


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found_by_name(bug: Bug) -> None:
    assert find(bug) == bug.found_by


def test_an_ordered_disk_hides_missing_syncs_of_directories() -> None:
    hidden = [bug for bug in BUGS if bug.hidden]
    assert len(hidden) >= 3
    assert [find(bug, "ordered") for bug in hidden] == [None] * len(hidden)
