"""The drivers' own output: one file a command, in the run's root where that is a directory.

There it is found again, and goes with the run. For a root that is no directory yet, is full or lies
in an object store, the temporary directory is left. A command whose drivers said nothing leaves no
file, and old files give way to new ones, so nothing piles up.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

#: Below a run's root.
DIRECTORY = "drivers"
#: Logs of earlier commands that stay.
KEPT = 9
_PREFIX = "coherent-ray-driver-"
_WORDS = 6
_WORD_LENGTH = 300
_TAIL_BYTES = 8192


def place(root: str) -> Path:
    """Return the path of an empty, new file for a command's drivers.

    Args:
        root: The run's root, absolute, or an address.
    """
    if "://" not in root and Path(root).is_dir():
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        with contextlib.suppress(OSError):
            directory = Path(root) / DIRECTORY
            directory.mkdir(exist_ok=True)
            _make_room(directory)
            path = directory / f"{stamp}-{os.getpid()}.log"
            path.touch(exist_ok=True)
            _require_room(path)
            return path
    number, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".log")
    os.close(number)
    return Path(name)


def leave(path: Path) -> None:
    """Remove a log in which nothing was written, and its directory where nothing else is in it."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()
            if path.parent.name == DIRECTORY:
                path.parent.rmdir()


def has_words(path: Path) -> bool:
    """Return whether anything was written."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def last_words(path: Path) -> list[str]:
    """Return the last lines, each cut where it is long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [line[:_WORD_LENGTH] for line in lines[-_WORDS:]]


def _make_room(directory: Path) -> None:
    old = sorted(directory.glob("[0-9]*T[0-9]*Z-[0-9]*.log"))
    for path in old[: max(0, len(old) - KEPT)]:
        path.unlink(missing_ok=True)


def _require_room(path: Path) -> None:
    """Raise where the disk is full: an empty file may be made where no byte fits any more."""
    try:
        path.write_bytes(b"\0" * 4096)
        with path.open("r+b") as file:
            os.fsync(file.fileno())
            file.truncate(0)
    except OSError:
        path.unlink(missing_ok=True)
        raise
