"""Content digests are remembered only where the file cannot have changed."""

import os
import time

import pytest

from coherent_ray.data import content
from coherent_ray.data.content import DigestCache, cache_directory, file_digest
from coherent_ray.digests import digest_of


@pytest.fixture
def read(monkeypatch):
    """Count the files that are really read."""
    read = []

    def counted(path):
        read.append(path)
        return file_digest(path)

    monkeypatch.setattr(content, "file_digest", counted)
    return read


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(content, "_SETTLED_S", -1.0)


def test_a_files_digest_is_that_of_its_bytes(tmp_path):
    for size in (0, 1, content._BLOCK, content._BLOCK + 1):
        data = os.urandom(size)
        (tmp_path / "f").write_bytes(data)
        assert file_digest(tmp_path / "f") == digest_of(data)


def test_a_settled_file_is_read_once(tmp_path, read, settled):
    (tmp_path / "f").write_bytes(b"data")
    digests = {DigestCache(tmp_path / "cache").digest(tmp_path / "f") for _ in range(3)}
    assert digests == {digest_of(b"data")}
    assert len(read) == 1


def test_a_file_that_just_changed_is_not_remembered(tmp_path, read):
    (tmp_path / "f").write_bytes(b"data")
    for _ in range(2):
        DigestCache(tmp_path / "cache").digest(tmp_path / "f")
    assert len(read) == 2


def test_an_edit_is_seen_though_size_and_modification_time_are_as_before(tmp_path, read, settled):
    path = tmp_path / "f"
    path.write_bytes(b"data")
    cache = DigestCache(tmp_path / "cache")
    first, before = cache.digest(path), path.stat()
    time.sleep(0.02)
    with path.open("r+b") as stream:
        stream.write(b"DATA")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert cache.digest(path) == digest_of(b"DATA") != first


def test_a_replaced_file_is_seen(tmp_path, read, settled):
    path = tmp_path / "f"
    path.write_bytes(b"data")
    cache = DigestCache(tmp_path / "cache")
    cache.digest(path)
    (tmp_path / "g").write_bytes(b"DATA")
    (tmp_path / "g").replace(path)
    assert cache.digest(path) == digest_of(b"DATA")


@pytest.mark.parametrize("damage", [b"", b"blake3:00", b"\xff", b"blake3:" + b"0" * 64 + b"\nx"])
def test_a_damaged_entry_only_costs_time(tmp_path, read, settled, damage):
    (tmp_path / "f").write_bytes(b"data")
    cache = DigestCache(tmp_path / "cache")
    cache.digest(tmp_path / "f")
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(damage)
    assert cache.digest(tmp_path / "f") == digest_of(b"data")
    assert len(read) == 2
    assert cache.digest(tmp_path / "f") == digest_of(b"data")
    assert len(read) == 2


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, settled):
    (tmp_path / "f").write_bytes(b"data")
    (tmp_path / "cache").write_bytes(b"a file in the way")
    assert DigestCache(tmp_path / "cache").digest(tmp_path / "f") == digest_of(b"data")


def test_nothing_temporary_is_left(tmp_path, settled):
    (tmp_path / "f").write_bytes(b"data")
    DigestCache(tmp_path / "cache").digest(tmp_path / "f")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".digest"]


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        DigestCache(tmp_path).digest(tmp_path / "f")


def test_the_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "coherent_ray"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "coherent_ray"
