"""Manifests of many ranks: smaller, and the same manifest."""

import dataclasses

import pytest
from ranks import LAYOUT, Ranks

from coherent_ray import canonical
from coherent_ray.commit import packing
from coherent_ray.commit.manifest import (
    LaterFormat,
    Manifest,
    ShardRecord,
    TensorSpec,
    dump,
    generation_directory,
    load,
    shard_path,
)
from coherent_ray.commit.shard_records import Base, Reuse, Run, StoredFile
from coherent_ray.digests import digest_of


def manifest_of(ranks: int, moved: int = 0, **changes: object) -> Manifest:
    header = dataclasses.replace(Ranks(ranks=ranks).header, **changes)
    cuts = header.layout.cuts(ranks)
    if moved:
        cuts[moved] = cuts[moved + 1]
    shards = []
    for rank in range(ranks):
        size = 40 + rank % 3 + cuts[rank + 1] - cuts[rank]
        blocks = [digest_of(bytes([rank % 7, i]), "xxh3_128")[9:] for i in range(-(-size // 16))]
        raw = digest_of(bytes.fromhex("".join(blocks)), "xxh3_128")
        path = shard_path(header.directory, rank, ranks)
        span = (size, cuts[rank], cuts[rank + 1], 40 + rank % 3)
        shards.append(ShardRecord(rank, path, *span, "xxh3_128", 16, tuple(blocks), raw))
    return Manifest(header, digest_of(b"state"), tuple(shards))


@pytest.mark.parametrize("ranks", [1, packing.RANKS - 1])
def test_few_ranks_are_plain(ranks: int) -> None:
    manifest = manifest_of(ranks)
    assert packing.dump_manifest(manifest) == dump(manifest)
    assert packing.load_manifest(dump(manifest)) == manifest


@pytest.mark.parametrize("ranks", [packing.RANKS, 1000])
def test_many_ranks_are_a_table_that_stands_for_the_same(ranks: int) -> None:
    manifest = manifest_of(ranks)
    data = packing.dump_manifest(manifest)
    assert packing.load_manifest(data) == manifest
    assert len(data) < 0.6 * len(dump(manifest))
    table = canonical.load(data)
    assert table["shards"]["columns"]["header_bytes"] == {
        "each": [40 + rank % 3 for rank in range(ranks)]
    }
    assert table["shards"]["columns"]["algorithm"] == {"all": "xxh3_128"}
    assert table["header"]["layout"]["columns"]["name"]["each"] == [t.name for t in LAYOUT.tensors]


def test_old_plain_manifests_of_many_ranks_are_read() -> None:
    manifest = manifest_of(300)
    assert packing.load_manifest(dump(manifest)) == manifest


def test_a_version_that_knows_no_table_calls_it_a_later_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coherent_ray.commit.manifest.TABLE_FORMAT", 3)
    with pytest.raises(LaterFormat, match="format 4, this version reads 3"):
        load(Manifest, packing.dump_manifest(manifest_of(300)))


def test_what_is_later_than_tables_is_a_later_format() -> None:
    value = canonical.load(packing.dump_manifest(manifest_of(300)))
    value["header"]["format"] = 5
    with pytest.raises(LaterFormat, match="format 5, this version reads 4"):
        packing.load_manifest(canonical.dump(value))


def test_a_table_takes_references_to_earlier_generations() -> None:
    manifest = manifest_of(300, number=2)
    earlier = generation_directory(1, 1)
    shards = []
    for shard in manifest.shards:
        file = StoredFile(shard_path(earlier, shard.rank, 300), shard.size)
        head, rest = shard.header_bytes, shard.size - shard.header_bytes
        runs = (Run(head, 0, 0), Run(rest, 1, head)) if rest else (Run(head, 1, 0),)
        reuse = Reuse(Base(1, 1), head, (file,), runs)
        shards.append(dataclasses.replace(shard, reuse=reuse if shard.rank % 2 else None))
    manifest = dataclasses.replace(
        manifest,
        header=dataclasses.replace(manifest.header, format=3),
        shards=tuple(shards),
    )
    data = packing.dump_manifest(manifest)
    assert canonical.load(data)["header"]["format"] == 4
    assert packing.load_manifest(data) == manifest


def test_sharded_tensors_are_in_a_table_too() -> None:
    ranks = 300
    tensors = tuple(
        TensorSpec(spec.name, "F32", (600, 2), ranks) if "weight" in spec.name else spec
        for spec in LAYOUT.tensors
    )
    manifest = manifest_of(ranks, layout=dataclasses.replace(LAYOUT, tensors=tensors), format=2)
    data = packing.dump_manifest(manifest)
    assert canonical.load(data)["header"]["layout"]["columns"]["parts"] == {"some": {"1": ranks}}
    assert packing.load_manifest(data) == manifest


def test_what_does_not_follow_from_the_ranks_is_stored_plain() -> None:
    # Where a rank's part begins is not where every writer of this version would begin it.
    moved = next(
        rank for rank in range(1, 300) if LAYOUT.cut(rank, 300) < LAYOUT.cut(rank + 1, 300)
    )
    odd = manifest_of(300, moved=moved)
    assert packing.dump_manifest(odd) == dump(odd)
    assert packing.load_manifest(dump(odd)) == odd


def edited(change) -> bytes:
    value = canonical.load(packing.dump_manifest(manifest_of(300)))
    change(value)
    return canonical.dump(value)


def columns(value: dict) -> dict:
    return value["shards"]["columns"]


@pytest.mark.parametrize(
    "change",
    [
        lambda v: columns(v).pop("blocks"),
        lambda v: columns(v)["blocks"]["each"].pop(),
        lambda v: columns(v)["blocks"]["each"].__setitem__(3, "00"),
        lambda v: columns(v)["blocks"]["each"].__setitem__(3, 7),
        lambda v: columns(v).update(header_bytes={"each": [1]}),
        lambda v: columns(v).update(header_bytes={"other": 1}),
        lambda v: columns(v).update(header_bytes=None),
        lambda v: columns(v).update(header_bytes={"some": {"-1": 40, "x": 1}}),
        lambda v: columns(v).update(header_bytes={"some": {"5000": 40}}),
        lambda v: columns(v).update(algorithm={"all": "md5"}),
        lambda v: columns(v).update(surplus={"all": 1}),
        lambda v: columns(v).update(block_bytes={"all": 0}),
        lambda v: v["shards"].update(surplus=1),
        lambda v: v["shards"].update(format=4),
        lambda v: v["shards"].update(format=2),
        lambda v: v["header"].update(ranks=299),
        lambda v: v["header"].update(ranks=2**62),
        lambda v: v["header"].update(number="1"),
        lambda v: v["header"]["layout"].update(columns={}),
        lambda v: v["header"]["layout"]["columns"].update(name={"each": []}),
        lambda v: v.update(shards=[]),
        lambda v: v.pop("shards"),
    ],
)
def test_a_wrong_table_is_refused(change) -> None:
    with pytest.raises(ValueError, match=r".+"):
        packing.load_manifest(edited(change))


def test_other_bytes_than_the_canonical_ones_are_refused() -> None:
    data = packing.dump_manifest(manifest_of(300))
    with pytest.raises(ValueError, match="canonical"):
        packing.load_manifest(data.replace(b'{"', b'{ "', 1))
