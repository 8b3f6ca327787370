"""What each process of the agreement's tests starts with, and what it was told."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coherent_ray.errors import CoherentRayError
from coherent_ray.state.capture import State
from coherent_ray.train.agreement import check_same_start

RANKS = 3


def same() -> State:
    """The state that every rank has, unless a case changes it."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "model/weight": torch.randn(33, 7, generator=generator),
        "model/mean": torch.randn(5, generator=generator, dtype=torch.float64),
        "model/half": torch.randn(9, generator=generator).to(torch.bfloat16),
        "model/none": torch.empty(0, 4),
        "model/count": torch.tensor(7),
        "optimizer/weight/exp_avg": torch.zeros(33, 7),
    }
    return State(tensors, {"scheduler": {"last_lr": [0.1]}, "scaler": None})


def flip(tensor: Tensor, item: int, bit: int = 0) -> None:
    """Turn one bit of one item."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    tensor.view(kinds[tensor.element_size()]).view(-1)[item] ^= 1 << bit


def one_bit(state: State, rank: int) -> None:
    if rank == 2:
        flip(state.tensors["model/weight"], 100)


def one_bit_of_rank_0(state: State, rank: int) -> None:
    if rank == 0:
        flip(state.tensors["model/half"], 8, 14)


def last_bit_of_the_last_tensor(state: State, rank: int) -> None:
    if rank == 1:
        flip(state.tensors["optimizer/weight/exp_avg"], 33 * 7 - 1)


def two_tensors(state: State, rank: int) -> None:
    if rank == 1:
        flip(state.tensors["model/weight"], 0)
        flip(state.tensors["model/mean"], 0)


def sign_of_zero(state: State, rank: int) -> None:
    if rank == 2:
        state.tensors["optimizer/weight/exp_avg"][0, 0] = -0.0


def all_three(state: State, rank: int) -> None:
    state.tensors["model/count"] += rank


def other_shape(state: State, rank: int) -> None:
    if rank == 1:
        state.tensors["model/none"] = torch.empty(0, 5)


def other_dtype(state: State, rank: int) -> None:
    if rank == 1:
        state.tensors["model/half"] = state.tensors["model/half"].to(torch.float16)


def one_tensor_more(state: State, rank: int) -> None:
    if rank == 2:
        state.tensors["model/extra"] = torch.zeros(1)


def other_schedule(state: State, rank: int) -> None:
    if rank == 0:
        state.values["scheduler"]["last_lr"] = [0.1 + 1e-17 + 2e-17]
    if rank == 1:
        state.values["scheduler"]["last_lr"] = [0.2]


def nothing(state: State, rank: int) -> None:
    """All the same."""


CASES: dict[str, Callable[[State, int], None]] = {
    case.__name__: case
    for case in (
        nothing, one_bit, one_bit_of_rank_0, last_bit_of_the_last_tensor, two_tensors, sign_of_zero,
        all_three, other_shape, other_dtype, one_tensor_more, other_schedule,
    )
}  # fmt: skip


def told(change: Callable[[State, int], None], rank: int, ranks: int) -> Any:
    """Return the error that a rank gets; None where it goes on."""
    state = same()
    change(state, rank)
    try:
        check_same_start(state, rank, ranks, torch.device("cpu"))
    except CoherentRayError as error:
        facts = {"what": error.what, "where": error.where, "remedy": error.remedy}
        return {"type": type(error).__name__, "ranks": error.details["ranks"], **facts}
    return None


def main(rank: int, folder: str) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    # Twice nothing: after every refusal the ranks are still in step.
    seen = {name: told(case, rank, RANKS) for name, case in CASES.items()}
    seen["in step"] = told(nothing, rank, RANKS)
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
