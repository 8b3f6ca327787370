"""Inspection: what is wrong is found, and named down to the block and the tensor."""

import dataclasses

import pytest
from ranks import BLOCK, HEADER_BYTES, LAYOUT, Ranks

from coherent_ray.commit.inspection import (
    block_range,
    is_lost,
    shard_damage,
    tensors_between,
    tensors_in,
)
from coherent_ray.commit.manifest import (
    Manifest,
    ShardRecord,
    StateLayout,
    TensorSpec,
    shard_path,
)
from coherent_ray.digests import ALGORITHMS, Algorithm, digest_of, new_hasher
from coherent_ray.errors import NotFound, StorageError
from coherent_ray.storage.testing.faults import Fault, FaultyStorage, flipped
from coherent_ray.storage.testing.memory import MemoryStorage

GROUP = Ranks(ranks=2)
MANIFEST = Manifest(GROUP.header, digest_of(b"state"), (GROUP.shard(0), GROUP.shard(1)))
FIRST, SECOND = MANIFEST.shards


def written() -> MemoryStorage:
    storage = MemoryStorage()
    GROUP.write(storage)
    return storage


def byte_owner(shard: ShardRecord, at: int) -> str | None:
    """The tensor that a byte of a shard's file belongs to, found the slow way."""
    flat = shard.start + at - shard.header_bytes
    if at < shard.header_bytes:
        return None
    for tensor, offset in zip(LAYOUT.tensors, LAYOUT.offsets(), strict=True):
        if offset <= flat < offset + tensor.nbytes:
            return tensor.name
    return None


# --- which tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_blocks_tensors_are_those_that_own_its_bytes(ranks: int) -> None:
    group = Ranks(ranks=ranks)
    manifest = Manifest(group.header, digest_of(b""), tuple(map(group.shard, range(ranks))))
    for shard in manifest.shards:
        for block in range(len(shard.blocks)):
            owners = [byte_owner(shard, at) for at in range(*block_range(shard, block))]
            names = list(dict.fromkeys(owner for owner in owners if owner))
            assert tensors_in(manifest.header, shard, block) == names


def test_any_range_of_a_shard() -> None:
    for start in range(0, FIRST.size, 5):
        for stop in range(start + 1, FIRST.size + 1, 7):
            owners = [byte_owner(FIRST, at) for at in range(start, stop)]
            names = list(dict.fromkeys(owner for owner in owners if owner))
            assert tensors_between(MANIFEST.header, FIRST, start, stop) == names


def test_empty_tensors_own_no_bytes() -> None:
    layout = StateLayout(
        (TensorSpec("a", "F32", (0,)), TensorSpec("b", "F32", (4,)), TensorSpec("c", "F32", (0,)))
    )
    shard = dataclasses.replace(
        FIRST,
        path=shard_path(GROUP.header.directory, 0, 1),
        size=HEADER_BYTES + 16,
        start=0,
        stop=16,
        blocks=FIRST.blocks[:1],
    )
    header = dataclasses.replace(GROUP.header, layout=layout, ranks=1)
    manifest = Manifest(header, digest_of(b""), (shard,))
    assert tensors_in(manifest.header, shard, 0) == ["b"]
    assert tensors_between(manifest.header, shard, 0, HEADER_BYTES) == []


# --- what is wrong --------------------------------------------------------------------------------


def test_a_whole_shard_has_no_damage() -> None:
    storage = written()
    for shard in MANIFEST.shards:
        for deep in (True, False):
            assert shard_damage(storage, MANIFEST.header, shard, deep=deep) == []


def test_every_flipped_bit_is_found_and_named() -> None:
    storage = written()
    whole = storage.files[SECOND.path]
    for bit in range(8 * len(whole)):
        storage.files[SECOND.path] = flipped(whole, bit)
        (damage,) = shard_damage(storage, MANIFEST.header, SECOND, deep=True)
        block = bit // 8 // BLOCK
        assert damage.where == SECOND.path
        assert damage.details["kind"] == "block"
        assert damage.details["block"] == block
        assert damage.details["rank"] == 1
        assert damage.details["generation"] == "g1-a1"
        assert (damage.details["start"], damage.details["stop"]) == block_range(SECOND, block)
        assert damage.details["tensors"] == tensors_in(MANIFEST.header, SECOND, block)
        assert damage.details["expected"] == SECOND.blocks[block]
        assert damage.details["found"] not in {"", SECOND.blocks[block]}
        assert f"block {block} " in damage.what
        for name in tensors_in(MANIFEST.header, SECOND, block):
            assert repr(name) in damage.what
        assert ("header" in damage.what) == (block == 0)
        assert "fall_back" in damage.remedy


def test_a_flipped_bit_does_not_show_in_the_size() -> None:
    storage = written()
    storage.files[FIRST.path] = flipped(storage.files[FIRST.path], 1000)
    assert shard_damage(storage, MANIFEST.header, FIRST, deep=False) == []
    assert len(shard_damage(storage, MANIFEST.header, FIRST, deep=True)) == 1


def test_all_damaged_blocks_are_reported() -> None:
    storage = written()
    storage.files[FIRST.path] = bytes(FIRST.size)
    damages = shard_damage(storage, MANIFEST.header, FIRST, deep=True)
    assert [damage.details["block"] for damage in damages] == list(range(len(FIRST.blocks)))


@pytest.mark.parametrize("deep", [True, False])
def test_every_wrong_length_is_found_with_the_tensors_that_are_gone(deep: bool) -> None:
    storage = written()
    whole = storage.files[FIRST.path]
    for length in range(len(whole)):
        storage.files[FIRST.path] = whole[:length]
        (damage,) = shard_damage(storage, MANIFEST.header, FIRST, deep=deep)
        assert damage.details["kind"] == "size"
        assert damage.details["found"] == length
        assert damage.details["expected"] == FIRST.size
        assert damage.details["tensors"] == tensors_between(
            MANIFEST.header, FIRST, length, FIRST.size
        )
    storage.files[FIRST.path] = whole + b"\0"
    (damage,) = shard_damage(storage, MANIFEST.header, FIRST, deep=deep)
    assert f"{FIRST.size + 1} bytes instead of {FIRST.size}" in damage.what
    assert damage.details["tensors"] == []


@pytest.mark.parametrize("deep", [True, False])
def test_a_missing_shard_is_found(deep: bool) -> None:
    storage = written()
    storage.delete(FIRST.path)
    (damage,) = shard_damage(storage, MANIFEST.header, FIRST, deep=deep)
    assert damage.details["kind"] == "missing"
    assert damage.details["tensors"] == tensors_between(MANIFEST.header, FIRST, 0, FIRST.size)
    assert "rank 0 is missing" in damage.what


def test_shards_that_were_swapped_are_found() -> None:
    storage = written()
    storage.files[FIRST.path], storage.files[SECOND.path] = (
        storage.files[SECOND.path],
        storage.files[FIRST.path],
    )
    for shard in MANIFEST.shards:
        assert shard_damage(storage, MANIFEST.header, shard, deep=True)


def test_a_shard_that_shrinks_while_it_is_read_is_found() -> None:
    class Shrinking(MemoryStorage):
        def size(self, path: str) -> int:
            return FIRST.size

    storage = Shrinking()
    storage.files = {FIRST.path: GROUP.content(0)[:-1]}
    (damage,) = shard_damage(storage, MANIFEST.header, FIRST, deep=True)
    assert damage.details["block"] == len(FIRST.blocks) - 1
    storage.files = {}
    (damage,) = shard_damage(storage, MANIFEST.header, FIRST, deep=True)
    assert damage.details["kind"] == "missing"


def test_a_record_whose_digests_do_not_fit_together_is_found() -> None:
    shard = dataclasses.replace(FIRST, digest=SECOND.digest)
    (damage,) = shard_damage(written(), MANIFEST.header, shard, deep=True)
    assert damage.details["kind"] == "digest"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_and_blocks_larger_than_a_piece(algorithm: Algorithm) -> None:
    data = bytes(range(256)) * 40_000
    block_bytes = 9 << 20
    hexes = []
    for start in range(0, len(data), block_bytes):
        hasher = new_hasher(algorithm)
        hasher.update(data[start : start + block_bytes])
        hexes.append(hasher.hexdigest())
    shard = ShardRecord(
        rank=0, path=shard_path(GROUP.header.directory, 0, 1), size=len(data),
        start=0, stop=len(data) - 8, header_bytes=8,
        algorithm=algorithm, block_bytes=block_bytes, blocks=tuple(hexes),
        digest=digest_of(bytes.fromhex("".join(hexes)), algorithm),
    )  # fmt: skip
    layout = StateLayout((TensorSpec("a", "U8", (len(data) - 8,)),))
    header = dataclasses.replace(GROUP.header, layout=layout, ranks=1)
    manifest = Manifest(header, digest_of(b""), (shard,))
    storage = MemoryStorage()
    storage.files[shard.path] = data
    assert shard_damage(storage, manifest.header, shard, deep=True) == []
    storage.files[shard.path] = flipped(data, 8 * (len(data) - 1))
    (damage,) = shard_damage(storage, manifest.header, shard, deep=True)
    assert damage.details["block"] == 1


# --- what nobody knows ----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["size", "read_into"])
def test_a_storage_that_cannot_be_asked_is_no_damage(verb: str) -> None:
    storage = FaultyStorage(written(), [Fault("refuse", verb=verb)])  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="injected"):
        shard_damage(storage, MANIFEST.header, FIRST, deep=True)


def test_a_device_that_has_lost_the_bytes_is_damage() -> None:
    class BadSector(MemoryStorage):
        def read_into(self, path: str, start: int, target: memoryview) -> int:
            if start == BLOCK:
                raise StorageError("input/output error", where=path, details={"errno": "EIO"})
            return super().read_into(path, start, target)

    storage = BadSector()
    storage.files = written().files
    (damage,) = shard_damage(storage, MANIFEST.header, FIRST, deep=True)
    assert damage.details["kind"] == "unreadable"
    assert damage.details["block"] == 1
    assert "cannot be read from the device" in damage.what


def test_what_counts_as_lost() -> None:
    assert is_lost(NotFound("gone"))
    assert is_lost(StorageError("bad", details={"errno": "EIO"}))
    assert not is_lost(StorageError("no", details={"errno": "EACCES"}))
    assert not is_lost(StorageError("no"))
