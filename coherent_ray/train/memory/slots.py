"""Slots: shared memory that outlives the worker that writes it.

A slot is an anonymous file in memory (``memfd_create``) that the keeper's process makes. The worker
opens it through ``/proc``, maps it, and copies into it: no message carries the bytes, no mount and
none of its limits (a container's ``/dev/shm`` is often 64 MiB) has to do with it, and it has no
name that could be left behind: it is gone with the last process that has it open.

    head (one page) | data: the bytes of a shard file | words

| the worker is killed | the slot is |
|---|---|
| before `begin` | whole, with what it held before |
| between `begin` and `end` | void |
| in `begin` or `end` | void, or whole: the head has a digest of its own |
| after `end` | whole, with what is new |

There are at least two a rank, written in turn, so one is always whole. What a slot holds may change
under whoever reads it: a reader looks at the head before and after, and at the digests.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from coherent_ray.digests import digest_of
from coherent_ray.errors import ClusterError

#: Bytes before the data: a page, so that the data can be mapped and begins aligned.
HEAD_BYTES = 4096
#: Longer words are none: a manifest's limit, and as much again for receipts.
WORDS_BYTES = 512 * 2**20
_MAGIC = b"coherent-ray slot 1\n"
#: Of a digest as text: `coherent_ray.digests.RECORD_ALGORITHM`.
_DIGEST_BYTES = 71
_HEAD = struct.Struct(f"<{len(_MAGIC)}sQQ{_DIGEST_BYTES}s")
_VOID = bytes(HEAD_BYTES)
_NAME = "coherent-ray-"


@dataclass(frozen=True, slots=True)
class Head:
    """What a whole slot says in its first page."""

    data_bytes: int
    words_bytes: int
    digest: str
    """Of the words, which have a digest of everything else."""


class Slot:
    """One slot, open in this process."""

    def __init__(self, file: int, name: str) -> None:
        """Take over an open file; see `make` and `open_slot`."""
        self.file = file
        self.name = name
        """Unique among all slots."""
        self._memory: mmap.mmap | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return os.fstat(self.file).st_size

    def head(self) -> Head | None:
        """Return what the slot says of itself; None: it is void."""
        raw = os.pread(self.file, _HEAD.size, 0)
        if len(raw) < _HEAD.size:
            return None
        magic, data_bytes, words_bytes, digest = _HEAD.unpack(raw)
        digest = digest.rstrip(b"\0")
        check = os.pread(self.file, _DIGEST_BYTES, _HEAD.size).rstrip(b"\0")
        if magic != _MAGIC or words_bytes > WORDS_BYTES:
            return None
        if check.decode("ascii", "replace") != digest_of(raw):
            return None
        return Head(data_bytes, words_bytes, digest.decode("ascii", "replace"))

    def words(self, head: Head) -> bytes | None:
        """Return the words that a head tells of; None: they are not there."""
        data = os.pread(self.file, head.words_bytes, HEAD_BYTES + head.data_bytes)
        return data if digest_of(data) == head.digest else None

    def read_into(self, start: int, target: memoryview) -> int:
        """Fill a buffer with the data from a byte on; return how many bytes there were."""
        done = 0
        while done < len(target):
            count = os.preadv(self.file, [target[done:]], HEAD_BYTES + start + done)
            if count == 0:
                break
            done += count
        return done

    def memory(self, data_bytes: int) -> memoryview:
        """Return the data as memory to write to, mapped at the first call.

        Args:
            data_bytes: As it was made with.
        """
        if self._memory is None:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mmap.mmap(self.file, HEAD_BYTES + data_bytes, flags=flags)
        return memoryview(self._memory)[HEAD_BYTES : HEAD_BYTES + data_bytes]

    def begin(self) -> None:
        """Make the slot void: from here on its data may change."""
        os.pwrite(self.file, _VOID, 0)

    def end(self, data_bytes: int, words: bytes) -> str:
        """Make the slot whole.

        Args:
            data_bytes: Of the data, which is written.
            words: What it says of itself.

        Returns:
            The digest of the words: what the snapshot is known by.
        """
        at = HEAD_BYTES + data_bytes
        left = memoryview(words)
        while left:
            count = os.pwrite(self.file, left, at)
            left, at = left[count:], at + count
        digest = digest_of(words)
        raw = _HEAD.pack(_MAGIC, data_bytes, len(words), digest.encode())
        os.pwrite(self.file, raw + digest_of(raw).encode(), 0)
        return digest

    def close(self) -> None:
        """Give the memory back, as far as this process has it."""
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # somebody still looks at it: it goes with him
                self._memory.close()
            self._memory = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def make(data_bytes: int, name: str) -> Slot:
    """Make a slot, void, with all of its memory.

    Args:
        data_bytes: Of the data.
        name: Unique among all slots; letters and digits.

    Raises:
        ClusterError: This system has no such memory, or not so much.
    """
    if not hasattr(os, "memfd_create"):
        raise ClusterError(
            "this operating system has no memfd_create(2), which checkpoint.memory needs",
            where="checkpoint.memory",
            remedy="leave checkpoint.memory out; it works on Linux",
        )
    file = -1
    try:
        file = os.memfd_create(f"{_NAME}{name}", os.MFD_CLOEXEC)
        os.posix_fallocate(file, 0, HEAD_BYTES + data_bytes)
    except OSError as error:
        if file >= 0:
            os.close(file)
        raise ClusterError(
            f"{data_bytes / 2**20:,.0f} MiB of memory cannot be had: {error.strerror}",
            where="checkpoint.memory",
            remedy="leave checkpoint.memory out, or give the node more memory",
        ) from error
    return Slot(file, name)


def open_slot(pid: int, file: int, name: str) -> Slot:
    """Open a slot that another process of this machine has open.

    Args:
        pid: The process.
        file: Its descriptor of the slot.
        name: The slot's.

    Raises:
        ClusterError: It is gone, or something else is there.
    """
    path = f"/proc/{pid}/fd/{file}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _not_there(path, error.strerror or str(error)) from error
    found = str(Path(f"/proc/self/fd/{opened}").readlink())
    if found.split(" ", maxsplit=1)[0] != f"/memfd:{_NAME}{name}":
        os.close(opened)
        raise _not_there(path, f"it is {found}")
    return Slot(opened, name)


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this machine, or the container, can still give.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
    """
    free = [_meminfo(root / "proc/meminfo")]
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
            free.append(int((root / limit).read_text()) - int((root / used).read_text()))
    return max(min(free), 0)


def _meminfo(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**63


def _not_there(path: str, why: str) -> ClusterError:
    return ClusterError(
        f"shared memory at {path} cannot be opened: {why}",
        where="checkpoint.memory",
        remedy="the worker and the keeper of its node must be processes of one user, and see one "
        "another: leave checkpoint.memory out where each has a container of its own",
    )
