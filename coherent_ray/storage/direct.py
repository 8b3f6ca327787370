"""Past the page cache: a shard's bytes go from the snapshot to the device, and are copied nowhere.

The kernel then spends a tenth of the processor time, and training keeps its page cache. What may go
so is a matter of alignment (memory, place in the file, length), and of the file system, which says
yes when asked and no when written to, or the other way round. So nothing is asked: the first
aligned piece is the probe. Who refuses it gets the same bytes through the cache, and is not tried
again under this root. Nothing is durable by it: syncs are what they were.

This room decides and sets the descriptor; `coherent_ray.storage.local` makes the calls.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

#: Memory, place and length are multiples of it: what devices ask for at most.
ALIGNMENT = 4096
#: Shorter pieces go through the cache: records and manifests, which somebody reads soon.
LEAST_BYTES = 256 * 2**10
#: Whether anybody writes so. False for judges that hear Python's buffered files only.
allowed = True

_FLAG = getattr(os, "O_DIRECT", 0)
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


class Direct:
    """Whether the files of one root may be written past the page cache. Any thread may use it."""

    def __init__(self, wanted: bool = True) -> None:
        """Believe that they may, where the user does not forbid it."""
        self._wanted = wanted and bool(_FLAG)
        self._refused = False

    @property
    def on(self) -> bool:
        """Whether the next aligned piece is written so."""
        return self._wanted and allowed and not self._refused

    def refuse(self) -> None:
        """Remember that the file system does not take it."""
        self._refused = True


class DirectFile:
    """One descriptor, which is switched past the cache and back as its pieces ask for it."""

    def __init__(self, file: int, direct: Direct) -> None:
        """Take a descriptor that goes through the cache.

        Args:
            file: The descriptor; stays its owner's.
            direct: The root's.
        """
        self._file = file
        self._direct = direct
        self._past = False

    def next_piece(self, rest: memoryview, at: int) -> memoryview:
        """Return the first part of some bytes that is to be written alike, ready to be written.

        Args:
            rest: Bytes that are left.
            at: Where they belong in the file.
        """
        piece, past = rest, False
        if self._direct.on and len(rest) >= LEAST_BYTES:
            lead = -at % ALIGNMENT
            if (address := _address(rest)) is not None and (address + lead) % ALIGNMENT == 0:
                # A lead brings the place to a boundary, as after a write that was cut short.
                past = lead == 0
                piece = rest[: len(rest) - len(rest) % ALIGNMENT] if past else rest[:lead]
        return piece if self._switch(past) else rest

    def takes_back(self, error: OSError | None) -> bool:
        """Return whether a write that failed, or wrote nothing, is to be made again.

        Args:
            error: What the operating system said; None: it wrote nothing.
        """
        if not self._past or (error is not None and error.errno not in _REFUSALS):
            return False
        self._direct.refuse()
        return True

    def _switch(self, past: bool) -> bool:
        """Set the descriptor, and return whether it is as it should be."""
        if past == self._past:
            return True
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _FLAG if past else flags & ~_FLAG)
        except OSError as error:
            if not past or error.errno not in _REFUSALS:
                raise
            self._direct.refuse()  # tmpfs says so here already
            return False
        self._past = past
        return True


def _address(data: memoryview) -> int | None:
    """Return where bytes begin in memory; None: they are read-only, and it cannot be told."""
    if data.readonly:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
