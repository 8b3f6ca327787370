"""The dataset's identity follows the data and nothing else, and says what changed."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from coherent_ray import canonical
from coherent_ray.data.content import DigestCache
from coherent_ray.data.dataset import DatasetFile, DatasetManifest, differences, scan
from coherent_ray.errors import DataError

GOLDEN_CONTENT = "blake3:178329aa9e8ce218e1f53f7a59cf6b05b4bff16f6a6423f9f0792d7c52bca840"
GOLDEN_STRUCTURE = "blake3:a5ad62eb055ccc11dd3ef65afdcbc450b1ec49f6041c92cc261f6a65231847fe"


def write(path, first=0, rows=10, **extra):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"x": list(range(first, first + rows)), "s": ["v"] * rows, **extra}
    # No statistics: a footer that does not tell which values there are.
    pq.write_table(
        pa.table(columns), path, write_statistics=False, compression="none", use_dictionary=False
    )
    return path


@pytest.fixture
def data(tmp_path):
    for index, name in enumerate(("a", "b", "c")):
        write(tmp_path / "data" / f"{name}.parquet", 10 * index)
    return tmp_path / "data"


def scanned(data, **options):
    return scan([str(data)], "parquet", **options)


def test_a_scan_lists_every_file(data):
    found = scanned(data)
    assert [f.path for f in found.files] == ["a.parquet", "b.parquet", "c.parquet"]
    assert [f.rows for f in found.files] == [10, 10, 10]
    assert [f.size for f in found.files] == [p.stat().st_size for p in sorted(data.iterdir())]
    assert found.rows == 30
    assert found.columns == (("x", "int64"), ("s", "string"))
    assert found.hash == found.content_hash != found.structure_hash


def test_the_identity_is_the_same_wherever_and_whenever(data, tmp_path):
    before = scanned(data)
    for file in data.iterdir():
        os.utime(file, (1, 1))
    assert scanned(data) == before
    shutil.copytree(data, tmp_path / "elsewhere" / "copy")
    moved = scanned(tmp_path / "elsewhere" / "copy")
    assert moved == before
    assert moved.hash == before.hash
    assert scan([str(data / "*.parquet")], "parquet").hash == before.hash


def test_what_is_not_the_data_does_not_matter(data):
    before = scanned(data).hash
    (data / "README.txt").write_text("notes")
    assert scanned(data).hash == before


def same_size_edit(path):
    content = bytearray(path.read_bytes())
    at = content.index(np.int64(3).tobytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


CHANGES = {
    "a file longer": lambda d: write(d / "b.parquet", 10, 11),
    "a file gone": lambda d: (d / "b.parquet").unlink(),
    "a file new": lambda d: write(d / "d.parquet"),
    "two files swapped": lambda d: (
        (d / "a.parquet").rename(d / "t"),
        (d / "b.parquet").rename(d / "a.parquet"),
        (d / "t").rename(d / "b.parquet"),
    ),
    "a byte": lambda d: same_size_edit(d / "a.parquet"),
}
SAYS = {
    "a file longer": "b.parquet changed its size",
    "a file gone": "b.parquet is gone",
    "a file new": "d.parquet is new",
    "two files swapped": "has the same size and other bytes",
    "a byte": "a.parquet has the same size and other bytes",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found_and_named(data, change):
    before = scanned(data)
    CHANGES[change](data)
    now = scanned(data)
    assert now.hash != before.hash
    assert any(SAYS[change] in said for said in differences(before, now)), change
    assert differences(before, before) == []


def test_structure_finds_all_but_an_edit_in_place(data):
    # Documented: only the content finds it.
    before = scanned(data, level="structure")
    assert before.hash == before.structure_hash
    assert [f.digest for f in before.files] == [None] * 3
    same_size_edit(data / "a.parquet")
    assert scanned(data, level="structure").hash == before.hash
    write(data / "a.parquet", 0, 12)
    after = scanned(data, level="structure")
    assert after.hash != before.hash
    assert "the number of examples changed from 30 to 32" in differences(before, after)


def test_levels_never_pass_for_one_another(data):
    content, structure = scanned(data), scanned(data, level="structure")
    assert content.structure_hash == structure.structure_hash
    assert structure.hash != content.hash
    with pytest.raises(ValueError, match="only the dataset's structure"):
        _ = structure.content_hash
    assert differences(structure, content) == [
        "the data was compared by structure, and now by content"
    ]


def test_columns_and_order_are_part_of_the_identity(data):
    whole = scanned(data)
    part = scanned(data, columns=["x"])
    assert part.hash != whole.hash
    assert "the columns changed" in differences(whole, part)[0]
    names = [str(data / f"{n}.parquet") for n in "cba"]
    turned = scan(names, "parquet")
    assert turned.hash != whole.hash
    assert differences(whole, turned) == ["the files are the same, in another order"]


def test_differences_of_the_footer_and_of_rows_are_told():
    def manifest(rows=1, footer="blake3:" + "0" * 64):
        file = DatasetFile("f", 1, rows, None, footer)
        return DatasetManifest("parquet", "structure", (file,), ())

    other = "blake3:" + "1" * 64
    assert differences(manifest(), manifest(footer=other)) == [
        "f has the same size and another footer"
    ]
    assert "f changed from 1 to 2 examples" in differences(manifest(), manifest(rows=2))


def test_a_manifest_survives_json(data):
    adapter = TypeAdapter(DatasetManifest)
    found = scanned(data)
    stored = canonical.dump(adapter.dump_python(found, mode="json"))
    assert adapter.validate_json(stored) == found
    assert adapter.validate_json(stored).hash == found.hash


def test_the_identity_is_pinned():
    # Stored histories hold it: a change here makes every run's data "changed".
    zeros, ones = "blake3:" + "0" * 64, "blake3:" + "1" * 64
    file = DatasetFile("deep/a.parquet", 1234, 10, zeros, ones)
    manifest = DatasetManifest("parquet", "content", (file,), (("x", "int64"),))
    assert manifest.content_hash == GOLDEN_CONTENT
    assert manifest.structure_hash == GOLDEN_STRUCTURE
    assert manifest.rows == 10


def test_a_content_manifest_without_digests_is_refused(data):
    found = scanned(data, level="structure")
    with pytest.raises(ValueError, match="no content digest"):
        replace(found, level="content")


def test_a_cache_gives_the_same_identity(data, tmp_path):
    cache = DigestCache(tmp_path / "cache")
    assert scanned(data, cache=cache).hash == scanned(data).hash
    same_size_edit(data / "a.parquet")
    assert scanned(data, cache=cache).hash == scanned(data).hash


def test_an_empty_dataset_is_refused(tmp_path):
    write(tmp_path / "a.parquet", rows=0)
    with pytest.raises(DataError, match="empty: 1 file without an example") as caught:
        scan([str(tmp_path / "a.parquet")], "parquet")
    assert str(tmp_path / "a.parquet") in caught.value.where
    (tmp_path / "t.bin").write_bytes(bytes(10))
    with pytest.raises(DataError, match="empty") as caught:
        scan([str(tmp_path / "t.bin")], "tokens", window=8, dtype="uint16")
    assert "data.source.window" in caught.value.remedy


def test_an_empty_file_among_others_is_fine(data):
    write(data / "b.parquet", rows=0, x=pa.array([], pa.int64()), s=pa.array([], pa.string()))
    assert [f.rows for f in scanned(data).files] == [10, 0, 10]


def test_files_of_different_columns_are_refused(data):
    write(data / "b.parquet", x=["text"] * 10)
    with pytest.raises(DataError, match="'x' is string here") as caught:
        scanned(data)
    assert "b.parquet" in caught.value.where
    assert scanned(data, columns=["s"]).rows == 30


def test_a_missing_column_names_file_and_nearest(data):
    with pytest.raises(DataError, match="no column 'S'") as caught:
        scanned(data, columns=["S"])
    assert "'s'" in caught.value.remedy
    assert "a.parquet" in caught.value.where


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(data):
    (data / "b.parquet").chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        scanned(data)


def test_a_file_that_cannot_be_hashed_is_refused(data, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("coherent_ray.data.dataset.file_digest", fail)
    with pytest.raises(DataError, match="Input/output error"):
        scanned(data)
