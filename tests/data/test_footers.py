"""A file tells its columns, rows and footer; a wrong one is refused with its name and a remedy."""

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from coherent_ray.data.footers import Window, inspect
from coherent_ray.errors import DataError

TABLE = pa.table({"text": ["a", "bb", "ccc"], "label": [1, 2, 3]})


def write(path, table=TABLE):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


KINDS = [("f.parquet", "parquet"), ("f.arrow", "arrow"), ("f.stream", "arrow")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_columns_and_rows(tmp_path, name, kind):
    path = write(tmp_path / name)
    facts = inspect(path, kind, None, None)
    assert facts.columns == (("text", "string"), ("label", "int64"))
    assert facts.rows == 3
    assert inspect(path, kind, ["label"], None).columns == (("label", "int64"),)
    assert inspect(path, kind, ["label", "text"], None).columns[0][0] == "label"


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_the_footer_digest_is_the_files_own(tmp_path, name, kind):
    one = inspect(write(tmp_path / name), kind, None, None)
    (tmp_path / "copy").mkdir()
    assert inspect(write(tmp_path / "copy" / name), kind, None, None).footer == one.footer
    longer = pa.concat_tables([TABLE, TABLE])
    other = inspect(write(tmp_path / "copy" / name, longer), kind, None, None)
    assert other.footer != one.footer
    assert other.rows == 6


def test_a_compressed_feather_file_is_arrow(tmp_path):
    pyarrow.feather.write_feather(TABLE, tmp_path / "f.feather", compression="zstd")
    assert inspect(tmp_path / "f.feather", "arrow", None, None).rows == 3


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize(
    ("column", "hint"), [("txt", "'text'"), ("LABEL", "'label'"), ("zzzz", "'text', 'label'")]
)
def test_a_missing_column_names_the_nearest(tmp_path, name, kind, column, hint):
    path = write(tmp_path / name)
    with pytest.raises(DataError, match=f"no column '{column}'") as caught:
        inspect(path, kind, ["label", column], None)
    assert hint in caught.value.remedy
    assert str(path) in caught.value.where
    assert caught.value.details["columns"] == ["text", "label"]


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(DataError, match="two columns are named 'x'"):
        inspect(write(tmp_path / "f.arrow", table), "arrow", None, None)


def test_a_table_without_columns_is_refused(tmp_path):
    with pytest.raises(DataError, match="no columns"):
        inspect(write(tmp_path / "f.arrow", pa.table({})), "arrow", None, None)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"hello", b"PAR1" + bytes(40) + b"PAR1", b"ARROW1\0\0"])
def test_other_bytes_are_refused(tmp_path, kind, content):
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"cannot be read as {kind}") as caught:
        inspect(path, kind, None, None)
    assert str(path) in caught.value.where


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_torn_file_is_refused(tmp_path, name, kind):
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        inspect(path, kind, None, None)


def test_tokens_are_cut_into_windows(tmp_path):
    path = tmp_path / "t.bin"
    np.arange(100, dtype="<u2").tofile(path)
    facts = inspect(path, "tokens", None, Window(8, "uint16"))
    assert facts.rows == 12
    assert facts.columns == (("tokens", "uint16[8]"),)
    np.arange(1, 101, dtype="<u2").tofile(path)
    assert inspect(path, "tokens", None, Window(8, "uint16")).footer != facts.footer


def test_tokens_that_are_not_whole_are_refused(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(7))
    with pytest.raises(DataError, match="7 bytes are not a whole number of uint16 tokens"):
        inspect(path, "tokens", None, Window(8, "uint16"))
    with pytest.raises(DataError, match="need a window"):
        inspect(path, "tokens", None, None)
