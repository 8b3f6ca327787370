"""A storage that is attended: how long it has owed an answer, and for what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coherent_ray.errors import NotFound
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.attended import AttendedStorage
from coherent_ray.storage.base import Entry
from coherent_ray.storage.signing import KeyPlace, Signed
from coherent_ray.storage.testing.memory import MemoryStorage


class Hanging(MemoryStorage):
    """Every verb waits at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)

    def _wait(self) -> None:
        self.arrived.release()
        assert self.gate.wait(20)

    def size(self, path: str) -> int:
        self._wait()
        return super().size(path)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for entry in super().list(prefix):
            self._wait()
            yield entry


def test_the_call_that_has_waited_longest_is_told_until_it_comes_back() -> None:
    now = [10.0]
    inner = Hanging()
    storage = AttendedStorage(inner, clock=lambda: now[0])
    storage.create("a", b"x")
    assert storage.silence() is None
    answers: list[object] = []
    calls: list[Callable[[], object]] = [
        lambda: answers.append(storage.size("a")),
        lambda: answers.append([entry.path for entry in storage.list()]),
    ]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
        assert inner.arrived.acquire(timeout=20)
        now[0] += 5
    silence = storage.silence()
    assert silence is not None
    assert (silence.doing, silence.lasted_s) == ("asking for the size", 10.0)
    error = silence.error()
    assert error.where == f"{storage.uri}/a"
    assert "no answer from the storage for 10 s while asking for the size" in error.what
    assert "checkpoint.storage_timeout_s" in error.remedy
    inner.gate.set()
    for thread in threads:
        thread.join(20)
    assert sorted(map(str, answers)) == ["1", "['a']"]
    assert storage.silence() is None


def test_a_call_that_fails_is_answered() -> None:
    storage = AttendedStorage(MemoryStorage())
    with pytest.raises(NotFound):
        storage.read("nothing")
    assert storage.silence() is None


def test_slow_pieces_are_no_silence() -> None:
    now = [0.0]
    storage = AttendedStorage(MemoryStorage(), clock=lambda: now[0])
    with storage.open_writer("shard") as writer:
        for _ in range(10):
            writer.write(b"piece")
            now[0] += 100
            assert storage.silence() is None
        writer.finish()
    assert storage.size("shard") == 50


def test_the_key_s_place_is_passed_on(tmp_path: Path) -> None:
    place = KeyPlace(env="KEY")
    signed = AttendedStorage(LocalStorage(tmp_path, place))
    assert isinstance(signed, Signed)
    assert signed.key_place == place
    assert AttendedStorage(MemoryStorage()).key_place is None
