"""The canonical reduction: the gradient of an update, summed over lanes along one fixed tree.

The sum has the same bits at every rank count from 1 to ``lanes``. The tree is `lanes`'; this room
drives it: a rank's lanes are summed as they come, then all ranks vote (`vote`), then the nodes
that ranks hold whole are exchanged (`exchange`). torch.distributed, no Ray.

One update::

    reducer.begin(update)
    for lane in the lanes that this rank carries and that have examples, in order:
        ... forward and backward of its microbatches ...
        reducer.lane_done(lane)
    reduced = reducer.finish(losses, counts, wishes)

A rank that raises anywhere before `finish` calls `abort` instead: it votes too, and every rank
raises one `TrainingFailed` that names it. A rank that died cannot vote: the others raise
`PeerLost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from coherent_ray import canonical
from coherent_ray.train.buffers import LaneBuffers
from coherent_ray.train.collectives import Group, gather_all, sum_over_ranks
from coherent_ray.train.exchange import Exchange
from coherent_ray.train.gradients import (
    FlatGradients,
    FlatLayout,
    clear,
    require_dense,
    touched_now,
)
from coherent_ray.train.lanes import Carry, Subtree, lanes_of, tree_sum
from coherent_ray.train.vote import Ballot, Outcome, VoteShape, disagreement, failure
from coherent_ray.train.wishes import MIDWAY, Wish

#: Bytes of a failed rank's reason that reach the others.
REASON_BYTES = 2048
#: Hex digits of the contents' digest that fit exactly into a float64.
_CONTENTS_DIGITS = 12


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """What an update came to; the gradients are in the parameters' ``.grad``, not yet divided."""

    loss_sum: float
    """Sum over all accepted examples or tokens, float64, along the same tree."""
    losses: tuple[float, ...]
    """Sum over each lane; the same on every rank."""
    count: int
    """Examples or tokens that it is over."""
    wishes: int
    """The union of all ranks' wishes."""
    tokens: tuple[int, ...]
    """Of their wishes to save, by rank; 0: of none."""
    midway: bool
    """Whether a rank stands between two microbatches: then nothing was reduced, all ranks do what
    the wishes say, and then they vote once more."""
    gradients: tuple[Tensor, ...]
    """The memory behind every ``.grad``, one 1-D tensor a dtype: divide or clip it at once.

    Between the parameters, and where a parameter was not touched, it holds zeros.
    """


@dataclass(frozen=True, slots=True)
class Met:
    """What all ranks said in a vote that did not end the update."""

    wishes: int
    """The union of all ranks' wishes."""
    tokens: tuple[int, ...]
    """Of their wishes to save, by rank; 0: of none."""


class LaneReducer:
    """One rank's side of the reduction. Not thread-safe; used once an update."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        lanes: int,
        rank: int,
        ranks: int,
        group: Group = None,
    ) -> None:
        """Lay out the gradients of a model.

        Args:
            parameters: Names and parameters, in the same order on every rank
                (``model.named_parameters()``); one that is there twice counts once.
            lanes: Lanes of every update.
            rank: This rank.
            ranks: Number of ranks, at most ``lanes``; at 1 no process group is needed.
            group: The process group; None: the default one.

        Raises:
            ValueError: ``rank`` and ``ranks`` do not fit the lanes or the process group.
            TaskError: The trainable parameters lie on several devices.
        """
        if ranks > 1 and (dist.get_rank(group), dist.get_world_size(group)) != (rank, ranks):
            raise ValueError(
                f"rank {rank} of {ranks} was asked for, but the process group says rank "
                f"{dist.get_rank(group)} of {dist.get_world_size(group)}"
            )
        self._parameters = list({id(p): (name, p) for name, p in reversed(parameters)}.values())
        self._parameters.reverse()
        self._lanes = lanes
        self._owned = lanes_of(lanes, rank, ranks)
        self._rank = rank
        self._ranks = ranks
        self._group = group
        self._shape = VoteShape(lanes, len(self._parameters), ranks)
        self._update = 0
        self._open = False
        self.bytes_sent = 0
        """Gradient bytes that this rank has sent to others, over all updates."""
        self._device = next((p.device for _, p in self._parameters), torch.device("cpu"))
        self._exchanger: Exchange | None = None
        self._result: FlatGradients | None = None
        self._build()

    @property
    def owned(self) -> range:
        """The lanes that this rank carries."""
        return self._owned

    def begin(self, update: int) -> None:
        """Start an update: drop every ``.grad``, the last result too.

        Args:
            update: Its number; all ranks must be at the same.
        """
        if self._trainable() != self._layout.trainable:
            clear(self._layout)
            self._build()
        clear(self._layout)
        self._reset()
        self._update = update
        self._open = True

    def lane_done(self, lane: int) -> None:
        """Take the ``.grad`` of all parameters as a lane's gradient, and clear them.

        Lanes come in ascending order. A lane without examples is simply not named; a
        parameter without ``.grad`` adds nothing.

        Raises:
            ValueError: The lane is not this rank's, or it came out of order.
            TaskError: A gradient is sparse.
            RuntimeError: No update has begun.
        """
        if not self._open:
            raise RuntimeError("lane_done was called outside an update; call begin first")
        if lane not in self._owned or lane < self._carry.next:
            raise ValueError(f"lane {lane} is not due: {self._owned} from {self._carry.next} on")
        self._skip_to(lane)
        touched = touched_now(self._layout)
        additions = self._carry.arrive(lane, present=bool(touched))
        if not touched:
            return
        self._present.append(lane)
        self._touched.update(touched)
        # The first addition is done in place, straight from the gradients: no copy for this lane.
        if not additions:
            self._held.append(self._taken())
        self._held[-1].take(add=additions > 0)
        self._merge(additions - 1)

    def finish(
        self,
        losses: Mapping[int, float],
        counts: Mapping[int, int],
        wishes: int = 0,
        token: int = 0,
    ) -> Reduced:
        """Vote, exchange, and leave the sum over all lanes in the parameters' ``.grad``.

        A parameter that no lane touched gets None. All ranks must call this (or `abort`).

        Args:
            losses: For each lane of this rank with examples, the sum of their losses.
            counts: For each such lane, the examples or tokens that the sum is over.
            wishes: Bits, below ``2 ** WISH_BITS``; the result has the union.
            token: Of the wish to save; the result has every rank's.

        Raises:
            TrainingFailed: A rank failed, or the ranks are not at the same update.
            PeerLost: Another rank is gone.
        """
        try:
            ballot = self._ballot(losses, counts, wishes, token)
        except Exception as error:
            self.abort(f"{type(error).__name__}: {error}")
        outcome = self._vote(ballot, "")
        self._open = midway = bool(outcome.wishes & MIDWAY)
        return Reduced(
            loss_sum=tree_sum(outcome.losses),
            losses=outcome.losses,
            count=sum(outcome.counts),
            wishes=outcome.wishes & ~MIDWAY,
            tokens=outcome.tokens,
            midway=midway,
            gradients=() if midway else self._exchange(outcome),
        )

    def meet(self, wish: Wish) -> Met:
        """Vote between two microbatches; what was summed so far stays, and the update goes on.

        A rank that has done all of its lanes is in `finish` meanwhile, and learns of it there.

        Args:
            wish: This rank's.

        Raises:
            TrainingFailed: A rank failed, or the ranks are not at the same update.
            PeerLost: Another rank is gone.
        """
        none = [False] * len(self._parameters)
        bits = wish.bits | MIDWAY
        ballot = Ballot(self._update, self._contents, {}, {}, (), none, bits, False, wish.token)
        outcome = self._vote(ballot, "")
        return Met(outcome.wishes & ~MIDWAY, outcome.tokens)

    def held(self) -> dict[Subtree, tuple[tuple[int, ...], dict[str, Tensor]]]:
        """Return the nodes that are summed so far.

        Returns:
            By node: its lanes that brought a gradient, and their sum by parameter. The tensors are
            the sums themselves: they change when the next lane is done.
        """
        return {
            node: (
                tuple(lane for lane in self._present if node.start <= lane < node.stop),
                gradients.named(self._touched),
            )
            for node, gradients in zip(self._carry.held, self._held, strict=True)
        }

    def gradients(self) -> dict[str, Tensor]:
        """Return what the running lane has come to: every ``.grad`` that there is, by parameter.

        Raises:
            TaskError: A gradient is sparse.
        """
        found = {name: p.grad for name, p in self._parameters if p.grad is not None}
        for name, gradient in found.items():
            require_dense(name, gradient)
        return found

    def resume(self, gradients: Mapping[str, Tensor]) -> None:
        """Put the running lane, which has just begun, where it was: the inverse of `gradients`."""
        for name, parameter in self._parameters:
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, copy=True)

    @property
    def trainable(self) -> dict[str, Tensor]:
        """The parameters that an update changes, by name."""
        return {name: p for name, p in self._parameters if p.requires_grad}

    def put(self, node: Subtree, present: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Take a whole node from `held` of some other rank or time, instead of its lanes.

        Args:
            node: Lies in this rank's lanes; comes in order, as lanes do.
            present: Its lanes that brought a gradient.
            tensors: By name of the parameter; the others were not touched.
        """
        self._skip_to(node.start)
        additions = self._carry.arrive(node.start, bool(present), node.size)
        if not present:
            return
        self._present.extend(present)
        self._touched |= {i for i, (n, _) in enumerate(self._parameters) if n in tensors}
        gradients = self._taken()
        gradients.put(tensors)
        self._held.append(gradients)
        self._merge(additions)

    def abort(self, reason: str) -> NoReturn:
        """Vote that this rank failed; then every rank raises, this one too.

        Args:
            reason: What happened here; the first `REASON_BYTES` bytes reach all ranks.

        Raises:
            TrainingFailed: Always; it names every rank that failed, and why.
            PeerLost: But where another rank is gone.
        """
        self._open = False
        none = [False] * len(self._parameters)
        ballot = Ballot(self._update, self._contents, {}, {}, (), none, 0, failed=True)
        self._vote(ballot, reason)
        raise AssertionError("a failed vote always raises")

    def sync_buffers(self, buffers: LaneBuffers) -> None:
        """End an update of the model's buffers: every rank gets what lane 0 left.

        All ranks must call this, or none.

        Raises:
            PeerLost: Another rank is gone.
        """
        buffers.finish(self._rank, self._ranks, self._group)

    # --- one update -------------------------------------------------------------------------------

    def _ballot(
        self, losses: Mapping[int, float], counts: Mapping[int, int], wishes: int, token: int
    ) -> Ballot:
        """Close the lanes, and make all that can fail locally fail before the vote."""
        if not self._open:
            raise RuntimeError("finish was called outside an update; call begin first")
        strangers = sorted(lane for lane in {*losses, *counts} if lane not in self._owned)
        if strangers:
            raise ValueError(f"lanes {strangers} are not carried by rank {self._rank}")
        self._skip_to(self._owned.stop)
        if not self._held and self._result is None:
            self._result = self._taken()
        if self._ranks > 1 and self._exchanger is None:
            self._exchanger = Exchange(
                self._layout, self._lanes, self._rank, self._ranks, self._group
            )
        touched = [index in self._touched for index in range(len(self._parameters))]
        ballot = Ballot(
            self._update,
            self._contents,
            losses,
            counts,
            self._present,
            touched,
            wishes,
            failed=False,
            token=token,
        )
        self._shape.encode(ballot, self._rank)
        return ballot

    def _vote(self, ballot: Ballot, reason: str) -> Outcome:
        values = self._shape.encode(ballot, self._rank)
        if self._ranks > 1:
            vector = torch.tensor(values, dtype=torch.float64, device=self._device)
            sum_over_ranks(vector, self._group)
            values = vector.tolist()
        outcome = self._shape.decode(values)
        if outcome.failed:
            raise failure(self._update, self._reasons(outcome.failed, reason))
        for what, said in (("update", outcome.updates), ("parameters", outcome.contents)):
            if len(set(said)) > 1:
                raise disagreement(what, said)
        return outcome

    def _reasons(self, failed: Sequence[int], reason: str) -> dict[int, str]:
        """Bring the failed ranks' reasons to all; every rank is here, as all have voted."""
        if self._ranks == 1:
            return {0: reason}
        mine = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
        texts = torch.empty(self._ranks * REASON_BYTES, dtype=torch.uint8, device=self._device)
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)
        gather_all(texts, own, self._group)
        raw = bytes(texts.tolist())
        cut = {rank: raw[rank * REASON_BYTES : (rank + 1) * REASON_BYTES] for rank in failed}
        return {rank: text.rstrip(b"\0").decode(errors="ignore") for rank, text in cut.items()}

    def _exchange(self, outcome: Outcome) -> tuple[Tensor, ...]:
        if self._held:
            self._result = self._held[0]
        result = self._result
        if result is None or not any(outcome.present):
            return ()
        if self._exchanger is not None:
            self.bytes_sent += self._exchanger.run(self._held, outcome.present, result)
        result.give(outcome.touched)
        groups = self._layout.groups
        return tuple(f[: g.items] for f, g in zip(result.flats, groups, strict=True))

    def _skip_to(self, lane: int) -> None:
        """Let the lanes before one arrive empty, and add what that completes."""
        while self._carry.next < lane:
            self._merge(self._carry.arrive(self._carry.next, present=False))

    # --- memory -----------------------------------------------------------------------------------

    def _build(self) -> None:
        """Lay out what is trainable now; memory is taken when it is first needed."""
        self._layout = FlatLayout(self._parameters, self._ranks)
        facts = [self._lanes, self._layout.facts()]
        self._contents = int(canonical.digest(facts).partition(":")[2][:_CONTENTS_DIGITS], 16)
        self._exchanger = None
        self._spare: list[FlatGradients] = []
        self._clear_update()

    def _clear_update(self) -> None:
        """Forget the last update, but for its place in the memory."""
        self._carry = Carry(self._owned, self._lanes)
        self._held: list[FlatGradients] = []
        self._result = None
        self._present: list[int] = []
        self._touched: set[int] = set()

    def _reset(self) -> None:
        """Make all memory spare again."""
        if self._result is not None and self._result not in self._held:
            self._held.append(self._result)
        self._spare.extend(self._held)
        self._clear_update()

    def _taken(self) -> FlatGradients:
        return self._spare.pop() if self._spare else FlatGradients(self._layout)

    def _merge(self, additions: int) -> None:
        """Add the top of the stack to what is under it, some times."""
        for _ in range(additions):
            done = self._held.pop()
            self._held[-1].add(done)
            self._spare.append(done)

    def _trainable(self) -> tuple[int, ...]:
        return tuple(i for i, (_, p) in enumerate(self._parameters) if p.requires_grad)
