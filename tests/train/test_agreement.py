"""Before the first update every rank holds the same bits, or every rank is told who does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agreement_ranks import CASES, RANKS, main, told
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank was told."""
    folder = tmp_path_factory.mktemp("agreement")
    get_context("forkserver").set_forkserver_preload(["coherent_ray.train.reduce"])
    start_processes(main, (str(folder),), nprocs=RANKS, start_method="forkserver")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


VALUE = "would start with another value of {} than the other ranks"
SHAPE = "would start with other tensors, hyper-parameters or schedules than the other ranks"
EXPECTED: dict[str, tuple[list[int], str]] = {
    "one_bit": ([2], VALUE.format("model/weight")),
    "one_bit_of_rank_0": ([0], VALUE.format("model/half")),
    "last_bit_of_the_last_tensor": ([1], VALUE.format("optimizer/weight/exp_avg")),
    # The first in the order of the layout: larger items come first there.
    "two_tensors": ([1], VALUE.format("model/mean")),
    "sign_of_zero": ([2], VALUE.format("optimizer/weight/exp_avg")),
    # No two agree: rank 0 is believed.
    "all_three": ([1, 2], VALUE.format("model/count")),
    "other_shape": ([1], SHAPE),
    "other_dtype": ([1], SHAPE),
    "one_tensor_more": ([2], SHAPE),
    "other_schedule": ([1, 2], SHAPE),
}


def test_every_case_is_expected() -> None:
    assert set(CASES) == {"nothing", *EXPECTED}


def test_ranks_that_hold_the_same_go_on(seen: list[dict[str, Any]]) -> None:
    assert [words["nothing"] for words in seen] == [None] * RANKS
    assert [words["in step"] for words in seen] == [None] * RANKS


@pytest.mark.parametrize("case", EXPECTED)
def test_every_rank_is_told_who_differs_and_in_what(seen: list[dict[str, Any]], case: str) -> None:
    ranks, words = EXPECTED[case]
    first = seen[0][case]
    assert [told[case] for told in seen] == [first] * RANKS
    assert first["type"] == "StateMismatch"
    assert first["ranks"] == ranks
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} and {ranks[1]}"
    assert first["what"] == f"{who} {words}"
    assert first["where"] == who
    assert "never from the rank or an unseeded generator" in first["remedy"]


@pytest.mark.parametrize("case", CASES)
def test_one_rank_agrees_with_itself_without_a_group(case: str) -> None:
    assert told(CASES[case], 0, 1) is None
