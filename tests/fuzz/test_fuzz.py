"""Every reader of stored bytes, given a small seeded set of neighbours of valid documents.

The long campaign, coverage-guided, is ``benchmarks/fuzz.py``; its result is on record.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import mutate
from targets import TARGETS, crash

INPUTS = 400
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "fuzz.json"


@pytest.mark.parametrize("name", TARGETS)
def test_valid_documents_are_read(name: str) -> None:
    target = TARGETS[name]
    target.read(target.seeds[0])


@pytest.mark.parametrize("name", TARGETS)
def test_neighbours_of_valid_documents_are_read_or_refused(name: str) -> None:
    target, rng = TARGETS[name], random.Random(f"1 {name}")
    for _ in range(INPUTS):
        data = mutate(rng.choice(target.seeds), rng)
        error = crash(target, data)
        assert error is None, (data, error)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_pieces_of_valid_documents_are_read_or_refused(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    seed = data.draw(st.sampled_from(target.seeds))
    first = data.draw(st.integers(0, len(seed)))
    last = data.draw(st.integers(first, len(seed)))
    given_bytes = seed[:first] + data.draw(st.binary(max_size=40)) + seed[last:]
    assert crash(target, given_bytes) is None


def test_the_campaign_on_record_is_long_enough_and_found_nothing() -> None:
    result = json.loads(RESULT.read_text())
    assert {run["reader"] for run in result["readers"]} == set(TARGETS)
    assert sum(run["inputs"] for run in result["readers"]) >= 1_000_000
    assert all(run["crashes"] == 0 for run in result["readers"])
