"""Lane sums: what the lanes of one rank have come to, node by node of the tree, in reused memory.

A lane's gradient is added where `lanes.Carry` says; at most ``log2(lanes)`` sums are held at once.
The last lane of a rank may be summed bucket by bucket instead, while its backward pass goes on.
That sum, the total, is one buffer more, and leaves what it is made of as it was: so it can be
dropped and the lane be taken as any other, if a gradient turns out not to have been final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from coherent_ray.train.gradients import FlatGradients, FlatLayout, clear, touched_now
from coherent_ray.train.lanes import Carry, Subtree, cover


@dataclass(frozen=True, slots=True)
class _Total:
    """The last lane's sum with what it completes."""

    sums: FlatGradients
    additions: int
    """How many of the sums that are held it takes in, from the last one on."""
    node: Subtree
    """What it is the sum of, when all is done."""


class LaneSums:
    """One rank's sums, update after update."""

    def __init__(self, layout: FlatLayout, owned: range, lanes: int) -> None:
        self._layout = layout
        self._owned = owned
        self._lanes = lanes
        self._spare: list[FlatGradients] = []
        self._held: list[FlatGradients] = []
        self._total: _Total | None = None
        self._nothing: FlatGradients | None = None
        self._summed = 0
        self.buffers = 0
        """Sets of flat tensors that were ever needed at once."""
        self.reset()

    def reset(self) -> None:
        """Begin another update: all memory is spare again."""
        self.reopen()
        self._spare += self._held
        if self._nothing is not None:
            self._spare.append(self._nothing)
        self._held = []
        self._nothing = None
        self._carry = Carry(self._owned, self._lanes)
        self.present: list[int] = []
        """The lanes that brought a gradient."""
        self.touched: set[int] = set()
        """Places of the parameters that they brought one for."""

    @property
    def due(self) -> int:
        """The first lane that may come next."""
        return self._carry.next

    @property
    def nodes(self) -> dict[Subtree, FlatGradients]:
        """The nodes that are held, left to right."""
        return dict(zip(self._carry.held, self._held, strict=True))

    def named(self) -> dict[Subtree, tuple[tuple[int, ...], dict[str, Tensor]]]:
        """Return the nodes that are held: their lanes that brought a gradient, and their sum.

        The tensors, by the parameter's name, are the sums themselves.
        """
        return {
            node: (
                tuple(lane for lane in self.present if node.start <= lane < node.stop),
                gradients.named(self.touched),
            )
            for node, gradients in self.nodes.items()
        }

    def skip_to(self, lane: int) -> None:
        """Let the lanes before one arrive empty, and add what that completes."""
        while self._carry.next < lane:
            self._merge(self._carry.arrive(self._carry.next, present=False))

    def take(self, lane: int) -> None:
        """Move the parameters' ``.grad`` in, as a lane's, and clear them.

        Raises:
            TaskError: A gradient is sparse.
        """
        self.skip_to(lane)
        touched = touched_now(self._layout)
        additions = self._carry.arrive(lane, present=bool(touched))
        if not touched:
            self._merge(additions)
            return
        self._came([lane], touched)
        # The first addition is done in place, straight from the gradients: no copy for this lane.
        if not additions:
            self._held.append(self._taken())
        self._held[-1].take(add=additions > 0)
        self._merge(additions - 1)

    def put(self, node: Subtree, present: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Take a whole node from another rank or time, instead of its lanes.

        Args:
            node: Comes in order, as lanes do.
            present: Its lanes that brought a gradient.
            tensors: By the parameter's name; the others were not touched.
        """
        self.skip_to(node.start)
        additions = self._carry.arrive(node.start, bool(present), node.size)
        if not present:
            self._merge(additions)
            return
        self._came(present, self._layout.places(tensors))
        gradients = self._taken()
        gradients.put(tensors)
        self._held.append(gradients)
        self._merge(additions)

    def for_nodes(self, planned: Sequence[bool]) -> list[FlatGradients]:
        """Return the sums to send, left to right: -0.0 for a node that was to come and did not.

        Args:
            planned: For each lane of all ranks, whether it was to come.
        """
        nodes = self.nodes
        if self._total is not None:
            nodes[self._total.node] = self._total.sums
        return [
            nodes[node] if node in nodes else self._of_nothing()
            for node in cover(self._owned, self._lanes)
            if any(planned[node.start : node.stop])
        ]

    # --- the last lane, bucket by bucket ----------------------------------------------------------

    def close(self, lane: int) -> None:
        """Begin to sum the last lane, of which `total` is told."""
        self.skip_to(lane)
        after = Carry(self._owned, self._lanes)
        after.held, after.next = list(self._carry.held), lane
        additions = after.arrive(lane, present=True)
        while after.next < self._owned.stop:
            additions += after.arrive(after.next, present=False)
        self._total = _Total(self._taken(), additions, after.held[-1])
        self._summed = 0

    def total(self) -> None:
        """Sum the next bucket from the parameters' ``.grad`` and what is held.

        Raises:
            TaskError: A gradient is sparse.
        """
        total = self._total
        assert total is not None
        index, self._summed = self._summed, self._summed + 1
        under = self._held[::-1][: total.additions]
        total.sums.total(index, under)

    def closed(self, lane: int) -> None:
        """Let the total, all of whose buckets are summed, stand for what it was made of."""
        total, self._total = self._total, None
        assert total is not None
        assert self._summed == len(self._layout.buckets)
        self._came([lane], touched_now(self._layout))
        clear(self._layout)
        additions = self._carry.arrive(lane, present=True)
        while self._carry.next < self._owned.stop:
            additions += self._carry.arrive(self._carry.next, present=False)
        assert additions == total.additions
        for _ in range(additions):
            self._spare.append(self._held.pop())
        self._held.append(total.sums)

    def reopen(self) -> None:
        """Drop the total, if there is one: the lane can be taken as any other."""
        total, self._total = self._total, None
        if total is not None:
            self._spare.append(total.sums)

    # --- memory -----------------------------------------------------------------------------------

    def _came(self, lanes: Sequence[int], touched: Sequence[int]) -> None:
        self.present.extend(lanes)
        self.touched.update(touched)

    def _taken(self) -> FlatGradients:
        if self._spare:
            return self._spare.pop()
        self.buffers += 1
        return FlatGradients(self._layout)

    def _of_nothing(self) -> FlatGradients:
        if self._nothing is None:
            self._nothing = self._taken()
            self._nothing.put({})
        return self._nothing

    def _merge(self, additions: int) -> None:
        """Add the top of the stack to what is under it, some times."""
        for _ in range(additions):
            done = self._held.pop()
            self._held[-1].add(done)
            self._spare.append(done)
