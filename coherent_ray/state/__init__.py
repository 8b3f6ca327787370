"""Tensors to shards and back. Torch; no Ray.

`capture` turns a job into named tensors and JSON, and `restore` turns them back. `layout_of` says
where each byte lies in the flat state, `Snapshot` copies a rank's part of it, `write_shard` makes
that part durable, `BackgroundWriter` does so behind training, and `load_state` reads a generation
that any number of ranks wrote.
"""

from coherent_ray.state.capture import (
    State,
    capture,
    check_spec,
    restore,
    spec_digest,
    state_spec,
)
from coherent_ray.state.digest import state_digest, tensors_digest
from coherent_ray.state.fingerprint import Fingerprint, fingerprint
from coherent_ray.state.layout import FlatState, Piece, check_tensors, layout_of, pieces
from coherent_ray.state.shards import (
    BLOCK_BYTES,
    Hooks,
    load_state,
    read_tensor,
    shard_path,
    write_shard,
)
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.state.writer import BackgroundWriter

__all__ = [
    "BLOCK_BYTES",
    "BackgroundWriter",
    "Fingerprint",
    "FlatState",
    "Hooks",
    "Piece",
    "Snapshot",
    "State",
    "capture",
    "check_spec",
    "check_tensors",
    "fingerprint",
    "layout_of",
    "load_state",
    "pieces",
    "read_tensor",
    "restore",
    "shard_path",
    "spec_digest",
    "state_digest",
    "state_spec",
    "tensors_digest",
    "write_shard",
]
