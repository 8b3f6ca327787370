"""The same bits at every rank count: gradients, losses, parameters, buffers. Failures by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reduction_ranks import (
    CASES,
    LANES,
    MODELS,
    RANKS,
    UPDATES,
    Place,
    bits,
    build,
    cases,
    examples,
    lane_bounds,
    lane_is_empty,
    main,
    one,
    raw_gradient,
    raw_parameters,
)
from torch import Tensor, nn
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

from coherent_ray.errors import TaskError, TrainingFailed
from coherent_ray.train.lanes import cover, lanes_of, tree_sum, width
from coherent_ray.train.reduce import REASON_BYTES, LaneReducer

PLACES = [(lanes, ranks) for lanes in LANES for ranks in range(2, min(lanes, RANKS) + 1)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every process saw; torch is imported once, in the fork server."""
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
    """What one rank without any process group sees."""
    return {
        f"{name}/{lanes}": json.loads(json.dumps(case(Place(lanes, 0, 1, None))))
        for name, case in CASES.items()
        for lanes in LANES
    }


@pytest.mark.parametrize(
    ("name", "lanes", "ranks"),
    [(name, lanes, ranks) for lanes, ranks in PLACES for name in MODELS if name in cases(lanes)],
)
def test_training_has_the_same_bits_at_every_rank_count(
    seen: list[dict[str, Any]], alone: dict[str, Any], name: str, lanes: int, ranks: int
) -> None:
    for rank in range(ranks):
        assert seen[rank][f"{name}/{lanes}/{ranks}"] == alone[f"{name}/{lanes}"]


@pytest.mark.parametrize(("lanes", "ranks"), PLACES)
def test_raw_gradients_have_the_same_bits_at_every_rank_count(
    seen: list[dict[str, Any]], alone: dict[str, Any], lanes: int, ranks: int
) -> None:
    for rank in range(ranks):
        got = seen[rank][f"raw/{lanes}/{ranks}"]
        for update, expected in enumerate(alone[f"raw/{lanes}"]):
            wishes = (1 << ranks) - 1 | 1 << 15
            assert got[update] == {**expected, "wishes": wishes}, (rank, update)


def along_the_tree(values: list[Tensor | None], start: int, size: int) -> Tensor | None:
    """The definition, word for word."""
    if size == 1:
        return values[start] if start < len(values) else None
    left = along_the_tree(values, start, size // 2)
    right = along_the_tree(values, start + size // 2, size // 2)
    if left is None or right is None:
        return left if right is None else right
    if left.is_complex():
        return torch.view_as_complex(torch.view_as_real(left) + torch.view_as_real(right))
    return left + right


@pytest.mark.parametrize("lanes", LANES)
def test_raw_gradients_are_the_tree_s(alone: dict[str, Any], lanes: int) -> None:
    """Both zeros, infinities, subnormals, absent lanes, absent gradients: to the last bit."""
    parameters, nothing, zeros = raw_parameters(), 0, 0
    for update, got in enumerate(alone[f"raw/{lanes}"]):
        for index, (name, parameter) in enumerate(parameters):
            values = [
                None
                if lane_is_empty(update, lane)
                else raw_gradient(update, lane, index, parameter)
                for lane in range(lanes)
            ]
            expected = along_the_tree(values, 0, width(lanes))
            assert got["gradients"][index] == (None if expected is None else bits(expected)), name
            nothing += expected is None
            if expected is not None and not parameter.dtype.is_complex:
                zeros += int((expected.signbit() & (expected == 0)).sum())
        present = [lane for lane in range(lanes) if not lane_is_empty(update, lane)]
        losses = [(k - 1.5) / 7 ** (k + update) if k in present else 0.0 for k in range(lanes)]
        assert got["loss"] == tree_sum(losses).hex()
        assert got["count"] == sum(lane + update for lane in present)
    assert nothing > len(parameters)
    assert zeros > 100


def test_the_models_did_what_they_are_there_for(alone: dict[str, Any]) -> None:
    for name in MODELS:
        first, *_, last = alone[f"{name}/4"]
        assert [update["count"] for update in alone[f"{name}/4"]] == list(UPDATES)
        assert first["state"] != last["state"]
    odd = alone["Odd/4"]
    assert "head.weight" not in odd[0]["without"]
    assert {"unused", "frozen.weight", "experts.2.weight"} <= set(odd[0]["without"])
    # One example: only lane 0 ran, so the expert of the odd lanes got nothing.
    assert "experts.1.weight" in odd[3]["without"]
    assert "experts.1.weight" not in odd[0]["without"]
    normed = alone["Normed/4"]
    assert normed[0]["state"]["norm.running_mean"] != normed[1]["state"]["norm.running_mean"]
    assert normed[0]["state"]["seen"] != normed[1]["state"]["seen"]
    assert alone["Cast/4"][0]["norm"] != alone["Plain/4"][0]["norm"]
    assert alone["Plain/4"][-1]["state"] != alone["Plain/6"][-1]["state"]


@pytest.mark.parametrize("lanes", LANES)
def test_one_update_is_the_float64_gradient_of_the_whole_batch(
    alone: dict[str, Any], lanes: int
) -> None:
    model = build("Double")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = examples(0)
    loss = model(rows, 0) / len(rows)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    got = alone[f"Double/{lanes}"][0]
    assert float.fromhex(got["norm"]) == pytest.approx(float(norm), rel=1e-12)
    assert float.fromhex(got["loss"]) == pytest.approx(loss.item() * len(rows), rel=1e-12)
    expected = [value for p in model.parameters() for value in p.flatten().tolist()]
    assert [value for values in got["values"] for value in values] == pytest.approx(
        expected, rel=1e-10, abs=1e-12
    )


def test_buffers_are_lane_zero_s(alone: dict[str, Any]) -> None:
    model = build("Normed")
    rows = examples(0)[: lane_bounds(UPDATES[0], 4)[1]]
    for batch in rows.split(2):
        model(batch, 0)
    expected = {name: bits(tensor) for name, tensor in model.named_buffers() if name != "mask"}
    state = alone["Normed/4"][0]["state"]
    assert {name: state[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("lanes", "ranks"), [(lanes, ranks) for lanes, ranks in PLACES if "failures" in cases(lanes)]
)
def test_a_failure_is_raised_on_every_rank_by_name(
    seen: list[dict[str, Any]], lanes: int, ranks: int
) -> None:
    bad = ranks - 1
    results = [seen[rank][f"failures/{lanes}/{ranks}"] for rank in range(ranks)]
    for result in results:
        assert result == results[0]
    got = results[0]
    kind, text, details = got["abort"]
    assert kind == "TrainingFailed"
    assert details["update"] == 7
    assert list(details["ranks"]) == ["0", str(bad)]
    assert details["ranks"]["0"] == "out of memory"
    long = details["ranks"][str(bad)]
    assert long.startswith("ValueError: no such word, ää")
    assert REASON_BYTES - 2 < len(long.encode()) <= REASON_BYTES
    assert f"update 7 failed on rank 0, {bad}: out of memory" in text
    assert f"lanes [{lanes + 3}] are not carried by rank {bad}" in got["misuse"][1]
    assert got["update"][2]["ranks"] == {str(bad): 9} or ranks == 2
    assert "do not reduce the same update" in got["update"][1]
    assert "do not reduce the same parameters" in got["frozen"][1]
    assert got["after"] == [None, [float(lanes)] * 2]


def test_a_rank_that_ends_without_a_vote_is_a_lost_peer(seen: list[dict[str, Any]]) -> None:
    kind, text, _ = seen[0]["lost"]
    assert kind == "PeerLost"
    assert text.startswith("all_reduce failed: ")


@pytest.mark.parametrize(("lanes", "ranks"), PLACES)
def test_bytes_sent(seen: list[dict[str, Any]], lanes: int, ranks: int) -> None:
    for rank in range(ranks):
        full, tail = seen[rank][f"traffic/{lanes}/{ranks}"]
        chunk = -(-6144 // (16 * ranks)) * 64
        nodes = len(cover(lanes_of(lanes, rank, ranks), lanes))
        assert full == (nodes + 1) * (ranks - 1) * chunk
        # Only lane 0 has a gradient: only its rank sends a node.
        assert tail == ((rank == 0) + 1) * (ranks - 1) * chunk
        if ranks in {2, 4} and nodes == 1 and lanes == 4:
            assert full == 2 * (ranks - 1) / ranks * 6144 * 4


# --- one rank, no process group -------------------------------------------------------------------


def test_the_gradients_are_views_of_what_is_returned_and_memory_is_reused() -> None:
    parameters = one()
    reducer = LaneReducer(parameters, 8, 0, 1)
    places = set()
    for update in range(4):
        reducer.begin(update)
        assert all(parameter.grad is None for _, parameter in parameters)
        for lane in range(8):
            for _, parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            reducer.lane_done(lane)
            assert all(parameter.grad is None for _, parameter in parameters)
        (flat,) = reducer.finish({}, {}).gradients
        flat.div_(2)
        assert [p.grad.tolist() for _, p in parameters] == [[4.0] * 4, [4.0] * 2]
        assert float(flat.sum()) == 24.0
        places.add(flat.data_ptr())
    assert len(places) <= 3


def test_an_update_without_any_gradient_leaves_none() -> None:
    parameters = one()
    reducer = LaneReducer(parameters, 3, 0, 1)
    reducer.begin(1)
    reducer.lane_done(1)
    reduced = reducer.finish({1: -0.0}, {1: 0}, wishes=5)
    assert (reduced.loss_sum.hex(), reduced.count, reduced.wishes) == ((0.0).hex(), 0, 5)
    assert reduced.gradients == ()
    assert [p.grad for _, p in parameters] == [None, None]


@pytest.mark.parametrize("silent", range(4))
def test_a_lane_without_gradient_still_completes_its_nodes(silent: int) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    reducer = LaneReducer([("p", parameter)], 4, 0, 1)
    reducer.begin(1)
    for lane in range(4):
        parameter.grad = None if lane == silent else torch.full((2,), 10.0**lane)
        reducer.lane_done(lane)
    reducer.finish({}, {})
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1111.0 - 10**silent] * 2


def test_what_is_frozen_later_is_left_out_and_comes_back() -> None:
    parameters = one()
    reducer = LaneReducer(parameters, 2, 0, 1)
    for update, trainable in enumerate([True, False, True]):
        parameters[0][1].requires_grad_(trainable)
        reducer.begin(update)
        for _, parameter in parameters:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        reducer.lane_done(0)
        reducer.finish({}, {})
        assert (parameters[0][1].grad is not None) == trainable
        assert parameters[1][1].grad is not None


def test_a_gradient_of_another_dtype_is_rounded_before_it_is_added() -> None:
    """Else the lane that is added in place and the lane that is sent would differ."""
    totals = []
    for lanes in ((0, 1), (0, 2)):
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        parameter.grad_dtype = None
        reducer = LaneReducer([("p", parameter)], 4, 0, 1)
        reducer.begin(1)
        for lane in lanes:
            parameter.grad = torch.tensor([1.0, 1.00390625, 3e-3]) * (1 + lane % 2 + lane // 2)
            reducer.lane_done(lane)
        reducer.finish({}, {})
        totals.append(bits(parameter.grad))
    assert totals[0] == totals[1]


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    reducer = LaneReducer(list(embedding.named_parameters()), 2, 0, 1)
    reducer.begin(1)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    with pytest.raises(TaskError, match="sparse=False"):
        reducer.lane_done(0)


def test_wrong_calls_are_refused() -> None:
    parameters = one()
    reducer = LaneReducer(parameters, 4, 0, 1)
    with pytest.raises(RuntimeError, match="call begin first"):
        reducer.lane_done(0)
    with pytest.raises(TrainingFailed, match="call begin first"):
        reducer.finish({}, {})
    reducer.begin(1)
    reducer.lane_done(2)
    for lane in (1, 2, 4):
        with pytest.raises(ValueError, match=f"lane {lane} is not due"):
            reducer.lane_done(lane)
    with pytest.raises(TrainingFailed, match=r"lanes \[9\] are not carried"):
        reducer.finish({9: 1.0}, {})
    reducer.begin(2)
    with pytest.raises(TrainingFailed, match="do not fit into 16 bits"):
        reducer.finish({}, {}, wishes=1 << 16)
    with pytest.raises(ValueError, match="cannot carry"):
        LaneReducer(parameters, 4, 4, 4 + 1 - 4)


def test_abort_alone_says_why() -> None:
    reducer = LaneReducer(one(), 2, 0, 1)
    reducer.begin(3)

    def forward() -> None:
        try:
            raise KeyError("word")
        except KeyError as error:
            reducer.abort(repr(error))

    with pytest.raises(TrainingFailed) as caught:
        forward()
    assert caught.value.details == {"update": 3, "ranks": {"0": "KeyError('word')"}}
    assert isinstance(caught.value.__context__, KeyError)


def test_no_trainable_parameter_at_all() -> None:
    reducer = LaneReducer([("p", nn.Parameter(torch.zeros(2), requires_grad=False))], 2, 0, 1)
    reducer.begin(1)
    reducer.lane_done(0)
    assert reducer.finish({0: 2.5}, {0: 1}).loss_sum == 2.5


def test_a_parameter_that_is_named_twice_counts_once() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    reducer = LaneReducer([("a", parameter), ("b", parameter)], 1, 0, 1)
    reducer.begin(1)
    parameter.grad = torch.tensor([1.0, -0.0])
    reducer.lane_done(0)
    reducer.finish({}, {})
    assert bits(parameter.grad) == bits(torch.tensor([1.0, -0.0]))
