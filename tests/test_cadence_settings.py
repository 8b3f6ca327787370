"""One form of cadence decides; two, or settings of one that is not there, are named."""

from __future__ import annotations

from typing import Any

import pytest
from test_config import changed

from coherent_ray import config
from coherent_ray.config.sections import UPDATES_APART
from coherent_ray.drill.cases import fixed, prepared
from coherent_ray.drill.scenarios import course_of
from coherent_ray.errors import ConfigError


def built(**checkpoint: Any) -> config.Config:
    return config.build(changed(**{f"checkpoint__{key}": v for key, v in checkpoint.items()}))


@pytest.mark.parametrize(
    ("given", "apart"),
    [
        ({}, UPDATES_APART),
        ({"every_updates": 7}, 7),
        ({"every_updates": None, "every": None, "every_seconds": None}, UPDATES_APART),
        ({"every_seconds": 60.0}, None),
        ({"every_seconds": 60, "every_updates": None}, None),
        ({"every": "auto", "mtbf_s": 3_600.0}, None),
    ],
)
def test_one_form_decides(given: dict[str, Any], apart: int | None) -> None:
    found = built(**given)
    assert found.checkpoint.updates_apart == apart
    assert config.build(found.model_dump(mode="json")) == found, "as it travels to the workers"


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"every_updates": 5, "every_seconds": 60.0}, "every_seconds",
         "cannot be given together with checkpoint.every_updates"),
        ({"every": "auto", "every_updates": 5}, "every_updates",
         "cannot be given together with checkpoint.every"),
        ({"every": "auto", "every_seconds": 5.0}, "every_seconds",
         "cannot be given together with checkpoint.every"),
        ({"every": "often"}, "every", "must be auto.*did you mean checkpoint.every_updates"),
        ({"every_seconds": 0.0}, "every_seconds", "must be more than 0"),
        ({"mtbf_s": 60.0}, "mtbf_s", "needs checkpoint.every: auto"),
        ({"on_busy": "hurry"}, "on_busy", "must be one of wait, skip"),
    ],
)  # fmt: skip
def test_what_contradicts_is_named(given: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        built(**given)
    assert [p["key"] for p in caught.value.details["problems"]] == [f"checkpoint.{key}"]


@pytest.mark.parametrize("given", [{"every": "auto"}, {"every_seconds": 5.0}, {"on_busy": "skip"}])
def test_a_drill_must_know_in_which_updates_generations_are(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not say in which updates") as caught:
        course_of(built(**given), updates=60, kills=1, seed=0)
    assert "checkpoint.every_updates=" in caught.value.remedy


def test_a_proof_saves_in_updates_of_its_own() -> None:
    found = prepared(built(every="auto", mtbf_s=60.0, on_busy="skip"), 40).checkpoint
    assert found.updates_apart == found.every_updates
    assert (found.every, found.mtbf_s, found.on_busy) == (None, None, "wait")
    assert fixed(3)["every_updates"] == 3
