"""The drivers' own output: one file a command, in the run's root where that is a directory.

There it is found again, and goes with the run. For a root that is no directory yet, is full or lies
in an object store, the temporary directory is left. A command whose drivers said nothing leaves no
file, and old files give way to new ones, so nothing piles up.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

#: Below a run's root.
DIRECTORY = "drivers"
#: Logs of earlier commands that stay.
KEPT = 9
_STAMP = "%Y%m%dT%H%M%SZ"
_PREFIX = "coherent-ray-driver-"
_TRACE = "Traceback (most recent call last):"
_WORDS = 6
_WORD_LENGTH = 300
_TAIL_BYTES = 8192


def place(root: str) -> Path:
    """Return the path of an empty, new file for a command's drivers.

    Args:
        root: The run's root, absolute, or an address.
    """
    if "://" not in root and Path(root).is_dir():
        with contextlib.suppress(OSError):
            directory = Path(root) / DIRECTORY
            directory.mkdir(exist_ok=True)
            old = sorted(directory.glob("[0-9]*T[0-9]*Z-[0-9]*.log"))
            for path in old[: max(0, len(old) - KEPT)]:
                path.unlink(missing_ok=True)
            path = directory / f"{_stamp(old)}-{os.getpid()}.log"
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
    return size(path) > 0


def last_words(path: Path) -> list[str]:
    """Return the last lines, each cut where it is long."""
    return [line[:_WORD_LENGTH] for line in _lines(_tail(path))[-_WORDS:]]


def size(path: Path) -> int:
    """Return how many bytes were written."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def cause(path: Path, since: int = 0) -> str:
    """Return the line by which a driver's words end: its exception; empty where there are none.

    Args:
        path: The log.
        since: Bytes that were there before the driver.
    """
    _, trace, after = _tail(path, since).rpartition(_TRACE)
    lines = _lines(after)
    # The traceback's own lines are indented; its exception is the first that is not.
    ends = [line for line in lines if not line[0].isspace()] if trace else lines[-1:]
    return ends[0][:_WORD_LENGTH] if ends else ""


def _tail(path: Path, since: int = 0) -> str:
    """Return the end of what was written; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _stamp(old: list[Path]) -> str:
    """Return the time as names begin with; after that of the newest log, though the clock is not.

    Logs give way in order of name: a clock that was put back must not make the newest the oldest.
    """
    now = datetime.now(UTC)
    with contextlib.suppress(ValueError, IndexError, OverflowError):
        newest = datetime.strptime(old[-1].name.partition("-")[0], _STAMP).replace(tzinfo=UTC)
        now = max(now, newest + timedelta(seconds=1))
    return now.strftime(_STAMP)


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
