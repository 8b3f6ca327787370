"""Buffers through an update: every lane starts alike, and lane 0's result stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from coherent_ray.errors import TaskError
from coherent_ray.train.buffers import LaneBuffers


class Counting(nn.Module):
    """Buffers of several dtypes that a call changes in place, replaces, or leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool), persistent=False)
        self.register_buffer("absent", None)
        self.inner = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> None:
        self.calls += 1
        self.sums = self.sums * 0.5 + x.sum()
        self.inner(x)


def picture(model: nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.flatten().tolist() for name, tensor in model.named_buffers()}


def batch(lane: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(lane))


@pytest.mark.parametrize("lane", [0, 2])
def test_a_lane_that_was_broken_off_is_gone_on_with_elsewhere(lane: int) -> None:
    first, second, whole = Counting(), Counting(), Counting()
    one, other, straight = LaneBuffers(first), LaneBuffers(second), LaneBuffers(whole)
    for buffers in (one, other, straight):
        buffers.begin()
    one.lane_begin(1)
    first(batch(1))
    one.lane_end(1)
    one.lane_begin(lane)
    first(batch(lane))
    assert {"calls", "sums"} <= set(one.changed())
    assert "mask" not in one.changed(), "what no pass has changed"
    assert one.start()["calls"].item() == 0
    other.lane_begin(lane)
    other.resume(one.changed())
    second(batch(lane + 5))
    other.lane_end(lane)
    straight.lane_begin(lane)
    whole(batch(lane))
    whole(batch(lane + 5))
    straight.lane_end(lane)
    assert picture(second) == picture(whole)
    assert (other.kept() is None) == (lane != 0)


def test_what_lane_zero_left_is_kept_without_running_it() -> None:
    first, second = Counting(), Counting()
    one, other = LaneBuffers(first), LaneBuffers(second)
    one.begin()
    one.lane_begin(0)
    first(batch(0))
    one.lane_end(0)
    for more in (False, True):
        other.begin()
        start = picture(second)
        other.keep(one.kept() or {})
        if more:
            other.lane_begin(1)
            assert picture(second) == start
            second(batch(1))
            other.lane_end(1)
        assert set(other.kept() or {}) == set(one.kept() or {})
        other.finish(0, 1)
        assert picture(second) == picture(first)
        second.load_state_dict(Counting().state_dict())
        second.sums.zero_()


@pytest.mark.parametrize("lanes", [[0], [0, 1], [0, 1, 2, 5], [1, 2], []])
def test_every_lane_starts_alike_and_lane_zero_stays(lanes: list[int]) -> None:
    model, reference = Counting(), Counting()
    buffers = LaneBuffers(model)
    for update in range(3):
        buffers.begin()
        start = picture(model)
        for lane in lanes:
            buffers.lane_begin(lane)
            assert picture(model) == start
            model(batch(lane + 10 * update))
            model(batch(lane + 10 * update + 5))
            assert picture(model) != start
            buffers.lane_end(lane)
        buffers.finish(0, 1)
        if 0 in lanes:
            reference(batch(10 * update))
            reference(batch(10 * update + 5))
        assert picture(model) == picture(reference)


def test_a_model_without_buffers_costs_nothing() -> None:
    buffers = LaneBuffers(nn.Linear(2, 2))
    buffers.begin()
    buffers.lane_begin(0)
    buffers.lane_end(0)
    buffers.finish(0, 2)  # no process group: nothing may be sent


def test_tied_buffers_are_taken_once() -> None:
    model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    model[1].running_mean = model[0].running_mean
    buffers = LaneBuffers(model)
    buffers.lane_begin(1)
    model[0].running_mean.add_(1)
    buffers.lane_begin(2)
    assert model[1].running_mean is model[0].running_mean
    assert model[1].running_mean.tolist() == [0.0] * 3


def test_what_the_user_changes_between_updates_is_the_next_start() -> None:
    model = Counting()
    buffers = LaneBuffers(model)
    model.sums.fill_(4)
    model.register_buffer("late", torch.ones(2))
    buffers.begin()
    buffers.lane_begin(0)
    model.late.zero_()
    model(batch(0))
    buffers.lane_begin(1)
    assert model.sums.tolist() == [4.0] * 5
    assert model.late.tolist() == [1.0] * 2


def test_a_buffer_that_changes_its_shape_is_refused_by_name() -> None:
    model = Counting()
    buffers = LaneBuffers(model)
    buffers.lane_begin(0)
    model.sums = torch.zeros(6, dtype=torch.float64)
    with pytest.raises(TaskError, match=r"buffer 'sums' from torch.float64 \(5,\)") as caught:
        buffers.lane_end(0)
    assert caught.value.where == "sums"


def test_a_lazy_buffer_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match=r"'0\.running_mean' is not initialised"):
        LaneBuffers(nn.Sequential(nn.LazyBatchNorm1d()))


def test_buffers_on_several_devices_are_refused() -> None:
    model = Counting()
    model.register_buffer("far", torch.zeros(1, device="meta"))
    with pytest.raises(TaskError, match="several devices: cpu, meta"):
        LaneBuffers(model)


# --- two ranks, without processes: what rank 0 sends is what rank 1 gets ------------------------


class Wire:
    """Stands in for the broadcast: the first rank to call fills it, the next drains it."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.receiving = False

    def broadcast(self, tensor: torch.Tensor, group: object, group_src: int) -> None:
        assert group_src == 0
        if self.receiving:
            tensor.copy_(self.sent.pop(0))
        else:
            self.sent.append(tensor.clone())


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    stand_in = Wire()
    monkeypatch.setattr(dist, "broadcast", stand_in.broadcast)
    return stand_in


@pytest.mark.parametrize("busy", [True, False])
def test_every_rank_gets_lane_zero_s(wire: Wire, busy: bool) -> None:
    models = [Counting(), Counting()]
    ranks = [LaneBuffers(model) for model in models]
    for rank, lanes in ((0, [0, 1]), (1, [2, 3] if busy else [])):
        for lane in lanes:
            ranks[rank].lane_begin(lane)
            models[rank](batch(lane))
            ranks[rank].lane_end(lane)
    ranks[0].finish(0, 2)
    sent = [tensor.numel() for tensor in wire.sent]
    # A flag for each of the 6 buffers; then the changed ones: int64, 5 float64, mean, var, int64.
    assert sent == [6, 8 + 40 + 16 + 16 + 8]
    assert wire.sent[0].tolist() == [1, 1, 0, 1, 1, 1]
    wire.receiving = True
    ranks[1].finish(1, 2)
    assert wire.sent == []
    expected = Counting()
    expected(batch(0))
    assert picture(models[0]) == picture(models[1]) == picture(expected)


def test_where_nothing_changed_only_the_flags_are_sent(wire: Wire) -> None:
    models = [Counting(), Counting()]
    ranks = [LaneBuffers(model) for model in models]
    ranks[1].lane_begin(1)
    models[1](batch(1))
    ranks[1].lane_end(1)
    ranks[0].finish(0, 2)
    assert [tensor.tolist() for tensor in wire.sent] == [[0] * 6]
    wire.receiving = True
    ranks[1].finish(1, 2)
    assert picture(models[1]) == picture(Counting())


def test_a_zero_that_changes_its_sign_is_a_change(wire: Wire) -> None:
    models = [Counting(), Counting()]
    ranks = [LaneBuffers(model) for model in models]
    ranks[0].lane_begin(0)
    models[0].sums.neg_()
    ranks[0].lane_end(0)
    ranks[0].finish(0, 2)
    wire.receiving = True
    ranks[1].finish(1, 2)
    assert models[1].sums.signbit().all()
