"""The recipe: what makes it another job, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import config_for, stop_at, train

from coherent_ray.train.recipe import differences, length_of, recipe_of

SAME_JOB: list[dict[str, Any]] = [
    {"run__root": "/elsewhere"},
    {"run__claim": "exact"},
    {"cluster__workers": 4},
    {"cluster__max_failures": 1},
    {"checkpoint__every_updates": 1},
    {"checkpoint__digest": "sha256"},
    {"data__prefetch": 9},
    {"training__threads": 2},
    {"task__folder": "/elsewhere"},
    {"training__on_nonfinite": "go_on"},
]
OTHER_JOB: list[tuple[dict[str, Any], str]] = [
    ({"training__updates": 7}, "training.updates: 6 -> 7"),
    ({"training__precision": "bf16"}, 'training.precision: "fp32" -> "bf16"'),
    ({"training__clip_norm": 1.0}, "training.clip_norm: null -> 1.0"),
    ({"optimizer__lr": 0.5}, "optimizer.lr: 0.0003 -> 0.5"),
    ({"optimizer__betas": [0.8, 0.9]}, "optimizer.betas: [0.9,0.999] -> [0.8,0.9]"),
    ({"task__args": {"hidden": 9}}, "task.args.hidden: absent -> 9"),
    ({"task__factory": "a.b:C"}, 'task.factory: "small_run:Tiny" -> "a.b:C"'),
]


@pytest.mark.parametrize("changes", SAME_JOB, ids=str)
def test_what_is_no_part_of_the_job(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert (
        differences(recipe_of(config_for(tmp_path)), recipe_of(config_for(tmp_path, **changes)))
        == []
    )


@pytest.mark.parametrize(("changes", "line"), OTHER_JOB, ids=[line for _, line in OTHER_JOB])
def test_what_makes_it_another_job(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    before, after = recipe_of(config_for(tmp_path)), recipe_of(config_for(tmp_path, **changes))
    assert differences(before, after) == [line]


def test_a_length_in_epochs_is_another_length(tmp_path: Path) -> None:
    before = recipe_of(config_for(tmp_path))
    after = recipe_of(config_for(tmp_path, training__epochs=2))
    assert differences(before, after) == [
        "training.epochs: null -> 2",
        "training.updates: 6 -> null",
    ]


def test_a_job_without_a_task_has_a_recipe(tmp_path: Path) -> None:
    config = config_for(tmp_path).model_copy(update={"task": None})
    assert recipe_of(config)["task"] == "null"


def test_differences_are_in_order_and_name_what_is_gone() -> None:
    stored, now = {"a": "1", "b": "2", "d": "4"}, {"a": "1", "c": "3", "d": "5"}
    assert differences(stored, now) == ["b: 2 -> absent", "c: absent -> 3", "d: 4 -> 5"]
    assert differences(stored, dict(stored)) == []


@pytest.mark.parametrize(
    ("changes", "length"),
    [({"training__updates": 7}, 7), ({"training__epochs": 2}, 6)],
    ids=str,
)
def test_a_generation_tells_how_long_its_run_is(
    tmp_path: Path, changes: dict[str, Any], length: int
) -> None:
    left = train(config_for(tmp_path, **changes), stop_at(1))
    assert length_of(left.manifest().header) == length


def test_a_generation_without_a_recipe_tells_no_length(tmp_path: Path) -> None:
    header = train(config_for(tmp_path), stop_at(1)).manifest().header
    assert length_of(replace(header, recipe={})) is None
