"""Shared memory that outlives its writer: whole or void, whenever the writer is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coherent_ray.digests import digest_of
from coherent_ray.errors import ClusterError
from coherent_ray.train.memory.slots import HEAD_BYTES, Slot, available_bytes, make, open_slot

SIZE = 3 * 4096 + 5
OLD, NEW = b"\x01" * SIZE, b"\x02" * SIZE


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = make(SIZE, "one")
    yield made
    made.close()


def write(slot: Slot, data: bytes, words: bytes) -> str:
    slot.begin()
    slot.memory(SIZE)[:] = data
    return slot.end(SIZE, words)


def read(slot: Slot) -> bytes:
    buffer = bytearray(SIZE)
    assert slot.read_into(0, memoryview(buffer)) == SIZE
    return bytes(buffer)


def test_a_new_slot_is_void_and_has_all_its_memory(slot: Slot) -> None:
    assert slot.head() is None
    assert os.fstat(slot.file).st_blocks * 512 >= HEAD_BYTES + SIZE


def test_what_was_written_is_there_with_its_words(slot: Slot) -> None:
    digest = write(slot, OLD, b"words")
    head = slot.head()
    assert head is not None
    assert (head.data_bytes, head.words_bytes, head.digest) == (SIZE, 5, digest)
    assert digest == digest_of(b"words")
    assert slot.words(head) == b"words"
    assert read(slot) == OLD


def test_longer_and_shorter_words_follow_one_another(slot: Slot) -> None:
    for words in (b"w" * 100_000, b"", b"short"):
        write(slot, OLD, words)
        head = slot.head()
        assert head is not None
        assert slot.words(head) == words
        assert read(slot) == OLD


def test_from_begin_to_end_it_is_void(slot: Slot) -> None:
    write(slot, OLD, b"words")
    slot.begin()
    assert slot.head() is None


@pytest.mark.parametrize("at", [0, 5, 21, 30, 60, 110, 150])
def test_a_head_of_which_a_bit_flipped_is_none(slot: Slot, at: int) -> None:
    write(slot, OLD, b"words")
    byte = os.pread(slot.file, 1, at)[0]
    os.pwrite(slot.file, bytes([byte ^ 1]), at)
    assert slot.head() is None


def test_words_of_which_a_bit_flipped_are_none(slot: Slot) -> None:
    write(slot, OLD, b"words")
    os.pwrite(slot.file, b"W", HEAD_BYTES + SIZE)
    head = slot.head()
    assert head is not None
    assert slot.words(head) is None


def test_reading_ends_with_the_file(slot: Slot) -> None:
    write(slot, OLD, b"")
    assert slot.read_into(SIZE - 3, memoryview(bytearray(10))) == 3
    assert slot.read_into(SIZE + 5, memoryview(bytearray(10))) == 0


# --- another process ------------------------------------------------------------------------------

WRITER = f"""
import os, sys, time
from coherent_ray.train.memory.slots import open_slot
slot = open_slot(int(sys.argv[1]), int(sys.argv[2]), "one")
memory = slot.memory({SIZE})
def pause(at):
    if sys.argv[3] == at:
        print(at, flush=True)
        time.sleep(60)
pause("before")
slot.begin()
pause("begun")
memory[: {SIZE // 2}] = bytes([2]) * {SIZE // 2}
pause("half")
memory[:] = bytes([2]) * {SIZE}
pause("copied")
slot.end({SIZE}, b"new words")
pause("after")
"""


@pytest.mark.parametrize(
    ("point", "words", "data"),
    [
        ("before", b"words", OLD),
        ("begun", None, None),
        ("half", None, None),
        ("copied", None, None),
        ("after", b"new words", NEW),
    ],
)
def test_a_killed_writer_leaves_it_whole_or_void(
    slot: Slot, point: str, words: bytes | None, data: bytes | None
) -> None:
    write(slot, OLD, b"words")
    command = [sys.executable, "-c", WRITER, str(os.getpid()), str(slot.file), point]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline().decode().strip() == point
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    head = slot.head()
    assert (head and slot.words(head)) == words
    if data is not None:
        assert read(slot) == data


def test_another_slot_or_file_is_not_taken_for_it(slot: Slot, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be opened"):
        open_slot(os.getpid(), slot.file, "two")
    with (tmp_path / "file").open("w") as file, pytest.raises(ClusterError, match="it is /"):
        open_slot(os.getpid(), file.fileno(), "one")
    with pytest.raises(ClusterError, match="No such file") as caught:
        open_slot(os.getpid(), 999_999, "one")
    assert "one user" in caught.value.remedy


def test_nothing_is_left_in_the_file_system(slot: Slot) -> None:
    write(slot, OLD, b"words")
    assert Path(f"/proc/self/fd/{slot.file}").readlink().name.endswith("(deleted)")


# --- how much there is ----------------------------------------------------------------------------


def test_memory_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_files()
    with pytest.raises(ClusterError, match=r"8 MiB of memory cannot be had: No space"):
        make(8 * 2**20, "one")
    assert open_files() == before


def test_a_system_without_such_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ClusterError, match="memfd_create") as caught:
        make(1, "one")
    assert "leave checkpoint.memory out" in caught.value.remedy


def test_the_container_s_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    assert available_bytes(tmp_path) == 2**63
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1000 kB\n")
    assert available_bytes(tmp_path) == 1000 * 1024
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert available_bytes(tmp_path) == 1000 * 1024
    (group / "memory.max").write_text("105\n")
    assert available_bytes(tmp_path) == 100
    (group / "memory.current").write_text("200\n")
    assert available_bytes(tmp_path) == 0
