"""The records of the commit protocol, validated, with one canonical JSON form each.

Manifest, shard records, the state's layout, the data position, acknowledgements. A record is data
from outside until `load` has accepted it: unknown keys, wrong types and impossible values are
refused. No tensors here: a tensor is a name, a dtype, a shape and a byte range.

The *flat state* is the sequence of all tensors in layout order (larger items first, then by name,
so that every tensor is aligned to its own item size). Rank ``r`` of ``R`` owns the byte range
``[cut(r), cut(r + 1))`` of it.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from coherent_ray import canonical
from coherent_ray.canonical import Json
from coherent_ray.digests import Algorithm, Digest, algorithm_of, hex_digits

FORMAT = 1
#: Longer ones are neither published nor read: 10 TiB of state need a tenth of it.
MANIFEST_BYTES = 256 * 2**20
#: The same of a segment of receipts; a million updates need about so much.
RECEIPTS_BYTES = 2**30
#: Dimensions of a tensor; torch has no more either.
_MOST_DIMENSIONS = 64
_LIMIT = 2**63
#: Where a generation's values tell what it holds of an update that was not done.
PARTIAL = "partial"
#: What a part of a tensor is called in a shard: no tensor may have such a name.
_PART_NAME = re.compile(r".*\[[0-9]+:[0-9]+\]", re.DOTALL)

#: safetensors' names of dtypes, with bytes an item.
ITEM_BYTES: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
#: Ranks' parts begin at multiples of this many bytes, so no cut falls inside an item.
CUT_ALIGNMENT = 16

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
#: Not a Literal, which takes true and 1.0 for 1.
Format = Annotated[int, Field(ge=FORMAT, le=FORMAT)]
HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32,64}$")]
SegmentPath = Annotated[str, Field(pattern=r"^receipts/[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.jsonl$")]
RunId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,127}$")]
Claim = Literal["exact", "invariant", "statistical"]

_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class TensorSpec:
    """One tensor of the flat state."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    dtype: str
    """safetensors' name of it, a key of `ITEM_BYTES`."""
    shape: Annotated[tuple[Count, ...], Field(max_length=_MOST_DIMENSIONS)]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name!r} has unknown dtype {self.dtype!r}")
        if is_reserved(self.name):
            raise ValueError(f"tensor {self.name!r} has a name that shard files keep")
        if self.nbytes >= _LIMIT:
            raise ValueError(f"tensor {self.name!r} has more bytes than 63 bits count")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, config=_STRICT)
class StateLayout:
    """All tensors of the state, in the order of the flat state."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        order = [(-ITEM_BYTES[t.dtype], t.name) for t in self.tensors]
        if order != sorted(set(order)) or len({t.name for t in self.tensors}) != len(order):
            raise ValueError("tensors are not in layout order, or a name is there twice")
        if self.nbytes >= _LIMIT:
            raise ValueError("the state has more bytes than 63 bits count")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole flat state."""
        return sum(t.nbytes for t in self.tensors)

    def offsets(self) -> list[int]:
        """Return where each tensor begins in the flat state, in bytes."""
        result = []
        at = 0
        for tensor in self.tensors:
            result.append(at)
            at += tensor.nbytes
        return result

    def cut(self, rank: int, ranks: int) -> int:
        """Return the byte at which a rank's part begins; ``cut(ranks, ranks)`` is the end."""
        if rank == ranks:
            return self.nbytes
        at = self.nbytes * rank // ranks
        return at - at % CUT_ALIGNMENT


@dataclass(frozen=True, slots=True, config=_STRICT)
class DataPosition:
    """What every rank reads next: the whole state of the sampler."""

    epoch: Count
    position: Count
    """Examples of this epoch that are consumed."""
    update: Count
    """Optimizer steps that are done."""


@dataclass(frozen=True, slots=True, config=_STRICT)
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


@dataclass(frozen=True, slots=True, config=_STRICT)
class ShardRecord:
    """The file that one rank wrote for one generation."""

    rank: Count
    path: str
    """Relative to the run's root."""
    size: Positive
    """Bytes of the file."""
    start: Count
    """First byte of the flat state that it holds."""
    stop: Count
    """The byte of the flat state after its last one."""
    header_bytes: Positive
    """Bytes of the file before its first tensor byte."""
    algorithm: Algorithm
    block_bytes: Positive
    blocks: tuple[HexDigest, ...]
    """Hex digest of each ``block_bytes`` of the file, from its first on; the last may be short."""
    digest: Digest
    """Digest of the concatenated raw block digests, under `algorithm`."""

    def __post_init__(self) -> None:
        if self.header_bytes + self.stop - self.start != self.size:
            raise ValueError(f"shard {self.path!r}: header and tensor bytes do not add up to size")
        if len(self.blocks) != -(-self.size // self.block_bytes):
            raise ValueError(f"shard {self.path!r}: wrong number of block digests")
        digits = hex_digits(self.algorithm)
        if any(len(block) != digits for block in self.blocks):
            raise ValueError(f"shard {self.path!r}: a block's digest is not of {self.algorithm}")
        if algorithm_of(self.digest) != self.algorithm:
            raise ValueError(f"shard {self.path!r}: its digest is not of {self.algorithm}")


@dataclass(frozen=True, slots=True, config=_STRICT)
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


@dataclass(frozen=True, slots=True, config=_STRICT)
class GenerationHeader:
    """What all ranks must agree on about a generation before it may be published."""

    format: Format
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


@dataclass(frozen=True, slots=True, config=_STRICT)
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
        for shard in self.shards:
            if shard.start != at or shard.stop < at:
                raise ValueError(f"shard {shard.path!r} does not begin where the one before ends")
            # The very name, not a prefix: no `..`, and no file that stands for two ranks.
            if shard.path != shard_path(self.header.directory, shard.rank, ranks):
                raise ValueError(f"shard {shard.path!r} lies outside its generation, or its rank")
            at = shard.stop
        if at != layout.nbytes:
            raise ValueError("the shards do not cover the whole state")


@dataclass(frozen=True, slots=True, config=_STRICT)
class ReadBack:
    """A rank's word that it has read another rank's shard again, from the storage."""

    rank: Count
    """Whose shard it is."""
    digest: Digest
    """Of the shard record that the bytes were compared with."""
    problems: tuple[str, ...]
    """What does not hold, a sentence each; empty: every byte does."""


@dataclass(frozen=True, slots=True, config=_STRICT)
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


def generation_name(number: int, attempt: int) -> str:
    """Return the name that users see, ``g12-a3``."""
    return f"g{number}-a{attempt}"


def generation_directory(number: int, attempt: int) -> str:
    """Return a generation's directory, relative to the run's root."""
    return f"generations/{generation_name(number, attempt)}"


def manifest_path(number: int, attempt: int) -> str:
    """Return a manifest's path, relative to the run's root."""
    return f"{generation_directory(number, attempt)}/manifest.json"


def shard_path(directory: str, rank: int, ranks: int) -> str:
    """Return where a rank's shard lies, relative to the run's root."""
    return f"{directory}/shard-{rank:05d}-of-{ranks:05d}.safetensors"


def is_reserved(name: str) -> bool:
    """Return whether shard files keep a name for themselves, so that no tensor may have it."""
    return name == "__metadata__" or _PART_NAME.fullmatch(name) is not None


class LaterFormat(ValueError):
    """A document says that a later version of this software wrote it."""


def refuse_later(value: Json) -> None:
    """Return unless a document, parsed and not yet believed, is of a later format.

    Raises:
        LaterFormat: It is.
    """
    document = value.get("header", value) if isinstance(value, dict) else None
    found = document.get("format") if isinstance(document, dict) else None
    if type(found) is int and found > FORMAT:
        raise LaterFormat(
            f"it says that it has format {canonical.shown(found)}, this version reads {FORMAT}"
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
