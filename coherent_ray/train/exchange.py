"""The exchange: from the nodes that ranks hold whole to the root of the tree, on every rank.

Each flat tensor is cut into one chunk a rank. Rank ``i`` gets chunk ``i`` of every node from its
holder, sums these along the tree, and sends the sum to all. A rank that holds one node (a
power-of-two rank count) sends what a ring all-reduce sends: ``2 (R - 1) / R`` of the gradient.

Bytes travel, not numbers: no collective adds anything, so any backend's order is harmless and any
dtype can be sent. Nodes that hold no gradient are not sent at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from coherent_ray.train.collectives import Group, gather_all, scatter_all, wait
from coherent_ray.train.gradients import FlatGradients, FlatLayout, reals
from coherent_ray.train.lanes import Subtree, cover, lanes_of, merge_order


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who sends in which round, and what is added to what afterwards."""

    rounds: tuple[tuple[int, ...], ...]
    """Round ``k``: the ranks that hold more than ``k`` nodes; each sends its ``k``-th."""
    root: int
    """The part that holds the sum in the end; parts are numbered in order of arrival."""
    additions: tuple[tuple[int, int], ...]
    """Parts ``(into, other)``, in order."""


@lru_cache(maxsize=64)
def schedule(lanes: int, ranks: int, present: tuple[bool, ...]) -> Schedule:
    """Return the exchange for one set of lanes that brought a gradient (at least one)."""
    nodes = [
        [node for node in cover(lanes_of(lanes, rank, ranks), lanes) if _holds(node, present)]
        for rank in range(ranks)
    ]
    most = max(map(len, nodes))
    rounds = tuple(
        tuple(rank for rank in range(ranks) if len(nodes[rank]) > turn) for turn in range(most)
    )
    arrived: list[Subtree] = [
        nodes[rank][turn] for turn, senders in enumerate(rounds) for rank in senders
    ]
    by_lane = sorted(range(len(arrived)), key=lambda part: arrived[part])
    order = merge_order([arrived[part] for part in by_lane])
    return Schedule(
        rounds=rounds,
        root=by_lane[0],
        additions=tuple((by_lane[into], by_lane[other]) for into, other in order),
    )


def _holds(node: Subtree, present: tuple[bool, ...]) -> bool:
    return any(present[node.start : node.stop])


class Exchange:
    """One rank's side of it; its buffers are made once and used for every update."""

    def __init__(
        self,
        layout: FlatLayout,
        lanes: int,
        rank: int,
        ranks: int,
        process_group: Group,
    ) -> None:
        self._layout = layout
        self._lanes = lanes
        self._rank = rank
        self._ranks = ranks
        self._group = process_group
        parts = sum(len(cover(lanes_of(lanes, r, ranks), lanes)) for r in range(ranks))
        self._parts = tuple(
            torch.zeros(parts, g.chunk, dtype=g.dtype, device=g.device) for g in layout.groups
        )

    def run(
        self, nodes: Sequence[FlatGradients], present: tuple[bool, ...], into: FlatGradients
    ) -> int:
        """Sum all ranks' nodes.

        Args:
            nodes: This rank's nodes that hold a gradient, left to right.
            present: For each lane, whether it brought a gradient; at least one did.
            into: Receives the root; may be one of ``nodes``.

        Returns:
            Bytes that this rank sent.
        """
        plan = schedule(self._lanes, self._ranks, present)
        sent = 0
        for index, parts in enumerate(self._parts):
            sent += self._scatter([node.flats[index] for node in nodes], plan, parts)
            for target, other in plan.additions:
                reals(parts[target]).add_(reals(parts[other]))
            sent += self._gather(parts[plan.root], into.flats[index])
        return sent

    def _scatter(self, nodes: list[Tensor], plan: Schedule, parts: Tensor) -> int:
        """Send chunk ``i`` of each node to rank ``i``; round by round, so that nothing is packed.

        A round's input is a node's flat tensor as it lies: a rank with several nodes takes part
        in several rounds, and one that has run out sends nothing.
        """
        chunk = parts.shape[1] * parts.element_size()
        waiting = []
        arrived = 0
        for turn, senders in enumerate(plan.rounds):
            sends = self._rank in senders
            outgoing = _raw(nodes[turn]) if sends else _raw(parts[:0].flatten())
            incoming = _raw(parts[arrived : arrived + len(senders)].flatten())
            arrived += len(senders)
            received = [chunk if rank in senders else 0 for rank in range(self._ranks)]
            sent = [chunk if sends else 0] * self._ranks
            waiting.append(scatter_all(incoming, outgoing, received, sent, self._group))
        for work in waiting:
            wait(work)
        return len(nodes) * (self._ranks - 1) * chunk

    def _gather(self, mine: Tensor, into: Tensor) -> int:
        gather_all(_raw(into), _raw(mine), self._group)
        return (self._ranks - 1) * mine.nbytes


def _raw(tensor: Tensor) -> Tensor:
    """Return a contiguous 1-D tensor's bytes, as a view."""
    return tensor.view(torch.uint8)
