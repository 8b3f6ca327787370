"""The exchange: from the nodes that ranks hold whole to the root of the tree, on every rank.

Each bucket is cut into one chunk a rank. Rank ``i`` gets chunk ``i`` of every node from its
holder, sums these along the tree, and sends the sum to all. A rank that holds one node (a
power-of-two rank count) sends what a ring all-reduce sends: ``2 (R - 1) / R`` of the gradient.

Buckets are begun one by one, in the same order on every rank, and nothing waits for another rank
before `finish`: so a backward pass can go on meanwhile. A bucket's nodes are only read, and its sum
lies in memory of its own.

Bytes travel, not numbers: no collective adds anything, so any backend's order is harmless and any
dtype can be sent. Nodes that hold no gradient are not sent at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import Work

from coherent_ray.train.collectives import Group, gather_begin, ready, scatter_all, wait
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
        self._lanes = lanes
        self._rank = rank
        self._ranks = ranks
        self._group = process_group
        rows = max(ranks, sum(len(cover(lanes_of(lanes, r, ranks), lanes)) for r in range(ranks)))
        self._rooms = tuple(
            torch.zeros(rows, bucket.chunk, dtype=bucket.dtype, device=bucket.device)
            for bucket in layout.buckets
        )
        self.result = FlatGradients(layout, [room[:ranks].flatten() for room in self._rooms])
        """The sums, after `finish`."""
        self.begun = 0
        """Buckets that this rank has begun, and not finished."""
        self._plan: Schedule | None = None
        self._scattering: deque[tuple[int, list[Work]]] = deque()
        self._gathering: list[Work] = []
        self._sent = 0
        devices = {room.device for room in self._rooms if room.device.type == "cuda"}
        self._aside: torch.cuda.Stream | None = None
        """On a GPU, where sums are waited for and added, so that the backward pass goes on."""
        for device in devices:
            self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, present: tuple[bool, ...]) -> None:
        """Say what this exchange is of, before its first bucket; the same on every rank.

        Args:
            present: For each lane, whether a node that holds it is sent; at least one is.
        """
        assert not self.begun
        self._plan = schedule(self._lanes, self._ranks, present)

    def start(self, nodes: Sequence[Tensor]) -> None:
        """Begin the next bucket, and go on with those before it without waiting.

        Args:
            nodes: This rank's, left to right, flat; must not change before `finish`.

        Raises:
            PeerLost: Another rank is gone.
        """
        index = self.begun
        self.begun += 1
        self._scattering.append((index, self._scatter(nodes, self._rooms[index])))
        self.advance()

    def advance(self, *, waits: bool = False) -> None:
        """Add what has arrived, and send the sums.

        Args:
            waits: Wait for what has not arrived.

        Raises:
            PeerLost: Another rank is gone.
        """
        while self._scattering:
            index, works = self._scattering[0]
            room = self._rooms[index]
            if not waits and not all(ready(work, room.device) for work in works):
                return
            self._scattering.popleft()
            with torch.cuda.stream(self._aside) if self._aside else nullcontext():
                for work in works:
                    wait(work)
                self._add(room)
                if room.numel():
                    self._gathering += gather_begin(_raw(room[: self._ranks]), index, self._group)
                    self._sent += (self._ranks - 1) * room[0].nbytes

    def finish(self) -> int:
        """Wait for all that was begun.

        Returns:
            Bytes that this rank sent.

        Raises:
            PeerLost: Another rank is gone.
        """
        self.advance(waits=True)
        for work in self._gathering:
            wait(work)
        self._gathering.clear()
        sent, self._sent, self.begun = self._sent, 0, 0
        return sent

    def blank(self) -> list[Tensor]:
        """Return nodes for the next bucket whose sum is nobody's."""
        assert self._plan is not None
        room = self._rooms[self.begun]
        turns = sum(self._rank in senders for senders in self._plan.rounds)
        return [torch.zeros_like(room[: self._ranks]).flatten()] * turns

    def _scatter(self, nodes: Sequence[Tensor], room: Tensor) -> list[Work]:
        """Send chunk ``i`` of each node to rank ``i``; round by round, so that nothing is packed.

        A round's input is a node's flat tensor as it lies: a rank with several nodes takes part
        in several rounds, and one that has run out sends nothing.
        """
        assert self._plan is not None
        if not room.numel():
            return []
        chunk = room[0].nbytes
        works = []
        arrived = 0
        for turn, senders in enumerate(self._plan.rounds):
            sends = self._rank in senders
            outgoing = _raw(nodes[turn]) if sends else _raw(room[:0].flatten())
            incoming = _raw(room[arrived : arrived + len(senders)].flatten())
            arrived += len(senders)
            received = [chunk if rank in senders else 0 for rank in range(self._ranks)]
            sent = [chunk if sends else 0] * self._ranks
            works.append(scatter_all(incoming, outgoing, received, sent, self._group))
        self._sent += len(nodes) * (self._ranks - 1) * chunk
        return works

    def _add(self, room: Tensor) -> None:
        """Add up what has arrived, and leave the sum in this rank's row."""
        assert self._plan is not None
        rows, own = reals(room), self._rank
        for target, other in self._plan.additions[:-1]:
            rows[target].add_(rows[other])
        # By the last one all other rows have been added, so this rank's is free.
        for target, other in self._plan.additions[-1:]:
            torch.add(rows[target], rows[other], out=rows[own])
        if not self._plan.additions and self._plan.root != own:
            rows[own].copy_(rows[self._plan.root])


def _raw(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes, as a view of as many dimensions."""
    return tensor.view(torch.uint8)
