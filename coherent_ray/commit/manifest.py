"""The records of the commit protocol, validated, with one canonical JSON form each.

Manifest, shard records, the state's layout, the data position, acknowledgements. A record is data
from outside until `load` has accepted it: unknown keys, wrong types and impossible values are
refused. No tensors here: a tensor is a name, a dtype, a shape and a byte range.

The *flat state* is all ranks' parts, one after the other: rank ``r`` of ``R`` owns the byte range
``[cut(r), cut(r + 1))`` of it. Every rank, reader and writer computes from the layout alone what
lies there, so no plan is ever stored or sent:

- a *sharded* tensor (``parts``) is cut by rows, its first dimension: ``ceil(rows / parts)`` of them
  lie in each rank's part, fewer or none in the last ones;
- all others, in layout order (larger items first, then by name), are one sequence of bytes, of
  which each rank has an equal share.

In a part everything lies in layout order, so that it is aligned to its own item size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any, TypeVar

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
)
from pydantic.dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.canonical import Json
from coherent_ray.commit.fields import (
    STRICT,
    Claim,
    Count,
    Hex64,
    HexDigest,
    Positive,
    RunId,
    SegmentPath,
    generation_directory,
    generation_name,
    manifest_path,
    shard_path,
)
from coherent_ray.commit.reserved import is_reserved
from coherent_ray.commit.shard_records import Base, ShardRecord, require_earlier
from coherent_ray.commit.timings import Timings
from coherent_ray.digests import Digest

FORMAT = 1
#: Of a manifest with sharded tensors: a version that knows none would look for other bytes.
SHARDED_FORMAT = 2
#: Of one of which a shard refers to files of earlier generations.
REUSING_FORMAT = 3
#: Of one that holds tables (`coherent_ray.commit.packing`): a version that knows none must not call
#: it damaged.
TABLE_FORMAT = 4
#: Of a record of the log that publishes one.
RECORD_FORMAT = 2
#: Longer ones are neither published nor read: 10 TiB of state need a tenth of it.
MANIFEST_BYTES = 256 * 2**20
#: The same of a segment of receipts; a million updates need about so much.
RECEIPTS_BYTES = 2**30
#: Dimensions of a tensor; torch has no more either.
_MOST_DIMENSIONS = 64
_LIMIT = 2**63
#: Where a generation's values tell what it holds of an update that was not done.
PARTIAL = "partial"

#: safetensors' names of dtypes, with bytes an item.
ITEM_BYTES: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
#: Ranks' parts begin at multiples of this many bytes, so no cut falls inside an item.
CUT_ALIGNMENT = 16

#: Not a Literal, which takes true and 1.0 for 1.
Format = Annotated[int, Field(ge=FORMAT, le=FORMAT)]
ManifestFormat = Annotated[int, Field(ge=FORMAT, le=REUSING_FORMAT)]

__all__ = [
    "MANIFEST_BYTES", "RECEIPTS_BYTES", "Acknowledgement", "Claim", "Count", "DataPosition",
    "GenerationHeader", "HexDigest", "Manifest", "PlanIdentity", "Positive", "ReadBack",
    "ReceiptSegment", "RunId", "ShardRecord", "StateLayout", "TensorSpec", "dump", "format_of",
    "generation_directory", "generation_name", "load", "manifest_path", "shard_path",
]  # fmt: skip


@dataclass(frozen=True, slots=True, config=STRICT)
class TensorSpec:
    """One tensor of the flat state."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    dtype: str
    """safetensors' name of it, a key of `ITEM_BYTES`."""
    shape: Annotated[tuple[Count, ...], Field(max_length=_MOST_DIMENSIONS)]
    parts: Annotated[int, Field(ge=2, lt=2**63)] = 0
    """How many ranks its rows are cut over; 0, which no document says: it is not sharded."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name!r} has unknown dtype {self.dtype!r}")
        if is_reserved(self.name):
            raise ValueError(f"tensor {self.name!r} has a name that shard files keep")
        if self.nbytes >= _LIMIT:
            raise ValueError(f"tensor {self.name!r} has more bytes than 63 bits count")
        if self.parts and not (self.shape and self.nbytes):
            raise ValueError(f"tensor {self.name!r} is sharded, and has no rows or nothing in it")

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        if not self.parts:
            del found["parts"]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def whole(self) -> TensorSpec:
        """The tensor, and nothing of how it is cut."""
        return TensorSpec(self.name, self.dtype, self.shape) if self.parts else self

    def rows(self, rank: int) -> tuple[int, int]:
        """Return the first row of a sharded tensor that a rank has, and the one after its last."""
        return rows_of(self.shape[0], rank, self.parts)

    def span(self, rank: int) -> tuple[int, int]:
        """Return the same in bytes of the whole tensor."""
        row = self.nbytes // self.shape[0]
        first, last = self.rows(rank)
        return first * row, last * row


def rows_of(rows: int, rank: int, parts: int) -> tuple[int, int]:
    """Return which of some rows lie with one of ``parts`` ranks, as torch cuts them."""
    chunk = -(-rows // parts)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


@dataclass(frozen=True, slots=True, config=STRICT)
class StateLayout:
    """All tensors of the state, in layout order."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        order = [(-ITEM_BYTES[t.dtype], t.name) for t in self.tensors]
        if order != sorted(set(order)) or len({t.name for t in self.tensors}) != len(order):
            raise ValueError("tensors are not in layout order, or a name is there twice")
        if self.nbytes >= _LIMIT:
            raise ValueError("the state has more bytes than 63 bits count")
        if len({t.parts for t in self.tensors if t.parts}) > 1:
            raise ValueError("tensors are sharded over different numbers of ranks")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole flat state."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def parts(self) -> int:
        """How many ranks the sharded tensors are cut over; 0: there are none."""
        return max((t.parts for t in self.tensors), default=0)

    @property
    def whole(self) -> StateLayout:
        """The tensors, and nothing of how they are cut."""
        return StateLayout(tuple(t.whole for t in self.tensors)) if self.parts else self

    def offsets(self) -> list[int]:
        """Return where each tensor would begin, in bytes, if none were sharded."""
        return [0, *accumulate(t.nbytes for t in self.tensors)][:-1]

    def cut(self, rank: int, ranks: int) -> int:
        """Return the byte at which a rank's part begins; ``cut(ranks, ranks)`` is the end."""
        sharded = sum(t.span(rank)[0] for t in self.tensors if t.parts)
        return sharded + self._share(rank, ranks)[0]

    def cuts(self, ranks: int) -> list[int]:
        """Return `cut` of each rank and the end, in time for tensors plus ranks."""
        if not self.parts:
            return self.shares(ranks)
        # How the bytes of a rank's rows differ from those of the rank before.
        steps = [0] * (self.parts + 2)
        for tensor in self.tensors:
            if tensor.parts:
                chunk = tensor.span(0)[1]
                full, rest = divmod(tensor.nbytes, chunk)
                steps[0] += chunk
                steps[full] += rest - chunk
                steps[full + 1] -= rest
        sharded = [0, *accumulate(accumulate(steps))]
        return [a + b for a, b in zip(sharded[: ranks + 1], self.shares(ranks), strict=True)]

    def shares(self, ranks: int) -> list[int]:
        """Return where each rank's share of what is not sharded begins in it, and the end."""
        total = sum(t.nbytes for t in self.tensors if not t.parts)
        return [*(_aligned(total * rank // ranks) for rank in range(ranks)), total]

    def part(self, rank: int, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Yield what lies in a rank's part: index of the tensor, first byte, byte after the last.

        A tensor without bytes lies where it would begin, or with the last rank.
        """
        start, stop = self._share(rank, ranks)
        at = 0
        for index, tensor in enumerate(self.tensors):
            if tensor.parts:
                first, last = tensor.span(rank)
            else:
                first = min(max(start - at, 0), tensor.nbytes)
                last = min(max(stop - at, 0), tensor.nbytes)
                here = start <= at < stop or (at == stop and rank + 1 == ranks)
                at += tensor.nbytes
                if not tensor.nbytes and here:
                    yield index, 0, 0
            if first < last:
                yield index, first, last

    def _share(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return a rank's range of the bytes that are not sharded."""
        total = sum(t.nbytes for t in self.tensors if not t.parts)
        first, last = (_aligned(total * r // ranks) for r in (rank, rank + 1))
        return (total if rank == ranks else first), (total if rank + 1 >= ranks else last)


def _aligned(at: int) -> int:
    return at - at % CUT_ALIGNMENT


@dataclass(frozen=True, slots=True, config=STRICT)
class DataPosition:
    """What every rank reads next: the whole state of the sampler."""

    epoch: Count
    position: Count
    """Examples of this epoch that are consumed."""
    update: Count
    """Optimizer steps that are done."""


@dataclass(frozen=True, slots=True, config=STRICT)
class PlanIdentity:
    """What decides which examples an update takes, and in which order. Never the rank count."""

    dataset_hash: Digest
    examples: Positive
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    order: str
    """Name and version of the epoch permutation."""
    global_batch: Positive
    lanes: Positive
    microbatch: Positive
    """Examples of one forward/backward at most."""


@dataclass(frozen=True, slots=True, config=STRICT)
class ReceiptSegment:
    """The receipts of the updates that led from an earlier generation to this one."""

    path: SegmentPath
    size: Count
    digest: Digest
    first: Positive
    """First update."""
    last: Positive
    """Last update."""

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError(f"segment {self.path!r} ends before it begins")


@dataclass(frozen=True, slots=True, config=STRICT)
class GenerationHeader:
    """What all ranks must agree on about a generation before it may be published."""

    format: ManifestFormat
    run_id: RunId
    number: Positive
    attempt: Positive
    claim: Claim
    ranks: Positive
    position: DataPosition
    plan: PlanIdentity
    layout: StateLayout
    values: dict[str, Any]
    """State that is no tensor, as JSON."""
    environment: dict[str, str]
    """The environment fingerprint, fact by fact."""
    recipe: dict[str, str]
    """Settings that decide what an update does, by dotted key, each as canonical JSON."""
    receipt_tip: Digest
    """Digest of the last receipt, or of the run's identity where there is none yet."""
    receipts: ReceiptSegment | None
    """None where no update has been done since the generation before."""

    def __post_init__(self) -> None:
        if self.format not in {format_of(self.layout), REUSING_FORMAT}:
            raise ValueError(f"format {self.format} is not that of such a layout")
        if self.layout.parts not in {0, self.ranks}:
            raise ValueError("the tensors are sharded over another number of ranks than wrote them")

    @property
    def update(self) -> int:
        """Optimizer steps that are done."""
        return self.position.update

    @property
    def mid_update(self) -> bool:
        """Whether it lies between two microbatches, and holds a part of the update that follows."""
        return PARTIAL in self.values

    @property
    def directory(self) -> str:
        """Where this generation's files lie; no other attempt can share it."""
        return generation_directory(self.number, self.attempt)


@dataclass(frozen=True, slots=True, config=STRICT)
class Manifest:
    """A generation: the header that all ranks agreed on, and every shard."""

    header: GenerationHeader
    fingerprint: Digest
    """Of the whole state, as every replica has it; see `coherent_ray.state.fingerprint`."""
    shards: tuple[ShardRecord, ...]

    def __post_init__(self) -> None:
        layout, ranks = self.header.layout, self.header.ranks
        # The count first: `ranks` may be any number.
        if len(self.shards) != ranks or any(s.rank != r for r, s in enumerate(self.shards)):
            raise ValueError("there is not exactly one shard for each rank, in order")
        at = 0
        edges = layout.cuts(ranks) if layout.parts else []
        for shard in self.shards:
            if shard.start != at or shard.stop < at:
                raise ValueError(f"shard {shard.path!r} does not begin where the one before ends")
            if edges and shard.stop != edges[shard.rank + 1]:
                raise ValueError(f"shard {shard.path!r} does not end where its rank's part does")
            # The very name, not a prefix: no `..`, and no file that stands for two ranks.
            if shard.path != shard_path(self.header.directory, shard.rank, ranks):
                raise ValueError(f"shard {shard.path!r} lies outside its generation, or its rank")
            require_earlier(shard, self.header.number, ranks)
            at = shard.stop
        if at != layout.nbytes:
            raise ValueError("the shards do not cover the whole state")
        if len(self._bases) > 1:
            raise ValueError("the shards refer to different generations")
        if (self.header.format == REUSING_FORMAT) != bool(self._bases):
            raise ValueError(f"format {self.header.format} is not that of such shards")

    @property
    def base(self) -> Base | None:
        """The generation that its shards refer to; None: they refer to none."""
        return next(iter(self._bases), None)

    @property
    def _bases(self) -> set[Base]:
        return {shard.reuse.base for shard in self.shards if shard.reuse}

    @property
    def files(self) -> set[str]:
        """The path of every file that holds bytes of its state."""
        return {file.path for shard in self.shards for file in shard.files}


@dataclass(frozen=True, slots=True, config=STRICT)
class ReadBack:
    """A rank's word that it has read another rank's shard again, from the storage."""

    rank: Count
    """Whose shard it is."""
    digest: Digest
    """Of the shard record that the bytes were compared with."""
    problems: tuple[str, ...]
    """What does not hold, a sentence each; empty: every byte does."""


@dataclass(frozen=True, slots=True, config=STRICT)
class Acknowledgement:
    """A rank's word that its shard is durable."""

    attempt: Positive
    number: Positive
    rank: Count
    ranks: Positive
    shard: ShardRecord
    header_digest: Digest
    """Digest of the header as this rank sees it."""
    fingerprint: Digest
    """Of this rank's whole replica."""
    tensor_fingerprints: tuple[Hex64, ...]
    """One a tensor, in layout order: names the first tensor that differs."""
    header: GenerationHeader | None
    """The header itself; rank 0 sends it."""
    read_back: ReadBack | None = None
    """How the shard of the rank before was read back; None: it was not, yet."""
    timings: Timings | None = None
    """Where this rank's time went."""


def format_of(layout: StateLayout) -> int:
    """Return the format that a manifest with such a layout has."""
    return SHARDED_FORMAT if layout.parts else FORMAT


class LaterFormat(ValueError):
    """A document says that a later version of this software wrote it."""


def refuse_later(value: Json) -> None:
    """Return unless a document, parsed and not yet believed, is of a later format.

    Raises:
        LaterFormat: It is.
    """
    document = value.get("header", value) if isinstance(value, dict) else None
    found = document.get("format") if isinstance(document, dict) else None
    known = FORMAT
    if isinstance(document, dict):
        known = TABLE_FORMAT if "layout" in document else known
        known = RECORD_FORMAT if "record" in document else known
    if type(found) is int and found > known:
        raise LaterFormat(
            f"it says that it has format {canonical.shown(found)}, this version reads {known}"
        )


Record = TypeVar("Record")


def dump(record: object) -> bytes:
    """Return a record's canonical JSON.

    Raises:
        ValueError: It holds a NaN or an infinity.
        TypeError: It holds what is not JSON.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(type(record))
    # Not mode="json": that would write a NaN as null, and a state would come back changed.
    return canonical.dump(adapter.dump_python(record))


def load(kind: type[Record], data: bytes) -> Record:
    """Return the record of some bytes from outside.

    Raises:
        LaterFormat: A later version of this software wrote them, as far as they say.
        ValueError: The bytes are not canonical JSON of such a record; the message says where.
    """
    value = canonical.load(data)
    refuse_later(value)
    if canonical.dump(value) != data:
        raise ValueError("it is not canonical JSON")
    try:
        return TypeAdapter(kind).validate_json(data)
    except ValidationError as error:
        raise ValueError(reason_of(error, kind.__name__)) from error


def reason_of(error: ValidationError, what: str) -> str:
    """Return the first thing that is wrong with a document, at a length that a message can have."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    text = f"{where or what}: {first['msg']}"
    # From outside: what is no plain text would change the terminal that shows it.
    text = text.encode("ascii", "backslashreplace").decode()
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 500 else f"{text[:497]}..."
