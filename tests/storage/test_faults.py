"""The fault wrapper does what its script says, where it says it, and nothing else."""

import pytest

from coherent_ray.errors import AlreadyExists, StorageError, StorageFull
from coherent_ray.storage.testing.faults import Crash, Fault, FaultyStorage, flipped
from coherent_ray.storage.testing.memory import MemoryStorage


def faulty(*faults: Fault) -> FaultyStorage:
    return FaultyStorage(MemoryStorage(), list(faults))


def files(storage: FaultyStorage) -> dict[str, bytes]:
    assert isinstance(storage.inner, MemoryStorage)
    return storage.inner.files


def test_a_crash_before_leaves_nothing_and_ends_the_process() -> None:
    storage = faulty(Fault("crash_before", at=2))
    storage.create("a", b"1")
    with pytest.raises(Crash):
        storage.create("b", b"2")
    with pytest.raises(Crash):
        storage.read("a")
    assert files(storage) == {"a": b"1"}
    assert storage.calls == [("create", "a"), ("create", "b")]


def test_a_crash_after_has_done_it() -> None:
    storage = faulty(Fault("crash_after", at=1, verb="create"))
    with pytest.raises(Crash):
        storage.create("a", b"1")
    assert storage.crashed
    assert files(storage) == {"a": b"1"}


def test_no_handler_of_exceptions_notices_a_crash() -> None:
    assert not issubclass(Crash, Exception)


def test_a_lost_answer_has_done_it_and_says_it_failed() -> None:
    storage = faulty(Fault("lose_answer"))
    with pytest.raises(StorageError) as caught:
        storage.create("a", b"1")
    assert not isinstance(caught.value, AlreadyExists)
    assert files(storage) == {"a": b"1"}
    assert storage.read("a") == b"1"


@pytest.mark.parametrize(("effect", "kind"), [("refuse", StorageError), ("full", StorageFull)])
def test_a_refusal_has_done_nothing(effect: str, kind: type[StorageError]) -> None:
    storage = faulty(Fault(effect, at=2, verb="create", path="log/", times=2))  # type: ignore[arg-type]
    storage.create("log/1", b"")
    storage.create("elsewhere", b"")
    for path in ("log/2", "log/3"):
        with pytest.raises(kind):
            storage.create(path, b"")
    storage.create("log/4", b"")
    assert sorted(files(storage)) == ["elsewhere", "log/1", "log/4"]
    assert len(storage.struck) == 2


def test_verbs_that_do_not_match_are_not_counted() -> None:
    storage = faulty(Fault("refuse", at=2, verb="size"))
    storage.create("a", b"1")
    assert storage.size("a") == 1
    assert [entry.path for entry in storage.list()] == ["a"]
    with pytest.raises(StorageError):
        storage.size("a")


def test_bits_flip_on_the_way_in_and_on_the_way_out() -> None:
    storage = faulty(Fault("flip", verb="create", bit=9), Fault("flip", verb="read", bit=0))
    storage.create("a", b"\0\0")
    assert files(storage)["a"] == b"\0\2"
    assert storage.read("a") == b"\1\2"
    assert storage.read("a") == b"\0\2"


def test_bits_flip_in_buffers_and_in_writers() -> None:
    storage = faulty(Fault("flip", verb="read_into", bit=1), Fault("flip", verb="write", at=2))
    with storage.open_writer("a") as writer:
        writer.write(b"\0")
        writer.write(b"\0")
        writer.finish()
    assert files(storage)["a"] == b"\0\1"
    buffer = bytearray(3)
    assert storage.read_into("a", 0, memoryview(buffer)) == 2
    assert buffer == b"\2\1\0"


@pytest.mark.parametrize(
    ("verb", "effect", "left"),
    [
        ("open_writer", "crash_before", set()),
        ("write", "crash_after", set()),
        ("finish", "crash_before", set()),
        ("finish", "crash_after", {"a"}),
    ],
)
def test_a_writer_dies_at_each_of_its_steps(verb: str, effect: str, left: set[str]) -> None:
    storage = faulty(Fault(effect, verb=verb))  # type: ignore[arg-type]
    with pytest.raises(Crash), storage.open_writer("a") as writer:  # noqa: PT012
        writer.write(b"1")
        writer.finish()
    assert files(storage).keys() == left


def test_flipping_twice_is_nothing_and_nothing_has_no_bits() -> None:
    data = bytes(range(16))
    for bit in range(8 * len(data)):
        assert flipped(data, bit) != data
        assert flipped(flipped(data, bit), bit) == data
    assert flipped(data, 8 * len(data)) == flipped(data, 0)
    assert flipped(b"", 3) == b""
