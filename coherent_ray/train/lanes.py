"""The tree that gradients are summed along: which lanes meet, and in which order. Integers only.

The lanes are the leaves of one fixed binary tree, ``2 ** k`` leaves wide with the smallest such
width that holds them all. A node is the sum of its left and its right half; where one half holds no
gradient (lanes that do not exist, or that had no example), the node *is* the other half. So
the value of the root depends on the lanes alone. Ranks only decide who computes which node: a rank
sums the nodes that it holds whole, and the rest of the tree is summed after the exchange.

Nothing here knows tensors or ranks' messages; what is computed here is who is added to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Subtree:
    """An aligned node of the tree: the lanes ``[start, start + size)``, ``size`` a power of two."""

    start: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.size & (self.size - 1) or self.start % self.size:
            raise ValueError(f"lanes [{self.start}, {self.start + self.size}) are no aligned node")

    @property
    def stop(self) -> int:
        """The lane after the last one; it may lie beyond the lanes that exist."""
        return self.start + self.size

    @property
    def parent(self) -> Subtree:
        """The node of twice the size that holds this one."""
        return Subtree(self.start - self.start % (2 * self.size), 2 * self.size)


def width(lanes: int) -> int:
    """Return the number of leaves of the tree: the smallest power of two that is >= ``lanes``."""
    return 1 << (lanes - 1).bit_length()


def lanes_of(lanes: int, rank: int, ranks: int) -> range:
    """Return the lanes that a rank carries: contiguous blocks, as equal as they can be.

    Raises:
        ValueError: There are more ranks than lanes, or no such rank.
    """
    if not 0 <= rank < ranks <= lanes:
        raise ValueError(f"rank {rank} of {ranks} cannot carry a part of {lanes} lanes")
    return range(lanes * rank // ranks, lanes * (rank + 1) // ranks)


def cover(owned: range, lanes: int) -> list[Subtree]:
    """Return the largest nodes that lie wholly in some lanes, left to right.

    Args:
        owned: A contiguous, non-empty range of lanes.
        lanes: All lanes. Where ``owned`` holds the last one, a node may reach beyond it.

    Returns:
        At most ``2 * log2(width(lanes))`` nodes that tile ``owned``; one, where it is aligned.
    """
    full = width(lanes)
    stop = full if owned.stop == lanes else owned.stop
    result = []
    start = owned.start
    while start < owned.stop:
        size = start & -start or full
        while start + size > stop:
            size //= 2
        result.append(Subtree(start, size))
        start += size
    return result


def holds(owned: range, node: Subtree, lanes: int) -> bool:
    """Return whether some lanes hold a node whole; lanes that do not exist are everybody's."""
    inside = node.stop <= owned.stop or owned.stop == lanes
    return node.start >= owned.start and node.start < owned.stop and inside


class Carry:
    """A binary counter: sums lanes in order, holding as few partial sums as the tree allows.

    It keeps a stack of nodes; the caller keeps one buffer for each and does the additions that
    `arrive` tells. All lanes of ``owned`` must arrive, in order, each with or without a gradient.
    """

    __slots__ = ("_lanes", "_owned", "held", "next")

    def __init__(self, owned: range, lanes: int) -> None:
        self._owned = owned
        self._lanes = lanes
        self.held: list[Subtree] = []
        """The nodes that have a buffer, left to right."""
        self.next = owned.start
        """The lane that must arrive next."""

    def arrive(self, lane: int, present: bool, size: int = 1) -> int:
        """Take the next lane, or a whole node, and return how many additions follow.

        Args:
            lane: Must be `next`; the node's first.
            present: Whether it has a gradient. If so, it is pushed on the stack first.
            size: Of the node; it must lie in the owned lanes as `cover` has it.

        Returns:
            How many times the top of the stack is to be added to the one under it, and dropped.

        Raises:
            ValueError: Another lane is due, or the node is not owned whole.
        """
        node = Subtree(lane, size)
        owned = lane in self._owned and holds(self._owned, node, self._lanes)
        if lane != self.next or not owned:
            raise ValueError(f"lane {lane} came where lane {self.next} of {self._owned} was due")
        self.next = min(node.stop, self._lanes)
        if present:
            self.held.append(node)
        additions = 0
        while (node := node.parent).size <= width(self._lanes) and self._closed(node):
            inside = [held for held in self.held[-2:] if held.start >= node.start]
            if len(inside) == 2:
                additions += 1
            if inside:
                self.held[-len(inside) :] = [node]
        return additions

    def _closed(self, node: Subtree) -> bool:
        """Whether every lane of a node is owned, and has arrived or does not exist."""
        arrived = node.stop <= self.next or self.next == self._lanes
        return arrived and node.start >= self._owned.start


def merge_order(parts: Sequence[Subtree]) -> list[tuple[int, int]]:
    """Return the additions that turn disjoint nodes into the root.

    Args:
        parts: Nodes that hold a gradient, left to right, none inside another.

    Returns:
        Pairs ``(into, other)`` of indices: ``parts[into] += parts[other]``, in this order. What is
        left in ``parts[0]`` is the root. Empty for one part or none.
    """
    if not parts:
        return []
    order: list[tuple[int, int]] = []

    def visit(first: int, last: int, start: int, size: int) -> None:
        if last - first == 1:
            return
        half = start + size // 2
        cut = first
        while cut < last and parts[cut].start < half:
            cut += 1
        if cut > first:
            visit(first, cut, start, size // 2)
        if cut < last:
            visit(cut, last, half, size // 2)
        if first < cut < last:
            order.append((first, cut))

    visit(0, len(parts), 0, width(parts[-1].stop))
    return order


def tree_sum(values: Sequence[float]) -> float:
    """Return the sum of one float64 a lane along the tree; 0.0 for no lanes.

    A lane that has nothing to say holds 0.0.
    """
    partial = list(values) or [0.0]
    for into, other in merge_order([Subtree(lane, 1) for lane in range(len(partial))]):
        partial[into] += partial[other]
    return partial[0]
