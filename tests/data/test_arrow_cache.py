"""The Arrow copy of Parquet data is made once, whole, by whoever is first."""

import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coherent_ray.data import arrow_cache, arrow_files
from coherent_ray.data.arrow_cache import transcoded
from coherent_ray.errors import DataError

IDENTITY = "blake3:" + "0" * 64


@pytest.fixture
def files(tmp_path):
    made = []
    for index in range(2):
        path = tmp_path / f"{index}.parquet"
        table = pa.table({"x": range(10 * index, 10 * index + 10), "s": ["v"] * 10})
        pq.write_table(table, path, row_group_size=3)
        made.append(path)
    return made


def values(path):
    return pa.Table.from_batches(arrow_files.read_batches(path))["x"].to_pylist()


def test_the_copy_holds_every_row_in_order(files, tmp_path):
    copy = transcoded(files, ["s", "x"], IDENTITY, 20, tmp_path / "cache")
    assert values(copy) == list(range(20))
    assert arrow_files.read_schema(copy).names == ["s", "x"]
    assert transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache") != copy
    assert transcoded(files, ["s", "x"], "blake3:" + "1" * 64, 20, tmp_path / "cache") != copy


def test_it_is_made_once(files, tmp_path, monkeypatch):
    first = transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache")
    monkeypatch.setattr(arrow_cache, "_write", None)
    assert transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache") == first


@pytest.mark.parametrize("damage", ["torn", "foreign", "short"])
def test_a_damaged_copy_is_made_again(files, tmp_path, damage):
    copy = transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache")
    if damage == "torn":
        copy.write_bytes(copy.read_bytes()[:-30])
    elif damage == "foreign":
        copy.write_bytes(b"not Arrow")
    else:
        with pa.ipc.new_file(copy, pa.schema([("x", pa.int64())])) as writer:
            writer.write_batch(pa.record_batch({"x": [1]}))
    assert values(transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache")) == list(range(20))


def test_a_failed_copy_leaves_nothing(files, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left") as caught:
        transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache")
    assert "XDG_CACHE_HOME" in caught.value.remedy
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_dead_process_left_is_written_over(files, tmp_path):
    copy = transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache")
    copy.rename(copy.with_suffix(".tmp"))
    copy.with_suffix(".tmp").write_bytes(b"half")
    assert values(transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache")) == list(range(20))
    assert not copy.with_suffix(".tmp").exists()


SCRIPT = """
import sys
from pathlib import Path
from coherent_ray.data import arrow_cache
write = arrow_cache._write
def counted(*args):
    print("wrote", flush=True)
    write(*args)
arrow_cache._write = counted
files = [Path(p) for p in sys.argv[2:]]
arrow_cache.transcoded(files, ["x"], "blake3:" + "0" * 64, 20, Path(sys.argv[1]))
"""


def test_processes_that_race_make_one_copy(files, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache"), *map(str, files)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert sorted(said) == ["", "", "wrote"]


def test_a_cache_that_cannot_be_made_is_a_clear_error(files, tmp_path):
    (tmp_path / "cache").write_bytes(b"in the way")
    with pytest.raises(DataError, match="cannot be written"):
        transcoded(files, ["x"], IDENTITY, 20, tmp_path / "cache")
