"""Shard records: where a shard's bytes lie, and what may never be referred to."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from ranks import BLOCK, Ranks
from safetensors import safe_open

from coherent_ray import canonical
from coherent_ray.commit.manifest import LaterFormat, Manifest, ShardRecord, dump, load
from coherent_ray.commit.partial_files import header_of_record
from coherent_ray.commit.shard_records import (
    Base,
    Places,
    Reuse,
    Run,
    StoredFile,
    require_earlier,
    reuse_problem,
)
from coherent_ray.digests import digest_of
from coherent_ray.storage.testing.memory import MemoryStorage

FIRST = Ranks(ranks=2, number=4)
SECOND = Ranks(ranks=2, number=5, base=FIRST)
THIRD = Ranks(ranks=2, number=6, attempt=2, base=SECOND)
OLD = "generations/g4-a1/shard-00000-of-00002.safetensors"
NEW = "generations/g5-a1/shard-00000-of-00002.safetensors"


def manifest_of(group: Ranks, **changes: Any) -> Manifest:
    header = dataclasses.replace(group.header, format=3 if group.base else 1)
    shards = tuple(group.shard(rank) for rank in range(group.ranks))
    return Manifest(header, digest_of(b"state"), changes.get("shards", shards))


def written() -> MemoryStorage:
    storage = MemoryStorage()
    for group in (FIRST, SECOND, THIRD):
        group.write(storage)
    return storage


# --- where bytes lie ------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [FIRST, SECOND, THIRD], ids=["whole", "refers", "refers twice"])
def test_any_range_of_a_shard_is_found_where_it_lies(group: Ranks) -> None:
    storage = written()
    for rank in range(2):
        shard, whole = group.shard(rank), group.whole(rank)
        places = Places(shard)
        for first in range(0, shard.size, 7):
            for last in range(first, shard.size + 1, 11):
                pieces = list(places.pieces(first, last))
                found = b"".join(storage.read(path, at, size) for path, at, size in pieces)
                assert found == whole[first:last]
        for file in shard.files:
            assert storage.size(file.path) == file.size


def test_a_reference_leads_to_the_file_that_holds_the_bytes_and_to_no_other_reference() -> None:
    """However long the chain of generations is."""
    shard = THIRD.shard(0)
    assert shard.reuse is not None
    assert shard.reuse.base == Base(5, 1)
    assert [file.path for file in shard.reuse.files] == [OLD], "the last block is new in each"


def test_a_whole_shard_says_nothing_of_it_and_its_manifest_is_as_before() -> None:
    data = dump(manifest_of(FIRST))
    assert b"reuse" not in data
    assert json.loads(data)["header"]["format"] == 1
    assert load(Manifest, data) == manifest_of(FIRST)


def test_a_manifest_that_refers_comes_back_as_it_was_and_says_format_3() -> None:
    data = dump(manifest_of(SECOND))
    value = json.loads(data)
    assert value["header"]["format"] == 3
    assert value["shards"][0]["reuse"]["base"] == {"number": 4, "attempt": 1}
    assert value["shards"][0]["reuse"]["runs"][-1][1:] == [0, 4096]
    assert load(Manifest, data) == manifest_of(SECOND)
    assert load(Manifest, data).base == Base(4, 1)
    assert load(Manifest, data).files == {
        f"generations/{name}/shard-{rank:05d}-of-00002.safetensors"
        for name in ("g4-a1", "g5-a1")
        for rank in range(2)
    }


def test_a_later_format_is_called_that() -> None:
    value = json.loads(dump(manifest_of(SECOND)))
    value["header"]["format"] = 5
    with pytest.raises(LaterFormat, match="format 5, this version reads 4"):
        load(Manifest, canonical.dump(value))


def test_the_own_file_of_a_shard_that_refers_is_a_safetensors_file_too(tmp_path: Any) -> None:
    shard, path = SECOND.shard(1), tmp_path / "part.safetensors"
    path.write_bytes(SECOND.content(1))
    kept = (shard.size - 1) // BLOCK * BLOCK
    with safe_open(path, "np") as file:
        (name,) = file.keys()
        assert name == f"shard[{kept}:{shard.size}]"
        assert file.get_tensor(name).tobytes() == SECOND.whole(1)[kept:]
        about = json.loads(file.metadata()["coherent_ray"])
    assert about == {"format": 3, "start": shard.start, "stop": shard.stop, "base": "g4-a1"}
    assert len(header_of_record(shard)) == 4096


# --- what is refused ------------------------------------------------------------------------------


def changed(**changes: Any) -> Reuse:
    reuse = SECOND.shard(0).reuse
    assert reuse is not None
    return dataclasses.replace(reuse, **changes)


SIZE = SECOND.shard(0).size
FILE = StoredFile(OLD, SIZE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": (FILE, FILE)}, "a file is named twice"),
        ({"files": (FILE, StoredFile(NEW, 10))}, "the files are not those that the runs lie in"),
        ({"runs": (Run(SIZE, 0, 0),)}, "the files are not those that the runs lie in"),
        ({"runs": (Run(10, 2, 0),)}, "the files are not those that the runs lie in"),
        ({"runs": (Run(SIZE, 1, 1),)}, "beyond the end of its file"),
        ({"written": 4096}, "beyond the end of its file"),
        ({"runs": (Run(8, 1, 0), Run(8, 1, 8))}, "two runs are one"),
        ({"files": ()}, "at least 1 item"),
        ({"runs": ((0, 1, 0),)}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        changed(**changes)


def test_runs_cover_the_shard() -> None:
    reuse = changed(runs=(Run(BLOCK, 1, 0),), written=1)
    with pytest.raises(ValueError, match="its runs do not add up"):
        dataclasses.replace(SECOND.shard(0), reuse=reuse)


@pytest.mark.parametrize(
    "path",
    [
        OLD.replace("shard-00000", "shard-00001"),
        OLD.replace("of-00002", "of-00003"),
        OLD.replace("g4-a1", "g4-a1/../g4-a1"),
        OLD.replace("g4", "g04"),
        "log/00000000000000000001.json",
        "/etc/passwd",
        NEW.replace("g5-a1", "g9-a1"),
    ],
)
def test_nothing_but_earlier_files_of_the_rank_is_referred_to(path: str) -> None:
    reuse = changed(files=(StoredFile(path, SIZE),))
    shard = dataclasses.replace(SECOND.shard(0), reuse=reuse)
    with pytest.raises(ValueError, match=r"another rank's file|no file of a generation|later than"):
        require_earlier(shard, 5, 2)
    with pytest.raises(ValueError, match=r"another rank's file|no file of a generation|later than"):
        manifest_of(SECOND, shards=(shard, SECOND.shard(1)))


def test_a_base_is_an_earlier_generation_and_one_for_all_shards() -> None:
    shard = dataclasses.replace(SECOND.shard(0), reuse=changed(base=Base(5, 1)))
    with pytest.raises(ValueError, match="refers to g5-a1, a later one"):
        manifest_of(SECOND, shards=(shard, SECOND.shard(1)))
    other = dataclasses.replace(SECOND.shard(0), reuse=changed(base=Base(4, 2)))
    with pytest.raises(ValueError, match="the shards refer to different generations"):
        manifest_of(SECOND, shards=(other, SECOND.shard(1)))


def test_the_format_is_that_of_the_shards() -> None:
    for group, number in ((FIRST, 3), (SECOND, 1)):
        header = dataclasses.replace(group.header, format=number)
        shards = (group.shard(0), group.shard(1))
        with pytest.raises(ValueError, match=f"format {number} is not that of such shards"):
            Manifest(header, digest_of(b"state"), shards)


# --- held against the base ------------------------------------------------------------------------


def test_what_is_taken_from_the_base_contradicts_nothing() -> None:
    for group, base in ((SECOND, FIRST), (THIRD, SECOND)):
        for rank in range(2):
            assert reuse_problem(group.shard(rank), base.shard(rank)) is None


def lie(shard: ShardRecord, **changes: Any) -> ShardRecord:
    assert shard.reuse is not None
    return dataclasses.replace(shard, reuse=dataclasses.replace(shard.reuse, **changes))


def test_a_shard_that_takes_what_its_base_does_not_have_is_found() -> None:
    shard, base = THIRD.shard(0), SECOND.shard(0)
    reuse = shard.reuse
    assert reuse is not None
    unknown = lie(shard, files=(StoredFile(OLD.replace("g4", "g3"), SIZE),))
    assert "its base knows no generations/g3-a1/" in str(reuse_problem(unknown, base))
    longer = lie(shard, files=(StoredFile(OLD, SIZE + 1),))
    assert "its base knows no" in str(reuse_problem(longer, base))
    first = reuse.runs[0]
    moved = lie(shard, runs=(Run(first.size, 1, 8), *reuse.runs[1:]))
    assert "do not lie where they lie in its base" in str(reuse_problem(moved, base))
    digests = (digest_of(b"other", "xxh3_128").partition(":")[2], *shard.blocks[1:])
    changed_block = dataclasses.replace(shard, blocks=digests)
    assert "block 0 has another digest than in its base" in str(reuse_problem(changed_block, base))
    other_size = dataclasses.replace(base, block_bytes=2 * BLOCK, blocks=base.blocks[::2])
    assert "its block_bytes is 64, in its base 128" in str(reuse_problem(shard, other_size))
