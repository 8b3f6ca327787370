"""A job's file is made once, whole, and never over something else."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coherent_ray.errors import DataError
from jobs.parquet import keep_or_write


def table():
    return pa.table({"x": [1, 2, 3]})


def test_the_file_is_made_once(tmp_path):
    path = tmp_path / "deep" / "f.parquet"
    keep_or_write(path, {"a": 1}, table)
    before = path.stat()
    keep_or_write(path, {"a": 1}, lambda: pytest.fail("made again"))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert pq.read_table(path)["x"].to_pylist() == [1, 2, 3]
    assert [p.name for p in path.parent.iterdir()] == ["f.parquet"]


def test_a_file_made_from_something_else_is_kept_and_refused(tmp_path):
    path = tmp_path / "f.parquet"
    keep_or_write(path, {"rows": 1}, table)
    with pytest.raises(DataError, match=r'made from \{"rows": 1\}, not from \{"rows": 2\}'):
        keep_or_write(path, {"rows": 2}, table)
    pq.write_table(table(), path)
    with pytest.raises(DataError, match="made from something else"):
        keep_or_write(path, {"rows": 1}, table)


def test_a_file_that_is_no_parquet_is_kept_and_refused(tmp_path):
    path = tmp_path / "f.parquet"
    path.write_bytes(b"precious")
    with pytest.raises(DataError, match="cannot be read"):
        keep_or_write(path, {}, table)
    assert path.read_bytes() == b"precious"


def test_whoever_is_first_wins(tmp_path):
    path = tmp_path / "f.parquet"

    def slow():
        keep_or_write(path, {"a": 1}, table)
        return pa.table({"x": [9]})

    keep_or_write(path, {"a": 1}, slow)
    assert pq.read_table(path)["x"].to_pylist() == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["f.parquet"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        keep_or_write(tmp_path / "f.parquet", {}, table)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written"):
        keep_or_write(tmp_path / "file" / "f.parquet", {}, table)
