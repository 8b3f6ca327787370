"""The raw limits: the same bytes moved by nothing but the system's own calls."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from plane.product import State, sync_directory

#: Bytes of one call.
PIECE = 16 * 2**20
_PAGE = 4096


class Raw:
    """One rank's share of the state as raw bytes: copied, written and read."""

    def __init__(self, place: Path, rank: int, ranks: int, state: State) -> None:
        """Make one aligned buffer of the rank's share, and touch it."""
        self._place = place
        place.mkdir(parents=True, exist_ok=True)
        total = sum(tensor.nbytes for tensor in state.values())
        self.share = total // ranks
        first, last = rank * self.share, (rank + 1) * self.share
        self._memory = mmap.mmap(-1, self.share)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8).zero_()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for tensor in state.values():
            begin, end = max(first - at, 0), min(last - at, tensor.nbytes)
            if begin < end:
                to = at + begin - first
                source = tensor.view(-1).view(torch.uint8)[begin:end]
                self._copies.append((flat[to : to + end - begin], source))
            at += tensor.nbytes
        self._own = place / f"raw-{rank}"
        self._all = [place / f"raw-{other}" for other in range(ranks)]

    def copy(self) -> None:
        """Copy the rank's share of the state."""
        for target, source in self._copies:
            target.copy_(source)

    def write(self) -> None:
        """Write and sync the share, through the page cache."""
        self._write(0, PIECE)

    def write_behind(self) -> None:
        """Do the same, and have the kernel begin to write back after each piece."""
        self._write(0, PIECE // 2, behind=True)

    def write_direct(self) -> None:
        """Write and sync it past the page cache, but for an odd end."""
        self._write(os.O_DIRECT, PIECE)

    def write_direct_small(self) -> None:
        """Do the same in pieces of 1 MiB."""
        self._write(os.O_DIRECT, 2**20)

    def write_direct_large(self) -> None:
        """Do the same in pieces of 64 MiB."""
        self._write(os.O_DIRECT, 4 * PIECE)

    def write_direct_two(self) -> None:
        """Do the same with two pieces on their way at any time."""
        self._write(os.O_DIRECT, PIECE, depth=2)

    def read(self) -> None:
        """Read all ranks' shares into touched memory, one after the other."""
        target = memoryview(self._memory)
        for path in self._all:
            file = os.open(path, os.O_RDONLY)
            at = 0
            while count := os.preadv(file, [target[at : at + PIECE]], at):
                at += count
            os.close(file)

    def drop(self) -> None:
        """Remove the rank's file, so that the next write makes a new one."""
        self._own.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Return the files of all ranks."""
        return self._all

    def _write(self, flags: int, piece: int, *, behind: bool = False, depth: int = 1) -> None:
        data = memoryview(self._memory)
        size = self.share - (self.share % _PAGE if flags else 0)
        file = os.open(self._own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)

        def put(first: int) -> None:
            at, last = first, min(first + piece, size)
            while at < last:
                at += os.pwrite(file, data[at:last], at)
            if behind:
                os.posix_fadvise(file, first, last - first, os.POSIX_FADV_DONTNEED)

        pieces = range(0, size, piece)
        if depth == 1:
            for first in pieces:
                put(first)
        else:
            with ThreadPoolExecutor(depth) as pool:
                list(pool.map(put, pieces))
        os.fsync(file)
        os.close(file)
        sync_directory(self._place)
