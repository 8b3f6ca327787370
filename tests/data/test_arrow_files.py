"""Arrow files of both formats are opened as views, with the columns in the order wanted."""

import pyarrow as pa
import pyarrow.feather
import pytest

from coherent_ray.data import arrow_files

TABLE = pa.table({"a": list(range(10)), "b": [str(i) for i in range(10)], "c": [0.5] * 10})


@pytest.fixture(params=["file", "stream", "compressed"])
def path(request, tmp_path):
    path = tmp_path / "f.arrow"
    if request.param == "compressed":
        pyarrow.feather.write_feather(TABLE, path, compression="lz4", chunksize=4)
        return path
    new = pa.ipc.new_file if request.param == "file" else pa.ipc.new_stream
    with new(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=4)
    return path


def test_all_columns(path):
    batches = arrow_files.read_batches(path)
    assert [b.num_rows for b in batches] == [4, 4, 2]
    assert pa.Table.from_batches(batches).equals(TABLE)


@pytest.mark.parametrize("columns", [["c", "a"], ["b"], ["b", "a", "c"]])
def test_some_columns_in_another_order(path, columns):
    found = pa.Table.from_batches(arrow_files.read_batches(path, columns))
    assert found.equals(TABLE.select(columns))


def test_rows_are_counted(path):
    assert arrow_files.count_rows(path) == 10
    assert arrow_files.read_schema(path).equals(TABLE.schema)


def test_batches_outlive_the_reader_and_the_file(path):
    batches = arrow_files.read_batches(path, ["a"])
    path.unlink()
    assert pa.Table.from_batches(batches)["a"].to_pylist() == list(range(10))


def test_uncompressed_batches_are_views_of_the_map(tmp_path):
    size = 1_000_000
    with pa.ipc.new_file(tmp_path / "f", pa.schema([("x", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch({"x": pa.array(range(size))}))
    before = pa.total_allocated_bytes()
    (batch,) = arrow_files.read_batches(tmp_path / "f")
    assert batch.num_rows == size
    assert pa.total_allocated_bytes() - before < 100_000
