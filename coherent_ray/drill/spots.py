"""Spots: the first place in an update's computation at which two recordings of it differ.

Looked at in the order in which an update computes: lane by lane, each from its batch to its
gradients; the sum over the lanes; the buffers; the optimizer's step. So the first difference is the
cause, or the nearest thing to it that can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coherent_ray.drill.recording import Lane, Operation, Recording


@dataclass(frozen=True, slots=True)
class Spot:
    """One place in an update."""

    phase: str
    """lane, sum, step, buffers, tensors or values."""
    operation: str
    """As torch calls it; or what else differs."""
    where: str = ""
    """The module of the model, the pass, and the user's own line, as far as they are known."""
    lane: int | None = None
    microbatch: int | None = None
    index: int | None = None
    """Of the operation within its lane or step."""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        if self.phase == "lane":
            part = f", microbatch {self.microbatch}" if self.microbatch is not None else ""
            return f"lane {self.lane}{part}: {self.operation}{place}"
        if self.phase == "sum":
            return f"the sum over all lanes: {self.operation}; every lane's own part is equal"
        if self.phase == "buffers":
            return f"the buffer {self.operation}; every lane's part and their sum are equal"
        if self.phase in {"tensors", "values"}:
            return f"the state, at {self.operation}; no operation of this update differs"
        return f"the optimizer's step: {self.operation}{place}; lanes and their sum are equal"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "says": str(self)}


def first_spot(one: Sequence[Recording], other: Sequence[Recording]) -> Spot | None:
    """Return where two recordings of one update part; None: they do not.

    Args:
        one: Of every rank.
        other: Of every rank; these may be others, or more or fewer.
    """
    lanes = _lanes_of(one), _lanes_of(other)
    for lane in sorted(lanes[0].keys() | lanes[1].keys()):
        if spot := _in_lane(lane, lanes[0].get(lane, Lane()), lanes[1].get(lane, Lane())):
            return spot
    # What comes after is the same on all ranks, or that is the difference.
    first = one[0]
    everyone = [*one, *other]
    for recording in everyone:
        if name := _first_key(first.total, recording.total):
            return Spot("sum", name)
    for recording in everyone:
        if found := _in_row(first.step, recording.step):
            index, operation = found
            return Spot("step", operation.name, operation.where, index=index)
    for recording in everyone:
        if name := _first_key(first.buffers, recording.buffers):
            return Spot("buffers", name)
    for recording in everyone:
        for phase in ("tensors", "values"):
            if name := _first_key(getattr(first, phase), getattr(recording, phase)):
                return Spot(phase, name)
    return None


def _lanes_of(recordings: Sequence[Recording]) -> dict[int, Lane]:
    return {lane: did for recording in recordings for lane, did in recording.lanes.items()}


def _in_lane(number: int, one: Lane, other: Lane) -> Spot | None:
    if found := _in_row(one.operations, other.operations):
        index, operation = found
        longer = max(one, other, key=lambda lane: len(lane.operations))
        microbatch = longer.microbatch_of(index)
        return Spot("lane", operation.name, operation.where, number, microbatch, index)
    if name := _first_key(one.gradients, other.gradients):
        return Spot("lane", f"the gradient of {name}", lane=number)
    return None


def _in_row(one: Sequence[Operation], other: Sequence[Operation]) -> tuple[int, Operation] | None:
    """Return the first operation that is another one, or left something else."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left.name != right.name:
            both = Operation(f"{left.name} in one, {right.name} in the other", left.where, "")
            return index, both
        if left.digest != right.digest:
            return index, left
    if len(one) != len(other):
        index = min(len(one), len(other))
        extra = (one if len(one) > len(other) else other)[index]
        return index, Operation(f"{extra.name}, in one of them only", extra.where, "")
    return None


def _first_key(one: dict[str, str], other: dict[str, str]) -> str | None:
    keys = [*one, *(key for key in other if key not in one)]
    return next((key for key in keys if one.get(key) != other.get(key)), None)
