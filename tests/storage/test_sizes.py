"""Sizes of many files: one listing, and the truth of each file all the same."""

import pytest

from coherent_ray.errors import NotFound, StorageError
from coherent_ray.storage.sizes import MANY, Sizes
from coherent_ray.storage.testing.memory import MemoryStorage


class Listing(MemoryStorage):
    """Counts single questions; its listing may lag behind."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.hidden: set[str] = set()
        self.broken = False

    def size(self, path: str) -> int:
        self.asked.append(path)
        return super().size(path)

    def list(self, prefix: str = "") -> object:  # type: ignore[override]
        if self.broken:
            raise StorageError("no listing")
        return (entry for entry in super().list(prefix) if entry.path not in self.hidden)


def filled(files: int) -> Listing:
    storage = Listing()
    for number in range(files):
        storage.create(f"d/{number}", bytes(number))
    return storage


def paths(files: int) -> list[str]:
    return [f"d/{number}" for number in range(files)]


def test_few_files_are_asked_for_one_by_one() -> None:
    storage = filled(3)
    sizes = Sizes(storage, paths(3))
    assert [sizes.of(f"d/{n}", n) for n in range(3)] == [0, 1, 2]
    assert len(storage.asked) == 3


def test_many_files_are_listed_once() -> None:
    storage = filled(MANY)
    sizes = Sizes(storage, paths(MANY))
    assert [sizes.of(f"d/{n}", n) for n in range(MANY)] == list(range(MANY))
    assert not storage.asked


def test_what_is_not_as_expected_is_asked_for() -> None:
    storage = filled(MANY)
    storage.hidden = {"d/5"}
    sizes = Sizes(storage, paths(MANY))
    assert sizes.of("d/5", 5) == 5
    assert sizes.of("d/6", 7) == 6
    with pytest.raises(NotFound):
        sizes.of("d/none", 0)
    assert storage.asked == ["d/5", "d/6", "d/none"]


def test_a_listing_that_fails_leaves_each_file_to_answer_for_itself() -> None:
    storage = filled(MANY)
    storage.broken = True
    sizes = Sizes(storage, paths(MANY))
    assert sizes.of("d/9", 9) == 9


def test_only_directories_of_many_files_are_listed() -> None:
    storage = filled(MANY)
    storage.create("e/few", b"12")
    sizes = Sizes(storage, [*paths(MANY), "e/few"])
    assert [sizes.of("d/7", 7), sizes.of("e/few", 2)] == [7, 2]
    assert storage.asked == ["e/few"]
