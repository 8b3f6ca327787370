"""A partial update: what a generation between two microbatches holds besides the state before it.

| in the flat state | what |
|---|---|
| ``partial/node-START-SIZE/PARAMETER`` | the gradient summed over the lanes of a node of the tree |
| ``partial/lane-LANE/PARAMETER`` | the ``.grad`` of a lane whose microbatches are not all done |
| ``partial/buffer-LANE/BUFFER`` | a buffer that such a lane has changed, or lane 0 by its end |

What each lane has come to, and which of a node's lanes brought a gradient, is `Record`, in the
manifest's values. Any rank at any rank count goes on from the nodes and lanes that lie in its own;
the rest it computes again, and comes to the same bits, since a node's sum has only one value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field as plain_field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from coherent_ray import canonical
from coherent_ray.canonical import Json
from coherent_ray.commit.manifest import PARTIAL, Count, Positive, reason_of
from coherent_ray.errors import ManifestDamaged
from coherent_ray.train.lanes import Subtree, holds
from coherent_ray.train.receipts import HexFloat
from coherent_ray.train.tally import LaneTally

#: Where the record lies in a generation's values.
KEY = PARTIAL
_PREFIX = "partial/"
_STRICT = ConfigDict(strict=True, extra="forbid")
Lane = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True, slots=True, config=_STRICT)
class LaneRecord:
    """What a lane has come to."""

    lane: Lane
    done: Positive
    """Microbatches."""
    loss: HexFloat
    """Sum over them."""
    count: Count
    """Examples or tokens that it is over."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class NodeRecord:
    """A node of the tree whose lanes are all done."""

    start: Lane
    size: Positive
    present: tuple[Lane, ...]
    """Its lanes that brought a gradient."""

    def __post_init__(self) -> None:
        node = Subtree(self.start, self.size)
        if not self.present or any(not node.start <= lane < node.stop for lane in self.present):
            raise ValueError(f"{node} does not hold the lanes {list(self.present)}")


@dataclass(frozen=True, slots=True, config=_STRICT)
class Record:
    """What is done of an update, over all ranks."""

    update: Positive
    lanes: tuple[LaneRecord, ...]
    nodes: tuple[NodeRecord, ...]

    def __post_init__(self) -> None:
        lanes = [lane.lane for lane in self.lanes]
        starts = [(node.start, node.size) for node in self.nodes]
        if lanes != sorted(set(lanes)) or starts != sorted(set(starts)):
            raise ValueError("lanes or nodes are out of order, or there twice")


_ADAPTER = TypeAdapter(Record)


@plain_dataclass(frozen=True, slots=True)
class Held:
    """What one rank has done of an update."""

    record: Record
    tensors: dict[str, Tensor]
    """By their names in the flat state."""


@plain_dataclass(frozen=True, slots=True)
class Node:
    """A node to go on from."""

    node: Subtree
    present: tuple[int, ...]
    tensors: dict[str, Tensor]
    """By parameter."""


@plain_dataclass(frozen=True, slots=True)
class Started:
    """A lane to go on with."""

    gradients: dict[str, Tensor]
    """By parameter."""
    buffers: dict[str, Tensor]
    """By name: those that the lane has changed."""


@plain_dataclass(frozen=True, slots=True)
class Usable:
    """What one rank can go on from."""

    update: int
    tally: dict[int, LaneTally]
    """Of the lanes in `nodes`, and of those in `started`."""
    nodes: dict[int, Node] = plain_field(default_factory=dict)
    """By the node's first lane."""
    started: dict[int, Started] = plain_field(default_factory=dict)
    """By lane."""
    kept: dict[str, Tensor] | None = None
    """The buffers that lane 0 has changed; None: it is not done."""

    def within(self, lane: int) -> bool:
        """Return whether a lane lies in a node, but not first."""
        return any(n.node.start < lane < n.node.stop for n in self.nodes.values())


def held(
    update: int,
    tally: Mapping[int, LaneTally],
    nodes: Mapping[Subtree, tuple[tuple[int, ...], dict[str, Tensor]]],
    started: tuple[int, Started] | None,
    kept: Mapping[str, Tensor] | None,
) -> Held:
    """Return what a rank has done of an update, as it is stored.

    Args:
        update: It.
        tally: What its lanes have come to.
        nodes: The nodes that it holds: which lanes brought a gradient, and what by parameter.
        started: The lane that is not done, if it has begun.
        kept: What lane 0 has left in the buffers, where it is done here.
    """
    tensors: dict[str, Tensor] = {}
    for node, (_, gradients) in nodes.items():
        tensors |= _named(f"node-{node.start}-{node.size}", gradients)
    if started is not None:
        lane, found = started
        tensors |= _named(f"lane-{lane}", found.gradients)
        tensors |= _named(f"buffer-{lane}", found.buffers)
    if kept is not None:
        tensors |= _named("buffer-0", kept)
    record = Record(
        update,
        tuple(
            LaneRecord(lane, so_far.done, so_far.loss.hex(), so_far.count)
            for lane, so_far in sorted(tally.items())
            if so_far.done
        ),
        tuple(
            NodeRecord(node.start, node.size, present)
            for node, (present, _) in sorted(nodes.items())
        ),
    )
    return Held(record, tensors)


def together(records: Collection[Record]) -> Record:
    """Return what all ranks have done, from what each has."""
    update = next(iter(records)).update
    lanes = sorted((lane for r in records for lane in r.lanes), key=lambda lane: lane.lane)
    nodes = sorted((n for r in records for n in r.nodes), key=lambda n: (n.start, n.size))
    return Record(update, tuple(lanes), tuple(nodes))


def dump(record: Record) -> Json:
    """Return a record as JSON."""
    value: Json = _ADAPTER.dump_python(record, mode="json")
    return value


def load(value: Json) -> Record:
    """Return the record of JSON from outside.

    Raises:
        ManifestDamaged: It is none.
    """
    try:
        # Through JSON: a list in it is a tuple here.
        return _ADAPTER.validate_json(canonical.dump(value))
    except ValidationError as error:
        raise ManifestDamaged(
            f"what it says of a partial update cannot be read: {reason_of(error, KEY)}",
            remedy="Use the version of coherent-ray that wrote it, or an earlier generation.",
        ) from error


def is_partial(name: str) -> bool:
    """Return whether a tensor of the flat state belongs to a partial update."""
    return name.startswith(_PREFIX)


def usable(
    record: Record,
    tensors: Mapping[str, Tensor],
    owned: range,
    plan: Mapping[int, int],
    parameters: Mapping[str, Tensor],
) -> Usable:
    """Return what a rank can go on from.

    Args:
        record: What a generation says.
        tensors: Its tensors.
        owned: The rank's lanes.
        plan: Microbatches of every lane of the update.
        parameters: The trainable parameters by name. Where the stored ones are others, nothing can
            be used, and the whole update is computed again.
    """
    rests = _by_place(tensors)
    nothing = Usable(record.update, {})
    for place, found in rests.items():
        if not place.startswith("buffer-") and not all(
            _fits(parameters, *p) for p in found.items()
        ):
            return nothing
    tally = {
        lane.lane: LaneTally(lane.done, float.fromhex(lane.loss), lane.count)
        for lane in record.lanes
    }
    nodes = {
        n.start: Node(
            Subtree(n.start, n.size), n.present, _copies(rests.get(f"node-{n.start}-{n.size}"))
        )
        for n in record.nodes
        if holds(owned, Subtree(n.start, n.size), len(plan))
    }
    started = {
        lane: Started(_copies(rests.get(f"lane-{lane}")), _copies(rests.get(f"buffer-{lane}")))
        for lane, so_far in tally.items()
        if lane in owned and 0 < so_far.done < plan[lane]
    }
    first = nodes.get(0)
    kept = _copies(rests.get("buffer-0")) if first is not None else None
    inside = {lane for n in nodes.values() for lane in range(n.node.start, n.node.stop)}
    used = {lane: tally[lane] for lane in tally if lane in inside or lane in started}
    return Usable(record.update, used, nodes, started, kept)


def _named(place: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{_PREFIX}{place}/{name}": tensor for name, tensor in tensors.items()}


def _by_place(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for place, name, tensor in _split(tensors):
        found.setdefault(place, {})[name] = tensor
    return found


def _copies(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return copies: what was read of a generation is one piece of memory, and large."""
    return {name: tensor.clone() for name, tensor in (tensors or {}).items()}


def _split(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    for full, tensor in tensors.items():
        if is_partial(full):
            place, _, name = full.removeprefix(_PREFIX).partition("/")
            yield place, name, tensor


def _fits(parameters: Mapping[str, Tensor], name: str, tensor: Tensor) -> bool:
    live: Any = parameters.get(name)
    return live is not None and (live.shape, live.dtype) == (tensor.shape, tensor.dtype)
