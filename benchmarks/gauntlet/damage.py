"""What is done to files: flipped, cut, taken away, exchanged, made to run code when read."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gauntlet import states
from gauntlet.verdict import NotRun

#: Times that a copy is tried.
TRIES = 20


def flip(root: Path, files: list[str], step: int) -> str:
    """Flip one bit of the middle of a state's first tensor, or of its largest file.

    Returns:
        Where, in words.
    """
    weight = states.make(step)["weight"].numpy().tobytes()
    middle = len(weight) // 2
    needle = weight[middle : middle + 32]
    for name in files:
        data = (root / name).read_bytes()
        if (at := data.find(needle)) >= 0:
            _flip_at(root / name, at + 1)
            return f"a byte of a tensor in {name}"
    largest = max(files, key=lambda name: (root / name).stat().st_size)
    _flip_at(root / largest, (root / largest).stat().st_size // 2)
    return f"the middle byte of {largest}"


def _flip_at(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def large_ones(root: Path, files: list[str], expected: int) -> list[str]:
    """Return the files that hold the state's tensors: those that are not small beside it."""
    return sorted(name for name in files if (root / name).stat().st_size >= expected // 20)


class _Runs:
    """What runs a line of Python when it is unpickled."""

    def __init__(self, line: str) -> None:
        self._line = line

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (self._line,)


def armed(path: Path, canary: Path) -> Iterator[tuple[str, bytes]]:
    """Yield what a file's bytes may be replaced by, so that whoever unpickles them makes a file.

    Args:
        path: The file as it is.
        canary: The file that tells.
    """
    evil = pickle.dumps(_Runs(f"open({str(canary)!r}, 'w').close()"), protocol=2)
    yield "replaced by a pickle", evil
    if zipfile.is_zipfile(path):
        target = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
            for info in old.infolist():
                inner = evil if info.filename.endswith("data.pkl") else old.read(info)
                new.writestr(info.filename, inner)
        yield "with a pickle inside", target.getvalue()


def copied(root: Path, to: Path) -> Path:
    """Return a copy of a root; what its process renames meanwhile is looked for again."""
    for _ in range(TRIES):
        try:
            shutil.copytree(root, to, symlinks=True)
        except shutil.Error:
            shutil.rmtree(to)
        else:
            return to
    raise NotRun(f"{root.name} does not stand still to be copied")
