"""The first place at which two recordings of one update differ, in the order of its computation."""

from __future__ import annotations

import pytest

from coherent_ray.drill.recording import Lane, Operation, Recording
from coherent_ray.drill.spots import Spot, first_spot


def lane(*digests: str, gradients: str = "g") -> Lane:
    operations = [Operation(f"aten.op{i}", "forward, 0 (Linear)", d) for i, d in enumerate(digests)]
    return Lane(operations, [0, 2], {"weight": gradients})


def recording(*lanes: Lane, first: int = 0) -> Recording:
    return Recording(
        lanes=dict(enumerate(lanes, first)),
        total={"the loss": "1", "the gradient of weight": "2"},
        step=[Operation("aten.div_", "optimizer", "3")],
        buffers={"norm.mean": "4"},
        tensors={"model/weight": "5"},
        values={"scheduler.last_epoch": "6"},
    )


SAME = recording(lane("a", "b", "c"), lane("d", "e", "f"))


def test_the_same_at_another_rank_count() -> None:
    apart = [recording(lane("a", "b", "c")), recording(lane("d", "e", "f"), first=1)]
    assert first_spot([SAME], apart) is None
    assert first_spot(apart, [SAME]) is None


def test_the_first_lane_and_its_first_operation() -> None:
    spot = first_spot([SAME], [recording(lane("a", "b", "x"), lane("y", "e", "f"))])
    assert spot == Spot("lane", "aten.op2", "forward, 0 (Linear)", 0, 1, 2)
    assert str(spot) == "lane 0, microbatch 1: aten.op2 (forward, 0 (Linear))"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lane("a", "b"), "aten.op2, in one of them only"),
        (lane("a", "b", "c", gradients="x"), "lane 0: the gradient of weight"),
    ],
)
def test_operations_that_only_one_has_and_gradients(other: Lane, says: str) -> None:
    assert says in str(first_spot([SAME], [recording(other, lane("d", "e", "f"))]))


def test_another_operation() -> None:
    other = lane("a", "b", "c")
    other.operations[1] = Operation("aten.relu", "", "b")
    spot = first_spot([SAME], [recording(other, lane("d", "e", "f"))])
    assert spot is not None
    assert spot.operation == "aten.op1 in one, aten.relu in the other"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("total", "the sum over all lanes: the loss; every lane's own part is equal"),
        ("buffers", "the buffer norm.mean; every lane's part and their sum are equal"),
        ("tensors", "the state, at model/weight; no operation of this update differs"),
        ("values", "the state, at scheduler.last_epoch; no operation of this update differs"),
    ],
)
def test_what_comes_after_the_lanes(part: str, says: str) -> None:
    other = recording(lane("a", "b", "c"), lane("d", "e", "f"))
    found = getattr(other, part)
    found[next(iter(found))] = "other"
    assert str(first_spot([SAME], [other])) == says


def test_the_step_of_any_rank() -> None:
    ranks = [recording(lane("a", "b", "c")), recording(lane("d", "e", "f"), first=1)]
    ranks[1].step[0] = Operation("aten.div_", "optimizer", "other")
    spot = first_spot([SAME], ranks)
    assert spot is not None
    assert (spot.phase, spot.operation) == ("step", "aten.div_")
