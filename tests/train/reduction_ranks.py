"""What the processes of the reduction's tests do: one start, a group for every rank count.

Every case is a function of a `Place` that returns JSON; each process writes down what its rank saw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coherent_ray.errors import CoherentRayError
from coherent_ray.train.buffers import LaneBuffers
from coherent_ray.train.reduce import LaneReducer

RANKS = 6
LANES = (4, 6)
#: Examples of each update: full, full, tails that leave lanes empty, full again.
UPDATES = (24, 24, 5, 1, 24)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@dataclass(frozen=True, slots=True)
class Place:
    lanes: int
    rank: int
    ranks: int
    group: dist.ProcessGroup | None


# --- gradients that are handed over as they are ---------------------------------------------------


def raw_parameters() -> list[tuple[str, nn.Parameter]]:
    """Some of every dtype, every kind of shape: none, one item, odd, strided."""
    result = []
    for dtype in DTYPES:
        for name, shape in (("scalar", ()), ("odd", (3, 7)), ("none", (0, 4)), ("long", (129,))):
            result.append((f"{dtype}.{name}", nn.Parameter(torch.zeros(shape, dtype=dtype))))
    image = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    result.append(("channels_last", nn.Parameter(image)))
    result.append(("spread", nn.Parameter(torch.zeros(6, 10)[:, ::2])))
    return result


def raw_gradient(update: int, lane: int, index: int, parameter: Tensor) -> Tensor | None:
    """A gradient of every magnitude, with both zeros, infinities, subnormals; or none."""
    generator = torch.Generator().manual_seed(1_000_003 * update + 1_009 * lane + index)
    if float(torch.rand((), generator=generator)) < 0.3:
        return None
    shape = (*parameter.shape, 2)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    value *= 10.0 ** torch.randint(-6, 5, shape, generator=generator)
    value[torch.rand(shape, generator=generator) < 0.3] = -0.0
    value[torch.rand(shape, generator=generator) < 0.02] = 5e-41
    value[torch.rand(shape, generator=generator) < 0.01] = float("inf")
    if parameter.dtype.is_complex:
        return torch.view_as_complex(value).to(parameter.dtype)
    return value[..., 0].to(parameter.dtype)


def lane_is_empty(update: int, lane: int) -> bool:
    return update == 3 or (update == 2 and lane % 3 != 1)


def bits(tensor: Tensor) -> str:
    """A name of a tensor's exact bytes."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def raw(place: Place) -> Any:
    parameters = raw_parameters()
    reducer = LaneReducer(parameters, place.lanes, place.rank, place.ranks, place.group)
    seen = []
    for update in range(5):
        reducer.begin(update)
        losses, counts = {}, {}
        for lane in reducer.owned:
            if lane_is_empty(update, lane):
                continue
            for index, (_, parameter) in enumerate(parameters):
                parameter.grad = raw_gradient(update, lane, index, parameter)
            reducer.lane_done(lane)
            losses[lane], counts[lane] = (lane - 1.5) / 7 ** (lane + update), lane + update
        reduced = reducer.finish(losses, counts, 1 << place.rank | 1 << 15)
        gradients = [p.grad for _, p in parameters]
        seen.append(
            {
                "gradients": [None if g is None else bits(g) for g in gradients],
                "strides": [None if g is None else list(g.stride()) for g in gradients],
                "loss": reduced.loss_sum.hex(),
                "count": reduced.count,
                "wishes": reduced.wishes,
            }
        )
    return seen


# --- models ---------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 17), nn.GELU(), nn.Dropout(0.2), nn.Linear(17, 3))

    def forward(self, x: Tensor, lane: int) -> Tensor:
        return self.layers(x).square().sum()


class Cast(Plain):
    """bf16 autocast over float32 parameters."""

    def forward(self, x: Tensor, lane: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, lane)


class Normed(nn.Module):
    """Batch norm, a buffer that is replaced rather than changed, and a constant one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mask", torch.ones(9, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor, lane: int) -> Tensor:
        self.seen = self.seen * 0.5 + x.double().sum()
        # Batch norm cannot train on one row, which a lane's microbatch may be.
        x = torch.cat([x, x * 0.5 + 1])
        return (self.last(self.norm(self.first(x)) * self.mask)).square().sum()


class Odd(nn.Module):
    """Tied, frozen, never used and sometimes used parameters; bf16 and channels_last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.coarse = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, lane: int) -> Tensor:
        x = self.frozen(self.head(self.embed(x).tanh())) * self.scale
        x = self.experts[lane % 2](x).tanh()
        x = self.coarse(x.bfloat16()).float().tanh()
        return self.conv(torch.cat([x, x], 1)[:, :8].reshape(-1, 2, 2, 2)).square().sum()


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)).double()

    def forward(self, x: Tensor, lane: int) -> Tensor:
        return self.layers(x.double()).square().sum()


MODELS: dict[str, type[nn.Module]] = {m.__name__: m for m in (Plain, Cast, Normed, Odd, Double)}


def examples(update: int) -> Tensor:
    return torch.randn(UPDATES[update], 6, generator=torch.Generator().manual_seed(50 + update))


def lane_bounds(count: int, lanes: int) -> list[int]:
    return [lane * (count // lanes) + min(lane, count % lanes) for lane in range(lanes + 1)]


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def run_lane(model: nn.Module, rows: Tensor, update: int, lane: int) -> float:
    """Forward and backward of a lane in microbatches of 2; return its loss."""
    total = 0.0
    for micro, batch in enumerate(rows.split(2)):
        torch.manual_seed(update * 10_000 + lane * 100 + micro)
        loss = model(batch, lane)
        loss.backward()
        total += loss.item()
    return total


def train(name: str, place: Place) -> Any:
    model = build(name)
    reducer = LaneReducer(
        list(model.named_parameters()), place.lanes, place.rank, place.ranks, place.group
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    buffers = LaneBuffers(model)
    seen = []
    for update, total in enumerate(UPDATES):
        rows, bounds = examples(update), lane_bounds(total, place.lanes)
        reducer.begin(update)
        buffers.begin()
        losses, counts = {}, {}
        for lane in reducer.owned:
            own = rows[bounds[lane] : bounds[lane + 1]]
            if len(own):
                buffers.lane_begin(lane)
                losses[lane], counts[lane] = run_lane(model, own, update, lane), len(own)
                buffers.lane_end(lane)
                reducer.lane_done(lane)
        reduced = reducer.finish(losses, counts)
        reducer.sync_buffers(buffers)
        for gradient in reduced.gradients:
            gradient.div_(reduced.count)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(
            {
                "loss": reduced.loss_sum.hex(),
                "count": reduced.count,
                "norm": float(norm).hex(),
                "without": [n for n, p in model.named_parameters() if p.grad is None],
                "state": {n: bits(t) for n, t in model.state_dict(keep_vars=True).items()},
                "values": [p.flatten().tolist() for p in model.parameters()] if not update else [],
            }
        )
    return seen


# --- failures, bytes ------------------------------------------------------------------------------


def caught(call: Callable[[], Any]) -> Any:
    try:
        call()
    except CoherentRayError as error:
        return [type(error).__name__, str(error), error.details]
    return None


def one(items: int = 4) -> list[tuple[str, nn.Parameter]]:
    return [("p", nn.Parameter(torch.zeros(items))), ("q", nn.Parameter(torch.zeros(2)))]


def failures(place: Place) -> Any:
    """Each on a reducer of its own; afterwards the group must still be usable."""
    if place.ranks < 2:
        return {}
    bad = place.ranks - 1
    own = (place.lanes, place.rank, place.ranks, place.group)
    result = {}

    reducer = LaneReducer(one(), *own)
    reducer.begin(7)
    failed = place.rank in {0, bad}
    reason = "ValueError: no such word, " + "ä" * 2000 if place.rank else "out of memory"
    result["abort"] = caught(
        (lambda: reducer.abort(reason)) if failed else (lambda: reducer.finish({}, {}))
    )

    reducer = LaneReducer(one(), *own)
    reducer.begin(8)
    foreign = {place.lanes + 3: 1.0} if place.rank == bad else {}
    result["misuse"] = caught(lambda: reducer.finish(foreign, {}))

    reducer = LaneReducer(one(), *own)
    reducer.begin(9 if place.rank == bad else 10)
    result["update"] = caught(lambda: reducer.finish({}, {}))

    parameters = one()
    reducer = LaneReducer(parameters, *own)
    parameters[1][1].requires_grad_(place.rank != bad)
    reducer.begin(11)
    result["frozen"] = caught(lambda: reducer.finish({}, {}))

    parameters[1][1].requires_grad_(True)
    reducer.begin(12)
    for lane in reducer.owned:
        parameters[1][1].grad = torch.ones(2)
        reducer.lane_done(lane)
    reducer.finish({}, {})
    result["after"] = [None if p.grad is None else p.grad.tolist() for _, p in parameters]
    return result


def traffic(place: Place) -> Any:
    """Bytes of one update of 6,144 float32 items, which every rank count divides."""
    parameters = [("p", nn.Parameter(torch.zeros(6144)))]
    reducer = LaneReducer(parameters, place.lanes, place.rank, place.ranks, place.group)
    sent = []
    for lanes in (range(place.lanes), range(1)):
        before = reducer.bytes_sent
        reducer.begin(1)
        for lane in reducer.owned:
            if lane in lanes:
                parameters[0][1].grad = torch.full((6144,), float(lane))
                reducer.lane_done(lane)
        reducer.finish({}, {})
        assert parameters[0][1].grad is not None
        assert parameters[0][1].grad.unique().tolist() == [float(sum(lanes))]
        sent.append(reducer.bytes_sent - before)
    return sent


CASES: dict[str, Callable[[Place], Any]] = {
    "raw": raw,
    **{name: lambda place, name=name: train(name, place) for name in MODELS},
    "failures": failures,
    "traffic": traffic,
}


#: At more lanes, the cases that have something to lose there; the others would only cost time.
SHORT = ("raw", "Normed", "Odd", "traffic")


def cases(lanes: int) -> dict[str, Callable[[Place], Any]]:
    """The cases that run at a number of lanes."""
    return {name: case for name, case in CASES.items() if lanes == LANES[0] or name in SHORT}


def main(process: int, folder: str) -> None:
    """Run every case at every rank count that this process is part of."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout, world_size=RANKS, rank=process)
    seen: dict[str, Any] = {}
    for ranks in range(2, RANKS + 1):
        group = dist.new_group(list(range(ranks)))
        if process >= ranks:
            continue
        for lanes in LANES:
            if ranks <= lanes:
                place = Place(lanes, process, ranks, group)
                for name, case in cases(lanes).items():
                    seen[f"{name}/{lanes}/{ranks}"] = case(place)
    if process == 0:
        # All others end here; rank 0 is left alone in the last group.
        reducer = LaneReducer(one(), RANKS, 0, RANKS, group)
        reducer.begin(1)
        seen["lost"] = caught(lambda: reducer.finish({}, {}))
    Path(folder, f"{process}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
