"""Reading at somebody's pace: every byte is asked for, and whoever sets the pace may end it."""

from __future__ import annotations

import pytest

from coherent_ray.errors import Interrupted
from coherent_ray.storage.paced import paced
from coherent_ray.storage.testing.memory import MemoryStorage

DATA = bytes(range(200))


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    storage.create("a/file", DATA)
    return storage


def test_every_read_is_asked_for(storage: MemoryStorage) -> None:
    asked: list[int] = []
    slow = paced(storage, asked.append)
    target = memoryview(bytearray(64))
    assert slow.read_into("a/file", 0, target) == 64
    assert bytes(target) == DATA[:64]
    assert slow.read("a/file", 190, 100) == DATA[190:]
    assert asked == [64, 0, 10]
    assert slow.size("a/file") == 200
    assert [entry.path for entry in slow.list()] == ["a/file"]
    assert len(asked) == 3, "what reads no bytes waits for nothing"


def test_a_pace_that_ends_ends_the_read_before_it_begins(storage: MemoryStorage) -> None:
    def stop(size: int) -> None:
        raise Interrupted("enough")

    slow = paced(storage, stop)
    target = memoryview(bytearray(64))
    with pytest.raises(Interrupted):
        slow.read_into("a/file", 0, target)
    with pytest.raises(Interrupted):
        slow.read("a/file")
    assert bytes(target) == bytes(64)
