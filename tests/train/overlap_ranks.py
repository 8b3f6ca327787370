"""What the processes of the overlap's tests do: exchanges that begin in the backward pass.

What a microbatch does depends on update, lane and index alone, so every case must come to the bits
that one rank comes to, which sends nothing. Each case returns what the rank saw, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reduction_ranks import Odd, Plain, bits, caught, lane_bounds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coherent_ray.train.collectives import second_group
from coherent_ray.train.reduce import LaneReducer, Reduced
from coherent_ray.train.wishes import WISH_SAVE, Wish

RANKS = 4
#: Lanes and ranks; a last lane completes two nodes or more, one, none; a rank holds two nodes.
PLACES = ((8, 2), (6, 3), (4, 4), (6, 4))
#: Examples of each update; tails leave lanes, and ranks, without any.
UPDATES = (24, 24, 24, 5, 1, 24)
BUCKETS = (1, 600, 1 << 20)


@dataclass(frozen=True, slots=True)
class Place:
    lanes: int
    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None
    beside: dist.ProcessGroup | None = None
    bucket_bytes: int = 600


class Forked(nn.Module):
    """The order in which gradients come depends on the lane."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.end = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor, lane: int) -> Tensor:
        if lane % 2:
            y = self.right(x)
            y = self.left(x) * y.tanh()
        else:
            y = self.left(x).tanh()
            y = y * self.right(x)
        return self.end(y).square().sum()


class Checked(nn.Module):
    """Blocks that are computed twice, one kind of them in a backward pass within the other."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.end = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2)

    def forward(self, x: Tensor, lane: int) -> Tensor:
        x = x.requires_grad_()
        for reentrant in (True, True, False):
            x = checkpoint(self.block, x, use_reentrant=reentrant)
        return self.end(x).square().sum()


MODELS: dict[str, type[nn.Module]] = {m.__name__: m for m in (Plain, Odd, Forked, Checked)}


class Broken(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no gradient today")


@dataclass(slots=True)
class Micro:
    """One microbatch of a job."""

    model: nn.Module
    rows: Tensor
    update: int
    lane: int
    last: bool
    """Of its lane."""


def plainly(micro: Micro) -> None:
    micro.model(micro.rows, micro.lane).backward()


def twice(micro: Micro) -> None:
    """Always two backward passes; in one lane of two updates three."""
    for _ in range(3 if micro.lane == 3 and micro.update in {2, 5} and micro.last else 2):
        plainly(micro)


def meddling(micro: Micro) -> None:
    """Change gradients after the backward pass: in place, by others, by none at all."""
    plainly(micro)
    if not micro.last or micro.update == 1:
        return
    first, *rest = micro.model.parameters()
    for parameter in rest[:: 2 + micro.lane % 2]:
        if parameter.grad is not None and micro.update == 2:
            parameter.grad.mul_(0.5)
        elif parameter.grad is not None:
            parameter.grad = parameter.grad * 3
    if micro.update == 5 and micro.lane == 1:
        first.grad = None
    if micro.update == 2 and micro.lane == 3:
        micro.model.zero_grad()


def silent(micro: Micro) -> None:
    """Some lanes of later updates bring no gradient."""
    if micro.update < 2 or micro.lane % 2 == 0:
        plainly(micro)


@dataclass
class Job:
    """A model in training, on one rank."""

    place: Place
    name: str = "Plain"
    way: Callable[[Micro], None] = plainly
    seen: list[Any] = field(default_factory=list)
    update: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        place = self.place
        self.model = MODELS[self.name]()
        self.reducer = LaneReducer(
            list(self.model.named_parameters()),
            place.lanes,
            place.rank,
            place.ranks,
            place.group,
            beside=place.beside,
            bucket_bytes=place.bucket_bytes,
        )
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=0.01)

    def lanes(self) -> dict[int, Tensor]:
        total = UPDATES[self.update]
        rows = torch.randn(total, 6, generator=torch.Generator().manual_seed(50 + self.update))
        bounds = lane_bounds(total, self.place.lanes)
        parts = {lane: rows[bounds[lane] : bounds[lane + 1]] for lane in range(self.place.lanes)}
        return {lane: part for lane, part in parts.items() if len(part)}

    def compute(self, before_last: Callable[[], None] = lambda: None) -> None:
        """Forward and backward of all microbatches of this rank."""
        lanes = self.lanes()
        self.reducer.begin(self.update, list(lanes))
        own = [lane for lane in self.reducer.owned if lane in lanes]
        for lane in own:
            batches = lanes[lane].split(2)
            for index, rows in enumerate(batches):
                last = index == len(batches) - 1
                torch.manual_seed(self.update * 10_000 + lane * 100 + index)
                if last and lane == own[-1]:
                    before_last()
                    self.reducer.closes(lane)
                self.way(Micro(self.model, rows, self.update, lane, last))
            self.reducer.lane_done(lane)

    def step(self, reduced: Reduced) -> None:
        for gradient in reduced.gradients:
            gradient.div_(7)
        self.optimizer.step()
        self.seen.append(
            {
                "without": [n for n, p in self.model.named_parameters() if p.grad is None],
                "state": {n: bits(t) for n, t in self.model.state_dict().items()},
            }
        )
        self.update += 1

    def train(self, updates: int) -> None:
        for _ in range(updates):
            self.compute()
            self.step(self.reducer.finish({}, {}))

    def found(self) -> Any:
        return {
            "seen": self.seen,
            "overlapped": self.reducer.overlapped,
            "repeated": self.reducer.repeated,
        }


def train(place: Place, name: str = "Plain", way: Callable[[Micro], None] = plainly) -> Any:
    job = Job(place, name, way)
    job.train(len(UPDATES))
    return job.found()


def midway(place: Place) -> Any:
    """The last rank meets the others before its last microbatch, when they wait in `finish`."""
    job = Job(place)
    job.train(1)
    late = place.ranks > 1 and place.rank == place.ranks - 1
    same = True
    for _ in range(2):
        job.compute((lambda: met(job)) if late else (lambda: None))
        before = held_bits(job)
        reduced = job.reducer.finish({}, {})
        if place.ranks > 1 and not late:
            assert reduced.midway
            same = same and held_bits(job) == before
            reduced = job.reducer.finish({}, {})
        job.step(reduced)
    job.train(1)
    return {**job.found(), "same": same}


def met(job: Job) -> None:
    assert job.reducer.meet(Wish(WISH_SAVE, 5)).tokens[-1] == 5


def held_bits(job: Job) -> list[Any]:
    return [
        [list(present), {name: bits(tensor) for name, tensor in tensors.items()}]
        for present, tensors in job.reducer.held().values()
    ]


def failures(place: Place) -> Any:
    """Whatever ends an update, nothing is left of it: the same groups train on afterwards."""
    bad = place.rank == place.ranks - 1
    result: dict[str, Any] = {}

    def raising(micro: Micro) -> None:
        broken = bad and micro.update == 2 and micro.last
        loss = micro.model(Broken.apply(micro.rows.requires_grad_()), micro.lane)
        (loss if broken else micro.model(micro.rows.detach(), micro.lane)).backward()

    job = Job(place, way=raising)
    job.train(2)
    try:
        job.compute()
        result["backward"] = caught(lambda: job.reducer.finish({}, {}))
    except ValueError as error:
        reason = str(error)
        job.reducer.begin(2, list(job.lanes()))  # as a session does, which may not have begun
        result["backward"] = caught(lambda: job.reducer.abort(reason))

    job = Job(place)
    job.train(3)  # the next is a tail
    if bad:
        job.reducer.begin(3, list(job.lanes()))
        result["before"] = caught(lambda: job.reducer.abort("no data"))
    else:
        job.compute()
        result["before"] = caught(lambda: job.reducer.finish({}, {}))

    job = Job(place)
    job.train(2)
    next(job.model.parameters()).requires_grad_(not bad)
    job.compute()
    result["frozen"] = caught(lambda: job.reducer.finish({}, {}))

    result["after"] = train(place)["seen"]
    return result


def leaving(place: Place) -> Any:
    """All ranks leave an update in which some have begun to send."""
    job = Job(place)
    job.train(1)
    bad = place.rank == place.ranks - 1

    class LeftError(Exception):
        pass

    def leave() -> None:
        met(job)
        job.reducer.let_go()
        raise LeftError

    if bad:
        with suppress(LeftError):
            job.compute(leave)
    else:
        job.compute()
        assert job.reducer.finish({}, {}).midway
        job.reducer.let_go()
    return {"overlapped": job.reducer.overlapped, "seen": train(place)["seen"]}


def traffic(place: Place) -> Any:
    """Bytes of an update in buckets that every rank count divides, and the memory for it."""
    parameters = [(f"p{i}", nn.Parameter(torch.ones(3072))) for i in range(4)]
    reducer = LaneReducer(
        parameters,
        place.lanes,
        place.rank,
        place.ranks,
        place.group,
        beside=place.beside,
        bucket_bytes=2 * 3072 * 4,
    )
    sent = []
    for update in range(3):
        before = reducer.bytes_sent
        reducer.begin(update)
        for lane in reducer.owned:
            if lane == reducer.owned[-1]:
                reducer.closes(lane)
            torch.stack([(p * lane).sum() for _, p in parameters]).sum().backward()
            reducer.lane_done(lane)
        reducer.finish({}, {})
        for _, parameter in parameters:
            assert parameter.grad is not None
            assert parameter.grad.unique().tolist() == [float(sum(range(place.lanes)))]
        sent.append(reducer.bytes_sent - before)
    return {"sent": sent, "buffers": reducer.buffers, "overlapped": reducer.overlapped}


def cases() -> dict[str, Callable[[Place], Any]]:
    models = {name: lambda place, name=name: train(place, name) for name in MODELS}
    ways = {
        way.__name__: lambda place, name=name, way=way: train(place, name, way)
        for name, way in (("Plain", twice), ("Odd", meddling), ("Odd", silent))
    }
    return {**models, **ways, "midway": midway, "traffic": traffic}


def among_ranks() -> dict[str, Callable[[Place], Any]]:
    """What has nothing to compare with at one rank."""
    return {"failures": failures, "leaving": leaving}


def main(process: int, folder: str) -> None:
    """Run every case at every place that this process is part of."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", timeout, world_size=RANKS, rank=process
    )
    seen: dict[str, Any] = {}
    for lanes, ranks in PLACES:
        members = list(range(ranks))
        groups = dist.new_group(members, timeout), dist.new_group(members, timeout)
        if ranks == RANKS:
            groups = None, second_group()
        if process >= ranks:
            continue
        place = Place(lanes, process, ranks, *groups)
        for name, case in {**cases(), **among_ranks()}.items():
            seen[f"{name}/{lanes}/{ranks}"] = case(place)
        for size in BUCKETS:
            sized = Place(lanes, process, ranks, *groups, size)
            seen[f"buckets of {size}/{lanes}/{ranks}"] = train(sized, "Odd")
    second = groups[1]._get_backend(torch.device("cpu")).options._timeout
    seen["timeout"] = [timeout.total_seconds(), second.total_seconds()]
    Path(folder, f"{process}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
