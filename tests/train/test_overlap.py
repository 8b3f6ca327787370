"""Buckets that are sent in the backward pass: the same bits, whatever gradients do after all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_ranks import BUCKETS, PLACES, RANKS, UPDATES, Place, cases, main
from torch import nn
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

from coherent_ray.train.arrivals import Arrivals
from coherent_ray.train.gradients import FlatLayout
from coherent_ray.train.reduce import LaneReducer

COMPARED = [name for name in cases() if name != "traffic"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every process saw."""
    folder = tmp_path_factory.mktemp("ranks")
    get_context("forkserver").set_forkserver_preload(["coherent_ray.train.reduce"])
    start_processes(main, (str(folder),), nprocs=RANKS, start_method="forkserver")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The number of threads changes bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one rank sees, which sends nothing."""
    return {
        f"{name}/{lanes}": json.loads(json.dumps(case(Place(lanes, 0, 1))))
        for name, case in cases().items()
        for lanes in sorted({lanes for lanes, _ in PLACES})
    }


@pytest.mark.parametrize(("lanes", "ranks"), PLACES)
@pytest.mark.parametrize("name", COMPARED)
def test_bits_are_those_of_one_rank(
    seen: list[dict[str, Any]], alone: dict[str, Any], name: str, lanes: int, ranks: int
) -> None:
    expected = alone[f"{name}/{lanes}"]
    assert (expected["overlapped"], expected["repeated"]) == (0, 0)
    overlapped = 0
    for rank in range(ranks):
        got = seen[rank][f"{name}/{lanes}/{ranks}"]
        assert got["seen"] == expected["seen"], rank
        assert got.get("same", True)
        overlapped += got["overlapped"]
    # The first update only learns; after it buckets are sent while others are computed.
    assert overlapped >= ranks


@pytest.mark.parametrize(("lanes", "ranks"), PLACES)
def test_only_what_was_not_final_is_sent_again(
    seen: list[dict[str, Any]], lanes: int, ranks: int
) -> None:
    repeated = {name: seen[0][f"{name}/{lanes}/{ranks}"]["repeated"] for name in COMPARED}
    assert repeated.pop("meddling") >= 2
    # A third backward pass is unheard of once; the next time it is waited for.
    assert repeated.pop("twice") == 1
    assert set(repeated.values()) == {0}


@pytest.mark.parametrize(("lanes", "ranks"), PLACES)
@pytest.mark.parametrize("size", BUCKETS)
def test_buckets_of_any_size_give_the_same_bits(
    seen: list[dict[str, Any]], alone: dict[str, Any], size: int, lanes: int, ranks: int
) -> None:
    for rank in range(ranks):
        got = seen[rank][f"buckets of {size}/{lanes}/{ranks}"]
        assert got["seen"] == alone[f"Odd/{lanes}"]["seen"]


def test_smaller_buckets_are_more(seen: list[dict[str, Any]]) -> None:
    early = [seen[0][f"buckets of {size}/8/2"]["overlapped"] for size in BUCKETS]
    assert early[0] > early[1] > early[2]


@pytest.mark.parametrize(("lanes", "ranks"), PLACES)
def test_a_failure_leaves_nothing_hanging(
    seen: list[dict[str, Any]], alone: dict[str, Any], lanes: int, ranks: int
) -> None:
    results = [seen[rank][f"failures/{lanes}/{ranks}"] for rank in range(ranks)]
    for result in results:
        assert result == results[0]
    got, bad = results[0], ranks - 1
    assert got["backward"][0] == "TrainingFailed"
    assert got["backward"][2] == {"update": 2, "ranks": {str(bad): "no gradient today"}}
    assert got["before"][2] == {"update": 3, "ranks": {str(bad): "no data"}}
    assert "do not reduce the same parameters" in got["frozen"][1]
    assert got["after"] == alone[f"Plain/{lanes}"]["seen"]


@pytest.mark.parametrize(("lanes", "ranks"), PLACES)
def test_an_update_that_is_left_in_its_middle_leaves_nothing_hanging(
    seen: list[dict[str, Any]], alone: dict[str, Any], lanes: int, ranks: int
) -> None:
    results = [seen[rank][f"leaving/{lanes}/{ranks}"] for rank in range(ranks)]
    assert [result["seen"] for result in results] == [alone[f"Plain/{lanes}"]["seen"]] * ranks
    assert results[0]["overlapped"] > 0
    assert results[-1]["overlapped"] == 0


def test_the_second_group_waits_as_long_as_the_first(seen: list[dict[str, Any]]) -> None:
    assert [each["timeout"] for each in seen] == [[120.0, 120.0]] * RANKS


@pytest.mark.parametrize(("lanes", "ranks"), PLACES)
def test_bytes_and_memory(seen: list[dict[str, Any]], lanes: int, ranks: int) -> None:
    gradient = 4 * 3072 * 4
    for rank in range(ranks):
        got = seen[rank][f"traffic/{lanes}/{ranks}"]
        if lanes % ranks == 0 and ranks in {2, 4}:
            assert got["sent"] == [2 * (ranks - 1) * gradient // ranks] * 3
        else:
            assert len(set(got["sent"])) == 1
        # One sum that is sent, and one for each level of the tree below it.
        assert got["buffers"] <= math.ceil(math.log2(math.ceil(lanes / ranks))) + 1
        assert lanes != ranks or got["buffers"] == 1
        assert got["overlapped"] > 0


@pytest.mark.parametrize("lanes", [1, 2, 4, 6, 8, 16])
def test_one_rank_holds_a_sum_for_each_level_of_the_tree(lanes: int) -> None:
    parameter = nn.Parameter(torch.ones(3))
    reducer = LaneReducer([("p", parameter)], lanes, 0, 1)
    for update in range(2):
        reducer.begin(update)
        for lane in range(lanes):
            reducer.closes(lane)
            (parameter * lane).sum().backward()
            reducer.lane_done(lane)
        reducer.finish({}, {})
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [sum(range(lanes))] * 3
    assert reducer.buffers <= max(1, (lanes - 1).bit_length())


# --- when a bucket is told of ---------------------------------------------------------------------


def watched(*shapes: int) -> tuple[list[nn.Parameter], Arrivals, list[int]]:
    parameters = [nn.Parameter(torch.ones(items)) for items in shapes]
    layout = FlatLayout([(f"p{i}", p) for i, p in enumerate(parameters)], 1, bucket_bytes=4)
    return parameters, Arrivals(layout), []


def passes(told: list[int], parameters: list[nn.Parameter], *used: int) -> None:
    """One backward pass for each, of that parameter alone."""
    for place in used:
        parameters[place].sum().backward()


def test_buckets_are_told_of_in_order_whatever_comes_first() -> None:
    parameters, arrivals, told = watched(2, 3, 4)
    arrivals.open(told.append)
    passes(told, parameters, 2, 1, 0)
    assert told == []  # nothing is known yet
    assert arrivals.close()
    arrivals.open(told.append)
    for place, expected in ((0, []), (2, [0]), (1, [0, 1, 2])):
        passes(told, parameters, place)
        assert told == expected
    assert arrivals.close()


def test_what_comes_more_often_than_ever_is_a_change_and_then_is_waited_for() -> None:
    parameters, arrivals, told = watched(2, 3)
    for count, same in ((1, True), (2, False), (2, True), (1, True)):
        told.clear()
        for parameter in parameters:
            parameter.grad = None
        arrivals.open(told.append)
        passes(told, parameters, *[1] * count, 0)
        assert arrivals.close() == same
    assert told == []


def test_what_never_came_is_not_waited_for() -> None:
    parameters, arrivals, told = watched(2, 3, 4)
    for _ in range(2):
        arrivals.open(told.append)
        passes(told, parameters, 2, 0)
        assert arrivals.close()
    assert told == [0, 1, 2]
    assert parameters[1].grad is None


@pytest.mark.parametrize("change", ["in place", "another", "none"])
def test_a_changed_gradient_is_seen(change: str) -> None:
    parameters, arrivals, told = watched(2)
    for _ in range(2):
        arrivals.open(told.append)
        passes(told, parameters, 0)
        gradient = parameters[0].grad
        assert gradient is not None
        if told and change == "in place":
            gradient.mul_(1)
        elif told:
            parameters[0].grad = gradient.clone() if change == "another" else None
        assert arrivals.close() != bool(told)
    assert told == [0]


def test_nobody_counts_outside_and_hooks_go() -> None:
    parameters, arrivals, told = watched(2)
    arrivals.open(told.append)
    passes(told, parameters, 0)
    arrivals.close()
    passes(told, parameters, 0)
    arrivals.open(told.append)
    arrivals.remove()
    passes(told, parameters, 0)
    assert told == []


def test_what_a_hook_raises_ends_the_backward_pass() -> None:
    parameters, arrivals, _ = watched(2)

    def lost(bucket: int) -> None:
        raise ConnectionError(f"bucket {bucket}")

    arrivals.open(None)
    passes([], parameters, 0)
    arrivals.close()
    arrivals.open(lost)
    with pytest.raises(ConnectionError, match="bucket 0"):
        passes([], parameters, 0)


def test_updates_of_the_cases_have_empty_ranks() -> None:
    assert min(UPDATES) == 1
