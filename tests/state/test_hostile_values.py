"""Values and shards from outside that mean harm."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import pytest
import torch
from saved import save

from coherent_ray.commit.manifest import Manifest, StateLayout, TensorSpec
from coherent_ray.digests import digest_of, new_hasher
from coherent_ray.errors import ManifestDamaged, ShardDamaged
from coherent_ray.state import values
from coherent_ray.state.shards import load_state, read_tensor
from coherent_ray.storage.testing.memory import MemoryStorage


def nested(depth: int, inner: Any = 1) -> Any:
    for _ in range(depth):
        inner = {"$tuple": [inner]}
    return inner


@pytest.mark.parametrize(
    "form",
    [
        nested(300), nested(5_000), {"$int": "x"}, {"$int": 5}, {"$float": "1e400"},
        {"$float": []}, {"$numpy": ["V1000000000", ""]}, {"$numpy": ["(1000000000,)f8", "00"]},
        {"$numpy": ["f8,f8", "00" * 16]}, {"$numpy": [["f8"], "00"]}, {"$numpy": ["<f8", ""]},
        {"$numpy": "f8"}, {"$numpy": ["i3", "000000"]}, {"$tensor": ["F32", [2**62, 2**62, 0], ""]},
        {"$tensor": ["F32", [2**70], ""]}, {"$tensor": ["F32", [-1], "00000000"]},
        {"$tensor": ["F32", [True], "00000000"]}, {"$tensor": ["F32", [0] * 65, ""]},
        {"$tensor": ["X", [], ""]}, {"$dtype": []}, {"$dtype": "X"}, {"$dict": [[[], 1]]},
        {"$dict": [["a", 1], ["a", 2]]}, {"$dict": [[1]]}, {"$counter": 3}, {"$what": 1},
        {"$int": "0x1", "a": 1},
    ],
)  # fmt: skip
def test_a_form_that_nobody_wrote_is_damage(form: Any) -> None:
    with pytest.raises(ManifestDamaged):
        values.decode(form)


def test_the_deepest_value_that_is_stored_comes_back() -> None:
    value: Any = 1
    for _ in range(31):
        value = ({1: value},)[0]
    assert values.decode(values.encode(value, "here")) == value


# --- shards under their right digests -----------------------------------------------------------


def generation() -> tuple[MemoryStorage, Manifest]:
    storage = MemoryStorage()
    state = {"a": torch.arange(1000.0), "b": torch.arange(3000.0)}
    return storage, save(storage, state, ranks=1)


def lied(change: Any) -> tuple[MemoryStorage, Manifest]:
    """A generation whose shard's bytes are changed, and hashed again as an attacker would."""
    storage, manifest = generation()
    (shard,) = manifest.shards
    data = change(storage.files[shard.path])
    hexes = []
    for at in range(0, len(data), shard.block_bytes):
        hasher = new_hasher(shard.algorithm)
        hasher.update(data[at : at + shard.block_bytes])
        hexes.append(hasher.hexdigest())
    digest = digest_of(b"".join(map(bytes.fromhex, hexes)), shard.algorithm)
    storage.files[shard.path] = data
    lying = dataclasses.replace(shard, blocks=tuple(hexes), digest=digest)
    return storage, dataclasses.replace(manifest, shards=(lying,))


def with_header(edit: Any) -> Any:
    def change(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        edit(header)
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        return data[:8] + text.ljust(length)[:length] + data[8 + length :]

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda data: struct.pack("<Q", 2**63 - 1) + data[8:],
        lambda data: struct.pack("<Q", 10**9) + data[8:],
        lambda data: struct.pack("<Q", 0) + data[8:],
        with_header(lambda h: h["a"].update(data_offsets=[0, 2**62])),
        with_header(lambda h: h["b"].update(data_offsets=h["a"]["data_offsets"])),
        with_header(lambda h: h["a"].update(shape=[2**40, 2**40])),
        with_header(lambda h: h["a"].update(dtype="F64")),
        with_header(lambda h: h.update(c=h["a"])),
        lambda data: data.replace(b'"b":{', b'"a":{', 1),
        lambda data: data[:8] + b"[" * 4000 + data[4008:],
    ],
)
def test_a_shards_header_is_never_believed(change: Any) -> None:
    storage, manifest = lied(change)
    with pytest.raises(ShardDamaged, match="header"):
        load_state(storage, manifest)
    # Whoever reads a tensor alone does not even look at it.
    assert torch.equal(read_tensor(storage, manifest, "a"), torch.arange(1000.0))


def test_a_layout_of_more_bytes_than_there_are_takes_no_memory() -> None:
    storage, manifest = generation()
    (shard,) = manifest.shards
    layout = StateLayout((TensorSpec("a", "U8", (2**62,)),))
    shard = dataclasses.replace(
        shard, stop=2**62, size=shard.header_bytes + 2**62, block_bytes=2**62 + 2**20,
        blocks=shard.blocks[:1],
    )  # fmt: skip
    header = dataclasses.replace(manifest.header, layout=layout)
    manifest = dataclasses.replace(manifest, header=header, shards=(shard,))
    for read in (
        lambda: load_state(storage, manifest),
        lambda: read_tensor(storage, manifest, "a"),
    ):
        with pytest.raises(ShardDamaged, match=r"bytes instead of|cannot be"):
            read()
