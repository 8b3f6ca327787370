"""The standard library's text becomes rows that, put together, are the text again."""

import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from coherent_ray.data.dataset import scan
from coherent_ray.errors import DataError
from jobs import stdlib_text
from jobs.stdlib_text import prepare


@pytest.fixture
def library(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    for name in ("b.py", "a.py", "pkg/c.py", "test/t.py", "site-packages/s.py", "notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n" * 20)
    monkeypatch.setattr(stdlib_text.sysconfig, "get_path", lambda name: str(root))
    return root


def text_of(path):
    return b"".join(pq.read_table(path)["text"].to_pylist())


def test_rows_are_the_sources_in_order(library, tmp_path):
    prepare(str(tmp_path / "f.parquet"), row_bytes=16)
    table = pq.read_table(tmp_path / "f.parquet")
    assert str(table.schema.field("text").type) == "fixed_size_binary[16]"
    whole = b"\n\n".join((f"# {n}\n" * 20).rstrip().encode() for n in ("a.py", "b.py", "pkg/c.py"))
    whole += b"\n\n"
    assert text_of(tmp_path / "f.parquet") == whole[: len(whole) // 16 * 16]


def test_the_text_is_cut_where_it_is_enough(library, tmp_path):
    prepare(str(tmp_path / "f.parquet"), row_bytes=16, max_bytes=100)
    assert len(text_of(tmp_path / "f.parquet")) == 96


def test_the_same_python_gives_the_same_bytes(library, tmp_path):
    for name in ("one", "two"):
        prepare(str(tmp_path / f"{name}.parquet"))
    hashes = {
        scan([str(tmp_path / f"{n}.parquet")], "parquet").files[0].digest for n in ("one", "two")
    }
    assert len(hashes) == 1


def test_it_is_made_once_and_never_over_something_else(library, tmp_path):
    path = str(tmp_path / "f.parquet")
    prepare(path)
    before = text_of(path)
    (library / "a.py").write_text("changed")
    prepare(path)
    assert text_of(path) == before
    with pytest.raises(DataError, match="made from"):
        prepare(path, row_bytes=65)


def test_a_python_without_source_is_a_clear_error(library, tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_text.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(DataError, match="not installed"):
        prepare(str(tmp_path / "f.parquet"))


def test_this_python_has_enough_text(tmp_path):
    path = tmp_path / "f.parquet"
    prepare(str(path))
    manifest = scan([str(path)], "parquet", ["text"])
    assert 4_000_000 < 129 * manifest.rows <= 16_000_000
    assert manifest.columns == (("text", "fixed_size_binary[129]"),)
    assert b"def " in text_of(path)


def test_processes_that_race_see_one_file(tmp_path):
    path = tmp_path / "f.parquet"
    code = f"from jobs.stdlib_text import prepare; prepare({str(path)!r}, max_bytes=300_000)"
    racers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [racer.wait(60) for racer in racers] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["f.parquet"]
    assert pq.read_metadata(path).num_rows == 300_000 // 129
