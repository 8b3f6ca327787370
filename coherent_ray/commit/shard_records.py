"""The record of one rank's shard: its digests, and in which files its bytes lie.

A shard is a range of the flat state with a header before it: bytes, cut into blocks, each with a
digest. Where all of them were written for this generation they are one ordinary ``.safetensors``
file. Blocks that did not change since an earlier generation need not be written again; then a
`Reuse` says where they lie: runs of the shard's bytes, each in the shard's own file or in one of an
earlier generation. A run always leads to the file that holds the bytes, never to another reference.

What may be referenced follows from one generation, the *base*: a file of the base, or one that the
base itself refers to. The log refuses to publish a generation whose base is retired (see
`coherent_ray.commit.history`), and a prune keeps what any kept generation refers to. So no file
goes that is still needed, whoever prunes and however late a save comes through.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.dataclasses import dataclass

from coherent_ray.commit.fields import (
    STRICT,
    Count,
    HexDigest,
    Positive,
    generation_directory,
    generation_name,
    shard_path,
)
from coherent_ray.digests import Algorithm, Digest, algorithm_of, hex_digits

_GENERATION = re.compile(r"generations/g([1-9][0-9]{0,18})-a([1-9][0-9]{0,18})")
#: Files of earlier generations that one shard may refer to: a reader opens so many at most.
MOST_FILES = 64


@dataclass(frozen=True, slots=True, config=STRICT)
class Base:
    """The published generation that another one refers to."""

    number: Positive
    attempt: Positive
    """The attempt that published it."""

    @property
    def name(self) -> str:
        """The generation's name, ``g12-a3``."""
        return generation_name(self.number, self.attempt)

    @property
    def key(self) -> tuple[int, int]:
        """Its number and attempt."""
        return self.number, self.attempt


@dataclass(frozen=True, slots=True, config=STRICT)
class StoredFile:
    """A file, and how long it is."""

    path: str
    """Relative to the run's root."""
    size: Positive
    """Bytes."""

    @property
    def key(self) -> tuple[int, int]:
        """Number and attempt of the generation for which it was written.

        Raises:
            ValueError: It is no shard's.
        """
        directory, _, _ = self.path.rpartition("/")
        match = _GENERATION.fullmatch(directory)
        if match is None:
            raise ValueError(f"{self.path!r} is no file of a generation")
        return int(match[1]), int(match[2])


class Run(NamedTuple):
    """Bytes of a shard that follow one another in a file."""

    size: Annotated[int, Field(ge=1, lt=2**63)]
    """How many; each run begins where the one before ended."""
    file: Annotated[int, Field(ge=0, lt=2**31)]
    """0: the shard's own file; else a place in `Reuse.files`, from 1 on."""
    at: Annotated[int, Field(ge=0, lt=2**63)]
    """The first of them in that file."""


class Piece(NamedTuple):
    """Some bytes of a shard, and where they lie."""

    path: str
    at: int
    """The first of them in the file."""
    size: int


@dataclass(frozen=True, slots=True, config=STRICT)
class Reuse:
    """Where the bytes of a shard lie that was not written whole."""

    base: Base
    written: Positive
    """Bytes of the shard's own file, its header too."""
    files: Annotated[tuple[StoredFile, ...], Field(min_length=1, max_length=MOST_FILES)]
    """Of earlier generations; each is referred to."""
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]
    """Cover the shard, in order."""

    def __post_init__(self) -> None:
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("a file is named twice")
        named = {run.file for run in self.runs} - {0}
        if named != set(range(1, len(self.files) + 1)):
            raise ValueError("the files are not those that the runs lie in")
        if any(a.file == b.file and a.at + a.size == b.at for a, b in pairwise(self.runs)):
            raise ValueError("two runs are one")  # so that a layout has one form
        sizes = [self.written, *(file.size for file in self.files)]
        if any(run.at + run.size > sizes[run.file] for run in self.runs):
            raise ValueError("a run reaches beyond the end of its file")


@dataclass(frozen=True, slots=True, config=STRICT)
class ShardRecord:
    """What one rank stored for one generation."""

    rank: Count
    path: str
    """The rank's own file, relative to the run's root."""
    size: Positive
    """Bytes of the shard: of its file, where that is whole."""
    start: Count
    """First byte of the flat state that it holds."""
    stop: Count
    """The byte of the flat state after its last one."""
    header_bytes: Positive
    """Bytes of the shard before its first tensor byte."""
    algorithm: Algorithm
    block_bytes: Positive
    blocks: tuple[HexDigest, ...]
    """Hex digest of each ``block_bytes`` of the shard, from its first on; the last may be short."""
    digest: Digest
    """Digest of the concatenated raw block digests, under `algorithm`."""
    reuse: Reuse | None = None
    """Where its bytes lie; None, which no document says: all of them in its file, as they are."""

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
        if self.reuse and sum(run.size for run in self.reuse.runs) != self.size:
            raise ValueError(f"shard {self.path!r}: its runs do not add up to size")

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        if self.reuse is None:
            del found["reuse"]
        return found

    @property
    def own_file(self) -> StoredFile:
        """The file that was written for this generation."""
        return StoredFile(self.path, self.reuse.written if self.reuse else self.size)

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Every file that holds bytes of it, its own one first."""
        return (self.own_file, *(self.reuse.files if self.reuse else ()))

    def block_range(self, block: int) -> tuple[int, int]:
        """Return the first byte of a block in the shard, and the byte after its last."""
        start = block * self.block_bytes
        return start, min(start + self.block_bytes, self.size)


class Places:
    """Where the bytes of one shard lie. Safe to use from several threads."""

    def __init__(self, record: ShardRecord) -> None:
        self._files = [file.path for file in record.files]
        reuse = record.reuse
        self._runs: Sequence[Run] = reuse.runs if reuse else (Run(record.size, 0, 0),)
        self._starts = [0, *accumulate(run.size for run in self._runs)]

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """Yield where bytes ``[first, last)`` of the shard lie, in order."""
        index = bisect_right(self._starts, first) - 1
        while first < last:
            run, start = self._runs[index], self._starts[index]
            size = min(last, start + run.size) - first
            yield Piece(self._files[run.file], run.at + first - start, size)
            first += size
            index += 1


def require_earlier(record: ShardRecord, number: int, ranks: int) -> None:
    """Return if a shard refers to nothing but files of its rank in earlier generations.

    Args:
        record: Of the shard.
        number: Of the generation that it is of.
        ranks: How many wrote that.

    Raises:
        ValueError: It does.
    """
    if record.reuse is None:
        return
    if record.reuse.base.number >= number:
        raise ValueError(f"shard {record.path!r} refers to {record.reuse.base.name}, a later one")
    for file in record.reuse.files:
        key = file.key
        # The very name, not a prefix: no `..`, and nothing outside what a prune looks at.
        if file.path != shard_path(generation_directory(*key), record.rank, ranks):
            raise ValueError(f"shard {record.path!r} refers to {file.path!r}, another rank's file")
        if key[0] > record.reuse.base.number:
            raise ValueError(f"shard {record.path!r} refers to {file.path!r}, later than its base")


def reuse_problem(record: ShardRecord, base: ShardRecord) -> str | None:
    """Return how a shard contradicts the one of the base that it refers to; None: it does not.

    What it takes over must be, byte for byte and digest for digest, what lies there according to
    the base's manifest. That is why nothing can be referred to that the base does not keep.

    Args:
        record: Of the shard.
        base: Of the same rank's shard in its base.
    """
    shape = "algorithm", "block_bytes", "size", "start", "stop", "header_bytes"
    for name in shape:
        if getattr(record, name) != getattr(base, name):
            return f"its {name} is {getattr(record, name)}, in its base {getattr(base, name)}"
    known = {file.path: file.size for file in base.files}
    for file in record.files[1:]:
        if known.get(file.path) != file.size:
            return f"its base knows no {file.path} of {file.size} bytes"
    there, at = Places(base), 0
    own: list[range] = []
    for run in record.reuse.runs if record.reuse else ():
        piece = Piece(record.files[run.file].path, run.at, run.size)
        if not run.file:
            own.append(range(at, at + run.size))
        elif list(there.pieces(at, at + run.size)) != [piece]:
            return f"bytes {at} to {at + run.size} do not lie where they lie in its base"
        at += run.size
    written = {block for run in own for block in _blocks_of(record, run)}
    for block, digest in enumerate(record.blocks):
        if block not in written and digest != base.blocks[block]:
            return f"block {block} has another digest than in its base, and was not written"
    return None


def _blocks_of(record: ShardRecord, part: range) -> range:
    """Return the blocks that have bytes in a part of a shard."""
    return range(part.start // record.block_bytes, -(-part.stop // record.block_bytes))
