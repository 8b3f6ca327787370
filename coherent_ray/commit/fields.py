"""The types of which the records' fields are made, and the names of what lies under a root."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

#: Of every record: no type is bent to fit, no key is passed over.
STRICT = ConfigDict(strict=True, extra="forbid")

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32,64}$")]
SegmentPath = Annotated[str, Field(pattern=r"^receipts/[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.jsonl$")]
RunId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,127}$")]
Claim = Literal["exact", "invariant", "statistical"]


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
