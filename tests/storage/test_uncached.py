"""Reading from the device: what is asked of the page cache, and that nothing else changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coherent_ray.storage import LocalStorage
from coherent_ray.storage.testing.faults import FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage
from coherent_ray.storage.uncached import Cached, from_device

DATA = bytes(range(256)) * 64


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path)
    storage.create("a/file", DATA)
    return storage


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []

    def advise(file: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        assert os.fstat(file).st_size == len(DATA)
        seen.append((start, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return seen


def test_who_has_a_cache(storage: LocalStorage) -> None:
    assert isinstance(storage, Cached)
    for other in (MemoryStorage(), FaultyStorage(storage)):
        assert from_device(other) is other


def test_all_is_forgotten_before_the_first_read_and_each_part_after_it(
    storage: LocalStorage, advised: list[tuple[int, int]]
) -> None:
    device = from_device(storage)
    target = memoryview(bytearray(10_000))
    assert device.read_into("a/file", 0, target) == 10_000
    assert device.read_into("a/file", 10_000, target) == len(DATA) - 10_000
    assert advised == [(0, 0), (0, 10_000), (10_000, len(DATA) - 10_000)]
    assert bytes(target[: len(DATA) - 10_000]) == DATA[10_000:]


def test_a_file_that_is_met_in_its_middle_is_forgotten_whole_first(
    storage: LocalStorage, advised: list[tuple[int, int]]
) -> None:
    """As where blocks lie in several files: none of them need be read from its first byte."""
    storage.create("b", DATA)
    device = from_device(storage)
    target = memoryview(bytearray(100))
    for path, at in (("a/file", 4096), ("a/file", 4196), ("b", 200), ("a/file", 4296)):
        device.read_into(path, at, target)
    assert advised == [
        (0, 0), (4096, 100), (4196, 100), (0, 0), (200, 100), (0, 0), (4296, 100),
    ]  # fmt: skip


def test_other_verbs_are_the_storage_s_own(storage: LocalStorage) -> None:
    device = from_device(storage)
    assert device.read("a/file", 5, 3) == DATA[5:8]
    assert device.size("a/file") == len(DATA)
    assert device.uri == storage.uri


def test_what_cannot_be_forgotten_is_no_error(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.forget("not/there")
    storage.forget("a/file", 5, 100)

    def refuse(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    storage.forget("a/file")
    monkeypatch.delattr(os, "posix_fadvise")
    storage.forget("a/file")


def _cached(path: Path) -> bool:
    """Whether the page cache answers for the first bytes of a file."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(16)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="needs preadv2")
def test_where_the_kernel_listens_the_bytes_are_gone_from_its_cache(storage: LocalStorage) -> None:
    path = Path(storage.uri) / "a/file"
    path.read_bytes()
    try:
        assert _cached(path)
    except OSError as error:
        pytest.skip(f"this file system does not tell: {error}")
    from_device(storage).read_into("a/file", 0, memoryview(bytearray(len(DATA))))
    if _cached(path):
        pytest.skip("this file system keeps its cache")
