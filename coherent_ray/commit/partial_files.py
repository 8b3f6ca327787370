"""The file of a shard that was not written whole: what was written of it, and nothing else.

It is a ``.safetensors`` file as well. Each run of bytes that was written is a 1-D tensor of bytes,
``shard[first:last]``, named by its place in the shard; ``__metadata__`` says of which shard. Like
the header of a whole shard it follows from the record, byte for byte, and spaces fill it up to
whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from coherent_ray import canonical
from coherent_ray.canonical import Json
from coherent_ray.commit.shard_records import ShardRecord

HEADER_ALIGNMENT = 4096


def header_of_runs(start: int, stop: int, base: str, runs: Sequence[tuple[int, int]]) -> bytes:
    """Return the file's bytes before the first one of the shard.

    Args:
        start: First byte of the flat state that the shard holds.
        stop: The byte after its last.
        base: Name of the generation that has the rest of the shard.
        runs: First byte in the shard, and the one after the last, of each run that was written.
    """
    entries: dict[str, Json] = {}
    at = 0
    for first, last in runs:
        entries[f"shard[{first}:{last}]"] = {
            "dtype": "U8",
            "shape": [last - first],
            "data_offsets": [at, at + last - first],
        }
        at += last - first
    about = {"format": 3, "start": start, "stop": stop, "base": base}
    entries["__metadata__"] = {
        "format": "pt",
        "coherent_ray": canonical.dump(about).decode("ascii"),
    }
    text = canonical.dump(entries)
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def header_of_record(record: ShardRecord) -> bytes:
    """Return the first bytes of the own file of a shard that was not written whole."""
    assert record.reuse is not None
    written, at = [], 0
    for run in record.reuse.runs:
        if not run.file:
            written.append((at, at + run.size))
        at += run.size
    return header_of_runs(record.start, record.stop, record.reuse.base.name, written)
