"""What a generation says of an update that was not done, and who can go on from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coherent_ray.errors import ManifestDamaged
from coherent_ray.train import partial
from coherent_ray.train.lanes import Subtree
from coherent_ray.train.partial import Record, Started, Usable, held, together, usable
from coherent_ray.train.tally import LaneTally

PLAN = dict.fromkeys(range(6), 4)
WEIGHT = torch.ones(2, 3)
PARAMETERS = {"weight": WEIGHT, "bias": torch.ones(3)}


def stored() -> tuple[Record, dict[str, torch.Tensor]]:
    """Of six lanes: 0 to 3 are done, 4 is half done, 5 has not begun."""
    first = held(
        3,
        {lane: LaneTally(4, lane + 0.1, 8) for lane in range(4)},
        {
            Subtree(0, 2): ((0, 1), {"weight": WEIGHT}),
            Subtree(2, 2): ((3,), {"weight": WEIGHT * 2}),
        },
        None,
        {"mean": torch.zeros(3)},
    )
    second = held(
        3, {4: LaneTally(2, 4.1, 4), 5: LaneTally(0, 0.0, 0)}, {},
        (4, Started({"bias": torch.ones(3)}, {"mean": torch.ones(3)})), None,
    )  # fmt: skip
    return together([second.record, first.record]), first.tensors | second.tensors


def use(owned: range) -> Usable:
    record, tensors = stored()
    return usable(record, tensors, owned, PLAN, PARAMETERS)


def test_names_say_what_is_what() -> None:
    record, tensors = stored()
    assert sorted(tensors) == [
        "partial/buffer-0/mean",
        "partial/buffer-4/mean",
        "partial/lane-4/bias",
        "partial/node-0-2/weight",
        "partial/node-2-2/weight",
    ]
    assert all(partial.is_partial(name) for name in tensors)
    assert not partial.is_partial("model/partial/x")
    assert [lane.lane for lane in record.lanes] == [0, 1, 2, 3, 4], "what has not begun is nothing"


def test_a_record_comes_back_from_json() -> None:
    record, _ = stored()
    assert partial.load(partial.dump(record)) == record


def test_a_rank_uses_the_nodes_and_lanes_that_are_its_own() -> None:
    everything = use(range(6))
    assert sorted(everything.nodes) == [0, 2]
    assert everything.nodes[2].present == (3,)
    assert everything.tally == {
        **{lane: LaneTally(4, lane + 0.1, 8) for lane in range(4)},
        4: LaneTally(2, 4.1, 4),
    }
    assert everything.kept is not None
    assert [lane for lane in range(6) if everything.within(lane)] == [1, 3]
    assert list(everything.started) == [4]

    middle = use(range(1, 4))
    assert (sorted(middle.nodes), sorted(middle.tally), middle.kept) == ([2], [2, 3], None)
    assert use(range(0, 1)).tally == {}
    last = use(range(4, 6))
    assert (last.nodes, sorted(last.tally)) == ({}, [4])
    assert set(last.started[4].gradients) == {"bias"}
    assert set(last.started[4].buffers) == {"mean"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"weight": WEIGHT},
        {"weight": torch.ones(3, 2), "bias": torch.ones(3)},
        {"weight": WEIGHT.double(), "bias": torch.ones(3)},
    ],
)
def test_other_parameters_can_use_nothing(parameters: dict[str, torch.Tensor]) -> None:
    record, tensors = stored()
    assert usable(record, tensors, range(6), PLAN, parameters) == Usable(3, {})


def test_a_lane_that_is_done_but_in_no_node_is_computed_again() -> None:
    """It brought no gradient: there is nothing to store of it."""
    record = held(3, {0: LaneTally(4, 0.5, 0)}, {}, None, {}).record
    assert usable(record, {}, range(6), PLAN, PARAMETERS) == Usable(3, {})


@pytest.mark.parametrize(
    "change",
    [
        {"update": 0},
        {"lanes": "none"},
        {"nodes": [{"start": 1, "size": 2, "present": [1]}]},
        {"nodes": [{"start": 0, "size": 2, "present": [2]}]},
        {"nodes": [{"start": 0, "size": 2, "present": []}]},
        {
            "nodes": [
                {"start": 2, "size": 2, "present": [2]},
                {"start": 0, "size": 2, "present": [0]},
            ]
        },
        {"lanes": [{"lane": 1, "done": 0, "loss": "0x0.0p+0", "count": 1}]},
        {"lanes": [{"lane": 1, "done": 1, "loss": "1.5", "count": 1}]},
        {"lanes": [{"lane": 1, "done": 1, "loss": "0x0.0p+0", "count": 1}] * 2},
        {"surprise": 1},
    ],
)
def test_what_is_no_record_is_damage(change: dict[str, Any]) -> None:
    value = {"update": 3, "lanes": [], "nodes": [], **change}
    with pytest.raises(ManifestDamaged, match="partial update"):
        partial.load(value)
