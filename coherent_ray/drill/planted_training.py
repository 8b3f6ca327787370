"""Planted bugs in training: each breaks what makes a resumed job the same job, and must be found.

A proof that has never failed proves nothing. So each rule that the claims rest on is broken once,
in this process; `prove` must then find a run that differs, and a named test must fail. What is
broken alike in every run (a loss that is divided wrongly everywhere) no comparison can find: such
bugs are left to tests that know the right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from coherent_ray.data.loader import LoadedUpdate, Loader
from coherent_ray.data.order import EpochOrder
from coherent_ray.drill.patching import Patch
from coherent_ray.train import buffers, collectives, exchange, reduce, restoring, update
from coherent_ray.train.exchange import Schedule
from coherent_ray.train.reduce import LaneReducer, Reduced

Need = Literal["dropout", "batch norm", "scheduler", "fp16"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One rule that is broken."""

    name: str
    needs: Need
    """What the job must have, so that it matters."""
    says: str
    """A part of what the proof says of it."""
    spot: str
    """A part of what is said of the place in the update; empty: nothing is."""
    test: str
    """The test that fails as well, by its node id below ``tests/``."""
    patches: tuple[Patch, ...]


def _by_rank(original: Callable[..., Schedule]) -> Callable[..., Schedule]:
    def schedule(lanes: int, ranks: int, present: tuple[bool, ...]) -> Schedule:
        plan = original(lanes, ranks, present)
        parts = range(sum(map(len, plan.rounds)))
        order = tuple((plan.root, part) for part in parts if part != plan.root)
        return replace(plan, additions=order)

    return schedule


def _seeded_by_rank(original: Callable[[int], None]) -> Callable[[int], None]:
    # The stand-in that the ranks of a rehearsal have there, not torch's.
    return lambda seed: original(seed ^ vars(collectives)["dist"].get_rank())


def _not_seeded(original: Callable[[int], None]) -> Callable[[int], None]:
    return lambda seed: None


def _local_count(original: Callable[..., Reduced]) -> Callable[..., Reduced]:
    def finish(reducer: LaneReducer, losses: Any, counts: Any, *wishes: int) -> Reduced:
        reduced = original(reducer, losses, counts, *wishes)
        return replace(reduced, count=max(1, sum(counts.values()) * reducer._ranks))

    return finish


def _any_lane(original: Callable[..., None]) -> Callable[..., None]:
    return lambda kept, lane: original(kept, 0)


def _never_sent(original: Any) -> Callable[..., None]:
    return lambda tensor, group: None


def _lost(ending: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def restored(tensors: dict[str, torch.Tensor], *rest: Any) -> Any:
            left = {
                name: torch.zeros_like(tensor) if name.endswith(ending) else tensor
                for name, tensor in tensors.items()
            }
            return original(left, *rest)

        return restored

    return wrap


def _new_again(index: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a part of the job, by its place among the arguments of `restore`, start over."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def restored(*arguments: Any) -> Any:
            before = dict(arguments[index].state_dict())
            result = original(*arguments)
            arguments[index].load_state_dict(before)
            return result

        return restored

    return wrap


def _one_further(original: Callable[..., Iterator[LoadedUpdate]]) -> Any:
    def updates(loader: Loader, first: int, last: int | None = None) -> Iterator[LoadedUpdate]:
        if first == 1:
            yield from original(loader, first, last)
            return
        plan = loader._plan
        for number, loaded in enumerate(original(loader, first + 1, last and last + 1), first):
            yield replace(loaded, plan=replace(plan.update(number)))

    return updates


def _always_the_first(original: Callable[..., None]) -> Callable[..., None]:
    def made(order: EpochOrder, examples: int, dataset_hash: str, seed: int, epoch: int) -> None:
        original(order, examples, dataset_hash, seed, 0)

    return made


_RANKS = "drill/test_rehearsal.py::test_any_rank_count_is_the_same_run"
_RESUME = "drill/test_rehearsal.py::test_a_run_that_died_and_was_resized_is_the_same_run"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "lanes are summed in the order of ranks",
        "dropout",
        "grad_norm is",
        "the sum over all lanes: the gradient of",
        f"{_RANKS}[dropout]",
        ((exchange, "schedule", _by_rank),),
    ),
    Mutant(
        "random numbers are keyed by rank",
        "dropout",
        "loss is",
        "aten.bernoulli_ (forward, 2 (Dropout)",
        f"{_RANKS}[dropout]",
        ((update, "seed_everything", _seeded_by_rank),),
    ),
    Mutant(
        "random numbers are carried on",
        "dropout",
        "loss is",
        "",  # what a generator held by then is not there when the update is run again
        f"{_RESUME}[dropout]",
        ((update, "seed_everything", _not_seeded),),
    ),
    Mutant(
        "a tail weighs what a rank has of it",
        "dropout",
        "ReplicaDiverged",
        "the optimizer's step: aten.div_",
        f"{_RANKS}[dropout]",
        ((reduce.LaneReducer, "finish", _local_count),),
    ),
    Mutant(
        "buffers are the last lane's of the first rank",
        "batch norm",
        "tensors differ; the first: model/norm",
        "the buffer norm.running_mean",
        f"{_RANKS}[batch norm]",
        ((buffers.LaneBuffers, "lane_end", _any_lane),),
    ),
    Mutant(
        "each rank keeps its own buffers",
        "batch norm",
        "ReplicaDiverged",
        "the buffer norm.running_mean",
        f"{_RANKS}[batch norm]",
        ((buffers, "from_first", _never_sent),),
    ),
    Mutant(
        "a moment is lost in a resume",
        "dropout",
        "state is",
        "differs first at: the optimizer's step",
        f"{_RESUME}[dropout]",
        ((restoring, "restore", _lost("/exp_avg_sq")),),
    ),
    Mutant(
        "the scaler starts over",
        "fp16",
        "the first: scaler.state._growth_tracker",
        "a resume from update",
        f"{_RESUME}[fp16]",
        ((restoring, "restore", _new_again(5)),),
    ),
    Mutant(
        "the schedule starts over",
        "scheduler",
        "lr is",
        "the state, at optimizer.groups.0",
        f"{_RESUME}[scheduler]",
        ((restoring, "restore", _new_again(4)),),
    ),
    Mutant(
        "the position is one update further after a resume",
        "dropout",
        "did not take the examples at its positions",
        "batch",
        f"{_RESUME}[dropout]",
        ((Loader, "updates", _one_further),),
    ),
    Mutant(
        "the epoch's key is forgotten",
        "dropout",
        "has the order of epoch 0",
        "",
        "data/test_plan.py::test_epochs_have_different_orders",
        ((EpochOrder, "__init__", _always_the_first),),
    ),
)
