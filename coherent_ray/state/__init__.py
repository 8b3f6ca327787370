"""Tensors to shards and back. Torch; no Ray.

`capture` turns a job into named tensors and JSON, and back; `layout` says where each byte lies in
the flat state; `snapshot` copies a rank's part of it; `shards` makes that part durable and reads
generations that any number of ranks wrote; `writer` does so behind training; `fingerprint`, by
`chunks` and `multilinear`, and `digest` say whether two states are one.

The functions `capture` and `fingerprint` are imported from the rooms of the same name.
"""

from coherent_ray.state.capture import State, restore
from coherent_ray.state.digest import state_digest
from coherent_ray.state.fingerprint import Fingerprint
from coherent_ray.state.layout import layout_of
from coherent_ray.state.shards import load_rows, load_state, read_tensor, write_shard
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.state.writer import BackgroundWriter

__all__ = [
    "BackgroundWriter",
    "Fingerprint",
    "Snapshot",
    "State",
    "layout_of",
    "load_rows",
    "load_state",
    "read_tensor",
    "restore",
    "state_digest",
    "write_shard",
]
