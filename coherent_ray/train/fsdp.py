"""FSDP2 as a strategy: each rank holds some rows of every parameter, and of its moments.

`shard_model` applies `torch.distributed.fsdp.fully_shard`; `ShardedReducer` stands where the
canonical reduction stands otherwise. FSDP2 gathers parameters before each forward and backward pass
and sums gradients behind each: these are collectives, so *every rank takes the same number of
passes in an update* (`passes`). One with fewer microbatches repeats one, and its loss counts zero
times. The sum over ranks is the backend's, in an order that depends on the rank count: so the
updates are the same bit for bit at the same rank count, and at another they are not.

A rank that fails leaves the others in a collective that it will never enter: it cannot tell them,
as it does in the canonical reduction. It raises, and Ray Train ends the group.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from coherent_ray.config import Config
from coherent_ray.data.plan import UpdatePlan
from coherent_ray.errors import PeerLost, TaskError
from coherent_ray.state.capture import MODEL, plain
from coherent_ray.state.layout import spec_of
from coherent_ray.state.sharded import here, is_distributed, parts_of
from coherent_ray.train import finite
from coherent_ray.train.buffers import LaneBuffers
from coherent_ray.train.collectives import Group, second_group, sum_over_ranks
from coherent_ray.train.lanes import lanes_of, tree_sum
from coherent_ray.train.reduce import LaneReducer, Reduced
from coherent_ray.train.vote import Ballot, VoteShape, disagreement, failure

#: As torch clips: keeps a norm of zero from being divided by.
_EPSILON = 1e-6


def shard_model(model: nn.Module, ranks: int, device: torch.device, task: object = None) -> None:
    """Cut a model's parameters over all ranks, in place. All ranks must call this.

    Args:
        model: The whole model, the same on every rank; on the CPU, the device or ``meta``.
        ranks: Number of ranks, more than one.
        device: Where to train.
        task: Its ``shard(model, mesh)`` decides which modules are gathered together, where it has
            one. Otherwise each module of a `torch.nn.ModuleList` or `torch.nn.Sequential` that the
            model has directly is one, and the rest is another.

    Raises:
        TaskError: A parameter is not cut by rows over all ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    try:
        if hasattr(task, "shard"):
            task.shard(model, mesh)
        else:
            for block in _blocks(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
    except ValueError as error:
        raise TaskError(
            f"the model cannot be sharded: {error}",
            where="training.strategy",
            remedy="give every parameter a dimension, or use training.strategy: replicated",
        ) from error
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A sum, not a mean: what it is divided by is the update's global count.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    require_sharded(model, ranks)


def require_sharded(model: nn.Module, ranks: int, average: nn.Module | None = None) -> None:
    """Check that every parameter is cut by rows over all ranks, and that nothing is averaged.

    Raises:
        TaskError: One is not; names it.
    """
    if average is not None:
        raise TaskError(
            "the weights are averaged, which needs training.strategy: replicated",
            where="training.strategy",
            remedy="take configure_average out of the task, or use training.strategy: replicated",
        )
    for name, parameter in model.named_parameters():
        spec_of(MODEL + name, parameter, with_memory=False)
        if not is_distributed(parameter) or (parameter.numel() and parts_of(parameter) != ranks):
            raise TaskError(
                f"parameter {name!r} is not sharded over all {ranks} ranks",
                where=name,
                remedy="apply fully_shard to the whole model, last: in the task's shard(), or by "
                "run.shard(model) before the optimizer is made",
            )


def passes(plan: UpdatePlan, ranks: int) -> int:
    """Return how many forward and backward passes every rank takes in an update."""
    lanes = len(plan.lanes)
    return max(
        sum(len(plan.lanes[lane].microbatches) for lane in lanes_of(lanes, rank, ranks))
        for rank in range(ranks)
    )


class ShardedReducer:
    """One rank's side of the reduction where FSDP2 sums the gradients. Not thread-safe."""

    def __init__(self, model: nn.Module, lanes: int, rank: int, ranks: int) -> None:
        """Take a model that `shard_model` has cut."""
        self._named = list(model.named_parameters())
        self._parameters = [parameter for _, parameter in self._named]
        self._rank, self._ranks, self._lanes = rank, ranks, lanes
        self._group: Group = None
        self._device = next((here(p).device for p in self._parameters), torch.device("cpu"))
        self._shape = VoteShape(lanes, len(self._parameters), ranks)
        self._present: list[int] = []
        self._update = 0
        self.owned = lanes_of(lanes, rank, ranks)
        """The lanes that this rank carries."""

    def begin(self, update: int, with_examples: object = None) -> None:
        """Start an update: drop every ``.grad``."""
        for parameter in self._parameters:
            parameter.grad = None
        self._present = []
        self._update = update

    def closes(self, lane: int) -> None:
        """Hear that a lane's last backward pass is next; FSDP2 overlaps by itself."""

    def lane_done(self, lane: int) -> None:
        """Note a lane; FSDP2 has summed its gradient already."""
        self._present.append(lane)

    def finish(
        self,
        losses: Mapping[int, float],
        counts: Mapping[int, int],
        wishes: int = 0,
        token: int = 0,
    ) -> Reduced:
        """Vote; the sum over all lanes is in the parameters' ``.grad`` already, by rows.

        Args:
            losses: For each lane of this rank with examples, the sum of their losses.
            counts: For each such lane, the examples or tokens that the sum is over.
            wishes: Bits; the result has the union.
            token: Of the wish to save; the result has every rank's.

        Raises:
            TrainingFailed: The ranks are not at the same update.
            PeerLost: Another rank is gone.
        """
        touched = [parameter.grad is not None for parameter in self._parameters]
        ballot = Ballot(
            self._update, 0, losses, counts, self._present, touched, wishes, False, token
        )
        vector = torch.tensor(
            self._shape.encode(ballot, self._rank), dtype=torch.float64, device=self._device
        )
        sum_over_ranks(vector, self._group)
        outcome = self._shape.decode(vector.tolist())
        if len(set(outcome.updates)) > 1:
            raise disagreement("update", outcome.updates)
        return Reduced(
            loss_sum=tree_sum(outcome.losses),
            losses=outcome.losses,
            count=sum(outcome.counts),
            wishes=outcome.wishes,
            tokens=outcome.tokens,
            midway=False,
            gradients=tuple(self._gradients()),
        )

    def clip(self, limit: float | None, most: float | None = None) -> float:
        """Return the norm of the whole gradient, and clip it where there are limits.

        Args:
            limit: Of the norm; None: there is none.
            most: Of each value, which is cut first; None: there is none.

        Raises:
            PeerLost: Another rank is gone.
        """
        gradients = self._gradients()
        before = norm = self._norm(gradients)
        if most is not None:
            for gradient in gradients:
                gradient.clamp_(-most, most)
            norm = self._norm(gradients) if limit is not None else norm
        if limit is not None and gradients:
            torch._foreach_mul_(gradients, min(limit / (norm + _EPSILON), 1.0))
        return before

    def _norm(self, gradients: list[Tensor]) -> float:
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            square += get_total_norm(gradients).double().square()
        sum_over_ranks(square, self._group)
        return float(square.sqrt())

    def require_finite(self, update: int) -> None:
        """Return if every trainable parameter is finite on every rank; all decide alike.

        Raises:
            NotFinite: One is not; names it.
            PeerLost: Another rank is gone.
        """
        flags = torch.zeros(len(self._parameters), dtype=torch.float64, device=self._device)
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                flags[index] = (~torch.isfinite(here(parameter)).all()).double()
        sum_over_ranks(flags, self._group)
        if bool(flags.any()):
            name = self._named[int(flags.nonzero()[0])][0]
            raise finite.poisoned(name, update)

    def sync_buffers(self, buffers: LaneBuffers) -> None:
        """End an update of the model's buffers: every rank gets what lane 0 left."""
        buffers.finish(self._rank, self._ranks, self._group)

    def abort(self, reason: str) -> NoReturn:
        """Raise what this rank failed of; the others wait in a collective, and hear nothing.

        Raises:
            TrainingFailed: Always.
        """
        raise failure(self._update, {self._rank: reason})

    def _gradients(self) -> list[Tensor]:
        """Return this rank's rows of all gradients; none where it has no row."""
        found = (parameter.grad for parameter in self._parameters)
        return [here(g) for g in found if g is not None and here(g).numel()]


def reducer_of(
    model: nn.Module, config: Config, rank: int, ranks: int
) -> LaneReducer | ShardedReducer:
    """Return what sums the gradients of a model under a configuration's strategy."""
    lanes = config.data.lanes
    if config.training.strategy == "fsdp2" and ranks > 1:
        return ShardedReducer(model, lanes, rank, ranks)
    beside = second_group() if ranks > 1 else None
    return LaneReducer(list(model.named_parameters()), lanes, rank, ranks, beside=beside)


def require_finite(reducer: LaneReducer | ShardedReducer, model: nn.Module, update: int) -> None:
    """Return if every trainable parameter is finite; all ranks decide alike.

    Raises:
        NotFinite: One is not; names it.
    """
    if isinstance(reducer, ShardedReducer):
        reducer.require_finite(update)
    else:
        finite.require_parameters(model, update)


def as_lost_peer(error: BaseException) -> PeerLost | None:
    """Return an error of FSDP2's own collectives as what it means; None: it is another.

    They run inside the model's passes, where nothing of ours stands between.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if not any("torch/distributed/distributed_c10d.py" in f.filename for f in frames[-3:]):
        return None
    reason = str(error).strip().partition("\n")[0]
    return PeerLost(
        f"a collective of FSDP2 failed: {reason}",
        remedy="see why another rank ended; the group is started again",
    )


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (block for block in child if any(True for _ in block.parameters()))


def rows_at(
    model: nn.Module | None, layout: Any, rank: int, ranks: int
) -> dict[str, tuple[int, int]]:
    """Return the rows of stored tensors that a rank will hold of a sharded model.

    Args:
        model: The whole model; None: it is not known yet, and nothing is.
        layout: Of the stored state.
        rank: This rank.
        ranks: Number of ranks; at 1 nothing is cut.
    """
    from coherent_ray.commit.manifest import rows_of
    from coherent_ray.state.sharded import parameter_of

    if model is None or ranks == 1:
        return {}
    live = dict(plain(model).named_parameters())
    return {
        spec.name: rows_of(spec.shape[0], rank, ranks)
        for spec in layout.tensors
        if (owner := parameter_of(spec.name, live))
        and spec.nbytes
        and spec.shape == tuple(live[owner].shape)
    }
