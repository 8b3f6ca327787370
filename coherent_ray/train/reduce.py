"""The canonical reduction: the gradient of an update, summed over lanes along one fixed tree.

The sum has the same bits at every rank count from 1 to ``lanes``. The tree is `lanes`'; this room
drives it: a rank's lanes are summed as they come, the nodes that ranks hold whole are exchanged
(`exchange`), and all ranks vote (`vote`). torch.distributed, no Ray.

One update::

    reducer.begin(update, the lanes that have examples, on any rank)
    for lane in the lanes that this rank carries and that have examples, in order:
        ... forward and backward of its microbatches, but for the very last:
        reducer.closes(lane)
        ... forward and backward of that ...
        reducer.lane_done(lane)
    reduced = reducer.finish(losses, counts, wishes)

In the backward pass after `closes` each bucket is sent as soon as its sum over this rank's lanes is
final. What is sent then cannot wait for the vote, so it goes through a process group of its own:
there its order is the buckets', here the vote's, and neither has to wait for the other. If the vote
says that an update failed, all ranks end what any has begun. Without a second group, in a layout's
first update, and where a gradient changed after it was sent, all is exchanged after the vote.

A rank that raises anywhere before `finish` calls `abort` instead: it votes too, and every rank
raises one `TrainingFailed` that names it. A rank that died cannot vote: the others raise
`PeerLost`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from coherent_ray import canonical
from coherent_ray.errors import PeerLost, TrainingFailed
from coherent_ray.train.arrivals import Arrivals
from coherent_ray.train.buffers import LaneBuffers
from coherent_ray.train.collectives import Group, gather_all, sum_over_ranks
from coherent_ray.train.exchange import Exchange
from coherent_ray.train.gradients import (
    BUCKET_BYTES,
    FlatGradients,
    FlatLayout,
    clear,
    require_dense,
)
from coherent_ray.train.lanes import Subtree, lanes_of, tree_sum
from coherent_ray.train.sums import LaneSums
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
    """The memory behind every ``.grad``, one 1-D tensor a bucket: divide or clip it at once.

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
        *,
        beside: Group = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Lay out the gradients of a model.

        Args:
            parameters: Names and parameters, in the same order on every rank
                (``model.named_parameters()``); one that is there twice counts once.
            lanes: Lanes of every update.
            rank: This rank.
            ranks: Number of ranks, at most ``lanes``; at 1 no process group is needed.
            group: The process group; None: the default one.
            beside: Another one of the same ranks, for what is sent during a backward pass; None:
                nothing is.
            bucket_bytes: What is sent at once, but for a parameter that is larger.

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
        self._beside = beside
        self._bucket_bytes = bucket_bytes
        self._shape = VoteShape(lanes, len(self._parameters), ranks)
        self._update = 0
        self._open = False
        self.bytes_sent = 0
        """Gradient bytes that this rank has sent to others, over all updates."""
        self.overlapped = 0
        """Buckets that it has begun to send in a backward pass, over all updates."""
        self.repeated = 0
        """Updates that were exchanged once more, as a gradient changed after it was sent."""
        self._device = next((p.device for _, p in self._parameters), torch.device("cpu"))
        self._agreed: Exchange | None = None
        self._any_begun = 0
        self._exchanger: Exchange | None = None
        self._arrivals: Arrivals | None = None
        self._closing: int | None = None
        self._build()
        self._prepare(None)

    @property
    def buffers(self) -> int:
        """How many sums of lanes this rank's memory is for; each is as large as the gradient."""
        return self._sums.buffers

    @property
    def owned(self) -> range:
        """The lanes that this rank carries."""
        return self._owned

    def begin(self, update: int, lanes: Collection[int] | None = None) -> None:
        """Start an update: drop every ``.grad``, the last result too.

        Args:
            update: Its number; all ranks must be at the same.
            lanes: The lanes, of all ranks, that are to come; None: every one. All ranks must say
                the same.
        """
        if self._trainable() != self._layout.trainable:
            clear(self._layout)
            self._build()
        clear(self._layout)
        self._update = update
        self._prepare(lanes)
        self._open = True

    def closes(self, lane: int) -> None:
        """Say that what is computed until `lane_done` is all that this rank's lanes still bring.

        From here on, what is final is sent in the backward pass; bits do not depend on it.

        Raises:
            ValueError: The lane is not this rank's, or it came out of order.
        """
        self._require_due(lane)
        if self._arrivals is None or any(self._planned[lane + 1 : self._owned.stop]):
            return
        sends = self._exchanger is not None and self._exchanger is self._agreed
        self._arrivals.open(self._send if sends else None)
        if sends:
            self._closing = lane
            self._sums.close(lane)

    def lane_done(self, lane: int) -> None:
        """Take the ``.grad`` of all parameters as a lane's gradient, and clear them.

        Lanes come in ascending order. A lane without examples is simply not named; a
        parameter without ``.grad`` adds nothing.

        Raises:
            ValueError: The lane is not this rank's, or it came out of order.
            TaskError: A gradient is sparse.
            RuntimeError: No update has begun.
            PeerLost: Another rank is gone.
        """
        self._require_due(lane)
        same = self._arrivals is None or self._arrivals.close()
        closing, self._closing = self._closing, None
        self.overlapped += self._begun
        if closing is not None and self._begun:
            if same and closing == lane:
                while self._begun < len(self._layout.buckets):
                    self._send(self._begun)
                self._sums.closed(lane)
                return
            self._again = True
        self._sums.reopen()
        self._sums.take(lane)

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
        outcome = self._vote(self._blank(wish.bits | MIDWAY, wish.token), "")
        return Met(outcome.wishes & ~MIDWAY, outcome.tokens)

    def held(self) -> dict[Subtree, tuple[tuple[int, ...], dict[str, Tensor]]]:
        """Return the nodes that are summed so far.

        Returns:
            By node: its lanes that brought a gradient, and their sum by parameter. The tensors are
            the sums themselves: they change when the next lane is done.
        """
        return self._sums.named()

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
        self._sums.put(node, present, tensors)

    def abort(self, reason: str) -> NoReturn:
        """Vote that this rank failed; then every rank raises, this one too.

        Args:
            reason: What happened here; the first `REASON_BYTES` bytes reach all ranks.

        Raises:
            TrainingFailed: Always; it names every rank that failed, and why.
            PeerLost: But where another rank is gone.
        """
        self._open = False
        self._vote(self._blank(failed=True), reason)
        raise AssertionError("a failed vote always raises")

    def let_go(self) -> None:
        """End what was begun of an update that does not go on after the vote before.

        All ranks must call this, or none.

        Raises:
            PeerLost: Another rank is gone.
        """
        exchange = self._agreed
        if exchange is None or not self._any_begun:
            return
        if not exchange.begun:
            exchange.begin(self._planned)
        while exchange.begun < self._any_begun:
            exchange.start(exchange.blank())
        self.bytes_sent += exchange.finish()
        self._any_begun = 0

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
        self._sums.skip_to(self._owned.stop)
        if self._ranks > 1 and self._exchanger is None:
            group = self._group if self._beside is None else self._beside
            self._exchanger = Exchange(self._layout, self._lanes, self._rank, self._ranks, group)
        touched = [index in self._sums.touched for index in range(len(self._parameters))]
        mine = self._update, self._contents, losses, counts, self._sums.present, touched
        ballot = Ballot(*mine, wishes, False, token, self._begun, self._again)
        self._shape.encode(ballot, self._rank)
        return ballot

    def _blank(self, wishes: int = 0, token: int = 0, *, failed: bool = False) -> Ballot:
        """Return what this rank says when it has no sum to exchange."""
        none = [False] * len(self._parameters)
        mine = self._update, self._contents
        return Ballot(*mine, {}, {}, (), none, wishes, failed, token, self._begun)

    def _vote(self, ballot: Ballot, reason: str) -> Outcome:
        values = self._shape.encode(ballot, self._rank)
        if self._ranks > 1:
            vector = torch.tensor(values, dtype=torch.float64, device=self._device)
            sum_over_ranks(vector, self._group)
            values = vector.tolist()
        outcome = self._shape.decode(values)
        self._any_begun = outcome.begun
        if outcome.failed:
            raise self._ended(outcome, failure(self._update, self._reasons(outcome.failed, reason)))
        for what, said in (("update", outcome.updates), ("parameters", outcome.contents)):
            if len(set(said)) > 1:
                raise self._ended(outcome, disagreement(what, said))
        return outcome

    def _ended(self, outcome: Outcome, error: TrainingFailed) -> TrainingFailed:
        """Return an error that every rank raises, when nothing that was begun is left."""
        # At different updates the ranks may have begun different things: then nothing can be ended.
        if len(set(outcome.updates)) == 1:
            with suppress(PeerLost):
                self.let_go()
        return error

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
        if (result := self._sum_of_all(outcome)) is None:
            return ()
        result.give(outcome.touched)
        buckets = self._layout.buckets
        return tuple(f[: b.items] for f, b in zip(result.flats, buckets, strict=True))

    def _sum_of_all(self, outcome: Outcome) -> FlatGradients | None:
        """Return the root of the tree; None: no lane brought a gradient."""
        present, exchange = outcome.present, self._exchanger
        surprise = any(here and not told for here, told in zip(present, self._planned, strict=True))
        if outcome.begun and (outcome.again or surprise):
            self.let_go()
            self.repeated += 1
        if not any(present):
            return None
        if exchange is None:
            (result,) = self._sums.nodes.values()
            return result
        sent = self._planned if self._any_begun else present
        nodes = self._sums.for_nodes(sent)
        if not exchange.begun:
            exchange.begin(sent)
        for index in range(exchange.begun, len(self._layout.buckets)):
            exchange.start([node.flats[index] for node in nodes])
        self.bytes_sent += exchange.finish()
        self._agreed = exchange
        return exchange.result

    def _send(self, index: int) -> None:
        """Send a bucket of the last lane with what it completes: the next one."""
        exchange = self._exchanger
        assert exchange is not None
        if not exchange.begun:
            exchange.begin(self._planned)
        self._sums.total()
        exchange.start([node.flats[index] for node in self._sums.for_nodes(self._planned)])

    @property
    def _begun(self) -> int:
        """Buckets that this rank has begun to exchange."""
        return self._agreed.begun if self._agreed is not None else 0

    def _require_due(self, lane: int) -> None:
        if not self._open:
            raise RuntimeError("lane_done was called outside an update; call begin first")
        if lane not in self._owned or lane < self._sums.due:
            raise ValueError(f"lane {lane} is not due: {self._owned} from {self._sums.due} on")

    # --- memory -----------------------------------------------------------------------------------

    def _build(self) -> None:
        """Lay out what is trainable now; memory is taken when it is first needed."""
        self._layout = FlatLayout(self._parameters, self._ranks, self._bucket_bytes)
        facts = [self._lanes, self._bucket_bytes, self._layout.facts()]
        self._contents = int(canonical.digest(facts).partition(":")[2][:_CONTENTS_DIGITS], 16)
        # What was agreed before stays: others may have begun it, where only this rank has changed.
        self._exchanger = None
        self._sums = LaneSums(self._layout, self._owned, self._lanes)
        if self._arrivals is not None:
            self._arrivals.remove()
        self._arrivals = Arrivals(self._layout) if self._beside is not None else None

    def _prepare(self, lanes: Collection[int] | None) -> None:
        """Forget the last update, but for its memory."""
        self._sums.reset()
        if self._arrivals is not None:
            self._arrivals.close()
        self._planned = tuple(lanes is None or lane in lanes for lane in range(self._lanes))
        self._closing = None
        self._again = False

    def _trainable(self) -> tuple[int, ...]:
        return tuple(i for i, (_, p) in enumerate(self._parameters) if p.requires_grad)
