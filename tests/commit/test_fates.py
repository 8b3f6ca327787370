from __future__ import annotations

import json
import pickle

import pytest

from coherent_ray.commit.fates import NAMED_RANKS, Fate, name_ranks
from coherent_ray.errors import CoherentRayError, Fenced, ReplicaDiverged, SaveFailed


@pytest.mark.parametrize("kind", ["published", "failed", "diverged", "fenced"])
def test_a_fate_survives_the_trip_through_json(kind: str) -> None:
    fate = Fate(kind, 12, 3, "because", 7, {"ranks": [1, 2], "tensor": None})
    assert Fate.from_json(json.loads(json.dumps(fate.to_json()))) == fate


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"kind": "lost", "number": 1, "attempt": 1},
        {"kind": "failed", "number": "1", "attempt": 1},
        {"kind": "failed", "number": 1, "attempt": 1, "more": 1},
    ],
)
def test_what_is_no_fate_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not a fate"):
        Fate.from_json(value)


def test_a_published_fate_is_no_error() -> None:
    Fate("published", 1, 1, seq=4).raise_for_error()


@pytest.mark.parametrize(
    ("kind", "error"),
    [("failed", SaveFailed), ("diverged", ReplicaDiverged), ("fenced", Fenced)],
)
def test_each_other_fate_is_its_own_error(kind: str, error: type[CoherentRayError]) -> None:
    fate = Fate(kind, 12, 3, "rank 2 is on fire", None, {"ranks": [2]})
    with pytest.raises(error) as caught:
        fate.raise_for_error()
    assert type(caught.value) is error
    assert caught.value.what == "rank 2 is on fire"
    assert caught.value.where == "generation g12-a3"
    assert caught.value.remedy
    assert caught.value.details == {"ranks": [2]}
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_ranks_as_words() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([3, 4]) == "ranks 3 and 4"
    assert name_ranks([3, 4, 17]) == "ranks 3, 4 and 17"
    many = name_ranks(range(2000))
    assert many.endswith(f"and {2000 - NAMED_RANKS} more")
    assert len(many) < 100
