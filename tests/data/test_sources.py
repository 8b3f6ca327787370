"""Every source gives the rows asked for, in their order, and notices data that moved under it."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coherent_ray.data import sources
from coherent_ray.data.dataset import scan
from coherent_ray.data.sources import (
    ArrowSource,
    MapStyleSource,
    ParquetSource,
    TokenSource,
    open_source,
)
from coherent_ray.errors import DataError

ROWS = 50
VECTORS = np.arange(3 * ROWS, dtype=np.int32).reshape(ROWS, 3)
IDS = np.random.default_rng(2).integers(0, ROWS, 200)


def table(first=0, last=ROWS):
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(VECTORS[first:last].ravel()), 3)
    texts = [f"text {i}" for i in range(first, last)]
    return pa.table({"vector": vectors, "text": texts, "label": range(first, last)})


@pytest.fixture
def parquet(tmp_path):
    for name, first, last in (("a", 0, 20), ("b", 20, ROWS)):
        pq.write_table(table(first, last), tmp_path / f"{name}.parquet", row_group_size=7)
    return [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]


@pytest.fixture
def arrow(tmp_path):
    for name, first, last in (("a", 0, 20), ("b", 20, ROWS)):
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", table().schema) as writer:
            writer.write_table(table(first, last), max_chunksize=6)
    return [str(tmp_path / "a.arrow"), str(tmp_path / "b.arrow")]


def assert_gives_rows(source):
    rows = source.rows(IDS)
    assert len(source) == ROWS
    assert np.array_equal(rows["vector"], VECTORS[IDS])
    assert rows["text"] == [f"text {i}" for i in IDS]
    assert rows["label"].tolist() == IDS.tolist()


@pytest.mark.parametrize("level", ["content", "structure"])
def test_parquet_in_memory(parquet, level):
    source = open_source(parquet, "parquet", None, scan(parquet, "parquet", level=level))
    assert source.columns == ("vector", "text", "label")
    assert_gives_rows(source)


@pytest.mark.parametrize("level", ["content", "structure"])
def test_large_parquet_through_an_arrow_copy(parquet, level, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MEMORY_LIMIT", 0)
    manifest = scan(parquet, "parquet", level=level)
    names = ["text", "vector", "label"]
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for _ in range(2):
        source = ParquetSource(files, names, manifest, memory_limit=0, cache=tmp_path / "cache")
        assert source.columns == tuple(names)
        assert_gives_rows(source)
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1


def test_the_copy_does_not_outlive_an_edit_that_the_structure_misses(tmp_path):
    path = tmp_path / "f.parquet"
    options = {"write_statistics": False, "compression": "none", "use_dictionary": False}

    def read():
        manifest = scan([str(path)], "parquet", level="structure")
        source = ParquetSource([path], ["x"], manifest, memory_limit=0, cache=tmp_path / "cache")
        return manifest.hash, source.rows(np.arange(3))["x"].tolist()

    pq.write_table(pa.table({"x": [1, 2, 3]}), path, **options)
    first = read()
    pq.write_table(pa.table({"x": [1, 2, 4]}), path, **options)
    second = read()
    assert first[0] == second[0]
    assert (first[1], second[1]) == ([1, 2, 3], [1, 2, 4])


def test_the_memory_limit_counts_decoded_bytes(tmp_path):
    # Run-length encoding stores a million equal numbers in next to nothing.
    pq.write_table(pa.table({"x": np.zeros(10**6), "y": ["t"] * 10**6}), tmp_path / "f.parquet")
    assert (tmp_path / "f.parquet").stat().st_size < 100_000
    assert sources._decoded_bytes(tmp_path / "f.parquet", ["x"]) == 8 * 10**6
    assert sources._decoded_bytes(tmp_path / "f.parquet", ["y"]) < 100_000


@pytest.mark.parametrize("columns", [None, ["label", "vector", "text"]])
def test_arrow(arrow, columns):
    assert_gives_rows(open_source(arrow, "arrow", columns, scan(arrow, "arrow", columns)))


def test_columns_are_those_asked_for(parquet, arrow):
    for paths, kind in ((parquet, "parquet"), (arrow, "arrow")):
        source = open_source(paths, kind, ["label"], scan(paths, kind, ["label"]))
        assert source.columns == ("label",)
        assert list(source.rows(np.array([3]))) == ["label"]


def test_an_arrow_file_without_batches_is_refused(tmp_path):
    with pa.ipc.new_file(tmp_path / "f.arrow", table().schema):
        pass
    with pytest.raises(DataError, match="empty"):
        ArrowSource([tmp_path / "f.arrow"])


def tokens(tmp_path):
    paths = []
    for name, first, count in (("a", 0, 103), ("tiny", 900, 3), ("b", 200, 64)):
        np.arange(first, first + count, dtype="<u2").tofile(tmp_path / f"{name}.bin")
        paths.append(str(tmp_path / f"{name}.bin"))
    return paths


def test_tokens_are_windows_that_do_not_overlap_or_cross_files(tmp_path):
    # llm-foundry#1277: packing that repeats data.
    paths = tokens(tmp_path)
    options = {"window": 16, "dtype": "uint16"}
    manifest = scan(paths, "tokens", **options)
    source = open_source(paths, "tokens", None, manifest, **options)
    assert len(source) == manifest.rows == 6 + 0 + 4
    rows = source.rows(np.arange(10))["tokens"]
    assert rows.dtype == np.uint16
    assert rows.shape == (10, 16)
    assert rows.ravel().tolist() == [*range(96), *range(200, 264)]
    turned = source.rows(np.array([9, 0, 6, 0]))["tokens"]
    assert turned[:, 0].tolist() == [248, 0, 200, 0]
    assert source.rows(np.empty(0, np.int64))["tokens"].shape == (0, 16)


def test_tokens_need_their_window(tmp_path):
    paths = tokens(tmp_path)
    manifest = scan(paths, "tokens", window=16, dtype="uint16")
    with pytest.raises(DataError, match="window and a dtype"):
        open_source(paths, "tokens", None, manifest)
    source = open_source(paths, "tokens", None, manifest, window=16, dtype="uint16")
    with pytest.raises(IndexError):
        source.rows(np.array([10]))


def test_a_tokens_batch_may_be_changed(tmp_path):
    paths = tokens(tmp_path)
    source = TokenSource([tmp_path / "a.bin"], sources.Window(16, "uint16"))
    source.rows(np.arange(2))["tokens"][:] = 9
    assert source.rows(np.arange(2))["tokens"].max() == 31
    assert paths


def test_map_style_datasets():
    class Items:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return {"image": index * 10, "label": str(index)}

    source = MapStyleSource(Items(), "items v1")
    assert source.rows(np.array([4, 0])) == {"image": [40, 0], "label": ["4", "0"]}
    assert len(source) == 5
    plain = MapStyleSource(["a", "b", "c"], "letters")
    assert plain.rows(np.array([2, 2, 0])) == {"item": ["c", "c", "a"]}
    hashes = {
        MapStyleSource(data, name).dataset_hash
        for data, name in (("ab", "x"), ("ab", "y"), ("abc", "x"), ("ba", "x"))
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(("data", "identity"), [([], "x"), (["a"], "")])
def test_map_style_datasets_need_items_and_an_identity(data, identity):
    with pytest.raises(DataError, match=r"empty|identity"):
        MapStyleSource(data, identity)


def test_data_that_changed_since_the_scan_is_noticed(parquet, tmp_path):
    manifest = scan(parquet, "parquet")
    pq.write_table(table(20, 30), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="held 50 examples when they were scanned, now 30"):
        open_source(parquet, "parquet", None, manifest)


def test_data_that_became_unreadable_is_a_clear_error(parquet, arrow, tmp_path):
    manifests = scan(parquet, "parquet"), scan(arrow, "arrow")
    (tmp_path / "a.parquet").write_bytes(b"gone")
    (tmp_path / "a.arrow").write_bytes(b"gone")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        open_source(parquet, "parquet", None, manifests[0])
    with pytest.raises(DataError, match="cannot be read as arrow"):
        open_source(arrow, "arrow", None, manifests[1])
