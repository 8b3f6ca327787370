"""The tally: what the lanes of one rank have come to in an update, microbatch by microbatch.

A lane's loss is the sum over its microbatches in order, in float64. So it can be broken off after
any of them and gone on with elsewhere, from the sum so far, and comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LaneTally:
    """One lane, so far."""

    done: int
    """Microbatches, from the first on."""
    loss: float
    """Sum over them."""
    count: int
    """Examples or tokens that it is over."""


@dataclass(slots=True)
class _Lane:
    done: int = 0
    loss: float = 0.0
    count: int = 0
    later: list[Tensor] = field(default_factory=list)
    """Losses that are not added yet: to read one waits for its device."""


class Tally:
    """All lanes of one rank in one update."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}

    def resume(self, lanes: Mapping[int, LaneTally]) -> None:
        """Go on from what some lanes came to before."""
        for lane, so_far in lanes.items():
            self._lanes[lane] = _Lane(so_far.done, so_far.loss, so_far.count)

    def add(self, lane: int, loss: Tensor, count: int) -> None:
        """Take in the loss of a part of a microbatch, a scalar without gradient."""
        found = self._lanes.setdefault(lane, _Lane())
        found.later.append(loss)
        found.count += count

    def did(self, lane: int) -> None:
        """Take in that a microbatch is done."""
        self._lanes.setdefault(lane, _Lane()).done += 1

    def done(self, lane: int) -> int:
        """Return how many microbatches of a lane are done."""
        found = self._lanes.get(lane)
        return found.done if found else 0

    def so_far(self) -> dict[int, LaneTally]:
        """Return what every lane has come to; waits for the device."""
        for lane in self._lanes.values():
            if lane.later:
                parts = torch.stack([loss.double().reshape(()) for loss in lane.later])
                for part in parts.tolist():
                    lane.loss += part
                lane.later.clear()
        return {
            number: LaneTally(lane.done, lane.loss, lane.count)
            for number, lane in self._lanes.items()
        }
