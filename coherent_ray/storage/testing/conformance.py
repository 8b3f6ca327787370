"""What every Storage must do, as tests to inherit. No backend vouches for itself.

A backend's test class inherits `StorageConformance` and says how to make an empty root and how to
read, write and list it *behind the backend's back*: with the file system's own calls, or with the
vendor's own client. Whatever a verb claims is checked there, and what is put there the verbs must
find.
"""

# ruff: noqa: D102, PT012 (the tests' names say what they hold; a `with` may hold a story)

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import pytest

from coherent_ray.errors import AlreadyExists, NotFound, StorageError
from coherent_ray.storage.base import TEMPORARY_PREFIX, Storage

ILLEGAL = [
    "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a/..", "a\\b", "a\0b",
    "a\nb", "a\ud800b", f"{TEMPORARY_PREFIX}a", f"a/{TEMPORARY_PREFIX}b/c",
]  # fmt: skip
CONTENTS = [b"", b"x", bytes(range(256)), b"\0" * 4096, b"ab\r\n" * 100_000]


class Reach(ABC):
    """How the tests reach a backend, and behind it."""

    @abstractmethod
    def open(self) -> Storage:
        """Return a storage of this test's root: the same root each time it is called."""

    @abstractmethod
    def raw_read(self, path: str) -> bytes | None:
        """Return what lies under a path, not using the backend; None: nothing."""

    @abstractmethod
    def raw_write(self, path: str, data: bytes) -> None:
        """Put a file under a path, not using the backend."""

    @abstractmethod
    def raw_paths(self) -> set[str]:
        """Return every path that exists, the backend's temporary ones too."""


class WriterConformance(Reach):
    """What a `Writer` must do; for a backend that writes in more than one way, once for each."""

    def test_a_written_file_has_its_name_only_when_finished(self) -> None:
        storage = self.open()
        with storage.open_writer("g1/shard") as writer:
            writer.write(b"head")
            writer.write(memoryview(b"12345678").cast("i"))
            assert self.raw_read("g1/shard") is None
            assert list(storage.list()) == []
            writer.write(bytearray(b"tail"))
            writer.finish()
            assert self.raw_read("g1/shard") == b"head12345678tail"
        assert self.raw_paths() == {"g1/shard"}

    def test_an_empty_file_can_be_written(self) -> None:
        with self.open().open_writer("empty") as writer:
            writer.finish()
        assert self.raw_read("empty") == b""

    def test_leaving_without_finish_leaves_nothing(self) -> None:
        with self.open().open_writer("g1/shard") as writer:
            writer.write(b"some")
        assert self.raw_paths() == set()

    def test_an_error_on_the_way_leaves_nothing(self) -> None:
        with pytest.raises(ZeroDivisionError), self.open().open_writer("g1/shard") as writer:
            writer.write(b"some")
            raise ZeroDivisionError
        assert self.raw_paths() == set()

    def test_the_writer_refuses_a_taken_name(self) -> None:
        storage = self.open()
        self.raw_write("g1/shard", b"theirs")
        with pytest.raises(AlreadyExists), storage.open_writer("g1/shard") as writer:
            writer.write(b"ours")
            writer.finish()
        assert self.raw_read("g1/shard") == b"theirs"
        assert self.raw_paths() == {"g1/shard"}

    def test_of_two_writers_the_first_to_finish_wins(self) -> None:
        storage = self.open()
        with storage.open_writer("shard") as one, storage.open_writer("shard") as two:
            one.write(b"one")
            two.write(b"two")
            two.finish()
            with pytest.raises(AlreadyExists):
                one.finish()
        assert self.raw_read("shard") == b"two"
        assert self.raw_paths() == {"shard"}

    def test_a_finished_writer_takes_no_more(self) -> None:
        with self.open().open_writer("shard") as writer:
            writer.write(b"some")
            writer.finish()
            with pytest.raises(StorageError):
                writer.write(b"more")
            with pytest.raises(StorageError):
                writer.finish()
        assert self.raw_read("shard") == b"some"


class StorageConformance(WriterConformance):
    """Inherit, say how to reach behind, and run with pytest."""

    #: Whether a name is either a file's or a directory's. Object stores have no directories.
    directories = True

    # --- create -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("data", CONTENTS, ids=len)
    def test_create_makes_a_file_with_exactly_these_bytes(self, data: bytes) -> None:
        self.open().create("a/b/file.json", data)
        assert self.raw_read("a/b/file.json") == data
        assert self.raw_paths() == {"a/b/file.json"}

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_create_takes_every_kind_of_buffer(self, kind: type) -> None:
        self.open().create("file", kind(b"some bytes"))
        assert self.raw_read("file") == b"some bytes"

    def test_create_takes_a_view_of_wider_items(self) -> None:
        self.open().create("file", memoryview(b"12345678").cast("i"))
        assert self.raw_read("file") == b"12345678"

    def test_create_refuses_a_taken_name_and_leaves_what_is_there(self) -> None:
        storage = self.open()
        storage.create("log/1", b"first")
        for data in (b"second", b"first", b""):
            with pytest.raises(AlreadyExists) as caught:
                storage.create("log/1", data)
            assert "log/1" in caught.value.where
        assert self.raw_read("log/1") == b"first"
        assert self.raw_paths() == {"log/1"}

    def test_create_refuses_a_name_that_another_has_taken(self) -> None:
        self.raw_write("log/1", b"theirs")
        with pytest.raises(AlreadyExists):
            self.open().create("log/1", b"ours")
        assert self.raw_read("log/1") == b"theirs"

    def test_of_many_creators_exactly_one_wins(self) -> None:
        storages = [self.open() for _ in range(8)]
        for number in range(5):
            path, start = f"log/{number}", threading.Barrier(len(storages))
            won: list[bytes] = []

            def race(index: int, path: str, start: threading.Barrier, won: list[bytes]) -> None:
                start.wait()
                try:
                    storages[index].create(path, f"writer {index}".encode() * 100)
                except AlreadyExists:
                    return
                won.append(f"writer {index}".encode() * 100)

            threads = [
                threading.Thread(target=race, args=(index, path, start, won))
                for index in range(len(storages))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(won) == 1
            assert self.raw_read(path) == won[0]
        assert self.raw_paths() == {f"log/{number}" for number in range(5)}

    # --- replace ----------------------------------------------------------------------------------

    def test_replace_makes_and_overwrites(self) -> None:
        storage = self.open()
        for data in (b"long before", b"short", b""):
            storage.replace("a/hint", data)
            assert self.raw_read("a/hint") == data
        assert self.raw_paths() == {"a/hint"}

    def test_a_reader_sees_the_old_bytes_or_the_new(self) -> None:
        storage, other = self.open(), self.open()
        storage.replace("hint", b"0" * 10_000)
        done = threading.Event()

        def replace() -> None:
            for digit in b"123456789" * 5:
                storage.replace("hint", bytes([digit]) * 10_000)
            done.set()

        thread = threading.Thread(target=replace)
        thread.start()
        while not done.is_set():
            seen = other.read("hint")
            assert len(seen) == 10_000
            assert len(set(seen)) == 1
        thread.join()

    # --- reading ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 1000])
    @pytest.mark.parametrize("length", [None, 0, 1, 9, 10, 11, 1000])
    def test_read_returns_the_range_and_no_more(self, start: int, length: int | None) -> None:
        self.raw_write("a/file", b"0123456789")
        expected = b"0123456789"[start : None if length is None else start + length]
        assert self.open().read("a/file", start, length) == expected

    @pytest.mark.parametrize("start", [0, 3, 9, 10, 11])
    @pytest.mark.parametrize("length", [0, 1, 7, 20])
    def test_read_into_fills_what_the_file_holds(self, start: int, length: int) -> None:
        self.raw_write("file", b"0123456789")
        target = bytearray(b"." * length)
        count = self.open().read_into("file", start, memoryview(target))
        expected = b"0123456789"[start : start + length]
        assert count == len(expected)
        assert target == expected + b"." * (length - count)

    def test_read_into_takes_a_view_of_wider_items(self) -> None:
        self.raw_write("file", b"0123456789abcdef")
        target = bytearray(8)
        assert self.open().read_into("file", 4, memoryview(target).cast("i")) == 8
        assert target == b"456789ab"

    def test_size_is_the_files(self) -> None:
        for number, data in enumerate(CONTENTS):
            self.raw_write(f"a/{number}", data)
            assert self.open().size(f"a/{number}") == len(data)

    @pytest.mark.parametrize("path", ["absent", "a/absent", "absent/file", "a/file/below", "a"])
    def test_what_is_not_there_is_not_found(self, path: str) -> None:
        self.raw_write("a/file", b"x")
        storage = self.open()
        for verb in (
            lambda: storage.read(path),
            lambda: storage.read_into(path, 0, memoryview(bytearray(1))),
            lambda: storage.size(path),
        ):
            with pytest.raises(NotFound) as caught:
                verb()
            assert path in caught.value.where

    def test_an_absent_root_holds_nothing(self) -> None:
        storage = self.open()
        assert list(storage.list()) == []
        assert list(storage.list("log")) == []
        storage.delete("log/1")
        with pytest.raises(NotFound):
            storage.read("log/1")
        assert self.raw_paths() == set()

    # --- list and delete --------------------------------------------------------------------------

    def test_list_is_recursive_and_in_order_of_path(self) -> None:
        paths = ["a", "b-c/x", "b.c", "b/10", "b/9", "b/c/d/e", "b/c0", "b0", "Z/z"]
        for number, path in enumerate(paths):
            self.raw_write(path, b"x" * number)
        found = [(entry.path, entry.size) for entry in self.open().list()]
        assert found == sorted((path, number) for number, path in enumerate(paths))

    def test_list_under_a_directory_takes_whole_names(self) -> None:
        for path in ["log/1", "log/deep/2", "log2/3", "logs", "a/log/4"]:
            self.raw_write(path, b"x")
        assert [e.path for e in self.open().list("log")] == ["log/1", "log/deep/2"]
        assert [e.path for e in self.open().list("log/deep")] == ["log/deep/2"]

    @pytest.mark.parametrize("prefix", ["absent", "lo", "log/1", "log/1/2"])
    def test_list_of_no_directory_is_empty(self, prefix: str) -> None:
        self.raw_write("log/1", b"x")
        assert list(self.open().list(prefix)) == []

    def test_list_hides_temporary_files(self) -> None:
        self.raw_write(f"log/{TEMPORARY_PREFIX}123", b"left by the dead")
        self.raw_write("log/1", b"x")
        assert [e.path for e in self.open().list()] == ["log/1"]

    def test_delete_removes_one_file_and_may_be_repeated(self) -> None:
        for path in ["a/1", "a/2"]:
            self.raw_write(path, b"x")
        storage = self.open()
        for _ in range(2):
            storage.delete("a/1")
            assert self.raw_paths() == {"a/2"}
        storage.create("a/1", b"again")
        assert self.raw_read("a/1") == b"again"

    # --- paths ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("path", ILLEGAL, ids=repr)
    def test_illegal_paths_are_refused_by_every_verb(self, path: str) -> None:
        storage = self.open()
        for verb in (
            lambda: storage.create(path, b"x"),
            lambda: storage.replace(path, b"x"),
            lambda: storage.open_writer(path),
            lambda: storage.read(path),
            lambda: storage.read_into(path, 0, memoryview(bytearray(1))),
            lambda: storage.size(path),
            lambda: storage.delete(path),
        ):
            with pytest.raises(StorageError):
                verb()
        assert self.raw_paths() == set()

    @pytest.mark.parametrize("path", [path for path in ILLEGAL if path], ids=repr)
    def test_illegal_directories_are_not_listed(self, path: str) -> None:
        with pytest.raises(StorageError):
            list(self.open().list(path))

    def test_a_file_cannot_be_a_directory_too(self) -> None:
        if not self.directories:
            pytest.skip("this storage has no directories")
        storage = self.open()
        storage.create("a/b", b"x")
        for path in ("a/b/c", "a"):
            with pytest.raises(StorageError):
                storage.create(path, b"y")
        assert self.raw_paths() == {"a/b"}

    def test_without_directories_names_are_only_names(self) -> None:
        if self.directories:
            pytest.skip("this storage has directories")
        storage = self.open()
        for path in ("a/b", "a/b/c", "a"):
            storage.create(path, path.encode())
        assert [e.path for e in storage.list()] == ["a", "a/b", "a/b/c"]
        assert [e.path for e in storage.list("a/b")] == ["a/b/c"]
        storage.delete("a/b")
        assert storage.read("a/b/c") == b"a/b/c"

    def test_plain_names_may_hold_anything_else(self) -> None:
        for path in ["a b/c:d", "ünï/漢字", "~", "-rf", "...", "g1-a1/shard-00000-of-00002.x"]:
            self.open().create(path, path.encode())
            assert self.raw_read(path) == path.encode()

    def test_the_uri_is_an_address(self) -> None:
        assert self.open().uri == self.open().uri
        assert self.open().uri
