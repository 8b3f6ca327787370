"""Inventory: what a file under a run's root is, told by its name alone. No I/O.

A name that no writer of this project gives is *foreign*: nothing may delete it, whatever it lies
beside. So the patterns are exact, and whoever deletes asks here first. The names themselves are
``docs/formats.md``'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from coherent_ray.commit.history import GenerationKey

Kind = Literal[
    "record",
    "hint",
    "scrub",
    "timings",
    "manifest",
    "shard",
    "receipts",
    "hold",
    "dataset",
    "probe",
    "driver_log",
    "ray",
]

#: Where files of the run lie; a generation's directory is one more for each generation.
DIRECTORIES = ("", "log", "receipts", "holds", "timings", "datasets", "probe")

# No number of 64 bits has more digits, and a longer one costs its square.
_GENERATION = r"g(?P<number>[1-9][0-9]{0,18})-a(?P<attempt>[1-9][0-9]{0,18})"
_DIRECTORY = re.compile(_GENERATION)
_NAMES: dict[Kind, str] = {
    "record": r"log/\d{20}\.json",
    "hint": r"latest\.json",
    "scrub": r"scrub\.json",
    "timings": rf"timings/{_GENERATION}\.json",
    "manifest": rf"generations/{_GENERATION}/manifest\.json",
    "shard": rf"generations/{_GENERATION}/shard-\d{{5,}}-of-\d{{5,}}\.safetensors",
    "receipts": rf"receipts/\d{{12,}}-\d{{12,}}-{_GENERATION}\.jsonl",
    "hold": rf"holds/{_GENERATION}-[0-9a-f]{{32}}\.json",
    "dataset": r"datasets/(?:blake3|sha256|xxh3_128)-[0-9a-f]{32,64}\.json",
    "probe": r"probe/[0-9a-f]{32}",
    "driver_log": r"drivers/\d{8}T\d{6}Z-\d+\.log",
    # Ray Train keeps its own files in the root; see docs/operations.md.
    "ray": r"checkpoint_manager_snapshot\.json|\.validate_storage_marker",
}
_PATTERNS = [(kind, re.compile(pattern, re.ASCII)) for kind, pattern in _NAMES.items()]


@dataclass(frozen=True, slots=True)
class Item:
    """What a file is."""

    kind: Kind
    generation: GenerationKey | None
    """Whose it is; None where it belongs to the run."""


def item_of(path: str) -> Item | None:
    """Return what a path under the root is; None: it is foreign."""
    for kind, pattern in _PATTERNS:
        if match := pattern.fullmatch(path):
            groups = match.groupdict()
            return Item(kind, _key(groups) if groups else None)
    return None


def generation_of(directory: str) -> GenerationKey | None:
    """Return the generation whose directory has this name, ``g12-a3``; None: it is foreign."""
    match = _DIRECTORY.fullmatch(directory)
    return _key(match.groupdict()) if match else None


def _key(groups: dict[str, str]) -> GenerationKey:
    return int(groups["number"]), int(groups["attempt"])
